"""A slice of the global envs and the policy that acts in them, by whatever weights it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from tfrl.experience.collector import ActingPolicy, Collector
from tfrl.experience.rollout import Rollout
from tfrl.run import rng


class BehaviorPolicy(ActingPolicy, Protocol):
    """A policy that acts by weights of others.

    Attributes:
      draw_noise: gives the random numbers of T steps of one env, float32 [T, K].
    """

    draw_noise: Callable[[np.random.Generator, int], np.ndarray]

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Acts by them from now on."""


class EnvStates(NamedTuple):
    """The state of envs: their global indices and, for each, its state, observation and `first` flag."""

    indices: list[int]
    states: list[bytes]
    observations: np.ndarray
    first: np.ndarray


class Collected(NamedTuple):
    """A rollout, and where its envs stand after it."""

    rollout: Rollout
    after: EnvStates


class EnvActor:
    """Makes rollouts, each of which its number and weights alone decide, and the one before it.

    Args:
      collector: the envs.
      policy: gives actions.
      seed: of the run.
      num_steps: T.
    """

    def __init__(self, collector: Collector, policy: BehaviorPolicy, *, seed: int, num_steps: int) -> None:
        self._collector = collector
        self._policy = policy
        self._seed = seed
        self._num_steps = num_steps
        self._ended: float | None = None  # when the last rollout was done

    def collect(
        self, number: int, weights: Mapping[str, np.ndarray], on_step: Callable[[int], None] = lambda t: None
    ) -> Collected:
        """Rollout `number` of the run, acted by `weights`; `on_step` gets the number of steps done."""
        began = time.perf_counter()
        idle = 0.0 if self._ended is None else began - self._ended
        self._policy.set_weights(weights)
        indices, draw = self._collector.indices, self._policy.draw_noise
        noise = rng.action_noise(self._seed, number, indices, self._num_steps, draw)
        rollout = self._collector.collect(self._policy, noise, on_step)
        rollout.idle_seconds = idle
        after = self.get_state()
        self._ended = time.perf_counter()
        return Collected(rollout, after)

    def get_state(self) -> EnvStates:
        """The envs' present state."""
        return EnvStates(*self._collector.get_state())

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index, which may be of more envs than these."""
        self._collector.set_state(states)

    def close(self) -> None:
        """Stops the envs' threads."""
        self._collector.close()
