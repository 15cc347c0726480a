"""The gradient of max pooling is rounded alike in every process.

Within a loop whose turns hang on each other, as gradient steps do, the addresses of TensorFlow's nodes
decide whether it becomes oneDNN's or stays Eigen's: not the usual one in about one of a hundred. To see
that happen takes hundreds of graphs, so what is held here is that none of these gradients is in such a loop.
"""

import collections
import functools

import numpy as np
import pytest
from tensorflow.python.eager import context  # nothing public tells which operations run

from tfrl.algorithms import registry as settings
from tfrl.algorithms.dqn import DQNAgent
from tfrl.experience.replay import Batch
from tfrl.workers import strategy


@pytest.fixture
def operations():
    """Counts operations of the graphs that a call runs, but for functions that stay graphs of their own."""

    def count(call):
        eager = context.context()
        eager.enable_run_metadata()
        call()
        ran = eager.export_run_metadata()
        eager.disable_run_metadata()
        graphs = [graph for function in ran.function_graphs for graph in function.partition_graphs]
        return collections.Counter(node.op for graph in graphs for node in graph.node)

    return count


def within_loops(found):
    """The gradients of max pooling among `found`, which must be of gradient steps, several in a loop."""
    assert found["NextIteration"] > 0
    assert found["AssignVariableOp"] + found["AssignAddVariableOp"] > 0
    return {name: count for name, count in found.items() if "MaxPoolGrad" in name}


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rollout_steps_use_one_gradient_of_max_pooling(small, learner, operations, replicas):
    agent = learner(small(torso="impala", epochs=1, replicas=replicas))
    rollout = agent.collect()
    assert not within_loops(operations(functools.partial(agent.agent.update, rollout, 0)))


@pytest.mark.long
def test_replay_steps_use_one_gradient_of_max_pooling(operations):
    flags = ["--env", "catch", "--torso", "impala", "--num-envs", "1", "--batch-size", "8"]
    config = settings.reader("dqn").parse(flags)
    agent = DQNAgent(config, strategy.make(config, None))
    shape, generator = (2, 1, 8), np.random.default_rng(1)
    images = generator.integers(255, size=(*shape, 10, 5, 1)).astype(np.uint8)
    ones = np.ones(shape, np.float32)
    batch = Batch(
        observation=images,
        action=generator.integers(3, size=shape).astype(np.int32),
        reward=ones,
        discount=ones,
        next_observation=images,
        weight=ones,
        rows=np.zeros(shape, np.int64),
    )
    noise = np.zeros((*shape, agent.update_noise), np.float32)
    step = functools.partial(agent.begin_gradient_steps, batch, noise, steps_done=0, count=2, iteration=0)
    assert not within_loops(operations(step))
