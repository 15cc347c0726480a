"""Parts side by side: what they compute, and who gets which cores."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl import actor_critic, distribute, parallel

IMAGES = np.random.default_rng(0).integers(0, 256, (21, 64, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def network():
    return actor_critic.build(
        torso="impala",
        observation_shape=(64, 64, 3),
        num_actions=15,
        share_torso=True,
        precision="float32",
        seed=1,
    )


@pytest.mark.parametrize(("count", "size"), [(21, 8), (16, 8), (9, 8), (8, 2), (3, 2), (1, 2)])
def test_rows_are_mapped_in_parts_whose_filling_is_left_out(count, size):
    def sums(part):
        return (
            tf.reduce_sum(part, axis=(1, 2)),
            part[:, 0] * 2.0,
            tf.fill([tf.shape(part)[0]], tf.shape(part)[0]),
        )

    rows = np.random.default_rng(0).normal(size=(count, 3, 4)).astype(np.float32)
    signature = [tf.TensorSpec([]), tf.TensorSpec([4]), tf.TensorSpec([], tf.int32)]
    mapped = tf.function(lambda x: parallel.map_rows(sums, x, signature, at_once=2))
    total, twice, sizes = mapped(rows)
    np.testing.assert_allclose(total, rows.sum(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_array_equal(twice, rows[:, 0] * 2)
    np.testing.assert_array_equal(sizes, [size] * count)


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_forward_pass_in_parts_is_that_of_the_whole(network, at_once):
    forward = tf.function(network.forward_pass(False, at_once))
    for found, expected in zip(forward(IMAGES), network(IMAGES), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_a_row_gives_does_not_depend_on_how_many_there_are(network):
    forward = tf.function(network.forward_pass(False, 2), reduce_retracing=True)
    logits, values = forward(IMAGES)
    for count in (1, 2, 7, 16):
        some_logits, some_values = forward(IMAGES[:count])
        np.testing.assert_array_equal(some_logits, logits[:count])
        np.testing.assert_array_equal(some_values, values[:count])


@pytest.mark.parametrize(("cores", "parts", "at_once"), [(2, 16, 2), (4, 4, 4), (8, 3, 3), (1, 4, 1)])
def test_no_more_parts_at_once_than_cores(monkeypatch, cores, parts, at_once):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", str(cores))
    assert parallel.cores() == cores
    assert parallel.share_cores(parts) == at_once


@pytest.mark.parametrize("value", ["", "0", "many"])
def test_without_a_number_of_threads_all_allowed_cores_are_used(monkeypatch, value):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 4})
    assert parallel.cores() == 3


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        ({}, 2),
        ({"micro_batch": 16}, 2),
        ({"micro_batch": 32}, 1),  # the whole minibatch
        ({"replicas": 2}, 1),  # one part each
    ],
)
def test_replicas_share_the_cores(small, monkeypatch, changes, at_once):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    assert distribute.make(small(**changes), None).parts_at_once == at_once
