"""Observers on Ray: they hold the envs, and get the actions from the agent. One that dies is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.algorithms.reinforce import Config
from tfrl.envs.spec import EnvSpec
from tfrl.experience.collector import Observer, Seen
from tfrl.remote.cluster import Cluster, ray, serve_driver
from tfrl.remote.supervised_actors import Ready, SupervisedActors, ready

if TYPE_CHECKING:
    from tfrl.run.session import Session


class RemoteObserver(Observer):
    """An `Observer` in a process of its own on Ray, which needs no TensorFlow."""

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        serve_driver()
        super().__init__(spec, indices)

    def begin_at(self, states: Mapping[int, bytes] | None) -> Ready:
        """Continues from states by global env index, if any."""
        if states is not None:
            self.set_state(states)
        return ready(self.get_state(), self.exact_state)


class RayObservers(SupervisedActors):
    """The envs of a run in several processes on Ray; see `tfrl.experience.collector.Observer`."""

    def __init__(self, config: Config, spec: EnvSpec, session: Session) -> None:
        cluster = Cluster(config.ray_address, {"--observers": config.observers}, 0)
        super().__init__(cluster, session, config.observer_timeout)
        share = config.num_envs // config.observers
        self._slices = [slice(i * share, (i + 1) * share) for i in range(config.observers)]
        kind = ray.remote(num_cpus=1, max_restarts=0)(RemoteObserver)

        def make(index: int) -> Any:
            return kind.remote(spec, list(range(config.num_envs)[self._slices[index]]))

        self._open("observer", range(config.observers), make)
        self._show()

    def _show(self) -> None:
        self.observation = np.concatenate([actor.after.observations for actor in self._actors])

    def step(self, actions: np.ndarray, playing: np.ndarray) -> Seen:
        """One step of the envs that are `playing`.

        Args:
          actions: [N, *shape] for all N envs; those of envs that do not play are ignored.
          playing: bool [N].

        Returns:
          The outcome for all N envs. Envs that do not play have a reward of 0 and their last observation.

        Raises:
          TrainingError: Ray has died; an observer failed, or died again and again.
          EnvError: an env failed.
          Stopped: the run was told to stop, and a process was to be replaced.

        `settle` raises the same errors, and then leaves all envs before the episode.
        """
        asked = [
            (actor, at) for actor, at in zip(self._actors, self._slices, strict=True) if playing[at].any()
        ]
        for actor, at in asked:
            actor.order("step", actions[at], playing[at])
        seen = Seen(np.zeros(len(playing), np.float32), self.observation.copy(), np.zeros(len(playing), bool))
        for actor, at in asked:
            for whole, part in zip(seen, actor.newest(), strict=True):
                whole[at] = part
        self.observation = seen.observation
        return seen

    def settle(self) -> None:
        """Notes the states of the envs, at which the replacement of a process that dies begins."""
        for actor in self._actors:
            actor.order("get_state")
        places = [actor.newest() for actor in self._actors]
        for actor, place in zip(self._actors, places, strict=True):  # a stop may come before all are there
            actor.settle(place)

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index. States of other envs are ignored."""
        super().set_state(states)
        self._show()
