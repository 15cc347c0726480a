"""Workers of different speeds: the run is that of one process, and none waits for ever.

A run that hangs ends by its --stall-timeout, with exit code 75.
"""

import contextlib
import subprocess
import sys

import pytest
from worker_pair import FAULTY, TRAIN, flags, results, run_alone, run_workers

pytestmark = pytest.mark.promise

PATIENCE = ("--stall-timeout", "20")
BUSY = ["nice", "-n", "5", sys.executable, "-c", "while True: pass"]


def slowed(logdir, *more, **sizes):
    """The command of a worker that waits for a random time before each call of gradient steps."""
    return [*FAULTY, "SLOW", "-1", "0", str(logdir / "marker"), *flags(logdir, *PATIENCE, *more, **sizes)]


@contextlib.contextmanager
def busy_processes(count):
    """Two or so processes that compute beside what is inside."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def weights_of(logdir, *command, workers=2, **more):
    """The checksum of the weights of a run by so many workers, which all end well."""
    ends = run_workers(*[command] * workers, **more)
    assert [code for code, _ in ends] == [0] * workers, ends
    assert results(logdir)["workers"] == workers
    return results(logdir)["weights_sha256"]


def quiet(logdir, *more, **sizes):
    """The checksum of the weights of the same run by one process."""
    code, stderr = run_alone(*TRAIN, *flags(logdir, *more, **sizes))
    assert code == 0, stderr
    return results(logdir)["weights_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
def test_slow_workers_give_equal_weights_after_many_updates(tmp_path, workers):
    slow, other = tmp_path / "slow", tmp_path / "other"
    command = slowed(slow, updates=40)
    # Sums over four workers are added in another order than those of one process.
    expected = quiet(other, updates=40) if workers == 2 else None
    expected = expected or weights_of(other, *TRAIN, *flags(other, updates=40), workers=4)
    assert weights_of(slow, *command, workers=workers) == expected


@pytest.mark.long
def test_a_busy_machine_does_not_hang_a_run(tmp_path):
    expected = quiet(tmp_path / "alone", updates=12)
    with busy_processes(2):
        for run in range(20):
            logdir = tmp_path / str(run)
            command = [*TRAIN, *flags(logdir, *PATIENCE, updates=12)]
            assert weights_of(logdir, *command) == expected, run


@pytest.mark.long
def test_learners_beside_busy_processes_give_the_weights_of_one(tmp_path):
    expected = quiet(tmp_path / "alone", updates=40)
    with busy_processes(2):
        assert quiet(tmp_path / "two", "--learners", "2", *PATIENCE, updates=40) == expected


@pytest.mark.long
def test_slow_supervised_workers_give_equal_weights(tmp_path):
    settings = "--dataset procgen_frames/games-mini --model cookbook --precision float32 --batch-size 16 "
    settings += "--max-steps 40 --log-every 5 --checkpoint-every 10 --run-name run"
    slow, alone = tmp_path / "slow", tmp_path / "alone"
    tfds = {"TFDS_DATA_DIR": str(tmp_path / "tfds")}
    both = settings.split()
    command = [*FAULTY, "SLOW", "-1", "0", str(slow / "marker"), *both, *PATIENCE, "--logdir", str(slow)]
    expected = weights_of(
        alone,
        "-m",
        "resnet.train",
        *both,
        "--logdir",
        str(alone),
        workers=1,
        **tfds,
    )
    assert weights_of(slow, *command, **tfds) == expected
