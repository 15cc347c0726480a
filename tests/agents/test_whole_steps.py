"""Where no second topology exists, gradient steps are one program: the same steps as those in parts."""

import learners
import numpy as np
import pytest
import tensorflow as tf

from tfrl.algorithms import registry as settings
from tfrl.config.run import RLSettings
from tfrl.experience.replay import Batch
from tfrl.networks.network import Packing
from tfrl.ops.graph import graph, is_for_xla
from tfrl.workers import strategy

SMALL = ["--hidden", "16,16", "--num-envs", "1", "--lr", "1e-2", "--adam-epsilon", "1e-2", "--seed", "3"]
K, ROWS = 4, 256  # two parts, where there are parts


def flags_of(algorithm, *more):
    env = "CartPole-v1" if algorithm == "dqn" else "Pendulum-v1"
    replay = ["--batch-size", str(ROWS), "--train-every", str(K), "--target-every", "2", "--tau", "0.1"]
    return [*SMALL, *replay, "--env", env, *more]


def agent_of(algorithm, flags):
    config = settings.reader(algorithm).parse(flags)
    module = __import__(f"tfrl.algorithms.{algorithm}", fromlist=["x"])
    return getattr(module, f"{algorithm.upper()}Agent")(config, strategy.make(config, None))


def batches(agent, algorithm):
    generator, size = np.random.default_rng(0), (K, 1, ROWS)
    normal = lambda *more: generator.normal(size=(*size, *more)).astype(np.float32)  # noqa: E731
    observations = agent.network.functions["q" if algorithm == "dqn" else "actor"].layer.input_shape[-1]
    actions = generator.integers(2, size=size).astype(np.int32)
    batch = Batch(
        observation=normal(observations),
        action=actions if algorithm == "dqn" else np.tanh(normal(1)),
        reward=normal(),
        discount=generator.choice([0.0, 0.98], size).astype(np.float32),
        next_observation=normal(observations),
        weight=generator.uniform(0.2, 1, size).astype(np.float32),
        rows=np.zeros(size, np.int64),
    )
    return batch, normal(agent.update_noise)


def close(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("td3", ("--huber-delta", "0.5", "--max-grad-norm", "0.1")),
        pytest.param("sac", (), marks=pytest.mark.long),
        pytest.param("ddpg", ("--optimizer", "nadam"), marks=pytest.mark.long),
        pytest.param("dqn", ("--prioritized", "--dueling"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_one_program_equals_steps_in_parts_bit_for_bit(monkeypatch, algorithm, more):
    """Compares weights, slots, target networks, metrics and errors after calls of K steps and of one."""
    flags = flags_of(algorithm, *more)
    whole = agent_of(algorithm, flags)
    monkeypatch.setattr(RLSettings, "has_one_topology", False)
    in_parts = agent_of(algorithm, flags)
    batch, noise = batches(whole, algorithm)
    for first, count in ((0, K), (K, 1)):
        results = [
            a.begin_gradient_steps(batch, noise, steps_done=first, count=count, iteration=0).wait()
            for a in (whole, in_parts)
        ]
        (metrics, _, errors), (expected_metrics, _, expected_errors) = results
        close(metrics, expected_metrics)
        np.testing.assert_allclose(errors, expected_errors, rtol=1e-3, atol=1e-4)
        close(whole.get_state(), in_parts.get_state())
    parts = [step.part_rows for agent in (whole, in_parts) for step in agent.steps.values()]
    assert len({*parts}) == 2, "both took the same way"


@pytest.mark.long
def test_one_program_equals_ppos_epochs_in_parts(tmp_path, monkeypatch):
    flags = [*SMALL, "--env", "Pendulum-v1", "--num-steps", "64", "--num-minibatches", "2", "--epochs", "2"]
    flags += ["--logdir", str(tmp_path), "--run-name", "run"]
    config = settings.reader("ppo").parse(flags)
    found = learners.updated(learners.make(config), 2)
    monkeypatch.setattr(RLSettings, "has_one_topology", False)
    expected = learners.updated(learners.make(config), 2)
    for one, other in zip(found[0], expected[0], strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    close(found[1], expected[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_a_split_vector_is_the_vector_of_gradients(compiled):
    shapes = ((3, 5), (16,), (), (7,))
    packing = Packing([tf.keras.Variable(np.zeros(shape, np.float32)) for shape in shapes])
    vector = tf.constant(np.random.default_rng(0).normal(size=packing.size).astype(np.float32))

    def gradient(vector):
        assert is_for_xla() == compiled
        with tf.GradientTape() as tape:
            tape.watch(vector)
            arrays = packing.arrays(vector)
            loss = tf.add_n([(k + 1) * tf.reduce_sum(tf.square(x)) for k, x in enumerate(arrays[:3])])
        return tape.gradient(loss, vector), packing.vector(packing.arrays(vector))

    found, again = graph(gradient, jit_compile=compiled)(vector)
    assert not is_for_xla()
    of_each = zip(packing.names, shapes, (2, 4, 6, 0), strict=True)
    factors = packing.join({name: np.full(shape, factor) for name, shape, factor in of_each})
    np.testing.assert_allclose(found, factors * vector, rtol=1e-6)
    is_used = packing.join({n: np.ones(s) for n, s in zip(packing.names, shapes, strict=True)}) > 0
    np.testing.assert_array_equal(again, np.where(is_used, vector, 0))
