"""Reward normalisation and episode statistics, computed alike on every worker from the global rollout."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

_RETURN_GAMMA = 0.99  # OpenAI Baselines' VecNormalize discounts with this, whatever the agent's gamma
_CLIP = 10.0
_EPSILON = 1e-8
_WINDOW = 100  # episodes


class RewardNormalizer:
    """Divides rewards by the standard deviation of the running discounted return.

    OpenAI Baselines' VecNormalize, which the published procgen results used: at each step every env's
    discounted return is updated, the running moments take in all envs' returns, the reward is divided by
    their deviation (no mean is subtracted) and clipped to +-10; a return starts again with its episode.
    It works on whole rollouts of all envs, so that every topology computes the same numbers.
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._count, self._mean, self._variance = 1e-4, 0.0, 1.0  # Baselines' RunningMeanStd begins so

    def __call__(self, rewards: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Normalised rewards.

        Args:
          rewards: float32 [T, N], raw, of all envs.
          first: bool [T, N]: the reward at t ended an episode.

        Returns:
          float32 [T, N].
        """
        normalized = np.empty_like(rewards)
        for t in range(len(rewards)):
            self._returns = self._returns * _RETURN_GAMMA + rewards[t]
            self._take_in(self._returns)
            scaled = rewards[t] / np.sqrt(self._variance + _EPSILON)
            normalized[t] = np.clip(scaled, -_CLIP, _CLIP)
            self._returns[first[t]] = 0.0
        return normalized

    def _take_in(self, batch: np.ndarray) -> None:
        """Parallel update of mean and variance (Chan et al. 1979)."""
        delta = batch.mean() - self._mean
        total = self._count + batch.size
        squares = self._variance * self._count + batch.var() * batch.size
        squares += delta**2 * self._count * batch.size / total
        self._mean += delta * batch.size / total
        self._variance, self._count = squares / total, total

    def get_state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint."""
        return {
            "returns": self._returns,
            "moments": np.array([self._count, self._mean, self._variance]),
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`."""
        self._returns = state["returns"].copy()
        self._count, self._mean, self._variance = map(float, state["moments"])


class EpisodeStatistics:
    """Raw returns and lengths of every finished episode; means are over the last 100."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.episodes = 0

    def add(self, rewards: np.ndarray, first: np.ndarray) -> None:
        """Takes in raw rewards [T, N] and `first` [T, N] of all envs, in the order of time and env."""
        for t in range(len(rewards)):
            self._returns += rewards[t]
            self._lengths += 1
            for i in np.flatnonzero(first[t]):
                self._recent.append((self._returns[i], float(self._lengths[i])))
                self.episodes += 1
            self._returns[first[t]] = 0.0
            self._lengths[first[t]] = 0

    @property
    def mean_return(self) -> float:
        """Of the last 100 episodes; NaN before the first has ended."""
        return float(np.mean([r for r, _ in self._recent])) if self._recent else float("nan")

    @property
    def mean_length(self) -> float:
        """In env steps, of the last 100 episodes; NaN before the first has ended."""
        return float(np.mean([n for _, n in self._recent])) if self._recent else float("nan")

    def get_state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint."""
        return {
            "returns": self._returns,
            "lengths": self._lengths,
            "recent": np.array(self._recent, np.float64).reshape(-1, 2),
            "episodes": np.array(self.episodes),
        }

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from `get_state`."""
        self._returns, self._lengths = state["returns"].copy(), state["lengths"].copy()
        self._recent = deque(map(tuple, state["recent"].tolist()), maxlen=_WINDOW)
        self.episodes = int(state["episodes"])
