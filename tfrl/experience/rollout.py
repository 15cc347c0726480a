"""Steps this worker's envs with the agent: double-buffered, so that env time hides behind inference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tfrl import envs
from tfrl.agents import Agent
from tfrl.cli.errors import UserError
from tfrl.config.ppo import Config
from tfrl.envs.registry import family
from tfrl.workers import machine


@dataclass
class Rollout:
    """T steps of this worker's envs, B for each of its R replicas.

    Attributes:
      observations: uint8 [R, T, B, H, W, C], o_0 ... o_{T-1}: kept here and nowhere else.
      actions: int32 [R, T, B]; log_probs, values: float32 [R, T, B], of the policy that acted.
      last_values: float32 [R, B], V(o_T).
      rewards: float32 [R, T, B], what a_t earned.
      first: bool [R, T, B]: o_{t+1} begins a new episode.
      seconds: how long collecting took; env_wait_seconds: the part of it spent waiting for envs.
    """

    observations: np.ndarray
    actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    last_values: np.ndarray
    rewards: np.ndarray
    first: np.ndarray
    seconds: float = 0.0
    env_wait_seconds: float = 0.0

    @classmethod
    def empty(cls, replicas: int, steps: int, envs_each: int, shape: tuple[int, ...]) -> Rollout:
        """Buffers to be filled."""
        size = (replicas, steps, envs_each)
        return cls(
            observations=_aligned_uint8((*size, *shape)),
            actions=np.zeros(size, np.int32),
            log_probs=np.zeros(size, np.float32),
            values=np.zeros(size, np.float32),
            last_values=np.zeros((replicas, envs_each), np.float32),
            rewards=np.zeros(size, np.float32),
            first=np.zeros(size, bool),
        )


def _aligned_uint8(shape: tuple[int, ...], alignment: int = 64) -> np.ndarray:
    """Memory that TensorFlow can read in place: unaligned arrays are copied, and this one is large."""
    size = int(np.prod(shape))
    memory = np.empty(size + alignment, np.uint8)
    offset = -memory.ctypes.data % alignment
    return memory[offset : offset + size].reshape(shape)


def check_memory(config: Config, workers: int) -> None:
    """Raise UserError if the observations of this worker's rollouts alone fill more than the whole memory."""
    if _observation_bytes(config, workers) > machine.memory():
        raise too_large(config, workers)


def too_large(config: Config, workers: int) -> UserError:
    """Says that this worker's rollouts do not fit into its memory, and what would make them smaller."""
    needed, there = map(machine.in_words, (_observation_bytes(config, workers), machine.memory()))
    share = f" in each of {workers} workers" if workers > 1 else ""
    return UserError(
        f"--num-envs {config.num_envs} x --num-steps {config.num_steps} fill {needed} with observations"
        f"{share}, and there are {there} of memory here; lower either."
    )


def _observation_bytes(config: Config, workers: int) -> int:
    return config.batch_size // workers * math.prod(family(config.env).observation_shape)


class _Group:
    """Envs that step together: the same slice of every replica's envs."""

    def __init__(self, env: envs.VecEnv, columns: slice, replicas: int) -> None:
        self.env = env
        self.columns = columns
        self.replicas = replicas

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards [R, B], observations [R, B, H, W, C], first [R, B]."""
        reward, observation, first = self.env.observe()
        return tuple(x.reshape(self.replicas, -1, *x.shape[1:]) for x in (reward, observation, first))


class Collector:
    """This worker's slice of the global envs and the buffers that they fill.

    Args:
      spec: the global vector of envs.
      indices: the global indices of this worker's envs.
      replicas: how many replicas share them, in order.
      num_steps: T.
    """

    def __init__(self, spec: envs.EnvSpec, indices: Sequence[int], *, replicas: int, num_steps: int) -> None:
        self.indices = list(indices)
        self._replicas = replicas
        each = len(self.indices) // replicas
        # Two groups, one stepping while the policy looks at the other, where that leaves two envs in each:
        # GPUs compute a batch of one in another way, and round it differently.
        halves = 2 if each % 2 == 0 and each >= 4 else 1
        width = each // halves
        by_replica = np.asarray(self.indices).reshape(replicas, each)
        self._groups = []
        for half in range(halves):
            columns = slice(half * width, (half + 1) * width)
            env = envs.make(spec, by_replica[:, columns].reshape(-1).tolist())
            self._groups.append(_Group(env, columns, replicas))
        first_env = self._groups[0].env
        self.observation_shape, self.num_actions = first_env.observation_shape, first_env.num_actions
        self._rollout = Rollout.empty(replicas, num_steps, each, self.observation_shape)
        self._num_steps = num_steps

    def collect(self, agent: Agent, uniforms: np.ndarray, on_step: Callable[[int], None]) -> Rollout:
        """T steps of every env. The returned buffers are used again by the next call.

        Args:
          agent: gives actions.
          uniforms: float32 [T, envs of this worker]: the actions' randomness.
          on_step: called with the number of steps done.
        """
        rollout = self._rollout
        start, rollout.env_wait_seconds = time.perf_counter(), 0.0
        uniforms = uniforms.reshape(self._num_steps, self._replicas, -1)
        for t in range(self._num_steps):
            for group in self._groups:
                at = (slice(None), t, group.columns)
                rollout.observations[at] = self._observe(group, t)
                actions, rollout.log_probs[at], rollout.values[at] = agent.act(
                    rollout.observations[at], uniforms[t][:, group.columns]
                )
                rollout.actions[at] = actions
                group.env.act(actions.reshape(-1))
            on_step(t + 1)
        for group in self._groups:
            observations = self._observe(group, self._num_steps)
            unused = np.zeros(observations.shape[:2], np.float32)
            rollout.last_values[:, group.columns] = agent.act(observations, unused)[2]
        rollout.seconds = time.perf_counter() - start
        return rollout

    def _observe(self, group: _Group, t: int) -> np.ndarray:
        """Waits for o_t, and stores what the action before it led to."""
        start = time.perf_counter()
        reward, observations, first = group.observe()
        self._rollout.env_wait_seconds += time.perf_counter() - start
        if t > 0:
            at = (slice(None), t - 1, group.columns)
            self._rollout.rewards[at], self._rollout.first[at] = reward, first
        return observations

    # State

    def get_state(self) -> tuple[list[int], list[bytes], np.ndarray, np.ndarray]:
        """Global env indices and, for each, the env's state, observation [H, W, C] and `first` flag."""
        indices, states, observations, firsts = [], [], [], []
        by_replica = np.asarray(self.indices).reshape(self._replicas, -1)
        for group in self._groups:
            _, observation, first = group.env.observe()
            indices += by_replica[:, group.columns].reshape(-1).tolist()
            states += group.env.get_state()
            observations.append(observation)
            firsts.append(first)
        return indices, states, np.concatenate(observations), np.concatenate(firsts)

    def set_state(self, states: dict[int, bytes]) -> None:
        """Continues from states by global env index; it may hold more envs than this worker's."""
        by_replica = np.asarray(self.indices).reshape(self._replicas, -1)
        for group in self._groups:
            wanted = by_replica[:, group.columns].reshape(-1).tolist()
            group.env.set_state([states[i] for i in wanted])

    def close(self) -> None:
        """Stops the envs' threads."""
        for group in self._groups:
            group.env.close()
