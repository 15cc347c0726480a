"""Rollouts of T steps and whole episodes for policy gradients, and the memory that they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from rich import filesize

from tfrl.cli.errors import UserError
from tfrl.envs.spec import ActionSpec, ArraySpec, Step, Sums
from tfrl.workers import machine


@dataclass
class Rollout:
    """T steps of this worker's envs, B for each of its R replicas.

    Attributes:
      observations: [R, T + 1, B, *shape], o_0 ... o_T, in the dtype of the spec.
      actions: [R, T, B, *shape].
      extras: further results [R, T, B, ...] of the agent for each action, by name: log_prob and value for
        PPO.
      rewards: float32 [R, T, B], of a_t.
      first: bool [R, T, B]: o_{t+1} begins a new episode.
      truncated: bool [R, T, B]: the episode that ended there was truncated, and did not terminate.
      memory: float32 [R, T + 1, B, M]: the memory of a recurrent policy before o_t; None for other policies.
        If o_t, t > 0, begins an episode, it is the memory of the episode before, because the value of that
        episode's last observation needs it.
      levels: int64 [R, T + 1, B], the level of the episode of o_t; None without --level-replay.
      final_observations: the last observation of each truncated episode, by (r, t, b).
      info: the `Sums` of the envs' infos, [2, R * B] each, in the order of the global envs.
      seconds: the time of collecting.
      env_wait_seconds: the part of `seconds` that was spent waiting for envs.
      idle_seconds: the time for which an actor waited before it could begin.
      version: the number of updates of the weights that collected it; for several actors, the mean.
    """

    observations: np.ndarray
    actions: np.ndarray
    extras: dict[str, np.ndarray]
    rewards: np.ndarray
    first: np.ndarray
    truncated: np.ndarray
    memory: np.ndarray | None = None
    levels: np.ndarray | None = None
    final_observations: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    info: Sums = field(default_factory=dict)
    seconds: float = 0.0
    env_wait_seconds: float = 0.0
    idle_seconds: float = 0.0
    version: float = 0.0

    @classmethod
    def empty(
        cls,
        replicas: int,
        steps: int,
        envs_each: int,
        *,
        observation: ArraySpec,
        action: ActionSpec,
        memory: int = 0,
        levels: bool = False,
    ) -> Rollout:
        """Empty buffers, without extras; `memory` is M. `levels` adds those of --level-replay."""
        size = (replicas, steps, envs_each)
        return cls(
            observations=_aligned((replicas, steps + 1, envs_each, *observation.shape), observation.dtype),
            actions=np.zeros((*size, *action.shape), action.dtype),
            extras={},
            rewards=np.zeros(size, np.float32),
            first=np.zeros(size, bool),
            truncated=np.zeros(size, bool),
            memory=np.zeros((replicas, steps + 1, envs_each, memory), np.float32) if memory else None,
            levels=np.zeros((replicas, steps + 1, envs_each), np.int64) if levels else None,
        )

    @property
    def keeps(self) -> np.ndarray:
        """Factors float32 [R, T + 1, B]: 0 where o_t, t > 0, begins an episode, otherwise 1."""
        return np.concatenate([np.ones_like(self.rewards[:, :1]), 1 - self.first.astype(np.float32)], axis=1)

    @property
    def started_memory(self) -> np.ndarray:
        """The memory from which a_t and V(o_t) follow, [R, T + 1, B, M]: 0 where o_t begins an episode."""
        return np.where(self.keeps[..., None] > 0, np.asarray(self.memory), np.float32(0))

    def steps(self) -> Iterator[tuple[np.ndarray, Step]]:
        """Iterates over actions [B, *shape] and the `Step` after them; only for R = 1."""
        for t, actions in enumerate(self.actions[0]):
            cut = np.flatnonzero(self.truncated[0, t])
            finals = [self.final_observations[0, t, int(b)] for b in cut]
            yield (
                actions,
                Step(
                    reward=self.rewards[0, t],
                    observation=self.observations[0, t + 1],
                    first=self.first[0, t],
                    truncated=self.truncated[0, t],
                    final_observation=np.stack(finals) if finals else None,
                ),
            )

    def by_env(self, array: np.ndarray) -> np.ndarray:
        """Reshapes an array [R, T, B, ...] of this rollout to [T, R * B, ...], in the order of the global
        envs.
        """
        return array.swapaxes(0, 1).reshape(array.shape[1], -1, *array.shape[3:])

    def by_replica(self, array: np.ndarray) -> np.ndarray:
        """Reshapes an array [T, R * B, ...] to [R, T, B, ...]: the inverse of `by_env`."""
        replicas, steps, each = self.rewards.shape
        return array.reshape(steps, replicas, each, *array.shape[2:]).swapaxes(0, 1)


def _aligned(shape: tuple[int, ...], dtype: str, alignment: int = 64) -> np.ndarray:
    """An aligned array, which TensorFlow reads in place; it would copy an unaligned array."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + alignment, np.uint8)
    offset = -memory.ctypes.data % alignment
    return memory[offset : offset + size].view(dtype).reshape(shape)


def observation_bytes(spec: ArraySpec, steps: int) -> int:
    """The bytes of the observations of these env steps."""
    return steps * math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def check_memory(spec: ArraySpec, num_envs: int, num_steps: int, workers: int, here: int = 1) -> None:
    """Raises UserError if the observations of this worker's rollouts do not fit into memory.

    `here` is the number of workers on this machine.
    """
    needed, memory = observation_bytes(spec, num_envs * num_steps // workers), machine.memory()
    if needed > memory // here:
        share = f" in each of {workers} workers" if workers > 1 else ""
        raise UserError(
            f"--num-envs {num_envs} x --num-steps {num_steps} need {filesize.decimal(needed)} for "
            f"observations{share}, and this machine has {filesize.decimal(memory)} of memory; lower one of "
            "the two."
        )


@dataclass(frozen=True)
class EpisodeBatch:
    """T steps of N envs; `playing` marks the steps that each env has taken.

    Attributes:
      observations: [T, N, *shape].
      actions: [T, N, *shape].
      noise: float32 [T, N, K], the random numbers of actions and dropout.
      log_probs: float32 [T, N], of the actions by the policy that took them.
      rewards: float32 [T, N]; 0 if the env waits.
      playing: bool [T, N]: the env has taken this step, and all steps before it.
      ended: bool [N]: the env ended the episode; False if --max-steps or --max-episodes cut it.
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
        """The number of steps of all envs."""
        return int(self.playing.sum())

    def taken(self, array: np.ndarray) -> np.ndarray:
        """Selects the steps that were taken from an array [T, N, ...], env by env: [env_steps, ...]."""
        return array.swapaxes(0, 1)[self.playing.T]

    def returns(
        self, gamma: float, learned_rewards: Callable[[np.ndarray], np.ndarray] = lambda rewards: rewards
    ) -> np.ndarray:
        """Discounted sums of the learned rewards from each step on, float64 [T, N]."""
        rewards = np.where(self.playing, learned_rewards(self.rewards), np.float32(0))
        returns, running = np.zeros(rewards.shape), np.zeros(rewards.shape[1])
        for t in reversed(range(len(returns))):
            running = returns[t] = rewards[t] + gamma * running
        return returns


def normalized(values: np.ndarray) -> np.ndarray:
    """Values [n] minus their mean, divided by their standard deviation (n - 1 degrees of freedom).

    Constant values become 0.
    """
    centred = values - values.mean()
    deviation = np.sqrt(np.square(centred).sum() / max(1, len(values) - 1))
    return centred / (deviation + np.finfo(np.float32).eps)
