"""Targets, losses and slow copies against NumPy in float64, row by row, and by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops import q_learning

B, A, N, D = 50, 5, 2, 3


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def gradient(function, x):
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(function(x))
    return tape.gradient(y, x)


def slope(function, x, step=1e-6):
    """Central differences of the sum, one number at a time."""
    slopes = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i], down[i] = x[i] + step, x[i] - step
        slopes[i] = (np.sum(function(up)) - np.sum(function(down))) / (2 * step)
    return slopes


# n-step transitions


def slow_n_step(rewards, first, truncated, gamma):
    total, steps = 0.0, 0
    for r, new, cut in zip(rewards, first, truncated, strict=True):
        total, steps = total + gamma**steps * r, steps + 1
        if new:
            return total, (gamma**steps if cut else 0.0), steps
    return total, gamma**steps, steps


@pytest.mark.parametrize("n", [1, 3, 7])
def test_n_step_transitions_equal_a_slow_reference(rng, n):
    rewards = rng.normal(size=(4, 200, n))
    first = rng.random(rewards.shape) < 0.3
    truncated = first & (rng.random(rewards.shape) < 0.5)
    found = q_learning.n_step(rewards, first, truncated, gamma=0.9)
    for i in np.ndindex(4, 200):
        expected = slow_n_step(rewards[i], first[i], truncated[i], 0.9)
        np.testing.assert_allclose([x[i] for x in found], expected, rtol=1e-12, atol=1e-15)


def test_n_step_transitions_by_hand():
    # gamma = 1/2: goes on; terminates with its second reward; is cut off there; is cut off with its last.
    rewards = np.tile(np.float32([1, 2, 4]), (4, 1))
    first = np.array([[0, 0, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1]], bool)
    truncated = np.array([[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
    reward, discount, steps = q_learning.n_step(rewards, first, truncated, gamma=0.5)
    np.testing.assert_array_equal(reward, [3, 2, 2, 3])
    np.testing.assert_array_equal(discount, [0.125, 0, 0.25, 0.125])
    np.testing.assert_array_equal(steps, [3, 2, 2, 3])
    assert (reward.dtype, discount.dtype, steps.dtype) == (np.float32, np.float32, np.int32)


def test_a_reward_that_is_not_a_number_after_the_end_is_not_read():
    rewards, first = np.array([[1.0, np.nan]]), np.array([[True, False]])
    reward, discount, _ = q_learning.n_step(rewards, first, np.zeros_like(first), gamma=0.9)
    assert (reward[0], discount[0]) == (1.0, 0.0)


# Targets


def test_targets_of_q_learning_equal_a_slow_reference(rng):
    reward, discount = rng.normal(size=B), rng.choice([0.0, 0.99], B)
    next_q, online = rng.normal(size=(2, B, A))
    found = q_learning.q_learning_target(reward, discount, next_q)
    np.testing.assert_allclose(
        found, [r + d * max(q) for r, d, q in zip(reward, discount, next_q, strict=True)]
    )
    found = q_learning.double_q_learning_target(reward, discount, next_q, online)
    rows = zip(reward, discount, next_q, online, strict=True)
    np.testing.assert_allclose(found, [r + d * q[list(o).index(max(o))] for r, d, q, o in rows])
    same = q_learning.double_q_learning_target(reward, discount, next_q, next_q)
    np.testing.assert_array_equal(same, q_learning.q_learning_target(reward, discount, next_q))


def test_no_gradient_flows_through_a_target(rng):
    reward, discount, next_q = rng.normal(size=B), np.full(B, 0.9), rng.normal(size=(B, A))
    assert gradient(lambda q: q_learning.q_learning_target(reward, discount, q), next_q) is None
    assert gradient(lambda q: q_learning.double_q_learning_target(reward, discount, q, q), next_q) is None


def test_smoothed_actions_stay_near_and_within_bounds(rng):
    action, noise = rng.uniform(-1, 1, (B, D)), 5 * rng.normal(size=(B, D))
    found = q_learning.smoothed_action(action, noise, scale=0.2, clip=0.5).numpy()
    for i in np.ndindex(B, D):
        moved = action[i] + max(-0.5, min(0.5, 0.2 * noise[i]))
        np.testing.assert_allclose(found[i], max(-1.0, min(1.0, moved)), rtol=1e-14)
    assert np.abs(found).max() == 1.0  # the case occurs


# Critics


def test_dueling_subtracts_the_mean_advantage(rng):
    value, advantages = rng.normal(size=B), rng.normal(size=(B, A))
    q = q_learning.dueling(value, advantages).numpy()
    np.testing.assert_allclose(
        q, [[v + a - sum(row) / A for a in row] for v, row in zip(value, advantages, strict=True)]
    )
    np.testing.assert_allclose(q.mean(axis=1), value)
    np.testing.assert_allclose(q_learning.dueling(value, advantages + 7.0), q)  # what makes V identifiable


def test_taken_q_selects_the_value_of_each_action(rng):
    q, actions = rng.normal(size=(B, A)), rng.integers(A, size=B, dtype=np.int32)
    np.testing.assert_array_equal(q_learning.taken_q(q, actions), [row[a] for row, a in zip(q, actions)])  # noqa: B905


@pytest.mark.parametrize("delta", [None, 0.5, 1.0])
def test_td_loss_and_its_slope(rng, delta):
    q, target = 2 * rng.normal(size=(2, B))
    weight = rng.random(B)

    def expected(x):
        size = np.abs(x - target)
        linear = 0.0 if delta is None else np.maximum(size - delta, 0.0)
        return weight * (0.5 * size**2 - 0.5 * linear**2)  # Huber's loss in another form

    np.testing.assert_allclose(q_learning.td_loss(q, target, weight, huber_delta=delta), expected(q))
    found = gradient(lambda x: q_learning.td_loss(x, target, weight, huber_delta=delta), q)
    bound = np.inf if delta is None else delta
    np.testing.assert_allclose(found, weight * np.clip(q - target, -bound, bound), rtol=1e-12)
    plain = q_learning.td_loss(q, target, huber_delta=delta)
    np.testing.assert_array_equal(q_learning.td_loss(q, target, np.ones(B), huber_delta=delta), plain)


# Soft values, actors, temperature


def test_soft_values_equal_a_slow_reference(rng):
    qs, log_prob = rng.normal(size=(N, B)), rng.normal(size=B)
    expected = [min(q) - 0.3 * lp for q, lp in zip(qs.T, log_prob, strict=True)]
    np.testing.assert_allclose(q_learning.soft_value(qs, log_prob, 0.3), expected)
    qs, probabilities = rng.normal(size=(N, B, A)), rng.dirichlet(np.ones(A), B)
    expected = [
        sum(p * (min(qs[:, b, a]) - 0.3 * np.log(p)) for a, p in enumerate(probabilities[b]))
        for b in range(B)
    ]
    found = q_learning.discrete_soft_value(qs, np.log(probabilities), 0.3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_discrete_soft_value_is_the_mean_of_the_sampled_one(rng):
    """And the greatest there is, alpha log sum exp(Q / alpha), for the policy softmax(Q / alpha)."""
    q, alpha = rng.normal(size=(1, B, A)), 0.4
    log_probs = np.log(softmax(q[0] / alpha))
    exact = q_learning.discrete_soft_value(q, log_probs, alpha)
    np.testing.assert_allclose(exact, alpha * np.log(np.exp(q[0] / alpha).sum(-1)), rtol=1e-12)
    one_by_one = [q_learning.soft_value(q[:, :, a], log_probs[:, a], alpha) for a in range(A)]
    np.testing.assert_allclose(exact, np.sum(np.exp(log_probs.T) * one_by_one, axis=0), rtol=1e-12)


def test_an_impossible_action_adds_nothing():
    log_probs, qs = np.array([[0.0, -1e9]]), np.array([[[2.0, 1e9]]])
    assert q_learning.discrete_soft_value(qs, log_probs, 0.1).numpy() == [2.0]
    assert q_learning.categorical_entropy(log_probs).numpy() == [0.0]


def test_actor_losses_and_their_slopes(rng):
    qs, log_prob, alpha = rng.normal(size=(N, B)), rng.normal(size=B), np.float64(0.2)
    np.testing.assert_allclose(
        q_learning.soft_actor_loss(qs, log_prob, alpha), alpha * log_prob - qs.min(axis=0)
    )
    # Down the smaller of the two critics, by the action alone.
    found = gradient(lambda q: q_learning.soft_actor_loss(q, log_prob, alpha), qs)
    np.testing.assert_array_equal(found, -np.float64(qs == qs.min(axis=0)))

    logits, qs = rng.normal(size=(6, A)), rng.normal(size=(N, 6, A))

    def expected(x):
        p = softmax(x)
        return (p * (alpha * np.log(p) - qs.min(axis=0))).sum(-1)

    def loss(x):
        return q_learning.discrete_soft_actor_loss(qs, tf.nn.log_softmax(x), alpha)

    np.testing.assert_allclose(loss(logits), expected(logits), rtol=1e-12)
    np.testing.assert_allclose(gradient(loss, logits), slope(expected, logits), rtol=1e-6, atol=1e-8)
    log_probs = tf.nn.log_softmax(logits)
    assert gradient(lambda q: q_learning.discrete_soft_actor_loss(q, log_probs, alpha), qs) is None
    with_alpha = gradient(lambda a: q_learning.discrete_soft_actor_loss(qs, log_probs, a), alpha)
    assert with_alpha is None


def test_temperature_rises_if_entropy_is_below_the_target(rng):
    log_prob, log_alpha, target = rng.normal(size=B), np.float64(-1.5), -3.0
    found = q_learning.temperature_loss(log_alpha, -log_prob, target)
    np.testing.assert_allclose(found, np.exp(log_alpha) * (-log_prob - target))
    np.testing.assert_allclose(
        gradient(lambda x: q_learning.temperature_loss(x, -log_prob, target), np.float64(log_alpha)),
        np.exp(log_alpha) * (-log_prob - target).sum(),
    )
    assert gradient(lambda h: q_learning.temperature_loss(log_alpha, h, target), log_prob) is None
    sure, unsure = (
        gradient(lambda x, h=h: q_learning.temperature_loss(x, np.array([h]), 1.0), np.float64(0))
        for h in (0.5, 1.5)
    )
    assert sure < 0 < unsure  # descending, alpha goes up and down


def test_entropy_is_minus_the_sum_of_p_log_p(rng):
    p = rng.dirichlet(np.ones(A), B)
    expected = [-sum(x * np.log(x) for x in row) for row in p]
    np.testing.assert_allclose(q_learning.categorical_entropy(np.log(p)), expected, rtol=1e-12)


def test_float32_rows_are_the_same_in_any_batch(rng):
    log_probs = tf.nn.log_softmax(tf.constant(rng.normal(size=(37, A)), tf.float32))
    qs = tf.constant(rng.normal(size=(N, 37, A)), tf.float32)
    whole = q_learning.discrete_soft_actor_loss(qs, log_probs, 0.1)
    for rows in (slice(0, 1), slice(5, 18), slice(36, 37)):
        part = q_learning.discrete_soft_actor_loss(qs[:, rows], log_probs[rows], 0.1)
        np.testing.assert_array_equal(part, whole[rows])


# Slow copies


def test_polyak_moves_the_target_by_tau(rng):
    target, source = rng.normal(size=(2, 4, 3))
    np.testing.assert_allclose(q_learning.polyak(target, source, 0.005), 0.995 * target + 0.005 * source)
    target, source = np.float32([1e30, -3.3, 0.1]), np.float32([1e-30, 7.7, 0.2])
    np.testing.assert_array_equal(q_learning.polyak(target, source, 1.0), source)
    np.testing.assert_array_equal(q_learning.polyak(target, source, 0.0), target)
