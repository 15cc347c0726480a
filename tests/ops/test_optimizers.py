"""Optimizers against Keras's, step by step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops import optimizers

STEPS, RATE = 6, 0.02
PAIRS = {
    "adam": (
        optimizers.Adam(1e-5, uncorrected_epsilon=True),
        lambda: keras.optimizers.Adam(RATE, epsilon=1e-5),
    ),
    "nadam": (optimizers.Nadam(1e-3), lambda: keras.optimizers.Nadam(RATE, epsilon=1e-3)),
    "rmsprop": (
        optimizers.RMSprop(0.1, decay=0.99),
        lambda: keras.optimizers.RMSprop(RATE, rho=0.99, epsilon=0.1),
    ),
    "sgd": (optimizers.SGD(), lambda: keras.optimizers.SGD(RATE)),
    "momentum": (optimizers.SGD(0.9), lambda: keras.optimizers.SGD(RATE, momentum=0.9)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_steps_equal_those_of_keras(name):
    ours, theirs = PAIRS[name][0], PAIRS[name][1]()
    generator = np.random.default_rng(0)
    start = generator.normal(size=40).astype(np.float32)
    variable = keras.Variable(start)
    weights, slots = tf.constant(start), {n: tf.constant(x) for n, x in ours.initial(start).items()}
    for _ in range(STEPS):
        gradient = tf.constant(generator.normal(size=40).astype(np.float32))
        weights, slots = ours.step(weights, slots, gradient, tf.constant(RATE))
        theirs.apply([gradient], [variable])
        assert set(slots) == set(ours.slots)
        np.testing.assert_allclose(weights, variable.numpy(), rtol=2e-5, atol=1e-6)


def test_adam_as_in_the_paper_equals_a_float64_computation():
    generator, optimizer = np.random.default_rng(0), optimizers.Adam(1e-2)
    expected = generator.normal(size=40)
    weights = tf.constant(expected, tf.float32)
    slots = {n: tf.constant(x) for n, x in optimizer.initial(weights.numpy()).items()}
    mean = square = np.zeros(40)
    for t in range(1, STEPS + 1):
        gradient = generator.normal(size=40)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        step = mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.999**t)) + 1e-2)
        expected = expected - RATE * step
        weights, slots = optimizer.step(weights, slots, tf.constant(gradient, tf.float32), tf.constant(RATE))
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
