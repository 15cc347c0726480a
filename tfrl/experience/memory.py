"""Numbers that belong to envs between their steps: the memory of recurrent policies, and correlated noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfrl.config.run import NetworkSettings, RLSettings
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec


class Carried:
    """Numbers of B envs that are part of the envs' states.

    Attributes:
      values: float32 [B, M].
    """

    values: np.ndarray

    def add_to(self, states: Sequence[bytes]) -> list[bytes]:
        """The states of the envs, each with its numbers."""
        return [row.tobytes() + state for row, state in zip(self.values, states, strict=True)]

    def take_from(self, states: Sequence[bytes]) -> list[bytes]:
        """Restores the numbers from states of `add_to`, and returns the states of the envs without them."""
        size = self.values[0].nbytes
        self.values = np.stack([np.frombuffer(state[:size], np.float32) for state in states])
        return [state[size:] for state in states]


class Memory(Carried):
    """The memory of B envs. It is zero at an episode's first step.

    A row of `values` holds the network's recurrent state and, with --memory-inputs, the last action and its
    reward.

    Args:
      envs: B.
      state_size: S, the size of the network's recurrent state.
      action_spec: the spec of the remembered actions; None: the memory has no actions and rewards.
    """

    def __init__(self, envs: int, state_size: int, action_spec: ActionSpec | None = None) -> None:
        self._state_size, self._action_spec = state_size, action_spec
        inputs = 0 if action_spec is None else action_spec.encoded_size + 1
        self.values = np.zeros((envs, state_size + inputs), np.float32)

    def acted(self, states: np.ndarray, actions: np.ndarray, rows: np.ndarray | slice = slice(None)) -> None:
        """Stores the states [b, S] of some envs after a step, and their actions [b, *shape]."""
        self.values[rows, : self._state_size] = states
        if self._action_spec is not None:
            self.values[rows, self._state_size : -1] = self._action_spec.encoded(actions)

    def rewarded(self, rewards: np.ndarray) -> None:
        """Stores the rewards [B] of the last actions, clipped to [-1, 1]."""
        if self._action_spec is not None:
            self.values[:, -1] = np.clip(rewards, -1.0, 1.0)

    def begin(self, first: np.ndarray) -> None:
        """Clears the memory of the envs where an episode begins, bool [B]."""
        self.values = np.where(first[:, None], np.float32(0), self.values)


def of_settings(config: RLSettings, envs: int) -> Memory | None:
    """The memory of `envs` envs for these settings; None without --memory."""
    if not isinstance(config, NetworkSettings) or config.memory == "none":
        return None
    return Memory(envs, config.state_size, registry.specs(config)[1] if config.memory_inputs else None)


class CorrelatedNoise(Carried):
    """Noise of some envs with unit variance that is correlated between neighbouring steps.

    n_t = c n_{t-1} + sqrt(1 - c^2) e_t, with e_t standard normal. This is the Ornstein-Uhlenbeck process of
    Lillicrap et al. 2015 (arXiv:1509.02971, section 7), with c = 1 - theta. As in their Algorithm 1, a new
    process begins with every episode; its first value has the stationary distribution. The process continues
    over iterations, because `values`, its last values, are part of the envs' states; they are NaN before its
    first step.

    Args:
      correlation: c.
      envs: the number of envs.
      size: K, the number of values of an action.
    """

    def __init__(self, correlation: float, envs: int, size: int) -> None:
        self._correlation = np.float32(correlation)
        self._rest = np.float32((1.0 - correlation**2) ** 0.5)
        self.values = np.full((envs, size), np.nan, np.float32)

    def next(self, rows: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Replaces the first K standard normal numbers of rows [B, K or more] by the noise of this step.

        `first`, bool [B]: an episode begins with this step.
        """
        size = self.values.shape[1]
        drawn = rows[:, :size]
        continued = self._correlation * self.values + self._rest * drawn
        self.values = np.where(first[:, None] | np.isnan(self.values), drawn, continued)
        return np.concatenate([self.values, rows[:, size:]], axis=1)


def correlated_noise(config: RLSettings, envs: int) -> CorrelatedNoise | None:
    """Makes the noise for --noise-correlation; returns None if the noise of steps is independent."""
    correlation = getattr(config, "noise_correlation", 0.0)
    if not correlation:
        return None
    return CorrelatedNoise(correlation, envs, math.prod(registry.specs(config)[1].shape))
