"""Returns against their definitions as sums, episode by episode, closed forms, and cases worked by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops.returns import gae, rewards_and_discounts, vtrace


def run_gae(rewards, values, last_value, first, gamma, lam, dtype=np.float64, cut=None, final=None):
    """Without `cut` no episode was truncated."""
    rewards, values, last_value = (np.asarray(x, dtype) for x in (rewards, values, last_value))
    cut = np.zeros(rewards.shape, bool) if cut is None else cut
    final = np.full(rewards.shape, np.nan, dtype) if final is None else final.astype(dtype)
    rewards, discounts = rewards_and_discounts(rewards, np.asarray(first, bool), cut, final, gamma=gamma)
    advantages, targets = gae(rewards, discounts, values, last_value, lam=lam)
    return advantages.numpy(), targets.numpy()


def random_rollout(steps, envs, end_rate, seed=0):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, steps, envs))
    return rewards, values, rng.normal(size=envs), rng.random((steps, envs)) < end_rate


def slow_gae(rewards, values, last_value, first, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, up to the end of the episode, term by term."""
    steps, envs = rewards.shape
    advantages = np.zeros((steps, envs))
    for b in range(envs):
        for t in range(steps):
            for l in range(steps - t):  # noqa: E741
                k = t + l
                following = last_value[b] if k == steps - 1 else values[k + 1, b]
                delta = rewards[k, b] - values[k, b] + (0.0 if first[k, b] else gamma * following)
                advantages[t, b] += (gamma * lam) ** l * delta
                if first[k, b]:
                    break
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(0.999, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.95)])
@pytest.mark.parametrize("end_rate", [0.0, 0.15, 1.0])
def test_gae_is_the_sum_that_defines_it(gamma, lam, end_rate):
    rollout = random_rollout(24, 5, end_rate)
    advantages, targets = run_gae(*rollout, gamma, lam)
    expected = slow_gae(*rollout, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(targets, expected + rollout[1], rtol=1e-12, atol=1e-12)


def test_float32_stays_close_to_float64_over_a_whole_rollout():
    rollout = random_rollout(256, 8, 0.01)
    advantages, _ = run_gae(*rollout, 0.999, 0.95, np.float32)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, run_gae(*rollout, 0.999, 0.95)[0], rtol=1e-4, atol=1e-4)


def test_lambda_0_gives_one_step_errors():
    rewards, values, last_value, first = random_rollout(20, 4, 0.2)
    advantages, _ = run_gae(rewards, values, last_value, first, 0.9, 0.0)
    following = np.vstack([values[1:], last_value])
    np.testing.assert_allclose(advantages, rewards + 0.9 * following * ~first - values, rtol=1e-12)


def test_lambda_1_gives_discounted_returns_minus_values():
    rewards, values, last_value, first = random_rollout(20, 4, 0.2)
    _, targets = run_gae(rewards, values, last_value, first, 0.9, 1.0)
    discounted = last_value
    for t in reversed(range(20)):
        discounted = rewards[t] + 0.9 * discounted * ~first[t]
        np.testing.assert_allclose(targets[t], discounted, rtol=1e-9, atol=1e-12)


def test_with_gamma_0_the_return_is_the_reward():
    rollout = random_rollout(10, 3, 0.2)
    advantages, targets = run_gae(*rollout, 0.0, 0.95)
    np.testing.assert_allclose(advantages, rollout[0] - rollout[1], rtol=1e-12)
    np.testing.assert_allclose(targets, rollout[0], rtol=1e-12, atol=1e-12)


def test_a_case_worked_by_hand():
    # gamma = lam = 1/2. Env 0 goes on throughout, env 1 ends an episode with its second reward.
    rewards, values, last_value = [[1, 1], [2, 2], [3, 3]], [[4, 4], [6, 6], [8, 8]], [10, 10]
    first = [[False, False], [False, True], [False, False]]
    # env 0: deltas 1 + 3 - 4 = 0, 2 + 4 - 6 = 0, 3 + 5 - 8 = 0
    # env 1: deltas 0, 2 - 6 = -4, 0; A_1 = -4, A_0 = 0 + 1/4 * -4 = -1
    advantages, targets = run_gae(rewards, values, last_value, first, 0.5, 0.5)
    np.testing.assert_array_equal(advantages, [[0, -1], [0, -4], [0, 0]])
    np.testing.assert_array_equal(targets, [[4, 3], [6, 2], [8, 8]])


def test_later_episodes_do_not_change_earlier_returns():
    rewards, values, last_value, first = random_rollout(12, 2, 0.0)
    first[5] = True
    before, _ = run_gae(rewards, values, last_value, first, 0.99, 0.95)
    rewards[6:], values[6:], last_value = 1e6, -1e6, last_value + 1e6
    after, _ = run_gae(rewards, values, last_value, first, 0.99, 0.95)
    np.testing.assert_array_equal(before[:6], after[:6])


def old_gae(rewards, values, last_value, first, gamma, lam):
    """As runs began before truncation was known: they go on with the same bits."""
    discounts = gamma * (1.0 - tf.cast(first, rewards.dtype))
    following = tf.concat([values[1:], last_value[None]], axis=0)
    deltas = rewards + discounts * following - values
    advantages = tf.scan(
        lambda later, now: now[0] + lam * now[1] * later,
        (deltas, discounts),
        tf.zeros_like(last_value),
        reverse=True,
    )
    return advantages, advantages + values


def new_gae(rewards, values, last_value, first, cut, final, gamma, lam):
    rewards, discounts = rewards_and_discounts(rewards, first, cut, final, gamma=gamma)
    return gae(rewards, discounts, values, last_value, lam=lam)


@pytest.mark.parametrize("compiled", [False, True])
def test_without_truncation_the_bits_are_those_of_plain_gae(compiled):
    rewards, values, last, first = (tf.constant(x) for x in random_rollout(64, 7, 0.05, seed=7))
    rewards, values, last = (tf.cast(x, tf.float32) for x in (rewards, values, last))
    old, new = (tf.function(f) if compiled else f for f in (old_gae, new_gae))
    expected = old(rewards, values, last, first, 0.999, 0.95)
    found = new(rewards, values, last, first, tf.zeros_like(first), values, 0.999, 0.95)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# Oracles that know nothing of discounts: each episode is a list of its own, closed by the value of its end.


def random_experience(steps, envs, seed=0):
    """A tenth of the steps terminate, a tenth are cut off, among them the rollout's first and last ones."""
    rng = np.random.default_rng(seed)
    rewards, values, last, _ = random_rollout(steps, envs, 0.0, seed)
    kind = rng.random((steps, envs))
    kind[-1, : envs // 3], kind[0, 0] = 0.0, 0.0  # on the rollout's last step and on its first
    final = rng.normal(size=(steps, envs))
    return rewards, values, last, kind < 0.2, kind < 0.1, np.where(kind < 0.1, final, np.nan)


def episodes(rewards, values, last, first, cut, final):
    """(env, start, rewards r_0 ... r_{n-1}, values V_0 ... V_n) of each piece of an episode."""
    steps, envs = rewards.shape
    for b in range(envs):
        start = 0
        for t in range(steps):
            if first[t, b] or t == steps - 1:
                end = (final[t, b] if cut[t, b] else 0.0) if first[t, b] else last[b]
                yield b, start, rewards[start : t + 1, b], np.append(values[start : t + 1, b], end)
                start = t + 1


def by_episode(function, rollout, *more):
    """`function(r, V, *more)` of each piece, put together to [T, B]; `more` are cut out of [T, B] arrays."""
    found = np.full(rollout[0].shape, np.nan)
    for b, start, rewards, values in episodes(*rollout):
        rows = slice(start, start + len(rewards))
        found[rows, b] = function(rewards, values, *(x[rows, b] for x in more))
    return found


def in_tfrl(rollout, gamma):
    rewards, values, last, first, cut, final = rollout
    rewards, discounts = rewards_and_discounts(rewards, first, cut, final, gamma=gamma)
    return rewards, discounts, values, last


GAMMAS_AND_LAMBDAS = [(0.99, 0.95), (0.9, 0.5), (1.0, 1.0), (0.9, 0.0)]


@pytest.mark.parametrize(("gamma", "lam"), GAMMAS_AND_LAMBDAS)
def test_gae_with_truncation(gamma, lam):
    rollout = random_experience(24, 9)

    def episode(r, v):
        deltas = r + gamma * v[1:] - v[:-1]
        return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]

    expected = by_episode(episode, rollout)
    advantages, targets = gae(*in_tfrl(rollout, gamma), lam=lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(targets, expected + rollout[1], rtol=1e-12, atol=1e-12)


def slow_vtrace(r, v, ratio, gamma, rho_bar, c_bar, lam):
    """Eq. 1 term by term: v_s = V_s + sum_t gamma^(t-s) (prod of c_s ... c_{t-1}) delta_t."""
    n = len(r)
    rho, c = np.minimum(ratio, rho_bar), lam * np.minimum(ratio, c_bar)
    targets = v.copy()
    for s in range(n):
        for t in range(s, n):
            delta = rho[t] * (r[t] + gamma * v[t + 1] - v[t])
            targets[s] += gamma ** (t - s) * np.prod(c[s:t]) * delta
    mixed = lam * targets[1:] + (1 - lam) * v[1:]
    return rho * (r + gamma * mixed - v[:-1]), targets[:-1]


@pytest.mark.parametrize(("gamma", "lam"), GAMMAS_AND_LAMBDAS)
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.7), (np.inf, np.inf), (0.1, 1.0)])
def test_vtrace_is_the_sum_that_defines_it(gamma, lam, rho_bar, c_bar):
    rollout = random_experience(20, 9, seed=1)
    log_ratios = np.random.default_rng(2).normal(scale=0.7, size=(20, 9))
    found = vtrace(log_ratios, *in_tfrl(rollout, gamma), rho_bar=rho_bar, c_bar=c_bar, lam=lam)
    for part in (0, 1):
        expected = by_episode(
            lambda r, v, ratio, part=part: slow_vtrace(r, v, ratio, gamma, rho_bar, c_bar, lam)[part],
            rollout,
            np.exp(log_ratios),
        )
        np.testing.assert_allclose(found[part], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("gamma", "lam"), GAMMAS_AND_LAMBDAS)
def test_vtrace_on_policy_is_gae(gamma, lam):
    rollout = in_tfrl(random_experience(30, 8, seed=3), gamma)
    found = vtrace(np.zeros((30, 8)), *rollout, lam=lam)
    for a, b in zip(found, gae(*rollout, lam=lam), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_vtrace_on_policy_is_the_return_to_the_end():
    rewards, discounts, values, last = in_tfrl(random_experience(30, 8, seed=4), 0.97)
    _, targets = vtrace(np.zeros((30, 8)), rewards, discounts, values, last)
    following = last
    for t in reversed(range(30)):
        following = rewards[t] + discounts[t] * following
        np.testing.assert_allclose(targets[t], following, rtol=1e-11)


def test_vtrace_by_hand():
    # gamma = 1/2, ratios 4, 1/2 and 1/4, so rho = c = 1, 1/2, 1/4; no end.
    # deltas: 1 (1 + 2 - 2) = 1, 1/2 (2 + 3 - 4) = 1/2, 1/4 (4 + 6 - 6) = 1
    # v - V: 1; 1/2 + 1/2 * 1/2 * 1 = 3/4; 1 + 1/2 * 1 * 3/4 = 11/8
    # A: 1 (1 + 1/2 (4 + 3/4) - 2) = 11/8; 1/2 (2 + 1/2 (6 + 1) - 4) = 3/4; 1
    column = np.array([[1.0], [2.0], [4.0]]), np.full((3, 1), 0.5), np.array([[2.0], [4.0], [6.0]])
    advantages, targets = vtrace(np.log([[4.0], [0.5], [0.25]]), *column, np.array([12.0]))
    np.testing.assert_allclose(targets[:, 0], [2 + 11 / 8, 4 + 3 / 4, 6 + 1], rtol=1e-14)
    np.testing.assert_allclose(advantages[:, 0], [11 / 8, 3 / 4, 1], rtol=1e-14)


def test_traces_end_at_truncations():
    """A truncated episode depends on its final observation, not on the next episode."""
    rollout = random_experience(12, 2, seed=5)
    rewards, values, last, first, cut, final = rollout
    first[:], cut[:], first[5], cut[5], final[5] = False, False, True, True, 3.0
    log_ratios = np.random.default_rng(6).normal(size=(12, 2))

    def all_of_them():
        inputs = in_tfrl((rewards, values, last, first, cut, final), 0.99)
        return [x.numpy()[:6] for x in (*gae(*inputs, lam=0.95), *vtrace(log_ratios, *inputs))]

    before = all_of_them()
    rewards[6:], values[6:], log_ratios[6:], last = 1e6, -1e6, 3.0, last + 1e6
    for a, b in zip(before, all_of_them(), strict=True):
        np.testing.assert_array_equal(a, b)
    final[5] += 1.0
    for a, b in zip(before, all_of_them(), strict=True):
        assert (np.abs(a[5] - b[5]) > 1e-3).all()


def test_vtrace_sends_no_gradient_and_rounds_alike_in_any_batch():
    rewards, discounts, values, last = (
        tf.cast(x, tf.float32) for x in in_tfrl(random_experience(7, 13, seed=7), 0.99)
    )
    log_ratios = tf.constant(np.random.default_rng(8).normal(size=(7, 13)), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch([log_ratios, values, last])
        advantages, targets = vtrace(log_ratios, rewards, discounts, values, last)
    assert tape.gradient([advantages, targets], [log_ratios, values, last]) == [None] * 3
    assert advantages.dtype == targets.dtype == tf.float32
    for columns in (slice(5, 6), slice(3, 13)):
        inputs = (x[..., columns] for x in (log_ratios, rewards, discounts, values, last))
        for part, whole in zip(vtrace(*inputs), (advantages, targets), strict=True):
            np.testing.assert_array_equal(part, whole[:, columns])
