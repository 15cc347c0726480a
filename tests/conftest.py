"""Four logical CPUs for all tests of this process, and the parts of a small run."""

import dataclasses
import sys

import numpy as np
import pytest

from tfrl.config import Config

LOGICAL_CPUS = 4


def pytest_collection_finish(session):
    """Splits the CPU after the test files are imported and before TensorFlow runs anything.

    Where no test of them uses TensorFlow, nothing waits for its import.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS
        )
    except RuntimeError:
        raise pytest.UsageError(
            "a test file uses TensorFlow when it is imported; do so in tests alone"
        ) from None


SMALL = Config(
    env="catch",
    run_name="small",
    torso="cookbook",
    precision="float32",
    num_levels=0,
    num_envs=8,
    num_steps=16,
    num_minibatches=4,
    epochs=2,
    total_steps=1024,
    gamma=0.99,
    env_threads=1,
)


@pytest.fixture
def small():
    """Settings of a run that takes seconds; keyword arguments change them."""
    return lambda **changes: dataclasses.replace(SMALL, **changes)


class Learner:
    """Agent, envs and random numbers of a run, without its folder."""

    def __init__(self, config):
        from tfrl import distribute, envs
        from tfrl.agents.ppo import PPOAgent
        from tfrl.rollout import Collector

        self.config = config
        self.runtime = distribute.make(config, None)
        spec = envs.EnvSpec(config.env, config.num_envs, config.seed, num_levels=config.num_levels)
        self.collector = Collector(
            spec,
            range(config.num_envs),
            replicas=self.runtime.local_replicas,
            num_steps=config.num_steps,
        )
        self.agent = PPOAgent(
            config,
            self.runtime,
            observation_shape=self.collector.observation_shape,
            num_actions=self.collector.num_actions,
        )
        self.updates = 0

    def collect(self):
        """The next update's rollout."""
        from tfrl import random

        config = self.config
        uniforms = random.action_uniforms(config.seed, self.updates, range(config.num_envs), config.num_steps)
        return self.collector.collect(self.agent, uniforms, lambda t: None)

    def steps(self):
        """The next update's minibatches: int32 [R, E, M, B, T / M]."""
        from tfrl import random

        config = self.config
        steps = random.minibatch_steps(
            config.seed,
            self.updates,
            range(config.num_envs),
            num_steps=config.num_steps,
            epochs=config.epochs,
            num_minibatches=config.num_minibatches,
        )
        replicas = self.runtime.local_replicas
        return np.moveaxis(steps.reshape(*steps.shape[:2], replicas, -1, steps.shape[-1]), 2, 0)

    def update(self, rollout, learning_rate=None):
        """Learns from the rollout; the metrics."""
        rate = self.config.lr if learning_rate is None else learning_rate
        metrics = self.agent.update(rollout, self.steps(), rate)
        self.updates += 1
        return metrics

    @property
    def weights(self):
        """A copy of the weights by name."""
        return {name: value.copy() for name, value in self.agent.network.get_weights().items()}


@pytest.fixture
def learner():
    """Makes a Learner from settings."""
    return Learner
