"""Normalisation against OpenAI Baselines' VecNormalize and NumPy's moments; episodes counted by hand."""

import math
import time

import numpy as np
import pytest
import tensorflow as tf

from tfrl.experience.normalize import (
    OBSERVATION_CLIP,
    EpisodeStatistics,
    ObservationNormalizer,
    RewardNormalizer,
    env_moments,
)


class VecNormalize:
    """baselines/common/vec_env/vec_normalize.py with ob=False, and running_mean_std.py, step by step."""

    def __init__(self, num_envs):
        self.ret = np.zeros(num_envs)
        self.mean, self.var, self.count = np.zeros((), "float64"), np.ones((), "float64"), 1e-4

    def step(self, rewards, news):
        self.ret = self.ret * 0.99 + rewards
        self.update(self.ret)
        rewards = np.clip(rewards / np.sqrt(self.var + 1e-8), -10.0, 10.0)
        self.ret[news] = 0.0
        return rewards

    def update(self, x):
        delta = np.mean(x, axis=0) - self.mean
        tot_count = self.count + x.shape[0]
        m_2 = self.var * self.count + np.var(x, axis=0) * x.shape[0]
        m_2 = m_2 + np.square(delta) * self.count * x.shape[0] / tot_count
        self.mean = self.mean + delta * x.shape[0] / tot_count
        self.var, self.count = m_2 / tot_count, tot_count


def random_rewards(steps, envs, seed=0):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(0.3, 3, (steps, envs)) * (rng.random((steps, envs)) < 0.3)
    return rewards.astype(np.float32), rng.random((steps, envs)) < 0.1


def test_rewards_are_divided_as_vecnormalize_does():
    normalizer, oracle = RewardNormalizer(6, 0.99), VecNormalize(6)
    for rollout in range(3):
        rewards, first = random_rewards(50, 6, rollout)
        expected = np.stack([oracle.step(r, f) for r, f in zip(rewards, first, strict=True)])
        np.testing.assert_allclose(normalizer(rewards, first), expected, rtol=1e-6, atol=1e-7)


class StepByStep:
    """Both statistics as runs have computed them from the first version on, with its bits."""

    def __init__(self, num_envs):
        self.discounted, self.count, self.mean, self.variance = np.zeros(num_envs), 1e-4, 0.0, 1.0
        self.returns, self.lengths, self.ended = np.zeros(num_envs), np.zeros(num_envs, int), []

    def step(self, rewards, first):
        self.discounted = self.discounted * 0.99 + rewards
        batch = self.discounted
        delta, total = batch.mean() - self.mean, self.count + batch.size
        squares = self.variance * self.count + batch.var() * batch.size
        squares += delta**2 * self.count * batch.size / total
        self.mean += delta * batch.size / total
        self.variance, self.count = squares / total, total
        self.discounted[first] = 0.0
        self.returns, self.lengths = self.returns + rewards, self.lengths + 1
        self.ended += [(self.returns[i], float(self.lengths[i])) for i in np.flatnonzero(first)]
        self.returns[first], self.lengths[first] = 0.0, 0
        return np.clip(rewards / np.float32(np.sqrt(self.variance + 1e-8)), -10.0, 10.0)


@pytest.mark.parametrize("envs", [1, 2, 8, 9, 33, 130])
@pytest.mark.parametrize("share_that_ends", [0.0, 0.1, 1.0])
def test_rewards_equal_a_step_by_step_normaliser_bit_for_bit(envs, share_that_ends):
    rng = np.random.default_rng(envs)
    normalizer, episodes, oracle = RewardNormalizer(envs, 0.99), EpisodeStatistics(envs), StepByStep(envs)
    for steps in (1, 40, 7):
        rewards = rng.normal(0.3, 10.0 ** rng.integers(-4, 5), (steps, envs)).astype(np.float32)
        first = rng.random((steps, envs)) < share_that_ends
        expected = np.stack([oracle.step(r, f) for r, f in zip(rewards, first, strict=True)])
        found = normalizer(rewards, first)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
        episodes.add(rewards, first)
        state = normalizer.get_state()
        np.testing.assert_array_equal(state["returns"], oracle.discounted)
        np.testing.assert_array_equal(state["moments"], [oracle.count, oracle.mean, oracle.variance])
        state = episodes.get_state()
        np.testing.assert_array_equal(state["returns"], oracle.returns)
        np.testing.assert_array_equal(state["lengths"], oracle.lengths)
        np.testing.assert_array_equal(state["recent"], np.reshape(oracle.ended[-100:], (-1, 2)))
        assert state["lengths"].dtype == np.int64 and state["episodes"] == len(oracle.ended)


@pytest.mark.parametrize("of_rollout", [RewardNormalizer(1, 0.99).__call__, EpisodeStatistics(1).add])
def test_a_long_rollout_of_one_env_costs_milliseconds(of_rollout):
    rewards, first = random_rewards(2048, 1)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        of_rollout(rewards, first)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.005


def test_the_moments_are_those_of_all_returns_so_far():
    rewards, first = random_rewards(400, 4)
    normalizer = RewardNormalizer(4, 0.99)
    normalizer(rewards, first)
    running, returns = np.zeros(4), []
    for reward, ended in zip(rewards, first, strict=True):
        running = running * 0.99 + reward
        returns.append(running.copy())
        running[ended] = 0
    count, mean, variance = normalizer.get_state()["moments"]
    assert math.isclose(count, 1600 + 1e-4)
    assert math.isclose(mean, np.mean(returns), rel_tol=1e-6)
    assert math.isclose(variance, np.var(returns), rel_tol=1e-4)  # it begins as one number's, of weight 1e-4


def test_no_mean_is_subtracted_so_a_zero_reward_stays_zero():
    normalized = RewardNormalizer(2, 0.99)(np.float32([[0, 5], [0, 5], [0, 5]]), np.zeros((3, 2), bool))
    assert (normalized[:, 0] == 0).all() and (normalized[:, 1] > 0).all()


def test_rewards_are_clipped_at_10():
    rewards = np.zeros((200, 4), np.float32)
    rewards[150], rewards[151] = 1e6, -1e6
    rewards[::7] += 0.01
    normalized = RewardNormalizer(4, 0.99)(rewards, np.ones_like(rewards, bool))
    assert normalized.max() <= 10 and normalized.min() >= -10
    one = RewardNormalizer(1, 0.99)
    one(np.full((5000, 1), 0.01, np.float32), np.ones((5000, 1), bool))
    assert one(np.float32([[100.0]]), np.array([[True]]))[0, 0] == 10.0


def test_two_parts_with_a_checkpoint_between_equal_the_whole_rollout():
    rewards, first = random_rewards(60, 3)
    whole = RewardNormalizer(3, 0.99)(rewards, first)
    before, after = RewardNormalizer(3, 0.99), RewardNormalizer(3, 0.99)
    parts = [before(rewards[:25], first[:25])]
    after.set_state({k: v.copy() for k, v in before.get_state().items()})
    parts.append(after(rewards[25:], first[25:]))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_rewards_given_are_left_as_they_are():
    rewards, first = random_rewards(10, 3)
    kept = rewards.copy()
    RewardNormalizer(3, 0.99)(rewards, first)
    np.testing.assert_array_equal(rewards, kept)


def test_episodes_counted_by_hand():
    episodes = EpisodeStatistics(2)
    assert math.isnan(episodes.mean_return) and math.isnan(episodes.mean_length) and episodes.episodes == 0
    rewards = np.float32([[1, 10], [2, 20], [3, 30], [4, 40]])
    first = np.array([[False, False], [True, False], [False, False], [False, True]])
    episodes.add(rewards[:3], first[:3])  # env 0: 1 + 2 in two steps
    assert (episodes.episodes, episodes.mean_return, episodes.mean_length) == (1, 3.0, 2.0)
    episodes.add(rewards[3:], first[3:])  # env 1: 100 in four steps, over two rollouts
    assert (episodes.episodes, episodes.mean_return, episodes.mean_length) == (2, 51.5, 3.0)
    episodes.add(np.float32([[5, 0]]), np.array([[True, True]]))  # env 0: 3 + 4 + 5; env 1: 0 in one step
    assert (episodes.episodes, episodes.mean_return) == (4, (3 + 100 + 12 + 0) / 4)
    assert episodes.mean_length == (2 + 4 + 3 + 1) / 4


@pytest.mark.parametrize(("envs", "share_that_ends"), [(1, 0.0), (1, 0.2), (5, 0.2), (40, 1.0)])
def test_the_last_steps_have_a_mean_reward_and_a_longest_episode(envs, share_that_ends):
    rng, episodes, lengths = np.random.default_rng(envs), EpisodeStatistics(envs), np.zeros(envs, int)
    assert math.isnan(episodes.mean_reward) and math.isnan(episodes.longest)
    for steps in (1, 30, 7):
        rewards = rng.normal(size=(steps, envs)).astype(np.float32)
        first = rng.random((steps, envs)) < share_that_ends
        longest = 0
        for ends in first:
            lengths += 1
            longest = max(longest, *lengths)  # TorchRL's: the largest step count of a batch
            lengths[ends] = 0
        episodes.add(rewards, first)
        assert episodes.longest == longest
        assert episodes.mean_reward == pytest.approx(sum(map(float, rewards.flat)) / rewards.size)


def test_whole_episodes_have_a_mean_reward_and_a_longest_one_as_well():
    episodes = EpisodeStatistics(2)
    episodes.add_one_each(np.array([2.0, 5.0]), np.array([2, 5]), np.array([False, True]))
    assert (episodes.mean_reward, episodes.longest) == (1.0, 5.0)
    episodes.add_one_each(np.array([12.0, 0.0]), np.array([4, 2]), np.array([True, True]))
    assert (episodes.mean_reward, episodes.longest) == (2.0, 6.0), "env 0's goes on from the part before"


def test_the_mean_is_over_the_last_100_episodes_and_all_are_counted():
    episodes = EpisodeStatistics(1)
    episodes.add(np.arange(250, dtype=np.float32)[:, None], np.ones((250, 1), bool))
    assert episodes.episodes == 250
    assert episodes.mean_return == np.arange(150, 250).mean()


def test_episode_statistics_continue_from_their_state():
    rewards, first = random_rewards(80, 3)
    whole, before, after = EpisodeStatistics(3), EpisodeStatistics(3), EpisodeStatistics(3)
    whole.add(rewards, first)
    before.add(rewards[:33], first[:33])
    after.set_state({k: v.copy() for k, v in before.get_state().items()})
    after.add(rewards[33:], first[33:])
    for name, value in whole.get_state().items():
        np.testing.assert_array_equal(after.get_state()[name], value)


def observations_of(steps, envs, size, seed=0):
    """Of numbers that differ in mean and deviation, float32 [T, B, D]."""
    rng = np.random.default_rng(seed)
    means, deviations = rng.normal(0, 100, size), 10 ** rng.uniform(-2, 2, size)
    return rng.normal(means, deviations, (steps, envs, size)).astype(np.float32)


def normalizer_of(*rollouts):
    normalizer = ObservationNormalizer(rollouts[0].shape[-1])
    for rollout in rollouts:
        normalizer.update(env_moments(rollout), len(rollout))
    return normalizer


def test_observations_get_mean_0_and_deviation_1_over_all_rollouts():
    rollouts = [observations_of(steps, 5, 3, seed=1) * np.float32(steps / 20) for steps in (33, 20, 1)]
    normalizer = normalizer_of(*rollouts)
    everything = np.concatenate([r.reshape(-1, 3) for r in rollouts])
    wide = everything.astype(np.float64)
    np.testing.assert_allclose(normalizer.mean, wide.mean(0), rtol=1e-5)
    np.testing.assert_allclose(normalizer.scale, 1 / wide.std(0), rtol=1e-5)
    normalized = normalizer(everything)
    assert normalized.dtype == np.float32
    expected = np.clip((wide - wide.mean(0)) / wide.std(0), -10, 10)
    np.testing.assert_allclose(normalized, expected, rtol=1e-3, atol=1e-4)


def test_before_the_first_rollout_observations_are_only_clipped():
    observations = np.float32([[0.5, -3.0, 25.0], [0.0, 1e-3, -1e6]])
    found = ObservationNormalizer(3)(observations)
    np.testing.assert_allclose(found, [[0.5, -3.0, 10.0], [0.0, 1e-3, -10.0]], rtol=1e-6)


@pytest.mark.parametrize("steps,envs,size", [(1, 4, 1), (7, 2, 1), (300, 8, 1), (100, 6, 5), (257, 12, 3)])
def test_moments_of_an_env_are_the_same_in_any_vector_and_those_of_all_on_any_topology(steps, envs, size):
    # Of all magnitudes: float64 adds float32 numbers of one magnitude without rounding, in any order.
    magnitudes = 10.0 ** np.random.default_rng(3).uniform(-8, 8, (3, steps, envs, size))
    rollouts = [
        (observations_of(steps, envs, size, seed) * m).astype(np.float32) for seed, m in enumerate(magnitudes)
    ]
    whole = [env_moments(rollout) for rollout in rollouts]
    for rollout, expected in zip(rollouts, whole, strict=True):
        assert expected.shape == (envs, 2, size) and expected.dtype == np.float64
        for workers in (2, envs):
            shares = [env_moments(share.copy()) for share in np.split(rollout, workers, axis=1)]
            np.testing.assert_array_equal(np.concatenate(shares), expected)
        np.testing.assert_array_equal(env_moments(np.asfortranarray(rollout)), expected)
        wide = rollout.astype(np.float64)
        np.testing.assert_allclose(expected[:, 0], wide.mean(0), rtol=1e-12)
        np.testing.assert_allclose(expected[:, 1], wide.var(0) * steps, rtol=1e-10, atol=1e-20)
    one, other = ObservationNormalizer(size), ObservationNormalizer(size)
    for rollout, expected in zip(rollouts, whole, strict=True):
        one.update(expected, steps)
        gathered = np.zeros((*expected.shape[1:], envs))  # as `Runtime.gather_envs` lays it out
        gathered[..., : envs // 2] = np.moveaxis(env_moments(rollout[:, : envs // 2]), 0, -1)
        gathered[..., envs // 2 :] = np.moveaxis(env_moments(rollout[:, envs // 2 :]), 0, -1)
        other.update(np.moveaxis(gathered, -1, 0), steps)
    for name, value in one.get_state().items():
        np.testing.assert_array_equal(other.get_state()[name], value)


def test_moments_of_large_numbers_that_hardly_vary():
    rng = np.random.default_rng(2)
    observations = (1e4 + rng.normal(size=(500, 4, 1))).astype(np.float32)
    normalizer = normalizer_of(*np.split(observations, 5))
    wide = observations.astype(np.float64)
    np.testing.assert_allclose(normalizer.get_state()["mean"], wide.mean(), rtol=1e-7)
    np.testing.assert_allclose(normalizer.get_state()["variance"], wide.var(), rtol=1e-9)


def test_a_number_that_never_varies_becomes_0():
    observations = np.full((77, 2, 1), 0.1, np.float32)
    assert (normalizer_of(observations, observations)(observations) == 0).all()


def test_evaluations_leave_the_moments_as_they_are():
    normalizer = normalizer_of(observations_of(50, 2, 3))
    before = {name: value.copy() for name, value in normalizer.get_state().items()}
    normalizer(observations_of(50, 2, 3, seed=1))
    for name, value in normalizer.get_state().items():
        np.testing.assert_array_equal(value, before[name])


def test_observation_moments_continue_from_their_state():
    first, second = (observations_of(20, 3, 4, seed) for seed in (0, 1))
    whole, before, after = normalizer_of(first, second), normalizer_of(first), ObservationNormalizer(4)
    after.set_state({name: value.copy() for name, value in before.get_state().items()})
    np.testing.assert_array_equal(after(second), before(second))
    after.update(env_moments(second), 20)
    for name, value in whole.get_state().items():
        np.testing.assert_array_equal(after.get_state()[name], value)


@pytest.mark.parametrize("jit", [False, True])
def test_a_network_with_the_constants_equals_normalised_inputs(jit):
    observations = observations_of(300, 3, 5)
    normalizer = normalizer_of(observations)

    @tf.function(jit_compile=jit)
    def network(x):
        scaled = (x - normalizer.mean) * normalizer.scale
        return tf.clip_by_value(scaled, -OBSERVATION_CLIP, OBSERVATION_CLIP)

    for shown in (observations[0], observations[:, 1], 100 * observations[7]):
        np.testing.assert_array_equal(network(shown), normalizer(shown))
