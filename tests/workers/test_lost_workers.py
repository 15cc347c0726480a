"""Workers that hang, stop, never come or disagree: the others end, and name them.

As in test_multi_worker.py, nothing depends on timing, except the pause: it is shorter than a limit.
"""

import signal
import time

import pytest
from launching import until
from processes import Answer, assert_refused
from worker_pair import (
    FAULTY,
    PATIENCE,
    TRAIN,
    ended,
    flags,
    results,
    run_workers,
    started,
)

pytestmark = pytest.mark.promise


@pytest.mark.long
def test_a_stopped_worker_is_found_and_named(tmp_path):
    command = [*FAULTY, "SIGSTOP", "1", "2", str(tmp_path / "marker"), *flags(tmp_path)]
    with started(command, command) as (chief, _):
        code, stderr = ended(chief)
    assert code == 75, stderr
    # On a busy machine TensorFlow may lose the connection in another way than by missing heartbeats.
    assert "worker 1 (127.0.0.1:" in stderr[stderr.index("error: ") :]


@pytest.mark.long
def test_workers_that_pause_for_some_seconds_go_on(tmp_path):
    """Twelve seconds, as if its machine moved to another host: by default TensorFlow would end the run."""
    weights = set()
    for worker in (0, 1):
        logdir, marker = tmp_path / str(worker), tmp_path / f"marker-{worker}"
        command = [*FAULTY, "SIGSTOP", str(worker), "2", str(marker), *flags(logdir)]
        with started(command, command) as processes:
            until(marker.exists, PATIENCE)
            time.sleep(12)
            processes[worker].send_signal(signal.SIGCONT)
            ends = [ended(process) for process in processes]
        assert [code for code, _ in ends] == [0, 0], ends
        weights.add(results(logdir)["weights_sha256"])
    assert len(weights) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "update", "patience"),
    [("HANG", 2, ["--stall-timeout", "10"]), ("HANG:20", 0, [])],
)
def test_a_worker_that_hangs_is_found_and_says_where(tmp_path, fault, update, patience):
    command = [*FAULTY, fault, "1", str(update), str(tmp_path / "marker"), *flags(tmp_path, *patience)]
    (chief_code, chief), (hanging_code, hanging) = run_workers(command, command)
    assert (chief_code, hanging_code) == (75, 75), chief + hanging
    stuck = f"is stuck in update {update + 1}, collecting, at tfrl/training/on_policy.py:"
    for stderr in (chief, hanging):
        # The first to end breaks the other's connections, which it may notice before its own watchdog does.
        assert stuck in stderr or "is gone" in stderr
    assert stuck in chief + hanging
    assert "time.sleep(3600)" in hanging or "is gone" in chief


@pytest.mark.long
def test_a_supervised_worker_that_hangs_ends_all_and_they_say_where(tmp_path):
    settings = "--dataset procgen_frames/games-mini --model cookbook --precision float32 --batch-size 16"
    settings += " --max-steps 8 --log-every 1 --checkpoint-every 1 --stall-timeout 20 --run-name run"
    settings = [*settings.split(), "--logdir", str(tmp_path)]
    command = [*FAULTY, "HANG", "1", "3", str(tmp_path / "marker"), *settings]
    ends = run_workers(command, command, TFDS_DATA_DIR=str(tmp_path / "tfds"))
    assert [code for code, _ in ends] == [75, 75], ends
    said = ends[0][1] + ends[1][1]
    assert "no worker has made a step for" in said
    assert "in update 4, training, at resnet/learner.py:" in said, said[-3000:]


@pytest.mark.long
def test_workers_with_other_settings_do_not_start(tmp_path):
    ends = run_workers([*TRAIN, *flags(tmp_path)], [*TRAIN, *flags(tmp_path, "--lr", "0.1")])
    for code, stderr in ends:
        assert code == 2
        assert "the workers differ: lr is 0.0005 on worker 0 (127.0.0.1:" in stderr
        assert "and 0.1 on worker 1 (127.0.0.1:" in stderr
        assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_missing_worker_is_named(tmp_path, missing):
    commands = [[*TRAIN, *flags(tmp_path, "--cluster-timeout", "3")]] * 2
    commands[missing] = ["-c", "pass"]
    code, stderr = run_workers(*commands)[1 - missing]
    assert code == 75  # a launcher is to start all again
    assert f"waiting for worker {missing} (127.0.0.1:" in stderr
    assert "did not start within 3 s" in stderr


@pytest.mark.parametrize(
    ("tf_config", "message"),
    [
        ("{not json", "TF_CONFIG is not JSON"),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG is {'task': {"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
            "worker with index 0 to 1",
        ),
        (
            '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}',
            "--num-envs must be divisible by the number of replicas, 3 (3 workers x 1); got 8",
        ),
    ],
)
def test_a_wrong_tf_config_ends_the_command_with_one_sentence(tmp_path, monkeypatch, tf_config, message):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    assert_refused(Answer(*flags(tmp_path)), message)
    assert not list(tmp_path.iterdir())
