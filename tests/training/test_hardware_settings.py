"""--device, --threads, --eager and --log-level: where and how a run computes, and what it says."""

import dataclasses
import logging
import re

import numpy as np
import pytest
import tensorflow as tf
from learners import make, updated
from processes import results, train, train_here
from refusals import refusal

from resnet.config import READER as SUPERVISED
from tfrl.algorithms.dqn import DQNAgent
from tfrl.algorithms.ppo import PPOAgent
from tfrl.algorithms.registry import reader
from tfrl.workers import machine, strategy

SHORT = "--env catch --num-levels 0 --torso linear --num-envs 8 --num-steps 16 --num-minibatches 4 --epochs 1"
SHORT += " --eval-episodes 1 --precision float32 --total-steps 256"


def test_results_do_not_depend_on_the_number_of_threads(small, tmp_path):
    runs = []
    for threads in (1, 3):
        config = small(logdir=str(tmp_path), threads=threads, micro_batch=16)
        learner = make(config)
        assert learner.session.runtime.parts_at_once == threads
        runs.append(updated(learner, 2))
        learner.close()
    (history, weights), *others = runs
    for other_history, other_weights in others:
        np.testing.assert_equal(other_history, history)
        for name, value in weights.items():
            np.testing.assert_array_equal(other_weights[name], value, err_msg=name)


def test_replicas_share_the_threads(small):
    assert strategy.make(small(threads=6, replicas=2), None).parts_at_once == 3


def test_the_number_of_devices_is_told(small):
    """The summary of a run and its last line name them."""
    for replicas, shown in ((1, "CPU"), (2, "2 x CPU")):
        runtime = strategy.make(small(replicas=replicas, device="cpu"), None)
        assert (runtime.device, runtime.replicas) == (shown, replicas)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("tfrl.ppo_procgen", SHORT),
        ("tfrl.sac", "--env Pendulum-v1 --total-steps 1000 --eval-episodes 1"),
    ],
)
def test_processes_with_other_numbers_of_threads_end_with_equal_weights(tmp_path, module, flags, monkeypatch):
    from processes import Training

    monkeypatch.setattr(Training, "module", module)
    found = set()
    for threads in (1, 3):
        folder = tmp_path / str(threads)
        code, _, stderr = train(folder, *flags.split(), "--threads", threads)
        assert code == 0, stderr
        found.add(results(folder)["weights_sha256"])
    assert len(found) == 1


def test_a_device_that_does_not_exist_is_refused():
    for parse in (reader("ppo").parse, SUPERVISED.parse):
        assert "--device must be auto, cpu, gpu or gpu:NUMBER; got 'cuda:0'." in refusal(
            parse, ["--device", "cuda:0"]
        )
    assert reader("ppo").parse(["--device", "gpu:1"]).device == "gpu:1"
    assert "TensorFlow finds " in refusal(machine.choose_device, "gpu:77")
    # This process sees no GPU.
    assert "needs a GPU that is not here: TensorFlow finds none" in refusal(machine.choose_device, "gpu")


@pytest.mark.parametrize(
    ("device", "shown"), [("cpu", "CPU"), ("gpu", r"(\d+ x )?GPU"), ("gpu:0", "GPU"), ("gpu:1", "GPU")]
)
def test_a_process_computes_on_its_device(tmp_path, gpus, device, shown):
    code, stdout, stderr = train(tmp_path / "run", *SHORT.split(), "--device", device)
    if device == "gpu:1" and gpus == 1:
        assert code == 2 and "only 1, from gpu:0 on" in stderr
        return
    assert code == 0, stderr
    assert re.search(f"computes on +{shown}, float32", stdout)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("dqn", marks=pytest.mark.long)])
def test_eager_functions_compute_the_same_up_to_rounding(tmp_path, algorithm, monkeypatch):
    """Python code of a loss runs at each gradient step, as a breakpoint there needs it."""
    kind, name = {"ppo": (PPOAgent, "_minibatch_loss"), "dqn": (DQNAgent, "_loss")}[algorithm]
    loss, calls = getattr(kind, name), []

    def noted(self, *arguments):
        calls.append(tf.executing_eagerly())
        return loss(self, *arguments)

    monkeypatch.setattr(kind, name, noted)
    flags = {
        "ppo": "--env CartPole-v1 --num-envs 2 --num-steps 8 --num-minibatches 2 --epochs 1 --total-steps 32",
        "dqn": "--env CartPole-v1 --total-steps 64 --iteration-steps 32 --learning-starts 32 --batch-size 8"
        " --train-every 8 --updates-per-step 0.25 --n-step 1",
    }[algorithm] + " --hidden 8 --eval-episodes 1"
    whole = {}
    for name, more in (("graph", []), ("eager", ["--eager"])):
        calls.clear()
        code, _, stderr = train_here(tmp_path / name, *flags.split(), *more, module=f"tfrl.{algorithm}")
        assert code == 0, stderr
        assert calls and all(calls) == (name == "eager")
        with np.load(tmp_path / name / "export" / "weights.npz") as arrays:
            whole[name] = {key: arrays[key] for key in arrays.files}
    assert not tf.config.functions_run_eagerly()
    for key, value in whole["graph"].items():
        np.testing.assert_allclose(whole["eager"][key], value, rtol=1e-3, atol=1e-4, err_msg=key)


def test_the_log_level_decides_which_messages_are_shown(tmp_path, caplog):
    root, ours = logging.getLogger(), logging.getLogger("tensorflow")
    before = root.level, ours.level
    try:
        with caplog.at_level(logging.DEBUG, "tfrl"):
            flags = [*SHORT.split(), "--log-level", "debug", "--device", "cpu", "--eager"]
            code, stdout, stderr = train_here(tmp_path / "run", *flags)
        assert code == 0, stderr
        assert re.search("computes on +CPU, float32", stdout)
        assert root.level == ours.level == logging.DEBUG
        assert {"collecting", "updating", "saving"} <= {record.getMessage() for record in caplog.records}
    finally:
        root.setLevel(before[0])
        ours.setLevel(before[1])
    assert "--log-level must be one of error, warning, info, debug" in refusal(
        reader("ppo").parse, ["--log-level", "loud"]
    )


def test_a_resumed_run_may_change_them(tmp_path):
    config = reader("ppo").parse(["--logdir", str(tmp_path)])
    assert {"device", "threads", "eager", "log_level", "yes", "resume"} <= config.may_change
    assert dataclasses.replace(config, threads=3).run_dir == config.run_dir
