"""Reward normalisation against OpenAI Baselines' VecNormalize step by step; episodes counted by hand."""

import math

import numpy as np

from tfrl.experience.normalize import EpisodeStatistics, RewardNormalizer


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
    normalizer, oracle = RewardNormalizer(6), VecNormalize(6)
    for rollout in range(3):
        rewards, first = random_rewards(50, 6, rollout)
        expected = np.stack([oracle.step(r, f) for r, f in zip(rewards, first, strict=True)])
        np.testing.assert_allclose(normalizer(rewards, first), expected, rtol=1e-6, atol=1e-7)


def test_the_moments_are_those_of_all_returns_so_far():
    rewards, first = random_rewards(400, 4)
    normalizer = RewardNormalizer(4)
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


def test_no_mean_is_subtracted_and_a_reward_of_nothing_stays_nothing():
    normalized = RewardNormalizer(2)(np.float32([[0, 5], [0, 5], [0, 5]]), np.zeros((3, 2), bool))
    assert (normalized[:, 0] == 0).all() and (normalized[:, 1] > 0).all()


def test_rewards_are_clipped_at_10():
    rewards = np.zeros((200, 4), np.float32)
    rewards[150], rewards[151] = 1e6, -1e6
    rewards[::7] += 0.01
    normalized = RewardNormalizer(4)(rewards, np.ones_like(rewards, bool))
    assert normalized.max() <= 10 and normalized.min() >= -10
    one = RewardNormalizer(1)
    one(np.full((5000, 1), 0.01, np.float32), np.ones((5000, 1), bool))
    assert one(np.float32([[100.0]]), np.array([[True]]))[0, 0] == 10.0


def test_a_rollout_in_two_parts_with_a_checkpoint_between_is_the_whole():
    rewards, first = random_rewards(60, 3)
    whole = RewardNormalizer(3)(rewards, first)
    before, after = RewardNormalizer(3), RewardNormalizer(3)
    parts = [before(rewards[:25], first[:25])]
    after.set_state({k: v.copy() for k, v in before.get_state().items()})
    parts.append(after(rewards[25:], first[25:]))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_rewards_given_are_left_as_they_are():
    rewards, first = random_rewards(10, 3)
    kept = rewards.copy()
    RewardNormalizer(3)(rewards, first)
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
