"""Envs that each play an episode and are told their actions: SEED RL's actors (Espeholt et al. 2020).

What chooses the actions, of all envs in one batch, is elsewhere (arXiv:1910.06591). Nothing here imports
TensorFlow, so a process with an observer starts at once and is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec


class Seen(NamedTuple):
    """N envs after a step of those that still play.

    Attributes:
      reward: float32 [N]; 0 of envs that wait.
      observation: [N, *shape]: what they show; of one whose episode has just ended, the next one's first.
      ended: bool [N]: the episode has ended with this step.
    """

    reward: np.ndarray
    observation: np.ndarray
    ended: np.ndarray


class Observer:
    """Some of the global envs, each of which waits at the end of its episode for the others.

    Each is a vector of its own, because one vector's envs all take their steps together.

    Args:
      spec: the global vector of envs.
      indices: the global indices of these.
    """

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self._envs = [registry.make(spec, [i]) for i in self.indices]
        self._show()

    def _show(self) -> None:
        self.observation = np.concatenate([env.observe().observation for env in self._envs])

    @property
    def exact_state(self) -> bool:
        """True if a state that is put back goes on exactly; after `set_state`, if all did."""
        return all(env.exact_state for env in self._envs)

    def step(self, actions: np.ndarray, playing: np.ndarray) -> Seen:
        """One step, by actions [N, *shape], of the envs that are `playing`, bool [N]."""
        count = len(self.indices)
        reward, ended = np.zeros(count, np.float32), np.zeros(count, bool)
        observation = self.observation.copy()
        at = np.flatnonzero(playing).tolist()
        for i in at:
            self._envs[i].act(actions[i : i + 1])
        for i in at:
            step = self._envs[i].observe()
            reward[i], ended[i], observation[i] = step.reward[0], step.first[0], step.observation[0]
        self.observation = observation
        return Seen(reward, observation, ended)

    def settle(self) -> None:
        """Says that all episodes have ended, or are broken off."""

    def get_state(self) -> tuple[list[int], list[bytes], np.ndarray, np.ndarray]:
        """Global env indices and, for each, the env's state, observation and `first` flag."""
        first = np.concatenate([env.observe().first for env in self._envs])
        return self.indices, [env.get_state()[0] for env in self._envs], self.observation, first

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index, which may be of more envs than these."""
        for index, env in zip(self.indices, self._envs, strict=True):
            env.set_state([states[index]])
        self._show()

    def close(self) -> None:
        """Stops the envs."""
        for env in self._envs:
            env.close()
