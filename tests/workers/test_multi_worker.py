"""Real training processes over loopback: the same run on any number of workers, whatever happens to them.

Nothing here depends on timing: faults come at a given update (faulty_worker.py), and every wait is for a
process to end. Workers have one core each, and a process alone has two.
"""

import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from launching import until
from learners import train
from worker_pair import (
    BATCH,
    FAULTY,
    PATIENCE,
    TRAIN,
    UPDATES,
    addresses,
    ended,
    env_steps,
    evaluations,
    flags,
    phases,
    results,
    run_alone,
    run_workers,
    saved,
    started,
)

from benchmarks import namespaces
from cluster.launch import free_ports
from tfrl import evaluate
from tfrl.algorithms.registry import reader
from tfrl.algorithms.runs import find_policy
from tfrl.cli.errors import PeerError
from tfrl.cli.settings import to_yaml
from tfrl.envs.registry import LEVEL_SETS
from tfrl.run.checkpoint import CheckpointStore, State

pytestmark = pytest.mark.promise

parse = reader("ppo_procgen").parse


def events(event_file, tag):
    """Steps and tensors of a tag."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(event_file)).Reload()
    if tag not in accumulator.Tags()["tensors"]:
        return []
    return [(e.step, make_ndarray(e.tensor_proto)) for e in accumulator.Tensors(tag)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The logdir of a run by this process that nothing disturbed."""
    logdir = tmp_path_factory.mktemp("alone")
    assert train(parse(flags(logdir, "--eval-every", "2"))) == 0
    return logdir


def launch_and_kill(logdir, victim):
    """Two workers by the launcher, one of which is killed in its third update; what the launcher said."""
    faulty = [*FAULTY, "SIGKILL", str(victim), "2", str(logdir / "marker")]
    code, stderr = run_alone(
        *["-m", "cluster.launch", "--workers", "2", "--max-restarts", "1", "--grace", "60", "--"],
        *[sys.executable, *faulty, *flags(logdir, "--eval-every", "2", "--checkpoint-every", "2")],
    )
    assert code == 0, stderr
    return stderr


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The logdir of the same run by two workers, whose chief was killed once, and what the launcher said."""
    logdir = tmp_path_factory.mktemp("killed")
    return logdir, launch_and_kill(logdir, 0)


@pytest.fixture(scope="module")
def pair(killed):
    """The logdir of that run of two workers."""
    return killed[0]


def test_two_workers_take_the_steps_of_one_process(alone, pair):
    assert results(pair)["workers"] == 2
    assert results(pair)["weights_sha256"] == results(alone)["weights_sha256"]
    assert results(pair)["eval"] == results(alone)["eval"]


@pytest.mark.long
def test_two_workers_of_two_replicas_take_the_steps_of_one_process(tmp_path):
    alone, four = tmp_path / "alone", tmp_path / "four"
    assert run_alone(*TRAIN, *flags(alone, updates=3))[0] == 0
    ends = run_workers(*[[*TRAIN, *flags(four, "--replicas", "2", updates=3)]] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert (results(four)["workers"], results(four)["replicas"]) == (2, 4)
    with (
        np.load(alone / "run" / "export" / "weights.npz") as expected,
        np.load(four / "run" / "export" / "weights.npz") as found,
    ):
        for name in expected.files:
            difference = np.linalg.norm(found[name] - expected[name])
            assert difference <= 1e-5 * np.linalg.norm(expected[name]), name


@pytest.mark.long
def test_killed_recurrent_workers_resume_exactly_as_one_process(tmp_path):
    """The checkpoint is in the middle of an episode and contains its recurrent state."""
    memory = ("--memory", "lstm", "--memory-size", "16", "--memory-inputs")
    alone, killed = (flags(tmp_path / name, *memory) for name in ("alone", "killed"))
    assert run_alone(*TRAIN, *alone)[0] == 0
    faults = [[*FAULTY, "SIGKILL", str(i), "2", str(tmp_path / f"marker-{i}"), *killed] for i in (0, 1)]
    codes = {code for code, _ in run_workers(*faults)}
    assert -9 in codes
    assert codes <= {-9, PeerError.exit_code}  # a slow worker may lose the other one before its own signal
    assert run_alone(*TRAIN, *killed)[0] == 0
    found, expected = results(tmp_path / "killed"), results(tmp_path / "alone")
    assert found["resumed_at"] == [2 * BATCH]
    assert found["weights_sha256"] == expected["weights_sha256"] and found["eval"] == expected["eval"]


def test_two_workers_write_one_run(alone, pair):
    assert env_steps(pair) == env_steps(alone) == [BATCH * (u + 1) for u in range(UPDATES)]
    assert len(list((pair / "run").glob("events.out.tfevents.*"))) == 2, "one for each process of the chief"
    assert not (pair / "run" / "heartbeats").exists()


def test_two_workers_evaluate_as_one_process_does_and_keep_the_best(alone, pair):
    assert list(evaluations(pair)) == [2 * BATCH, 4 * BATCH]
    assert evaluations(pair) == evaluations(alone)
    best = [find_policy(logdir / "run", "best") for logdir in (alone, pair)]
    assert best[0].env_steps == best[1].env_steps in evaluations(pair)
    for name, weights in best[0].weights.items():
        np.testing.assert_array_equal(best[1].weights[name], weights)
    arguments = ["--checkpoint", "best", "--levels", "test", "--episodes", "2"]
    assert evaluate.main([str(pair / "run"), *arguments]) == 0
    played = json.loads((pair / "run" / "eval.json").read_text())
    assert (played["checkpoint"], played["env_steps"]) == ("best", best[1].env_steps)
    # The same episodes, by one process: the policy is the one that the workers evaluated.
    assert played["evaluations"][0]["return_mean"] == evaluations(pair)[best[1].env_steps][1]


@pytest.mark.long
def test_a_slow_worker_gives_equal_weights(alone, tmp_path):
    """The other worker waits in every all-reduce. test_uneven_workers.py has many more cases."""
    command = [*FAULTY, "SLOW", "1", "0", str(tmp_path / "marker"), *flags(tmp_path)]
    ends = run_workers(command, command)
    assert [code for code, _ in ends] == [0, 0], ends
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]


@pytest.mark.long
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


def refused_from(place, address, port):
    """True if nobody listens there for who comes from a place; False if somebody answers."""
    program = f"import socket; socket.create_connection(({address!r}, {port}), timeout=5)"
    done = subprocess.run([*place, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or "ConnectionRefusedError" in done.stderr, done.stderr
    return done.returncode != 0


@pytest.mark.long
@pytest.mark.skipif(not namespaces.available(), reason="this machine does not let us make network namespaces")
def test_workers_with_loopback_addresses_listen_for_nobody_on_other_machines(tmp_path):
    ports, here = free_ports(2), namespaces.ADDRESSES[0]
    command = [*TRAIN, *flags(tmp_path, "--torso", "linear", updates=4000)]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    with (
        namespaces.two_machines() as (inside, outside),
        started(command, command, cluster=cluster, places=[inside, inside]),
    ):
        until((tmp_path / "run" / "progress.csv").exists, PATIENCE)
        for port in ports:
            assert not refused_from(inside, "127.0.0.1", port)
            assert refused_from(outside, here, port)


@pytest.mark.parametrize(
    ("moment", "update"),
    [
        ("1", 2),
        (str(UPDATES - 1), UPDATES),
        ("evaluation", UPDATES),
    ],
)
@pytest.mark.long
def test_sigterm_on_one_worker_saves_on_all_and_one_process_resumes(alone, tmp_path, moment, update):
    command = [*FAULTY, "SIGTERM", "1", moment, str(tmp_path / "marker"), *flags(tmp_path)]
    ends = run_workers(command, command, PHASES=str(tmp_path))
    assert [code for code, _ in ends] == [143, 143], ends
    assert phases(tmp_path, 0) == phases(tmp_path, 1)
    assert phases(tmp_path, 0)[-1] == f"{update} leaving"
    assert saved(tmp_path)[-1] == update  # in which the signal came
    assert not (tmp_path / "run" / "results.json").exists()
    assert not evaluations(tmp_path)
    assert train(parse(flags(tmp_path))) == 0
    assert results(tmp_path)["resumed_at"] == [update * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]
    assert results(tmp_path)["eval"] == results(alone)["eval"]
    assert env_steps(tmp_path) == env_steps(alone)


@pytest.mark.long
def test_all_workers_go_through_the_same_phases(tmp_path):
    """A worker that begins fewer phases would look hung. The chief alone also records (without a video
    program), evaluates, saves and exports.
    """
    periodic = ("--eval-every", "2", "--record-every", "2", "--checkpoint-every", "1")
    command = [*FAULTY, "NONE", "0", "99", str(tmp_path / "marker"), *flags(tmp_path, *periodic, updates=3)]
    ends = run_workers(command, command, PHASES=str(tmp_path), IMAGEIO_FFMPEG_EXE="/nowhere/ffmpeg")
    assert [code for code, _ in ends] == [0, 0], ends
    assert "Training continues." in ends[0][1]
    evaluation = [f"{w} on {s} levels" for s in LEVEL_SETS for w in ("evaluating", "gathering episodes")]
    assert phases(tmp_path, 0) == [
        *("0 connecting", "0 preparing"),
        *("0 collecting", "0 updating", "1 saving"),
        *("1 collecting", "1 updating", "2 saving", *(f"2 {phase}" for phase in evaluation), "2 recording"),
        *("2 collecting", "2 updating", "3 saving", *(f"3 {phase}" for phase in evaluation)),
        *("3 exporting", "3 leaving"),
    ]
    assert phases(tmp_path, 1) == phases(tmp_path, 0)


@pytest.mark.long
def test_sigterm_while_tensorflow_connects_ends_all_before_the_first_update(alone, tmp_path):
    """TensorFlow's own handler swallows the signal then."""
    command = [*FAULTY, "SIGTERM", "1", "connecting", str(tmp_path / "marker"), *flags(tmp_path)]
    ends = run_workers(command, command)
    assert [code for code, _ in ends] == [143, 143], ends
    assert saved(tmp_path) == [0]
    assert run_alone(*TRAIN, *flags(tmp_path))[0] == 0
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]


def cut_off(logdir, run, update):
    """Copies a run as it was after that update, for another process to go on with."""
    shutil.copytree(run, logdir / "run")
    for later in range(update + 1, UPDATES + 1):
        shutil.rmtree(logdir / "run" / "checkpoints" / f"update-{later:08d}")
    (logdir / "run" / "results.json").unlink()


@pytest.mark.long
def test_two_workers_resume_a_run_of_one_process(alone, tmp_path):
    cut_off(tmp_path, alone / "run", 2)
    ends = run_workers(*[[*TRAIN, *flags(tmp_path)]] * 2)
    assert [code for code, _ in ends] == [0, 0], ends
    assert results(tmp_path)["resumed_at"] == [2 * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]
    assert env_steps(tmp_path) == env_steps(alone)


@pytest.mark.long
def test_a_worker_that_does_not_see_the_runs_checkpoints_ends_all_and_none_begins_again(tmp_path):
    logdirs = [tmp_path / "shared", tmp_path / "its own"]
    run = logdirs[0] / "run"
    store = CheckpointStore(run / "checkpoints", keep=1)
    store.save(2, State({}, [{}]), env_steps=2 * BATCH)  # nobody comes so far as to read it
    settings = parse(flags(logdirs[0]))
    (run / "config.yaml").write_text(to_yaml(settings))
    (run / "progress.csv").write_text(f"env_steps\n{BATCH}\n{2 * BATCH}\n")
    ends = run_workers(*[[*TRAIN, *flags(logdir)] for logdir in logdirs])
    for logdir, (code, output) in zip(logdirs, ends, strict=True):
        assert code == 75, output
        assert (
            f"worker 1 sees no checkpoint in {logdir / 'run'}, and worker 0 sees that of update 2" in output
        )
        assert "Traceback" not in output
    assert env_steps(logdirs[0]) == [BATCH, 2 * BATCH]


@pytest.mark.long
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
    assert [step for step, _ in events(own, "eval_test/return")] == [3 * BATCH]
    assert results(tmp_path)["weights_sha256"] == results(alone)["weights_sha256"]


def test_a_killed_chief_ends_the_others_and_the_launcher_restarts_all(alone, killed):
    assert_restarted(alone, *killed, victim=0)


@pytest.mark.long
def test_a_killed_worker_ends_the_chief_and_the_launcher_restarts_all(alone, tmp_path):
    assert_restarted(alone, tmp_path, launch_and_kill(tmp_path, 1), victim=1)


def assert_restarted(alone, logdir, stderr, *, victim):
    """The launcher has said who died, and the run went on from the last checkpoint with the same bits."""
    assert "restarting all 2 workers from the last checkpoint (restart 1 of 1)" in stderr
    # The peer says it, unless the launcher stops it before: it has a second to say so.
    found = f"error: worker {victim} (", f"worker {victim} died (killed by signal 9)"
    assert any(sentence in stderr for sentence in found), stderr
    assert "Traceback" not in stderr
    # TensorFlow's own view of it is in a file.
    assert not re.search(r"^(\[1\] )?E\d{4} ", stderr, re.MULTILINE)
    assert "E0000" in (logdir / "run" / "tensorflow" / f"worker-{1 - victim}.log").read_text()
    assert results(logdir)["resumed_at"] == [2 * BATCH]
    assert results(logdir)["weights_sha256"] == results(alone)["weights_sha256"]
    assert env_steps(logdir) == env_steps(alone)


@pytest.mark.long
def test_a_full_disk_costs_checkpoints_and_not_the_run(alone, small_disk):
    # Two checkpoints of this network (1.1 MB each) fit, and not a third before the oldest is removed.
    disk = small_disk("3m")
    ends = run_workers(*[[*TRAIN, *flags(disk)]] * 2)
    said = ends[0][1]
    assert "is full" in said
    assert "Training continues." in said
    assert len(saved(disk)) >= 1
    assert not list((disk / "run" / "checkpoints").glob("*.tmp"))
    assert env_steps(disk) == env_steps(alone)
