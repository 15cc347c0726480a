"""The categorical policy: sampling by inversion, log-probabilities, entropy."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.networks.distributions import Categorical


def categorical(probabilities):
    return Categorical(tf.math.log(tf.constant(np.atleast_2d(probabilities), tf.float32)))


def sample(probabilities, uniforms):
    rows = np.tile(probabilities, (len(uniforms), 1))
    return categorical(rows).sample(tf.constant(uniforms, tf.float32)).numpy()


def test_sampling_inverts_the_cumulative_sum():
    uniforms = [0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 0.99]
    assert sample([0.1, 0.2, 0.3, 0.4], uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_share_of_each_action_is_its_probability():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(15))
    uniforms = (np.arange(100_000) + 0.5) / 100_000
    shares = np.bincount(sample(probabilities, uniforms), minlength=15) / 100_000
    np.testing.assert_allclose(shares, probabilities, atol=2e-5)


def test_the_largest_and_smallest_numbers_give_an_action_that_can_happen():
    largest = np.nextafter(np.float32(1), np.float32(0))
    logits = tf.constant(np.random.default_rng(1).normal(size=(1000, 15)), tf.float32)
    assert Categorical(logits).sample(tf.fill([1000], largest)).numpy().max() == 14
    assert (Categorical(logits).sample(tf.zeros(1000)).numpy() == 0).all()
    never = tf.constant([[-1e9, 0.0, -1e9]])
    for uniform in (0.0, 0.5, largest):
        assert Categorical(never).sample(tf.constant([uniform])).numpy() == [1]


def test_log_probabilities_are_normalised_and_ignore_a_shift():
    logits = np.random.default_rng(2).normal(0, 5, (50, 15)).astype(np.float32)
    policy = Categorical(tf.constant(logits))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(policy.log_probs, expected, rtol=1e-6, atol=1e-6)
    shifted = Categorical(tf.constant(logits + np.float32(64)))
    np.testing.assert_allclose(shifted.log_probs, expected, rtol=1e-4, atol=1e-5)
    actions = np.arange(50, dtype=np.int32) % 15
    taken = policy.log_prob(tf.constant(actions)).numpy()
    np.testing.assert_array_equal(taken, policy.log_probs.numpy()[np.arange(50), actions])


def test_entropy_and_mode():
    policy = categorical([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125]])
    np.testing.assert_allclose(policy.entropy(), [np.log(4), 1.75 * np.log(2)], rtol=1e-6)
    assert policy.mode().numpy().tolist() == [0, 0] and policy.mode().dtype == tf.int32
    certain = Categorical(tf.constant([[0.0, 1e6, -1e6]]))
    assert certain.entropy().numpy() == [0.0] and certain.mode().numpy() == [1]


def test_gradients_are_finite_for_extreme_logits():
    logits = tf.Variable([[0.0, 300.0, -300.0], [0.0, 0.0, 0.0]])
    with tf.GradientTape() as tape:
        policy = Categorical(logits)
        loss = tf.reduce_sum(policy.entropy() + policy.log_prob(tf.constant([2, 1])))
    assert np.isfinite(tape.gradient(loss, logits)).all()


def test_a_row_is_the_same_alone_and_in_any_batch():
    logits = tf.constant(np.random.default_rng(3).normal(size=(37, 15)), tf.float32)
    uniforms = tf.constant(np.random.default_rng(4).random(37, np.float32))
    whole = Categorical(logits)
    for size in (1, 3, 16):
        part = Categorical(logits[5 : 5 + size])
        np.testing.assert_array_equal(part.log_probs, whole.log_probs[5 : 5 + size])
        np.testing.assert_array_equal(
            part.sample(uniforms[5 : 5 + size]), whole.sample(uniforms)[5 : 5 + size]
        )


def test_wrong_ranks_are_refused():
    policy = categorical([0.5, 0.5])
    with pytest.raises(ValueError):
        Categorical(tf.zeros(3))
    with pytest.raises(ValueError):
        policy.sample(tf.zeros((1, 1)))
    with pytest.raises(ValueError):
        policy.log_prob(tf.zeros((1, 1), tf.int32))
