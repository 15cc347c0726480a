"""Real training processes over loopback: the same run on any number of workers, whatever happens to them.

Nothing here depends on timing: faults come at a given update (faulty_worker.py), and every wait is for a
process to end. All use one thread for each operation, because more of them sum in another order.
"""

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import namespaces
from cluster.places import free_ports
from tfrl.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[1]
TRAIN = ["-m", "tfrl.ppo_procgen"]
FAULTY = [str(ROOT / "tests" / "faulty_worker.py")]
PATIENCE = 600  # seconds, on a machine that has much else to do
UPDATES, BATCH = 4, 8 * 16
FLAGS = [
    *("--env", "catch", "--torso", "cookbook", "--precision", "float32", "--run-name", "run"),
    *("--num-envs", "8", "--num-steps", "16", "--num-minibatches", "4", "--epochs", "2"),
    *("--eval-episodes", "2", "--checkpoint-every", "1", "--keep-checkpoints", "9"),
]
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}


def flags(logdir, *more, updates=UPDATES):
    return [*FLAGS, "--total-steps", str(updates * BATCH), "--logdir", str(logdir), *more]


def environment(**more):
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    return {**inherited, **THREADS, "PYTHONPATH": str(ROOT), **more}


def addresses(count):
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


@contextlib.contextmanager
def started(*workers, cluster=None, role="worker", places=None, **more):
    """One process for each of `workers`, which are arguments to Python; `cluster` may have more roles.

    `places` has for each the beginning of its command, which leads to another machine; `more` is added to
    their environment.
    """
    cluster = cluster or {"worker": addresses(len(workers))}
    processes = []
    try:
        for index, arguments in enumerate(workers):
            tf_config = {"cluster": cluster, "task": {"type": role, "index": index}}
            processes.append(
                subprocess.Popen(
                    [*(places[index] if places else []), sys.executable, *arguments],
                    env=environment(TF_CONFIG=json.dumps(tf_config), **more),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()  # a stopped one, too
            process.wait()


def ended(process):
    """Exit code and output of a process, once it has ended."""
    output = process.communicate(timeout=PATIENCE)[0]
    return process.returncode, output


def run_workers(*workers, **more):
    """Runs them to their end; their exit codes and outputs."""
    with started(*workers, **more) as processes:
        return [ended(process) for process in processes]


def run_alone(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stderr


def results(logdir):
    return json.loads((logdir / "run" / "results.json").read_text())


def env_steps(logdir):
    with (logdir / "run" / "progress.csv").open() as file:
        return [int(row["env_steps"]) for row in csv.DictReader(file)]


def saved(logdir):
    return CheckpointStore(logdir / "run" / "checkpoints", keep=9).updates()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The logdir of a run by one process that nothing disturbed."""
    logdir = tmp_path_factory.mktemp("alone")
    assert run_alone(*TRAIN, *flags(logdir))[0] == 0
    return logdir


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same by two workers."""
    logdir = tmp_path_factory.mktemp("pair")
    ends = run_workers(*[[*TRAIN, *flags(logdir)]] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    return logdir


def test_two_workers_take_the_steps_of_one_process(alone, pair):
    assert results(pair)["workers"] == 2
    assert results(pair)["weights_sha256"] == results(alone)["weights_sha256"]
    assert results(pair)["eval"] == results(alone)["eval"]


def test_two_workers_write_one_run(alone, pair):
    assert env_steps(pair) == env_steps(alone) == [BATCH * (u + 1) for u in range(UPDATES)]
    assert len(list((pair / "run").glob("events.out.tfevents.*"))) == 1
    assert not (pair / "run" / "heartbeats").exists()


@pytest.mark.skipif(not namespaces.available(), reason="this machine does not let us make network namespaces")
def test_two_machines_with_addresses_of_their_own(alone, tmp_path):
    cluster = {"worker": [f"{address}:2222" for address in namespaces.ADDRESSES]}
    command = [*TRAIN, *flags(tmp_path)]
    with (
        namespaces.two_machines() as places,
        started(command, command, cluster=cluster, places=places) as processes,
    ):
        ends = [ended(process) for process in processes]
    assert [code for code, _ in ends] == [0, 0], ends
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]


def test_sigterm_on_one_saves_on_all_and_one_process_goes_on(alone, tmp_path):
    command = [*FAULTY, "SIGTERM", "1", "1", str(tmp_path / "marker"), *flags(tmp_path)]
    ends = run_workers(command, command)
    assert [code for code, _ in ends] == [143, 143], ends
    assert saved(tmp_path)[-1] == 2  # of the update in which the signal came
    assert run_alone(*TRAIN, *flags(tmp_path))[0] == 0
    assert results(tmp_path)["resumed_at"] == [2 * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]


def cut_off(logdir, run, update):
    """Copies a run as it was after that update, for another process to go on with."""
    shutil.copytree(run, logdir / "run")
    for later in range(update + 1, UPDATES + 1):
        shutil.rmtree(logdir / "run" / "checkpoints" / f"update-{later:08d}")
    (logdir / "run" / "results.json").unlink()


def points(event_file, tag):
    """Steps and values of a curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(event_file)).Reload()
    if tag not in accumulator.Tags()["tensors"]:
        return []
    return [(e.step, float(make_ndarray(e.tensor_proto))) for e in accumulator.Tensors(tag)]


def test_two_workers_go_on_with_a_run_of_one(alone, tmp_path):
    cut_off(tmp_path, alone / "run", 2)
    ends = run_workers(*[[*TRAIN, *flags(tmp_path)]] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert results(tmp_path)["resumed_at"] == [2 * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]
    assert env_steps(tmp_path) == env_steps(alone)


def test_an_evaluator_follows_the_checkpoints_and_ends_with_the_run(alone, tmp_path):
    cut_off(tmp_path, alone / "run", 3)
    command = [*TRAIN, *flags(tmp_path, "--eval-every", "1")]
    chief, worker, evaluator = addresses(3)
    cluster = {"chief": [chief], "worker": [worker], "evaluator": [evaluator]}
    theirs = set((tmp_path / "run").glob("events.out.tfevents.*"))
    with started(command, cluster=cluster, role="evaluator") as (following,):
        end = time.monotonic() + PATIENCE
        while not (mine := set((tmp_path / "run").glob("events.out.tfevents.*")) - theirs):
            assert following.poll() is None, ended(following)
            assert time.monotonic() < end
            time.sleep(0.2)
        with (
            started(command, cluster=cluster, role="chief") as (first,),
            started(command, cluster=cluster, role="worker") as (second,),
        ):
            assert [ended(p)[0] for p in (first, second, following)] == [0, 0, 0]
    (own,) = mine
    assert [step for step, _ in points(own, "eval_test/return")] == [3 * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_ends_the_others_and_the_launcher_restarts_all(alone, tmp_path, victim):
    faulty = [*FAULTY, "SIGKILL", str(victim), "2", str(tmp_path / "marker")]
    code, stderr = run_alone(
        *["-m", "cluster.launch", "--workers", "2", "--max-restarts", "1", "--grace", "60", "--"],
        *[sys.executable, *faulty, *flags(tmp_path, "--checkpoint-every", "2")],
    )
    assert code == 0, stderr
    # The victim's peer may be the one that ends first.
    assert "restarting all 2 workers from the last checkpoint (restart 1 of 1)" in stderr
    assert f"error: worker {victim} (" in stderr
    assert "Traceback" not in stderr
    assert results(tmp_path)["resumed_at"] == [2 * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]
    assert env_steps(tmp_path) == env_steps(alone)


def test_a_stopped_worker_is_found_and_named(tmp_path):
    command = [*FAULTY, "SIGSTOP", "1", "2", str(tmp_path / "marker"), *flags(tmp_path)]
    with started(command, command) as (chief, _):
        code, stderr = ended(chief)
    assert code == 75, stderr
    # On a busy machine TensorFlow may lose the connection in another way than by missing heartbeats.
    assert "worker 1 (127.0.0.1:" in stderr[stderr.index("error: ") :]


def test_a_worker_that_hangs_is_found_and_says_where(tmp_path):
    patient = flags(tmp_path, "--stall-timeout", "20")
    command = [*FAULTY, "HANG", "1", "2", str(tmp_path / "marker"), *patient]
    (chief_code, chief), (hanging_code, hanging) = run_workers(command, command)
    assert (chief_code, hanging_code) == (75, 75), chief + hanging
    for stderr in (chief, hanging):
        # The first to end breaks the other's connections, which it may notice before its own watchdog does.
        assert "is stuck in update 3, collecting, at tfrl/learner.py:" in stderr or "is gone" in stderr
    assert "is stuck in update 3" in chief + hanging
    assert "time.sleep(3600)" in hanging or "is gone" in chief


def test_a_supervised_worker_that_hangs_ends_all_and_they_say_where(tmp_path):
    settings = "--dataset procgen_frames/games-mini --model cookbook --precision float32 --batch-size 16"
    settings += " --max-steps 8 --log-every 1 --checkpoint-every 1 --stall-timeout 20 --run-name run"
    settings = [*settings.split(), "--logdir", str(tmp_path)]
    command = [*FAULTY, "HANG", "1", "3", str(tmp_path / "marker"), *settings]
    ends = run_workers(command, command, TFDS_DATA_DIR=str(tmp_path / "tfds"))
    assert [code for code, _ in ends] == [75, 75], ends
    said = ends[0][1] + ends[1][1]
    assert "no worker has made a step for" in said
    assert "in update 4, training, at resnet/trainer.py:" in said, said[-3000:]


def test_workers_with_other_settings_do_not_start(tmp_path):
    ends = run_workers([*TRAIN, *flags(tmp_path)], [*TRAIN, *flags(tmp_path, "--lr", "0.1")])
    for code, stderr in ends:
        assert code == 2
        assert "the workers differ: lr is 0.0005 on worker 0 (127.0.0.1:" in stderr
        assert "and 0.1 on worker 1 (127.0.0.1:" in stderr
        assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()


def test_a_missing_worker_is_named(tmp_path):
    absent = ["-c", "pass"]
    (code, stderr), _ = run_workers([*TRAIN, *flags(tmp_path, "--cluster-timeout", "3")], absent)
    assert code == 2
    assert "worker 1 (127.0.0.1:" in stderr
    assert "did not come up within 3 s" in stderr


@pytest.mark.parametrize(
    ("tf_config", "message"),
    [
        ("{not json", "TF_CONFIG is not JSON"),
        ('{"task": {"type": "worker", "index": 0}}', "TF_CONFIG has no 'cluster'"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}', "index 0 to 1"),
    ],
)
def test_a_wrong_tf_config_ends_the_command_with_one_sentence(tmp_path, tf_config, message):
    done = subprocess.run(
        [sys.executable, *TRAIN, *flags(tmp_path)],
        env=environment(TF_CONFIG=tf_config),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_full_disk_costs_checkpoints_and_not_the_run(alone, small_disk):
    # Two checkpoints of this network (1.1 MB each) fit, and not a third before the oldest is removed.
    disk = small_disk("3m")
    ends = run_workers(*[[*TRAIN, *flags(disk)]] * 2)
    said = ends[0][1]
    assert "is full" in said
    assert "Training goes on." in said
    assert len(saved(disk)) >= 1
    assert not list((disk / "run" / "checkpoints").glob("*.tmp"))
    assert env_steps(disk) == env_steps(alone)
