"""Losses worked by hand, and their gradients: zero where a loss is clipped. All in float64."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops import losses


def values_and_gradients(loss, x):
    x = tf.constant(x, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loss(x)
    return y.numpy(), tape.gradient(y, x).numpy()


# ratio, advantage, loss, d loss / d ratio; clipped to 0.8 ... 1.2
SURROGATE = [
    (0.5, 1.0, -0.5, -1.0),  # worse than before and good: all of it counts
    (1.0, 1.0, -1.0, -1.0),
    (1.1, 2.0, -2.2, -2.0),
    (1.5, 1.0, -1.2, 0.0),  # moved far enough
    (0.5, -1.0, 0.8, 0.0),  # moved away far enough
    (0.9, -2.0, 1.8, 2.0),
    (1.0, -1.0, 1.0, 1.0),
    (1.5, -1.0, 1.5, 1.0),  # moved towards what is bad: all of it counts
    (1.5, 0.0, 0.0, 0.0),
]


def test_clipped_surrogate_by_hand():
    ratio, advantage, expected, gradient = np.array(SURROGATE).T
    loss, slope = values_and_gradients(
        lambda r: losses.clipped_surrogate(r, tf.constant(advantage), 0.2), ratio
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(slope, gradient, rtol=1e-12, atol=1e-15)


# value, old value, target, loss, d loss / d value; clipped to +-0.2 of the old value
CLIPPED_VALUE = [
    (1.0, 1.0, 2.0, 0.5, -1.0),
    (1.1, 1.0, 2.0, 0.405, -0.9),  # within the clip: the plain error
    (1.5, 1.0, 2.0, 0.32, 0.0),  # 1/2 (1.2 - 2)^2 is larger than 1/2 (1.5 - 2)^2, and does not move
    (0.5, 1.0, 2.0, 1.125, -1.5),  # the plain error is larger
    (3.0, 1.0, 1.0, 2.0, 2.0),
    (0.5, 1.0, 0.0, 0.32, 0.0),
]


def test_losses_accept_numpy_arrays():
    ratio, advantage, expected, _ = np.array(SURROGATE).T
    np.testing.assert_allclose(losses.clipped_surrogate(ratio, advantage, 0.2), expected, atol=1e-15)
    value, old, target, expected, _ = np.array(CLIPPED_VALUE).T
    np.testing.assert_allclose(losses.clipped_value_error(value, old, target, 0.2), expected)


def test_clipped_value_error_by_hand():
    value, old, target, expected, gradient = np.array(CLIPPED_VALUE).T
    loss, slope = values_and_gradients(
        lambda v: losses.clipped_value_error(v, tf.constant(old), tf.constant(target), 0.2), value
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    np.testing.assert_allclose(slope, gradient, rtol=1e-12, atol=1e-12)


def test_value_error_is_half_the_square():
    loss, slope = values_and_gradients(
        lambda v: losses.value_error(v, tf.constant([3.0, 3.0], tf.float64)), [1.0, 3.5]
    )
    np.testing.assert_allclose(loss, [2.0, 0.125], rtol=1e-12)
    np.testing.assert_allclose(slope, [-2.0, 0.5], rtol=1e-12)


# value, target, delta, loss, d loss / d value
HUBER = [
    (1.0, 1.0, 1.0, 0.0, 0.0),
    (1.5, 1.0, 1.0, 0.125, 0.5),  # within: half the square
    (0.0, 1.0, 1.0, 0.5, -1.0),  # where both meet
    (4.0, 1.0, 1.0, 2.5, 1.0),
    (-9.0, 1.0, 1.0, 9.5, -1.0),
    (4.0, 1.0, 2.0, 4.0, 2.0),
    (1.25, 1.0, 0.5, 0.03125, 0.25),
]


@pytest.mark.parametrize("delta", [0.5, 1.0, 2.0])
def test_huber_value_error_by_hand(delta):
    rows = np.array([row for row in HUBER if row[2] == delta])
    value, target, _, expected, gradient = rows.T
    loss, slope = values_and_gradients(
        lambda v: losses.huber_value_error(v, tf.constant(target), delta), value
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    np.testing.assert_allclose(slope, gradient, rtol=1e-12)


def test_huber_is_smooth_and_half_the_square_while_delta_is_large():
    errors = np.linspace(-5, 5, 2001)
    loss, slope = values_and_gradients(lambda v: losses.huber_value_error(v, 0 * errors), errors)
    np.testing.assert_allclose(slope, np.clip(errors, -1, 1), rtol=1e-12)
    np.testing.assert_allclose(np.diff(loss), np.diff(errors) * (slope[1:] + slope[:-1]) / 2, atol=1e-5)
    square, _ = values_and_gradients(lambda v: losses.value_error(v, 0 * errors), errors)
    np.testing.assert_allclose(losses.huber_value_error(errors, 0 * errors, 6.0), square, rtol=1e-12)
    keras_loss = tf.keras.losses.Huber(delta=0.7, reduction=None, dtype="float64")
    mine = losses.huber_value_error(errors, 0 * errors, 0.7)
    np.testing.assert_allclose(mine, keras_loss(0 * errors[:, None], errors[:, None]), rtol=1e-12)


def test_the_clipped_value_loss_is_the_larger_error():
    value, old, target = map(tf.constant, np.random.default_rng(2).normal(0, 2, (3, 500)))
    found, slope = values_and_gradients(lambda v: losses.clipped_value_error(v, old, target, 0.2), value)
    kept = np.clip(value, old - 0.2, old + 0.2)
    plain, clipped = (losses.value_error(v, target).numpy() for v in (value, kept))
    np.testing.assert_allclose(found, np.maximum(plain, clipped), rtol=1e-9)
    moved = (np.abs(value - old) > 0.2) & (clipped > plain + 1e-9)
    assert moved.any() and (slope[moved] == 0).all()


def test_approx_kl_by_hand_and_never_negative():
    ratio = np.array([0.5, 1.0, 2.0])
    kl, slope = values_and_gradients(losses.approx_kl, np.log(ratio))
    np.testing.assert_allclose(kl, [np.log(2) - 0.5, 0.0, 1 - np.log(2)], rtol=1e-12)
    np.testing.assert_allclose(slope, ratio - 1, rtol=1e-12, atol=1e-15)
    assert (losses.approx_kl(tf.constant(np.linspace(-5, 5, 101))).numpy() >= 0).all()


def test_approx_kl_of_policies_that_are_far_apart_is_large_and_a_number():
    """One policy is almost certain of the action: a metric must not end a run."""
    kl = losses.approx_kl(tf.constant([49.0, 51.0, 125.0, -125.0], tf.float32)).numpy()
    assert np.isfinite(kl * 1e6).all() and (kl[:3] > 1e21).all() and kl[3] == 124


def test_the_mean_of_approx_kl_is_the_divergence():
    old, new = np.random.default_rng(0).dirichlet(np.ones(7), 2)
    kl = losses.approx_kl(tf.constant(np.log(new / old))).numpy()
    np.testing.assert_allclose(old @ kl, old @ np.log(old / new), rtol=1e-10)


def test_losses_equal_numpy_on_random_input():
    rng = np.random.default_rng(1)
    ratio, advantage = np.exp(rng.normal(size=500)), rng.normal(size=500)
    value, old, target = rng.normal(size=(3, 500))
    for clip in (0.1, 0.2, 1.0):
        surrogate = losses.clipped_surrogate(tf.constant(ratio), tf.constant(advantage), clip).numpy()
        expected = [
            -min(r * a, max(1 - clip, min(1 + clip, r)) * a) for r, a in zip(ratio, advantage, strict=True)
        ]
        np.testing.assert_allclose(surrogate, expected, rtol=1e-12)
        error = losses.clipped_value_error(*map(tf.constant, (value, old, target)), clip).numpy()
        expected = [
            max((v - r) ** 2, (o + max(-clip, min(clip, v - o)) - r) ** 2) / 2
            for v, o, r in zip(value, old, target, strict=True)
        ]
        np.testing.assert_allclose(error, expected, rtol=1e-12)


def test_policy_gradient_is_the_score_times_the_advantage():
    rng = np.random.default_rng(2)
    log_prob, advantage = rng.normal(size=(2, 50))
    loss, slope = values_and_gradients(lambda x: losses.policy_gradient(x, advantage), log_prob)
    np.testing.assert_allclose(loss, -log_prob * advantage)
    np.testing.assert_allclose(slope, -advantage)
    with tf.GradientTape() as tape:
        constant = tf.constant(advantage)
        tape.watch(constant)
        loss = losses.policy_gradient(log_prob, constant)
    assert tape.gradient(loss, constant) is None


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def slow_kl(p, q):
    return np.array([sum(a * np.log(a / b) for a, b in zip(*rows, strict=True)) for rows in zip(p, q)])  # noqa: B905


def test_categorical_kl_and_its_gradients():
    x, y = 3 * np.random.default_rng(3).normal(size=(2, 40, 6))
    p, q = softmax(x), softmax(y)
    expected = slow_kl(p, q)
    loss, slope = values_and_gradients(lambda z: losses.categorical_kl(x, z), y)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)
    np.testing.assert_allclose(slope, q - p, rtol=1e-9, atol=1e-12)
    _, slope = values_and_gradients(lambda z: losses.categorical_kl(z, y), x)
    np.testing.assert_allclose(slope, p * (np.log(p / q) - expected[:, None]), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(losses.categorical_kl(x, x + 5.0).numpy().round(12), np.zeros(40))


def test_categorical_kl_of_far_logits_is_finite():
    kl = losses.categorical_kl(np.float32([[0, 900.0], [0, -900]]), np.float32([[0, -900.0], [0, -900]]))
    assert kl.dtype == tf.float32
    np.testing.assert_allclose(kl, [900.0, 0.0])


def test_categorical_kl_by_hand():
    """KL of (1/2, 1/2) from (1/4, 3/4) is log 2 - log(3) / 2."""
    old, new = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    loss, slope = values_and_gradients(lambda z: losses.categorical_kl(old, z), new)
    np.testing.assert_allclose(loss, [np.log(2) - np.log(3) / 2], rtol=1e-12)
    np.testing.assert_allclose(slope, [[-0.25, 0.25]], rtol=1e-12)  # q - p


def test_the_kl_is_what_the_regularizer_of_a_sampled_action_estimates():
    """The authors' -log pi(a|f(o)), a ~ pi(.|o), less the entropy of pi(.|o), which has no gradient here."""
    x, y = np.random.default_rng(5).normal(size=(2, 20, 5))
    p, q = softmax(x), softmax(y)
    sampled = -(p * np.log(q)).sum(-1) + (p * np.log(p)).sum(-1)
    np.testing.assert_allclose(losses.categorical_kl(x, y), sampled, rtol=1e-10)
