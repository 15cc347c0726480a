"""Running statistics for rewards, observations and episodes; equal on every worker.

Each worker computes them from the global rollout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

OBSERVATION_CLIP = 10.0
_CLIP = 10.0
_EPSILON = 1e-8
_WINDOW = 100  # episodes
_FEW_ENVS = 8


class RewardNormalizer:
    """Divides rewards by the standard deviation of the running discounted return.

    This is OpenAI Baselines' VecNormalize, which the published procgen results used. Each step updates the
    discounted return of every env, and the running moments of all these returns. The reward is then divided
    by their deviation, without subtracting a mean, and clipped to +-10. A return restarts with its episode.
    It works on whole rollouts of all envs, so every topology computes the same numbers.

    Args:
      num_envs: N.
      gamma: the discount of the return, --reward-norm-gamma.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        self._gamma = gamma
        self._returns = np.zeros(num_envs)
        self._count, self._mean, self._variance = 1e-4, 0.0, 1.0  # as in Baselines' RunningMeanStd

    def __call__(self, rewards: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Normalised rewards.

        Args:
          rewards: float32 [T, N], raw, of all envs.
          first: bool [T, N]: the reward at t ended an episode.

        Returns:
          float32 [T, N].
        """
        returns, self._returns = _running_sums(rewards, first, self._returns, self._gamma)
        variances = self._take_in(returns.mean(axis=1), returns.var(axis=1), returns.shape[1])
        # The division is in float32, as NumPy 1 divides a float32 array by a float64 scalar.
        deviations = np.sqrt(variances + _EPSILON).astype(rewards.dtype)
        return np.clip(rewards / deviations[:, None], -_CLIP, _CLIP)

    def _take_in(self, means: np.ndarray, variances: np.ndarray, size: int) -> np.ndarray:
        """Adds the moments of T batches of `size` numbers; returns the variance after each batch, [T].

        This is the parallel update of Chan et al. 1979 with Python floats, which are ten times faster here
        than NumPy.
        """
        count, mean, variance = self._count, self._mean, self._variance
        running = []
        for batch_mean, batch_variance in zip(means.tolist(), variances.tolist(), strict=True):
            delta = batch_mean - mean
            total = count + size
            squares = variance * count + batch_variance * size
            squares += delta**2 * count * size / total
            mean += delta * size / total
            variance, count = squares / total, total
            running.append(variance)
        self._count, self._mean, self._variance = count, mean, variance
        return np.array(running)

    def get_state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint."""
        return {
            "returns": self._returns,
            "moments": np.array([self._count, self._mean, self._variance]),
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`."""
        self._returns = state["returns"].copy()
        self.begin_with(state)

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the moments of another run's `get_state`, but not the returns of its episodes."""
        self._count, self._mean, self._variance = map(float, state["moments"])

    def forget(self, envs: np.ndarray) -> None:
        """Resets the returns of some envs, bool [N], whose episodes were truncated."""
        self._returns = np.where(envs, 0.0, self._returns)


class ObservationNormalizer:
    """Normalises vectors to mean 0 and deviation 1 with running moments of each of their D numbers.

    Like OpenAI Baselines' VecNormalize, but for whole rollouts: observations are normalised with the moments
    of all earlier rollouts, and only clipped before the first `update`. Each worker computes the sums over
    the steps of its own envs (`env_moments`). From the sums of all envs in global order, every worker
    computes the same moments. Evaluations do not call `update`, so they do not change the moments.

    Args:
      size: D.

    Attributes:
      mean, scale: float32 [D], the constants of `clip((o - mean) * scale, -10, 10)`, for networks and exports
        that take raw observations. The results are bit-equal to those of this class.
    """

    def __init__(self, size: int) -> None:
        # Baselines begins with 1e-4 steps of mean 0. For a mean of 1e4, these matter even after thousands of
        # steps.
        self._count = 0.0
        self._set_moments(np.zeros(size), np.ones(size))

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Normalises raw observations, float32 [..., D], as a network does by itself with these constants.

        That is `ObservationScaling` of tfrl/networks/actor_critic.py; training calls nothing else.
        """
        return np.clip((observations - self.mean) * self.scale, -OBSERVATION_CLIP, OBSERVATION_CLIP)

    def update(self, all_env_moments: np.ndarray, num_steps: int) -> None:
        """Adds the moments of a rollout (Chan et al. 1979).

        Args:
          all_env_moments: float64 [N, 2, D], `env_moments` of all workers, in the order of the global envs.
          num_steps: T, the steps of each env.
        """
        means, squares = all_env_moments[:, 0], all_env_moments[:, 1]
        mean = _pairwise_sum(means) / len(means)
        spread = _pairwise_sum(squares) + num_steps * _pairwise_sum(np.square(means - mean))
        size, count = num_steps * len(means), self._count
        total = count + size
        delta = mean - self._mean
        spread = self._variance * count + spread + np.square(delta) * (count * size / total)
        self._count = total
        self._set_moments(self._mean + delta * (size / total), spread / total)

    def _set_moments(self, mean: np.ndarray, variance: np.ndarray) -> None:
        self._mean, self._variance = mean, variance
        self.mean = mean.astype(np.float32)
        self.scale = (1.0 / np.sqrt(variance + _EPSILON)).astype(np.float32)

    def get_state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint."""
        return {"count": np.array(self._count), "mean": self._mean, "variance": self._variance}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`."""
        self._count = float(state["count"])
        self._set_moments(state["mean"].copy(), state["variance"].copy())

    def begin_with(self, mean: np.ndarray, scale: np.ndarray, *, count: int) -> None:
        """Loads the mean and scale of another run, float32 [D] each, after its `count` env steps."""
        self._count = float(count)
        variance = 1.0 / np.square(scale.astype(np.float64)) - _EPSILON
        self._set_moments(mean.astype(np.float64), np.maximum(variance, 0.0))
        self.scale = scale.copy()


def env_moments(observations: np.ndarray) -> np.ndarray:
    """The mean and the sum of squared deviations of each env's observations over time.

    Args:
      observations: raw observations of any B envs, float32 [T, B, D]. The bits of an env's moments do not
        depend on the other envs.

    Returns:
      float64 [B, 2, D].
    """
    wide = observations.astype(np.float64)
    mean = _pairwise_sum(wide) / len(wide)
    wide -= mean
    return np.stack([mean, _pairwise_sum(np.square(wide, out=wide))], axis=1)


def _pairwise_sum(x: np.ndarray) -> np.ndarray:
    """The sum over the first axis, in an order that depends only on the length of this axis.

    NumPy's own order also depends on the other axes.
    """
    while len(x) > 1:
        half = len(x) // 2
        odd = x[2 * half :]
        x = x[:half] + x[half : 2 * half]
        if len(odd):
            x[0] += odd[0]
    return x[0]


class FinishedEpisodes(NamedTuple):
    """Episodes that have ended, in the order of their ends.

    Attributes:
      rounds: int64 [n], the number of rounds of env steps after which each one ended.
      envs: int64 [n], the global indices of their envs.
      returns: float64 [n], sums of raw rewards.
      lengths: float64 [n], in env steps.
    """

    rounds: np.ndarray
    envs: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


class EpisodeStatistics:
    """Raw returns and lengths of finished episodes; means are over the last 100 episodes.

    Attributes:
      episodes: the number of finished episodes.
      mean_reward: the mean raw reward of an env step in the last addition; NaN before the first.
      longest: env steps of the longest episode in the last addition, finished or not; NaN before the first.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.episodes = 0
        self.mean_reward = self.longest = float("nan")

    def add(self, rewards: np.ndarray, first: np.ndarray) -> FinishedEpisodes:
        """Adds raw rewards [T, N] and `first` [T, N] of all envs; returns the episodes that ended."""
        returns, self._returns = _running_sums(rewards, first, self._returns, 1.0)
        lengths, self._lengths = _running_sums(np.ones_like(rewards), first, self._lengths, 1.0)
        self._recent.extend(zip(returns[first].tolist(), lengths[first].tolist(), strict=True))
        self.episodes += int(first.sum())
        self.mean_reward = float(rewards.mean(dtype=np.float64))
        self.longest = float(lengths.max())
        rounds, envs = np.nonzero(first)
        return FinishedEpisodes(rounds + 1, envs, returns[first], lengths[first])

    def add_one_each(self, returns: np.ndarray, lengths: np.ndarray, ended: np.ndarray) -> FinishedEpisodes:
        """Adds one episode of every env, or the part so far of an episode that has not `ended`, bool [N].

        Args:
          returns: float64 [N], sums of raw rewards.
          lengths: int64 [N].

        Returns the episodes that ended.
        """
        rounds = lengths
        self.mean_reward = float(returns.sum() / lengths.sum())
        returns, lengths = self._returns + returns, self._lengths + lengths
        self.longest = float(lengths.max())
        self._recent.extend(zip(returns[ended].tolist(), lengths[ended].tolist(), strict=True))
        self.episodes += int(ended.sum())
        self._returns, self._lengths = np.where(ended, 0.0, returns), np.where(ended, 0.0, lengths)
        envs = np.flatnonzero(ended)
        envs = envs[np.argsort(rounds[envs], kind="stable")]
        return FinishedEpisodes(rounds[envs], envs, returns[envs], lengths[envs])

    def forget(self, envs: np.ndarray) -> None:
        """Resets the running episodes of some envs, bool [N], which were truncated."""
        self._returns, self._lengths = np.where(envs, 0.0, self._returns), np.where(envs, 0.0, self._lengths)

    @property
    def is_full(self) -> bool:
        """True if enough episodes have ended for the means."""
        return len(self._recent) == _WINDOW

    @property
    def mean_return(self) -> float:
        """The mean return of the last 100 episodes; NaN before the first has ended."""
        return float(np.mean([r for r, _ in self._recent])) if self._recent else float("nan")

    @property
    def mean_length(self) -> float:
        """The mean length of the last 100 episodes, in env steps; NaN before the first has ended."""
        return float(np.mean([n for _, n in self._recent])) if self._recent else float("nan")

    def get_state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint."""
        return {
            "returns": self._returns,
            "lengths": self._lengths.astype(np.int64),
            "recent": np.array(self._recent, np.float64).reshape(-1, 2),
            "episodes": np.array(self.episodes),
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`."""
        self._returns, self._lengths = state["returns"].copy(), state["lengths"].astype(np.float64)
        self._recent = deque(map(tuple, state["recent"].tolist()), maxlen=_WINDOW)
        self.episodes = int(state["episodes"])


def _running_sums(
    rewards: np.ndarray, first: np.ndarray, start: np.ndarray, discount: float
) -> tuple[np.ndarray, np.ndarray]:
    """Running sums R_t = discount * R_{t-1} + r_t, with R_{t-1} = 0 after an episode's end, R_{-1} = `start`.

    Returns:
      R, float64 [T, N], and the `start` of the next rollout, [N].
    """
    sums = np.empty(rewards.shape)
    if rewards.shape[1] > _FEW_ENVS:
        running = start
        for t, some_end in enumerate(first.any(axis=1).tolist()):
            running = sums[t] = running * discount + rewards[t]
            if some_end:
                running = np.where(first[t], 0.0, running)
        return sums, running
    # For few envs, additions in Python are faster than calls of NumPy.
    for i, value in enumerate(start.tolist()):
        column = []
        for reward, ends in zip(rewards[:, i].tolist(), first[:, i].tolist(), strict=True):
            value = value * discount + reward
            column.append(value)
            if ends:
                value = 0.0
        sums[:, i] = column
    return sums, np.where(first[-1], 0.0, sums[-1])
