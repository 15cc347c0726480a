"""Episodes that a policy-gradient agent learns from, one of each env, of whatever lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Episodes:
    """T steps of N envs, of which each has played as many as `playing` says.

    Attributes:
      observations: [T, N, *shape].
      actions: [T, N, *shape].
      noise: float32 [T, N, K], which the actions, and what else was random, were drawn by.
      log_probs: float32 [T, N], of the actions when they were taken.
      rewards: float32 [T, N]; 0 where the env waits.
      playing: bool [T, N]: the env has taken this step; then all steps before it, too.
      ended: bool [N]: its episode has ended, and was not broken off.
    """

    observations: np.ndarray
    actions: np.ndarray
    noise: np.ndarray
    log_probs: np.ndarray
    rewards: np.ndarray
    playing: np.ndarray
    ended: np.ndarray

    @property
    def env_steps(self) -> int:
        """The steps of all envs."""
        return int(self.playing.sum())

    def taken(self, array: np.ndarray) -> np.ndarray:
        """The steps that were taken, of an array [T, N, ...], env by env: [env_steps, ...]."""
        return array.swapaxes(0, 1)[self.playing.T]

    def returns(
        self, gamma: float, learned_rewards: Callable[[np.ndarray], np.ndarray] = lambda rewards: rewards
    ) -> np.ndarray:
        """Discounted sums from each step on of the rewards, or of what is learned from, float64 [T, N]."""
        rewards = np.where(self.playing, learned_rewards(self.rewards), np.float32(0))
        returns, running = np.zeros(rewards.shape), np.zeros(rewards.shape[1])
        for t in reversed(range(len(returns))):
            running = returns[t] = rewards[t] + gamma * running
        return returns


def normalized(values: np.ndarray) -> np.ndarray:
    """Values [n] less their mean, divided by their standard deviation (of n - 1 degrees of freedom).

    Zeros where they do not vary.
    """
    centred = values - values.mean()
    deviation = np.sqrt(np.square(centred).sum() / max(1, len(values) - 1))
    return centred / (deviation + np.finfo(np.float32).eps)
