"""An `Observer` steps envs by actions from outside, for a learner that acts in all envs at once.

This file does not import TensorFlow, so a process that only steps envs starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec, Sums, joined
from tfrl.experience.collector import EnvStates


class Seen(NamedTuple):
    """The results of a step of those of N envs whose episodes still run.

    Attributes:
      reward: float32 [N]; 0 for envs that wait.
      observation: [N, *shape]; if an episode has just ended, the first observation of the next episode.
      ended: bool [N]: the episode ended with this step.
    """

    reward: np.ndarray
    observation: np.ndarray
    ended: np.ndarray


class Observer:
    """Some of the global envs. An env whose episode has ended waits for the other envs.

    The learner chooses the actions of all envs in one batch, as for the actors of SEED RL (Espeholt et al.
    2020, arXiv:1910.06591). Each env is a separate vector, because all envs of a vector take their steps
    together.

    Args:
      spec: the global vector of envs.
      indices: the global indices of these envs.

    Attributes:
      observation: the current observations, [N, *shape].
    """

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self._envs = [registry.make(spec, [i]) for i in self.indices]
        self._show()

    def _show(self) -> None:
        self.observation = np.concatenate([env.observe().observation for env in self._envs])

    @property
    def exact_state(self) -> bool:
        """False if the last `set_state` could not continue exactly in some envs."""
        return all(env.exact_state for env in self._envs)

    def step(self, actions: np.ndarray, playing: np.ndarray) -> Seen:
        """Steps the envs that are `playing`, bool [N], by actions [N, *shape]."""
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

    def take_info(self) -> Sums:
        """The sums of the envs' infos since the last call, in the order of `indices`."""
        parts = [(env.take_info(), [place]) for place, env in enumerate(self._envs)]
        return joined(parts, len(self.indices))

    def settle(self) -> Sums:
        """Marks the end of all episodes of an update, whose states `get_state` gives; returns `take_info`."""
        return self.take_info()

    def get_state(self) -> EnvStates:
        """The present state of the envs."""
        first = np.concatenate([env.observe().first for env in self._envs])
        return EnvStates(self.indices, [env.get_state()[0] for env in self._envs], self.observation, first)

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index, which may be of more envs than these."""
        for index, env in zip(self.indices, self._envs, strict=True):
            env.set_state([states[index]])
        self._show()

    def close(self) -> None:
        """Stops the envs."""
        for env in self._envs:
            env.close()
