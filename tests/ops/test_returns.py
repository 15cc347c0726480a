"""GAE against its definition as a sum, its closed forms, and a case worked by hand."""

import numpy as np
import pytest

from tfrl.ops.returns import gae


def run_gae(rewards, values, last_value, first, gamma, lam, dtype=np.float64):
    arrays = (np.asarray(x, dtype) for x in (rewards, values, last_value))
    advantages, targets = gae(*arrays, np.asarray(first, bool), gamma=gamma, lam=lam)
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


def test_gamma_0_sees_nothing_but_the_reward():
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


def test_what_comes_after_an_episode_does_not_touch_it():
    rewards, values, last_value, first = random_rollout(12, 2, 0.0)
    first[5] = True
    before, _ = run_gae(rewards, values, last_value, first, 0.99, 0.95)
    rewards[6:], values[6:], last_value = 1e6, -1e6, last_value + 1e6
    after, _ = run_gae(rewards, values, last_value, first, 0.99, 0.95)
    np.testing.assert_array_equal(before[:6], after[:6])


@pytest.mark.parametrize("wrong", ["values", "last_value", "first"])
def test_wrong_shapes_are_refused(wrong):
    shapes = {"rewards": (6, 3), "values": (6, 3), "last_value": (3,), "first": (6, 3)}
    shapes[wrong] = (5, 3) if wrong != "last_value" else (4,)
    with pytest.raises(ValueError, match="[Ss]hape"):
        run_gae(*(np.zeros(shape) for shape in shapes.values()), 0.9, 0.9)
