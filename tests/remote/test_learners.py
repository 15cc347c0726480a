"""Several learners give the bits of one, whoever is killed or told to stop; skipped without Ray."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launching import PRELUDE, until
from learners import make, updated
from processes import PATIENCE, ROOT, results, rows, steps_done
from test_own_ray import CATCH, LONG, UPDATE, Impala, end_all, of_ray, train

from benchmarks.process_tree import family, wait_until_gone
from tfrl.algorithms import registry as settings
from tfrl.networks.weights import weights_of
from tfrl.run.checkpoint import CheckpointStore
from tfrl.training.on_policy import OnPolicyLearner

pytestmark = [
    pytest.mark.promise,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install -r requirements-ray.txt"),
]


# A command that runs a program, instead of a trainer, at the places of two learners.
ON_NODES = """
import contextlib, sys, types
from cluster import launch
from tfrl.cli import endings
from tfrl.remote.learners import Nodes

def main(arguments):
    address, program, folder = arguments
    sys.path.append(f"{folder}/modules")
    config = types.SimpleNamespace(learners=2, actors=0, ray_address=address, device="auto")
    options = {"max_restarts": 3, "restart_wait": 0.0, "grace": 5.0, "called": "learner"}
    with contextlib.closing(Nodes(config)) as places:
        return launch.launch(places.find, [sys.executable, "-S", "-c", program, folder], **options)

endings.run(main)
"""


def learners_of(parent):
    """The process numbers of the learners below a process, in their order."""
    found = {}
    for pid in family(parent):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            variables = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
            if b"\0tfrl.impala\0" in command and b"TFRL_LEARNER" in variables:
                found[json.loads(variables[b"TF_CONFIG"])["task"]["index"]] = pid
    return [found[index] for index in sorted(found)]


def assert_same_as_undisturbed(folder, *flags):
    """Ends the run of `folder` a little later, with these flags, and another one that nobody disturbs."""
    steps = steps_done(folder) + 2 * UPDATE
    undisturbed = folder.with_name("undisturbed")
    for run, own in ((folder, flags), (undisturbed, ())):
        code, stdout, stderr = train(run, "--total-steps", steps, *own)
        told = re.sub(r".*(waiting for |still starts).*\n", "", stderr)  # on a slow machine
        assert (code, told) == (0, ""), stdout + stderr
    found, expected = results(folder), results(undisturbed)
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert [row["train/policy_loss"] for row in rows(folder)] == [
        row["train/policy_loss"] for row in rows(undisturbed)
    ]
    return found


@pytest.mark.long
@pytest.mark.parametrize("ray_first", [False, True])
def test_learners_on_their_own_ray_stop_together_with_the_weights_of_one(tmp_path, ray_first):
    """SIGTERM goes to all processes, also to Ray's; the reference run is in this process."""
    folder = tmp_path / "disturbed"
    training = Impala(folder, *LONG, "--learners", 2, "--actors", 2)
    training.wait_until(3 * UPDATE)
    everyone = family(training.process.pid)
    assert (len(learners_of(training.process.pid)), len(training.actors())) == (2, 2)
    if ray_first:
        os.kill(of_ray(everyone, "raylet"), signal.SIGTERM)
        time.sleep(1)
    end_all(everyone, signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert (code, "Stopped, saved at" in stdout) == (143, True), stdout + stderr
    assert stdout.count("computes on") == 1  # one console, the chief's
    wait_until_gone(everyone)
    saved = CheckpointStore(folder / "checkpoints", keep=3).load(pytest.fail)
    config = settings.reader("impala").parse([*CATCH.split(), "--total-steps", str(UPDATE * 1000)])
    with contextlib.closing(make(config, OnPolicyLearner)) as alone:
        _, expected = updated(alone, saved.update)
    found = weights_of(saved.learner)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_workers_on_ray_pass_on_output_signals_and_exit_codes(node, tmp_path):
    """Without TensorFlow: the second of two dies, and the first is told to stop; both are started again."""
    program = """
print("this is", task, flush=True)
note(os.environ["TFRL_LEARNER"])
note("finds modules" if f"{folder}/modules" in sys.path else sys.path)
signal.signal(signal.SIGTERM, lambda *_: (note("told"), os._exit(143)))
all_started()
if task == 1 and starts == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if starts == 1 else 0)
"""
    command = [sys.executable, "-c", ON_NODES, node.address, PRELUDE + program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] this is 1"] * 2 + ["this is 0"] * 2
    reason = (
        f"launch: learner 1 on {socket.gethostname()} died (killed by signal 9); restarting all 2 learners"
    )
    assert done.stderr.startswith(reason) and done.stderr.count("\n") == 1
    first, second = ((tmp_path / f"worker-{i}").read_text().split("\n") for i in range(2))
    assert (first.count(node.address), first.count("told")) == (2, 1)
    assert (second.count(node.address), second.count("told")) == (2, 0)
    assert (first.count("finds modules"), second.count("finds modules")) == (2, 2)
    until(lambda: not node.processes(b"ray::LearnerHost"), 60)


@pytest.mark.long
def test_a_killed_learner_without_ray_is_restarted_with_equal_weights(tmp_path):
    folder = tmp_path / "disturbed"
    training = Impala(folder, *LONG, "--learners", 2)
    training.wait_until(3 * UPDATE)
    everyone, (_, victim) = family(training.process.pid), learners_of(training.process.pid)
    os.kill(victim, signal.SIGKILL)
    training.wait_for(lambda: victim not in learners_of(training.process.pid))
    training.wait_until(steps_done(folder) + 3 * UPDATE)
    training.process.send_signal(signal.SIGINT)
    code, stdout, stderr = training.end()
    assert code == 130, stdout + stderr
    assert "learner 1 died (killed by signal 9); restarting all 2 learners from the last checkpoint" in stderr
    wait_until_gone(everyone)
    assert_same_as_undisturbed(folder)


@pytest.mark.long
def test_killed_learners_actors_and_drivers_on_ray_give_equal_weights(node, tmp_path):
    folder, flags = tmp_path / "disturbed", ("--learners", 2, "--actors", 4, "--ray-address", node.address)
    training = Impala(folder, *LONG, *flags)
    training.wait_until(3 * UPDATE)
    assert (len(learners_of(node.process.pid)), len(node.actors())) == (2, 4)
    os.kill(node.actors()[1], signal.SIGKILL)
    training.wait_until(steps_done(folder) + 3 * UPDATE)
    victim = learners_of(node.process.pid)[0]
    os.kill(victim, signal.SIGKILL)
    training.wait_for(lambda: victim not in learners_of(node.process.pid))
    training.wait_until(steps_done(folder) + 3 * UPDATE)
    training.process.send_signal(signal.SIGINT)
    code, stdout, stderr = training.end()
    assert code == 130, stdout + stderr
    assert "learner 0 on " in stderr and "died (killed by signal 9); restarting all 2 learners" in stderr
    assert "has died; another process replaces it" in stdout + stderr
    wait_until_gone([*learners_of(node.process.pid), *node.actors()])
    training = Impala(folder, *LONG, *flags)
    training.wait_until(steps_done(folder) + 3 * UPDATE)
    left = [*learners_of(node.process.pid), *node.actors(), *node.processes(b"ray::LearnerHost")]
    assert len(left) == 8
    training.process.kill()
    training.end()
    wait_until_gone(left)
    found = assert_same_as_undisturbed(folder, *flags)
    assert (found["learners"], found["actors"]) == (2, 4)


@pytest.mark.long
def test_a_killed_driver_takes_its_learners_and_its_ray_with_it(tmp_path):
    folder = tmp_path / "disturbed"
    training = Impala(folder, *LONG, "--learners", 2, "--actors", 4)
    training.wait_until(3 * UPDATE)
    everyone = family(training.process.pid)
    training.process.kill()
    training.end()
    wait_until_gone(everyone, 180)
    found = assert_same_as_undisturbed(folder, "--learners", 2, "--actors", 2)
    assert (found["learners"], found["actors"]) == (2, 2)
