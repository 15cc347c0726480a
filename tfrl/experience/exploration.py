"""Exploration with noise that is correlated in time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfrl.envs import registry
from tfrl.envs.spec import EnvSettings

_MARK = b"\0noise\0"  # no state of an env begins with this byte string


class CorrelatedNoise:
    """Noise of some envs with unit variance that is correlated between neighbouring steps.

    n_t = c n_{t-1} + sqrt(1 - c^2) e_t, with e_t standard normal. This is the Ornstein-Uhlenbeck process of
    Lillicrap et al. 2015 (arXiv:1509.02971, section 7), with c = 1 - theta. As in their Algorithm 1, a new
    process begins with every episode; its first value has the stationary distribution. The process continues
    over iterations, because its last values are part of the envs' states.

    Args:
      correlation: c.
      envs: the number of envs.
      size: K, the number of values of an action.
    """

    def __init__(self, correlation: float, envs: int, size: int) -> None:
        self._correlation = np.float32(correlation)
        self._rest = np.float32((1.0 - correlation**2) ** 0.5)
        self._last = np.zeros((envs, size), np.float32)
        self._begins = np.ones(envs, bool)  # True where the next value is the first of its process

    def next(self, rows: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Replaces the first K standard normal numbers of rows [B, K or more] by the noise of this step.

        `first`, bool [B]: an episode begins with this step.
        """
        drawn = rows[:, : self._last.shape[1]]
        continued = self._correlation * self._last + self._rest * drawn
        self._last = np.where((first | self._begins)[:, None], drawn, continued)
        self._begins = np.zeros_like(self._begins)
        return np.concatenate([self._last, rows[:, self._last.shape[1] :]], axis=1)

    def add_to(self, states: Sequence[bytes]) -> list[bytes]:
        """The states of the envs, each with its last noise."""
        pairs = zip(states, self._last, self._begins, strict=True)
        return [state if begins else _MARK + last.tobytes() + state for state, last, begins in pairs]

    def take_from(self, states: Sequence[bytes]) -> list[bytes]:
        """Restores the noise from states of `add_to`, and returns the states of the envs without it."""
        end, found = len(_MARK) + self._last[0].nbytes, []
        for i, state in enumerate(states):
            self._begins[i] = not state.startswith(_MARK)
            if not self._begins[i]:
                self._last[i] = np.frombuffer(state[len(_MARK) : end], np.float32)
                state = state[end:]
            found.append(state)
        return found


def correlated_noise(config: EnvSettings, envs: int) -> CorrelatedNoise | None:
    """Makes the noise for --noise-correlation; returns None if the noise of steps is independent."""
    correlation = getattr(config, "noise_correlation", 0.0)
    if not correlation:
        return None
    return CorrelatedNoise(correlation, envs, math.prod(registry.specs(config)[1].shape))
