"""Sum, clip, one step: the same on 1, 2 and 4 replicas, compiled by XLA or not, and after a resume."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops.optimizers import SGD, Adam, Nadam, RMSprop
from tfrl.workers import strategy
from tfrl.workers.optimizers import VariablesOptimizer

RATE, EPSILON, CLIP = 0.01, 0.1, 1.0  # an epsilon that makes the size of a gradient count
SHAPES = ((3, 2), (2,))
OPTIMIZERS = {
    "adam": Adam(EPSILON, uncorrected_epsilon=True),
    "nadam": Nadam(EPSILON),
    "rmsprop": RMSprop(EPSILON),
    "sgd": SGD(),
}


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


def train(small, replicas, *, name="adam", scales=None, compiled=False, steps=5, resumed_at=None):
    """The weights after some steps under a strategy of that many replicas, seen by each of them."""
    runtime = strategy.make(small(replicas=replicas), None)

    def make(weights):
        with runtime.strategy.scope():
            variables = [keras.Variable(w, dtype="float32") for w in weights]
            optimizer = VariablesOptimizer(OPTIMIZERS[name], variables, RATE, scales)

        @tf.function
        def step_on_replica(*grads):
            grads = [tf.reduce_sum(g, axis=0) for g in grads]  # of this replica's samples
            context = tf.distribute.get_replica_context()
            grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
            return optimizer.apply(grads, CLIP, compiled=compiled)

        return variables, optimizer, step_on_replica

    variables, optimizer, step_on_replica = make(initial())
    for step in range(steps):
        if step == resumed_at:
            state = optimizer.get_state()
            variables, optimizer, step_on_replica = make([v.numpy() for v in variables])
            optimizer.set_state(state)
        grads = sample_gradients(step)
        shares = [np.split(g.astype(np.float32), replicas) for g in grads]
        norm = runtime.strategy.run(step_on_replica, args=tuple(map(runtime.per_replica, shares)))
        expected = np.sqrt(sum((g.sum(axis=0) ** 2).sum() for g in grads))
        np.testing.assert_allclose(runtime.first(norm), expected, rtol=1e-5)
    return [[np.asarray(part) for part in runtime.local_results(v.value)] for v in variables]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_any_number_of_replicas_takes_the_step_of_numpys_adam(small, replicas):
    weights = train(small, replicas)
    for parts, expected in zip(weights, numpy_adam(5), strict=True):
        assert len(parts) == replicas
        for part in parts:
            np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_scaled_rate_is_that_of_its_variables_alone(small, replicas):
    weights = train(small, replicas, scales=(1.0, 0.3))
    for parts, expected in zip(weights, numpy_adam(5, scales=(1.0, 0.3)), strict=True):
        np.testing.assert_allclose(parts[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_and_one_on_two_replicas_are_the_plain_one(small, name):
    plain = train(small, 1, name=name)
    for other in (train(small, 1, name=name, compiled=True), train(small, 2, name=name)):
        for expected, found in zip(plain, other, strict=True):
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_takes_the_state_of_another_goes_on_to_the_bit(small, name):
    for expected, found in zip(
        train(small, 2, name=name), train(small, 2, name=name, resumed_at=3), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
