"""A slice of the global envs and the policy that acts in them, by whatever weights it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tfrl.experience.collector import ActingPolicy, Collector
from tfrl.experience.rollout import Rollout

Weights = Mapping[str, np.ndarray]
"""The weights of a network by name, float32 of any shape."""


class Versioned(NamedTuple):
    """Weights, and the number of updates behind them."""

    version: int
    weights: Weights


class BehaviorPolicy(ActingPolicy, Protocol):
    """A policy that acts by weights of others."""

    def set_weights(self, weights: Weights) -> None:
        """Acts by them, float32 by name, from now on."""

    def draw(self, number: int, indices: Sequence[int]) -> np.ndarray:
        """The random numbers of rollout `number`, float32 [T, B, K], of envs by their global indices."""


class EnvStates(NamedTuple):
    """The state of envs.

    Attributes:
      indices: the global indices of N envs.
      states: the state of each.
      observations: [N, *shape], in the dtype of the envs' observations.
      first: bool [N], true where an episode begins.
    """

    indices: list[int]
    states: list[bytes]
    observations: np.ndarray
    first: np.ndarray


class Collected(NamedTuple):
    """A rollout [1, T, N] of N envs, and where they stand after it."""

    rollout: Rollout
    after: EnvStates


class EnvActor:
    """Makes rollouts, each of which its number and weights alone decide, and the one before it.

    Args:
      collector: the envs.
      policy: gives actions.
    """

    def __init__(self, collector: Collector, policy: BehaviorPolicy) -> None:
        self._collector = collector
        self._policy = policy
        self._ended: float | None = None  # when the last rollout was done

    def collect(
        self, number: int, weights: Versioned, on_step: Callable[[int], None] = lambda t: None
    ) -> Collected:
        """Rollout `number` of the run, acted by `weights`; `on_step` gets the number of steps done."""
        began = time.perf_counter()
        idle = 0.0 if self._ended is None else began - self._ended
        self._policy.set_weights(weights.weights)
        noise = self._policy.draw(number, self._collector.indices)
        rollout = self._collector.collect(self._policy, noise, on_step)
        rollout.idle_seconds, rollout.version = idle, float(weights.version)
        after = self.get_state()
        self._ended = time.perf_counter()
        return Collected(rollout, after)

    @property
    def exact_state(self) -> bool:
        """True where a state that is put back goes on exactly; after `set_state`, where the last one did."""
        return self._collector.exact_state

    def get_state(self) -> EnvStates:
        """The envs' present state."""
        return EnvStates(*self._collector.get_state())

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index, which may be of more envs than these."""
        self._collector.set_state(states)

    def close(self) -> None:
        """Stops the envs' threads."""
        self._collector.close()
