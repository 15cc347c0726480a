"""REINFORCE's step against float64 NumPy with numerical gradients; returns, statistics and observers."""

import numpy as np
import pytest

from tfrl.algorithms import registry as settings
from tfrl.algorithms.reinforce import ReinforceAgent
from tfrl.envs.registry import make
from tfrl.envs.spec import EnvSpec
from tfrl.experience.normalize import EpisodeStatistics
from tfrl.experience.observer import Observer
from tfrl.experience.rollout import EpisodeBatch, normalized
from tfrl.workers import strategy

T, N = 7, 3
LENGTHS = (7, 2, 4)


def make_agent(*flags):
    flags = ("--hidden", "6", "--num-envs", str(N), "--observers", "0", "--lr", "0.01", *flags)
    config = settings.reader("reinforce").parse(flags)
    return config, ReinforceAgent(config, strategy.make(config, None))


def made_episodes(agent, generator):
    playing = np.arange(T)[:, None] < np.array(LENGTHS)
    observations = generator.normal(size=(T, N, 4)).astype(np.float32)
    noise = np.stack([agent.draw_training_noise(generator, T) for _ in range(N)], axis=1)
    acted = [agent.sample(observations[t], noise[t]) for t in range(T)]
    rewards = np.where(playing, generator.normal(size=(T, N)), 0).astype(np.float32)
    actions, log_probs = (np.stack(x) for x in zip(*acted, strict=True))
    return EpisodeBatch(observations, actions, noise, log_probs, rewards, playing, np.ones(N, bool))


def slow_loss(vector, episodes, config):
    """The mean over all steps of -log pi(a) times the normalised return, by loops; 4 -> 6 -> 2."""
    w1, b1, w2, b2 = np.split(vector, np.cumsum([24, 6, 12]))
    w1, w2 = w1.reshape(4, 6), w2.reshape(6, 2)
    log_probs, returns, entropies = [], [], []
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            features = np.tanh(episodes.observations[t, i] @ w1 + b1)
            if config.dropout:
                stays = episodes.noise[t, i, 1:] >= np.float32(config.dropout)
                features = features * stays / (1 - config.dropout)
            logits = features @ w2 + b2
            wide = logits - np.log(np.exp(logits).sum())
            log_probs.append(wide[episodes.actions[t, i]])
            entropies.append(-(np.exp(wide) * wide).sum())
            rest = episodes.rewards[t:length, i] * config.reward_scale + config.reward_shift
            returns.append(sum(config.gamma**k * r for k, r in enumerate(rest)))
    returns = np.array(returns)
    advantages = (returns - returns.mean()) / returns.std(ddof=1)
    return (-np.array(log_probs) * advantages).mean() - config.entropy_coef * np.mean(entropies)


def flat(agent):
    """All weights, one after the other."""
    arrays = agent.network.functions["actor"].split(agent.learning.vectors()["actor"])
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.long),
        ("--dropout", "0.6"),
        ("--optimizer", "rmsprop", "--reward-scale", "2", "--reward-shift", "1.5"),
    ],
)
def test_a_step_equals_the_optimizer_on_the_slow_losss_gradient(flags):
    config, agent = make_agent(*flags, "--entropy-coef", "0.02", "--adam-epsilon", "1e-3")
    agent._rows = 5  # parts, of which the last one is filled up
    episodes = made_episodes(agent, np.random.default_rng(5))
    before = flat(agent).astype(np.float64)
    metrics = agent.update(episodes)
    gradient = np.zeros_like(before)
    for k in range(before.size):
        ends = []
        for sign in (1, -1):
            moved = before.copy()
            moved[k] += sign * 1e-5
            ends.append(slow_loss(moved, episodes, config))
        gradient[k] = (ends[0] - ends[1]) / 2e-5
    norm = np.linalg.norm(gradient)
    np.testing.assert_allclose(metrics["train/grad_norm"], norm, rtol=1e-3)
    clipped = gradient * min(1.0, config.max_grad_norm / norm)
    scale = np.abs(clipped) + config.adam_epsilon
    if config.optimizer == "rmsprop":
        scale = np.sqrt(0.01 * clipped**2 + config.adam_epsilon)
    expected = before - config.lr * clipped / scale
    np.testing.assert_allclose(flat(agent), expected, atol=2e-5)
    assert metrics["train/first_ratio_error"] < 1e-5


def test_waiting_envs_do_not_change_the_gradient():
    """Their rows may contain any numbers."""
    found = []
    for filler in (0.0, 7.0):
        _, agent = make_agent()
        episodes = made_episodes(agent, np.random.default_rng(5))
        episodes.observations[~episodes.playing] = filler
        episodes.log_probs[~episodes.playing] = filler
        agent.update(episodes)
        found.append(flat(agent))
    np.testing.assert_array_equal(*found)


def test_normalised_returns_that_do_not_vary_are_zero():
    np.testing.assert_array_equal(normalized(np.full(4, 3.0)), np.zeros(4))
    np.testing.assert_array_equal(normalized(np.array([2.0])), [0.0])


def test_statistics_of_one_episode_each_are_those_of_their_steps():
    one, other = EpisodeStatistics(2), EpisodeStatistics(2)
    first = np.zeros((5, 2), bool)
    first[4] = True
    one.add(np.ones((5, 2), np.float32), first)
    other.add_one_each(np.array([2.0, 5.0]), np.array([2, 5]), np.array([False, True]))
    assert other.episodes == 1
    other.add_one_each(np.array([3.0, 5.0]), np.array([3, 5]), np.array([True, False]))
    assert (one.mean_return, one.mean_length, one.episodes) == (5.0, 5.0, 2)
    assert (other.mean_return, other.mean_length, other.episodes) == (5.0, 5.0, 2)


def test_an_env_that_waits_between_episodes_continues_exactly():
    spec = EnvSpec("CartPole-v1", num_envs=3, seed=4)
    observer, alone = Observer(spec, [0, 1, 2]), make(spec, [1])
    playing, actions = np.ones(3, bool), np.zeros(3, np.int32)
    for _ in range(60):
        seen = observer.step(actions, playing)
        if playing[1]:
            alone.act(actions[:1])
        np.testing.assert_array_equal(seen.observation[1], alone.observe().observation[0])
        assert seen.reward[1] == playing[1]
        playing &= ~seen.ended
    assert not playing.any()
    other = Observer(spec, [1])
    other.set_state(dict(zip(*observer.get_state()[:2], strict=True)))
    for _ in range(5):
        alone.act(actions[:1])
        seen = other.step(actions[:1], np.ones(1, bool))
        np.testing.assert_array_equal(seen.observation[0], alone.observe().observation[0])
