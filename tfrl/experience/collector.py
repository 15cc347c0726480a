"""A `Collector` steps envs by the actions of a policy, and fills rollouts.

This file does not import TensorFlow, so a process that only steps envs starts quickly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tfrl.config.run import RLSettings
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec, Step, Sums, VecEnv, joined
from tfrl.experience import memory
from tfrl.experience.memory import CorrelatedNoise, Memory
from tfrl.experience.rollout import Rollout


class ActingPolicy(Protocol):
    """The policy that a collector needs."""

    def sample(
        self, observations: np.ndarray, noise: np.ndarray, memory: np.ndarray | None = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions of the training envs, or of half of them.

        Args:
          observations: [R, B, *shape], for B envs of each of this worker's R replicas.
          noise: float32 [R, B, K], the only source of randomness.
          memory: float32 [R, B, M], only for a recurrent policy.

        Returns:
          Actions [R, B, *shape] of the action spec's dtype, and further results by name, the extras, float32
          [R, B, ...].

        A recurrent policy adds its `state` [R, B, S] to the extras. The next call does not change these
        arrays.
        """

    def complete(self, rollout: Rollout) -> None:
        """Adds the extras that are computed for all actions of a rollout at once."""


class EnvStates(NamedTuple):
    """The state of envs.

    Attributes:
      indices: the global indices of N envs.
      states: the state of each.
      observations: [N, *shape], in the dtype of the envs' observations.
      first: bool [N], True at the first step of an episode.
    """

    indices: list[int]
    states: list[bytes]
    observations: np.ndarray
    first: np.ndarray


@dataclass
class _Group:
    """Envs that step together: the same slice of the envs of every replica."""

    env: VecEnv
    indices: list[int]  # global
    columns: slice
    replicas: int
    correlated: CorrelatedNoise | None
    memory: Memory | None
    levels: np.ndarray | None  # [R * B], of the running episodes, with level replay
    first: np.ndarray = field(init=False)  # `first` flags [R * B] of the last observations
    acted: list[tuple[np.ndarray, dict[str, np.ndarray]]] = field(init=False)  # of the present rollout
    outcomes: list[tuple[np.ndarray, ...]] = field(init=False)  # of these: reward, first, truncated
    next_levels: np.ndarray = field(init=False)  # [R * B], the levels that ended episodes give way to

    def by_replica(self, array: np.ndarray) -> np.ndarray:
        """Reshapes [R * B, ...] to [R, B, ...]."""
        return array.reshape(self.replicas, -1, *array.shape[1:])

    def noise(self, rows: np.ndarray) -> np.ndarray:
        """The noise [R, B, K] of this step's actions, from random numbers [R, B, K]."""
        if self.correlated is None:
            return rows
        return self.by_replica(self.correlated.next(rows.reshape(-1, rows.shape[-1]), self.first))

    def get_state(self) -> list[bytes]:
        """The states of the envs, each with its correlated noise or its memory."""
        states = self.env.get_state()
        for carried in filter(None, (self.memory, self.correlated)):
            states = carried.add_to(states)
        return states

    def set_state(self, states: Sequence[bytes]) -> None:
        """Restores states of `get_state`."""
        for carried in filter(None, (self.correlated, self.memory)):
            states = carried.take_from(states)
        self.env.set_state(states)
        if self.levels is not None:
            self.levels = self.env.levels.copy()
        if self.memory is not None:  # an env without exact state has begun a new episode
            self.memory.begin(self.env.observe().first)

    def store(self, rollout: Rollout) -> None:
        """Stores all steps at once, which is faster than one by one for small envs."""
        actions, extras = zip(*self.acted, strict=True)
        pairs = [(rollout.actions, actions)]
        for name, values in extras[0].items():
            if name not in rollout.extras:
                size = (*rollout.rewards.shape, *values.shape[2:])
                rollout.extras[name] = np.zeros(size, np.float32)
            pairs.append((rollout.extras[name], [step[name] for step in extras]))
        outcomes = zip(*self.outcomes, strict=True)
        pairs += zip((rollout.rewards, rollout.first, rollout.truncated), outcomes, strict=True)
        for array, steps in pairs:  # [R, T, envs of all groups, ...], and T of [R, B, ...] or [R * B, ...]
            whole = np.concatenate(steps).reshape(len(steps), self.replicas, -1, *array.shape[3:])
            array[:, :, self.columns] = whole.swapaxes(0, 1)


class Collector:
    """This worker's slice of the global envs and the buffers that they fill.

    Args:
      config: the run's settings.
      spec: the global vector of envs.
      indices: the global indices of this worker's envs.
      replicas: the number of replicas that share the envs, in order.
      rollouts: the number of buffers. A rollout is valid until this many later ones are collected.
      in_halves: one half of the envs may step while the policy computes the actions of the other.
    """

    def __init__(
        self,
        config: RLSettings,
        spec: EnvSpec,
        indices: Sequence[int],
        *,
        replicas: int,
        rollouts: int = 1,
        in_halves: bool = True,
    ) -> None:
        self.indices = list(indices)
        each = len(self.indices) // replicas
        # Each half needs two envs, because GPUs round a batch of one differently.
        steps_beside = in_halves and registry.family(spec.env).steps_beside
        halves = 2 if each % 2 == 0 and each >= 4 and steps_beside else 1
        width = each // halves
        by_replica = np.asarray(self.indices).reshape(replicas, each)
        self._groups = []
        for half in range(halves):
            columns = slice(half * width, (half + 1) * width)
            mine, envs = by_replica[:, columns].reshape(-1).tolist(), replicas * width
            noise, remembered = memory.correlated_noise(config, envs), memory.of_settings(config, envs)
            env = registry.make(spec, mine)
            levels = env.levels.copy() if spec.level_replay else None
            self._groups.append(_Group(env, mine, columns, replicas, noise, remembered, levels))
        first_env = self._groups[0].env
        self.observation_spec, self.action_spec = first_env.observation_spec, first_env.action_spec
        self._rollouts: deque[Rollout] = deque()
        self._most = rollouts
        self._size = (replicas, config.steps_per_env, each)

    def _buffers(self) -> Rollout:
        if len(self._rollouts) < self._most:
            remembered = self._groups[0].memory
            rollout = Rollout.empty(
                *self._size,
                observation=self.observation_spec,
                action=self.action_spec,
                memory=0 if remembered is None else remembered.values.shape[1],
                levels=self._groups[0].levels is not None,
            )
        else:
            rollout = self._rollouts.popleft()
        self._rollouts.append(rollout)
        rollout.final_observations = {}
        return rollout

    def collect(
        self,
        policy: ActingPolicy,
        noise: np.ndarray,
        on_step: Callable[[int], None],
        levels: np.ndarray | None = None,
    ) -> Rollout:
        """T steps of every env. With one buffer, the next call overwrites the returned rollout.

        Args:
          policy: gives actions.
          noise: float32 [T, envs of this worker, K], the random numbers of the actions.
          on_step: called with the number of finished steps.
          levels: int64 [T, envs of this worker], with level replay: the level that an env begins if its
            episode ends with that step.
        """
        replicas, num_steps, each = self._size
        rollout = self._buffers()
        start, rollout.env_wait_seconds = time.perf_counter(), 0.0
        noise = noise.reshape(num_steps, replicas, each, -1)
        chosen = None if levels is None else levels.reshape(num_steps, replicas, each)
        for group in self._groups:
            group.acted, group.outcomes = [], []
        for t in range(num_steps):
            for group in self._groups:
                observations = self._observe(group, t, rollout)
                remembered = [] if group.memory is None else [group.by_replica(group.memory.values)]
                drawn = group.noise(noise[t, :, group.columns])
                actions, extras = policy.sample(observations, drawn, *remembered)
                if group.memory is not None:
                    states = extras.pop("state")
                    states, flat = (x.reshape(-1, *x.shape[2:]) for x in (states, actions))
                    group.memory.acted(states, flat)
                group.acted.append((actions, extras))
                flat = actions.reshape(-1, *self.action_spec.shape)
                if chosen is None:
                    group.env.act(flat)
                else:
                    group.next_levels = chosen[t, :, group.columns].reshape(-1)
                    group.env.act(flat, group.next_levels)
            on_step(t + 1)
        for group in self._groups:
            self._observe(group, num_steps, rollout)
            group.store(rollout)
        rollout.info = self.take_info()
        policy.complete(rollout)
        rollout.seconds = time.perf_counter() - start
        return rollout

    def take_info(self) -> Sums:
        """The sums of the envs' infos since the last call, in the order of `indices`."""
        places = {index: place for place, index in enumerate(self.indices)}
        parts = [(group.env.take_info(), [places[i] for i in group.indices]) for group in self._groups]
        return joined(parts, len(self.indices))

    def observe(self) -> Step:
        """The present observations of one group of envs, and the results of the last actions."""
        (group,) = self._groups
        return group.env.observe()

    def steps(
        self, choose: Callable[[np.ndarray, np.ndarray], np.ndarray], noise: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Step]]:
        """Steps one group of envs; yields the actions [B, *shape] and the `Step` after each.

        `choose` gives the actions for observations [B, *shape] and noise [B, K], of which `noise` has all
        steps.
        """
        (group,), step = self._groups, self.observe()
        for rows in noise:
            if group.correlated is not None:
                rows = group.correlated.next(rows, step.first)
            actions = choose(step.observation, rows)
            group.env.act(actions)
            step = group.env.observe()
            yield actions, step

    def _observe(self, group: _Group, t: int, rollout: Rollout) -> np.ndarray:
        """Waits for o_t, stores it with the results of a_{t-1}, and returns o_t, [R, B, *shape]."""
        start = time.perf_counter()
        step = group.env.observe()
        rollout.env_wait_seconds += time.perf_counter() - start
        group.first = step.first
        at = (slice(None), t, group.columns)
        rollout.observations[at] = group.by_replica(step.observation)
        if group.memory is not None and rollout.memory is not None:
            if t > 0:
                group.memory.rewarded(step.reward)
            rollout.memory[at] = group.by_replica(group.memory.values)
            group.memory.begin(step.first)
        if group.levels is not None and rollout.levels is not None:
            if t > 0:
                group.levels = np.where(step.first, group.next_levels, group.levels)
            rollout.levels[at] = group.by_replica(group.levels)
        if t > 0:
            group.outcomes.append((step.reward, step.first, step.truncated))
            if step.final_observation is not None:
                width = group.columns.stop - group.columns.start
                for k, i in enumerate(np.flatnonzero(step.truncated)):
                    place = (int(i // width), t - 1, int(group.columns.start + i % width))
                    rollout.final_observations[place] = step.final_observation[k].copy()
        return rollout.observations[at]

    # State

    @property
    def exact_state(self) -> bool:
        """False if the last `set_state` could not continue exactly in some envs."""
        return all(group.env.exact_state for group in self._groups)

    def get_state(self) -> EnvStates:
        """The present state of the envs."""
        indices: list[int] = []
        states, observations, firsts = [], [], []
        for group in self._groups:
            step = group.env.observe()
            indices += group.indices
            states += group.get_state()
            observations.append(step.observation)
            firsts.append(step.first)
        return EnvStates(indices, states, np.concatenate(observations), np.concatenate(firsts))

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index; it may hold more envs than this worker's."""
        for group in self._groups:
            group.set_state([states[i] for i in group.indices])

    def close(self) -> None:
        """Stops the envs' threads."""
        for group in self._groups:
            group.env.close()


Weights = Mapping[str, np.ndarray]
"""The weights of a network by name, float32 of any shape."""


class Versioned(NamedTuple):
    """Weights, and the number of updates that made them.

    With level replay, also the probabilities of the levels after these updates, float64 [L].
    """

    version: int
    weights: Weights
    probabilities: np.ndarray | None = None


class Collected(NamedTuple):
    """A rollout [1, T, N] of N envs, and their states after it."""

    rollout: Rollout
    after: EnvStates
