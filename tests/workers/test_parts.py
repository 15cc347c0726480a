"""Parts side by side: what they compute, and who gets which cores."""

import numpy as np
import pytest
import tensorflow as tf
from learners import build_actor_critic

import resnet.config
from tfrl.envs.spec import ArraySpec, Discrete
from tfrl.workers import data_parallel, machine, strategy

IMAGES = np.random.default_rng(0).integers(0, 256, (66, 64, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def network():
    return build_actor_critic(
        torso="impala",
        observation_spec=ArraySpec((64, 64, 3), "uint8"),
        action_spec=Discrete(15),
        share_torso=True,
        precision="float32",
        seed=1,
    )


@pytest.fixture(scope="module")
def weights(network):
    return {name: tf.constant(vector) for name, vector in network.initial().items()}


@pytest.mark.parametrize(
    ("count", "at_once", "size"),
    [
        (21, 2, 11),
        (16, 2, 8),
        (9, 2, 5),
        (8, 4, 2),
        (3, 4, 2),
        (1, 1, 2),
        (32, 8, 4),
        (70, 2, 32),
        (64, 1, 32),
    ],
)
def test_rows_are_mapped_in_parts_without_the_padding(count, at_once, size):
    def sums(part):
        return (
            tf.reduce_sum(part, axis=(1, 2)),
            part[:, 0] * 2.0,
            tf.fill([tf.shape(part)[0]], tf.shape(part)[0]),
        )

    rows = np.random.default_rng(0).normal(size=(count, 3, 4)).astype(np.float32)
    signature = [tf.TensorSpec([]), tf.TensorSpec([4]), tf.TensorSpec([], tf.int32)]
    mapped = tf.function(lambda x: machine.map_rows(sums, x, signature, at_once))
    total, twice, sizes = mapped(rows)
    np.testing.assert_allclose(total, rows.sum(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_array_equal(twice, rows[:, 0] * 2)
    np.testing.assert_array_equal(sizes, [size] * count)


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_forward_pass_in_parts_equals_that_of_the_whole_batch(network, weights, at_once):
    forward = tf.function(network.forward_pass(on_gpu=False, at_once=at_once))
    expected_outputs = network.outputs(weights, tf.constant(IMAGES))
    for found, expected in zip(forward(weights, IMAGES), expected_outputs, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_result_of_a_row_does_not_depend_on_the_batch_size(network, weights):
    forward = tf.function(network.forward_pass(on_gpu=False, at_once=2), reduce_retracing=True)
    logits, values = forward(weights, IMAGES)
    for count in (1, 2, 7, 16, 40):
        some_logits, some_values = forward(weights, IMAGES[:count])
        np.testing.assert_array_equal(some_logits, logits[:count])
        np.testing.assert_array_equal(some_values, values[:count])


@pytest.mark.parametrize("value", ["", "0", "many"])
def test_without_a_number_of_threads_all_allowed_cores_are_used(monkeypatch, value):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 4})
    assert machine.threads() == 3


@pytest.mark.parametrize(
    ("cores", "changes", "at_once", "one_thread"),
    [
        (2, {}, 2, True),  # 4 parts
        (2, {"replicas": 2}, 1, True),
        (3, {"replicas": 2}, 2, True),
        (4, {"micro_batch": 8}, 4, True),
        (4, {"micro_batch": 16}, 4, False),  # 2 parts
        (2, {"micro_batch": 32}, 2, False),
        (8, {"replicas": 4}, 2, False),
    ],
)
def test_replicas_share_the_cores(small, monkeypatch, cores, changes, at_once, one_thread):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", str(cores))
    set_to = []
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", set_to.append)
    assert strategy.make(small(**changes), None).parts_at_once == at_once
    assert set_to == [1] * one_thread


def test_operations_of_the_supervised_trainer_keep_their_threads(monkeypatch):
    def fail(_):
        raise AssertionError

    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", fail)
    assert strategy.make(resnet.config.Config(), None).parts_at_once == 1


# The order of additions


def added(terms):
    """What `data_parallel.pairwise_sum` adds up in which order, as nested pairs."""
    while len(terms) > 1:
        pairs = [tuple(terms[i : i + 2]) for i in range(0, len(terms) - 1, 2)]
        terms = pairs + terms[len(terms) // 2 * 2 :]
    return terms[0]


def summed(config, replicas):
    """The order in which that many replicas sum the rows of a minibatch."""
    share = config.rows_per_step // replicas
    rows = strategy._cpu_micro_batch(config, config.rows_per_step, replicas)
    assert share % rows == 0
    starts = [range(r * share, (r + 1) * share, rows) for r in range(replicas)]
    return added([added([(start, rows) for start in each]) for each in starts])


def test_the_order_of_additions_is_that_of_pairwise_sum():
    """The numbers give these bits only in this order."""
    terms = np.random.default_rng(0).normal(size=1001).astype(np.float32)

    def value(nested):
        return np.float32(value(nested[0]) + value(nested[1])) if isinstance(nested, tuple) else nested

    assert data_parallel.pairwise_sum(tf.constant(terms)).numpy() == value(added(list(terms)))
    assert np.add.accumulate(terms)[-1] != value(added(list(terms)))  # one after another


@pytest.mark.parametrize("num_steps", [256, 128, 64])
def test_replicas_add_in_the_same_order_as_one_replica(small, num_steps):
    for num_envs in range(4, 260, 4):
        config = small(num_envs=num_envs, num_steps=num_steps, num_minibatches=8)
        alone = summed(config, 1)
        assert all(summed(config, replicas) == alone for replicas in (2, 4)), num_envs
    defaults = small(num_envs=64, num_steps=256, num_minibatches=8)
    assert strategy._cpu_micro_batch(defaults, defaults.rows_per_step, 1) == 128


def test_more_replicas_than_rows_are_accepted(small):
    assert strategy._cpu_micro_batch(small(), small().rows_per_step, 33) == 1
    assert strategy._cpu_micro_batch(small(micro_batch=8), small().rows_per_step, 33) == 1
