"""A small run of PPG, for tests of its agent and of its phases. Its functions import TensorFlow."""

import dataclasses

import numpy as np

from tfrl.algorithms import ppg
from tfrl.algorithms.registry import reader

SMALL = ppg.Config(
    **reader("ppg").changes_of("openai-easy"),
    env="catch",
    run_name="small",
    torso="cookbook",
    precision="float32",
    num_levels=0,
    num_envs=8,
    num_steps=16,
    num_minibatches=2,
    total_steps=1024,
    gamma=0.99,
    env_threads=1,
    policy_updates=2,
    aux_epochs=2,
    aux_minibatches=4,
    aux_lr=1e-3,
    lr=1e-3,
)
PARTS = 2 + 2 * 2  # of an auxiliary phase


def make(config):
    """The learner of these settings."""
    import learners

    from tfrl.training.phasic import PhasicLearner

    return learners.make(config, PhasicLearner)


def train(config):
    """Trains as the command does, in this process; the exit code."""
    import learners

    from tfrl.training.phasic import PhasicLearner

    return learners.train(config, PhasicLearner)


def settings(tmp_path, **changes):
    """The small run's, with a logdir of its own."""
    return dataclasses.replace(SMALL, **{"logdir": str(tmp_path / "logs"), **changes})


def finish(learner, updates):
    """Metrics of whole updates, without times, and the weights after them."""
    history = []
    while len(history) < updates:
        update = learner.update()
        if update is not None:
            history.append({k: v for k, v in update.items() if not k.startswith("time/")})
    return history, {name: weight.copy() for name, weight in learner.weights().items()}


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
