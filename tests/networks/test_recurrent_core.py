"""The recurrent cores beside a computation of their own in NumPy, step by step in float64."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.networks.network import Functional
from tfrl.networks.recurrent import Core

UNITS, FEATURES, STEPS, SEQUENCES = 16, 5, 7, 3


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, h, c, kernel, recurrent, bias):
    i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def gru(x, h, _, kernel, recurrent, bias):
    z, r, g = np.split(x @ kernel + bias, 3)
    pz, pr, pg = np.split(h @ recurrent, 3)
    z, r = sigmoid(z + pz), sigmoid(r + pr)
    return z * h + (1 - z) * np.tanh(g + r * pg), _


def slowly(kind, weights, features, state, begins):
    """Hidden states [U, n, H] and last states [n, S] of features [U, n, D]; begins bool [U, n]."""
    hidden = np.zeros((STEPS, SEQUENCES, UNITS))
    last = np.zeros_like(state)
    for n in range(SEQUENCES):
        h, c = state[n, :UNITS], state[n, UNITS:]
        for t in range(STEPS):
            if begins[t, n]:
                h, c = np.zeros_like(h), np.zeros_like(c)
            h, c = {"lstm": lstm, "gru": gru}[kind](features[t, n], h, c, *weights)
            hidden[t, n] = h
        last[n] = np.concatenate([h, c])
    return hidden, last


def made(kind, length=None, by_row=False):
    """A core's function, its weights moved at random, and inputs with episodes that begin on the way."""
    core = Functional(Core(kind, UNITS, features=FEATURES, by_row=by_row, seed=1, length=length))
    generator = np.random.default_rng(0)
    arrays = {name: a + generator.normal(size=a.shape) / 4 for name, a in core.split(core.initial()).items()}
    features = generator.normal(size=(STEPS, SEQUENCES, FEATURES))
    state = generator.normal(size=(SEQUENCES, core.layer.state_size))
    begins = np.zeros((STEPS, SEQUENCES), bool)
    begins[0, 0] = begins[3, 0] = begins[4, 0] = begins[6, 1] = True
    return core, arrays, features, state, begins


def flat(features, state, begins):
    keep = 1.0 - begins.astype(np.float32)
    arrays = (features.reshape(-1, FEATURES), state, keep.reshape(-1))
    return [tf.constant(a, tf.float32) for a in arrays]


def by_name(arrays):
    return [arrays[name].astype(np.float64) for name in ("kernel", "recurrent_kernel", "bias")]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_core_resets_where_episodes_begin_and_has_the_gradient_of_finite_differences(kind, jit_compile):
    core, arrays, features, state, begins = made(kind)
    expected, last = slowly(kind, by_name(arrays), features, state, begins)
    upstream = np.random.default_rng(1).normal(size=(STEPS, SEQUENCES, UNITS))

    @tf.function(jit_compile=jit_compile)
    def run(vector, *inputs):
        with tf.GradientTape() as tape:
            tape.watch([vector, inputs[0]])
            hidden, last = core(vector, *inputs)
            loss = tf.reduce_sum(hidden * upstream.reshape(-1, UNITS).astype(np.float32))
        return hidden, last, tape.gradient(loss, [vector, inputs[0]])

    hidden, found_last, gradients = run(tf.constant(core.join(arrays)), *flat(features, state, begins))
    np.testing.assert_allclose(hidden.numpy().reshape(expected.shape), expected, atol=2e-6)
    np.testing.assert_allclose(found_last, last, atol=2e-6)

    def loss(arrays, features):
        return (slowly(kind, by_name(arrays), features, state, begins)[0] * upstream).sum()

    generator = np.random.default_rng(2)
    for _ in range(3):  # along random directions
        moves = {name: generator.normal(size=a.shape) for name, a in arrays.items()}
        of_features = generator.normal(size=features.shape)

        def at(step, moves=moves, of_features=of_features):
            return loss({n: a + step * moves[n] for n, a in arrays.items()}, features + step * of_features)

        slope = (at(1e-5) - at(-1e-5)) / 2e-5
        found = (core.join(moves) * gradients[0]).numpy().sum()
        found += (of_features.reshape(-1, FEATURES) * gradients[1].numpy()).sum()
        np.testing.assert_allclose(found, slope, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_gradients_end_at_the_beginning_of_a_sequence(kind):
    core, arrays, features, state, begins = made(kind, length=4)
    inputs, vector = flat(features, state, np.zeros_like(begins)), tf.constant(core.join(arrays))
    reached = {}
    for t in (3, 6):
        with tf.GradientTape() as tape:
            tape.watch(inputs[0])
            hidden, _ = core(vector, *inputs)
            loss = tf.reduce_sum(tf.reshape(hidden, (STEPS, SEQUENCES, UNITS))[t])
        gradient = tape.gradient(loss, inputs[0]).numpy().reshape(features.shape)
        reached[t] = np.flatnonzero(np.abs(gradient).sum(axis=(1, 2))).tolist()
    assert reached == {3: [0, 1, 2, 3], 6: [4, 5, 6]}


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_step_of_a_row_does_not_depend_on_the_others(kind):
    core, arrays, *_ = made(kind, by_row=True)
    vector, generator = tf.constant(core.join(arrays)), np.random.default_rng(0)
    features = generator.normal(size=(9, FEATURES)).astype(np.float32)
    states = generator.normal(size=(9, core.layer.state_size)).astype(np.float32)

    @tf.function(
        input_signature=[tf.TensorSpec((None, FEATURES)), tf.TensorSpec((None, core.layer.state_size))]
    )
    def step(x, s):
        return core(vector, x, s, tf.ones(tf.shape(s)[0]))[1]

    everyone = step(features, states).numpy()
    for rows in (slice(0, 2), slice(3, 8), slice(None, None, -1)):
        np.testing.assert_array_equal(step(features[rows], states[rows]), everyone[rows])
