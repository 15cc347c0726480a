"""Sum, then clip, then one step of Adam: the same on 1, 2 and 4 replicas; Keras's own way is not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrl.workers import strategy
from tfrl.workers.optimizers import SummedAdam

RATE, EPSILON, CLIP = 0.01, 0.1, 1.0  # an epsilon that makes the size of a gradient count
SHAPES = ((3, 2), (2,))


def initial():
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in SHAPES]


def sample_gradients(step, samples=4):
    """One gradient for each of 4 samples, of which each replica holds an equal share."""
    rng = np.random.default_rng([1, step])
    return [rng.normal(size=(samples, *shape)) * 3.0 ** (step % 3) for shape in SHAPES]


def numpy_adam(steps, scales=(1.0, 1.0), clip=CLIP):
    """Kingma & Ba 2015, algorithm 1 in the form at the end of section 2, on clipped summed gradients."""
    weights, first, second = initial(), [0.0, 0.0], [0.0, 0.0]
    for step in range(steps):
        grads = [g.sum(axis=0) for g in sample_gradients(step)]
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        for i, grad in enumerate(grads):
            grad = grad * min(1.0, clip / norm)
            first[i] = 0.9 * first[i] + 0.1 * grad
            second[i] = 0.999 * second[i] + 0.001 * grad**2
            rate = RATE * scales[i] * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            weights[i] = weights[i] - rate * first[i] / (np.sqrt(second[i]) + EPSILON)
    return weights


def train(small, replicas, make_optimizer, steps=5, *, sums_itself=False):
    """The weights after some steps under a strategy of that many replicas, seen by each of them."""
    runtime = strategy.make(small(replicas=replicas), None)
    with runtime.strategy.scope():
        variables = [keras.Variable(w, dtype="float32") for w in initial()]
        optimizer = make_optimizer(variables)
        optimizer.build(variables)

    @tf.function
    def step_on_replica(*grads):
        grads = [tf.reduce_sum(g, axis=0) for g in grads]  # of this replica's samples
        if not sums_itself:
            context = tf.distribute.get_replica_context()
            grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
            grads, _ = tf.clip_by_global_norm(grads, CLIP)
        optimizer.apply(grads)

    for step in range(steps):
        shares = [np.split(g.astype(np.float32), replicas) for g in sample_gradients(step)]
        runtime.strategy.run(step_on_replica, args=tuple(map(runtime.per_replica, shares)))
    return [[np.asarray(part) for part in runtime.local_results(v.value)] for v in variables]


def summed_adam(_variables):
    return SummedAdam(RATE, epsilon=EPSILON)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_any_number_of_replicas_takes_the_step_of_numpys_adam(small, replicas):
    weights = train(small, replicas, summed_adam)
    for parts, expected in zip(weights, numpy_adam(5), strict=True):
        assert len(parts) == replicas
        for part in parts:
            np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-6)


def test_keras_clips_before_it_sums_so_replicas_change_its_step(small):
    """The guard of the reason for SummedAdam: once this fails, Keras's own optimizer may do."""

    def keras_adam(_variables):
        return keras.optimizers.Adam(RATE, epsilon=EPSILON, global_clipnorm=CLIP)

    one, two = (train(small, n, keras_adam, sums_itself=True)[0][0] for n in (1, 2))
    np.testing.assert_allclose(one, numpy_adam(5)[0], rtol=1e-5, atol=1e-6)
    assert np.abs(two - one).max() > 1e-3


def test_the_hook_of_keras_that_is_overridden_exists_and_is_what_sums(small):
    """The guard of a protected method: without it gradients would be summed a second time."""
    assert callable(getattr(keras.optimizers.Adam, "_all_reduce_sum_gradients", None))

    class WithoutTheHook(SummedAdam):
        _all_reduce_sum_gradients = keras.optimizers.Adam._all_reduce_sum_gradients

    weights = train(small, 2, lambda _variables: WithoutTheHook(RATE, epsilon=EPSILON))[0][0]
    assert np.abs(weights - numpy_adam(5)[0]).max() > 1e-3


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_scaled_rate_is_that_of_its_variables_alone(small, replicas):
    def scaled(variables):
        optimizer = SummedAdam(RATE, epsilon=EPSILON)
        optimizer.scale_rate(variables[1:], 0.3)
        return optimizer

    weights = train(small, replicas, scaled)
    for parts, expected in zip(weights, numpy_adam(5, scales=(1.0, 0.3)), strict=True):
        np.testing.assert_allclose(parts[0], expected, rtol=1e-5, atol=1e-6)
