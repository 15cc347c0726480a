"""Processes on Ray that step envs: actors choose actions themselves, observers get them from the learner.

A process that dies is replaced, and the new one repeats its part.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.algorithms import reinforce
from tfrl.algorithms.policies import RolloutActor
from tfrl.cli.errors import UserError
from tfrl.config import distributed
from tfrl.config.distributed import LEARNER, DistributedSettings
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec, Sums, joined
from tfrl.experience.collector import Collected, Collector, Versioned
from tfrl.experience.observer import Observer, Seen
from tfrl.experience.rollout import Rollout
from tfrl.ops.graph import tf
from tfrl.remote.cluster import Cluster, ray, serve_driver, store_bytes
from tfrl.remote.supervised_actors import Ready, SupervisedActors, ready
from tfrl.workers import machine
from tfrl.workers.strategy import set_up_tensorflow

if TYPE_CHECKING:
    from tfrl.run.session import Session

# Actors

_OFFERS = "offers"  # the threads of an actor that take the newest weights while others step envs


class RemoteActor:
    """A `RolloutActor` in a process of its own, on Ray.

    Args:
      config: the run's settings.
      spec: the global vector of envs.
      indices: the global indices of its envs.
      precision: of the torso, resolved.
      threads: CPU threads that its policy may use.
    """

    def __init__(
        self, config: DistributedSettings, spec: EnvSpec, indices: Sequence[int], precision: str, threads: int
    ) -> None:
        serve_driver()
        with contextlib.suppress(UserError):  # this machine may have fewer GPUs than the learner's
            machine.choose_device(config.device)
        set_up_tensorflow()
        machine.one_thread_each()
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        collector = Collector(config, spec, indices, replicas=1)
        self._actor = RolloutActor(config, collector, precision, at_once=threads)
        self._lag = config.lag or 0
        self._newest, self._offered = Versioned(-1, {}), threading.Condition()

    def offer(self, weights: Versioned) -> None:
        """Takes the newest weights, in another thread than `collect`, which may wait for them."""
        with self._offered:
            self._newest = weights
            self._offered.notify_all()

    def collect(self, number: int, weights: Versioned | None) -> Collected:
        """Collects rollout `number` with `weights`; None: with the newest ones, once they are not too old."""
        if weights is None:
            with self._offered:
                self._offered.wait_for(lambda: self._newest.version >= max(0, number - self._lag))
                weights = self._newest
        return self._actor.collect(number, weights)

    def begin_at(self, states: Mapping[int, bytes] | None) -> Ready:
        """Continues from states by global env index, if any."""
        envs = self._actor.collector
        if states is not None:
            envs.set_state(states)
        return ready(envs.get_state(), envs.exact_state)


class RayCollector(SupervisedActors):
    """The envs of a run in several processes on Ray; see `tfrl.training.prefetch.ThreadCollector`.

    Args:
      config: the settings, with the section Actors.
      spec: the global vector of envs.
      session: that of this learner, which has the actors of its envs.
      replicas: the learner's replicas, which share the envs in order.

    Raises, while it is made or asked for rollouts:
      UserError: there is no Ray at --ray-address, or it has too few CPUs.
      TrainingError: Ray cannot be started or has died; an actor failed, or died again and again.
      EnvError: an env failed.
      PeerError: the Ray of --learners has died.
      Stopped: the run was told to stop; SystemExit with its code before the trainer's loop runs.
    """

    def __init__(
        self, config: DistributedSettings, spec: EnvSpec, session: Session, *, replicas: int
    ) -> None:
        self.indices = indices = list(session.runtime.local_envs(config.num_envs))
        self.observation_spec, self.action_spec = registry.specs(config)
        self._size = (replicas, config.steps_per_env, len(indices) // replicas)
        self._rollout: Rollout | None = None
        share = config.num_envs // config.actors
        actors = range(indices[0] // share, (indices[-1] + 1) // share)
        # The launcher of --learners has already counted the CPUs.
        needs = {} if LEARNER in os.environ else {"--actors": len(actors)}
        store = store_bytes(config, len(indices))
        cluster = Cluster(distributed.ray_address(config), needs, store)
        super().__init__(cluster, session, config.actor_timeout)
        threads = max(1, machine.cores() // config.actors)
        offers: Any = {"concurrency_groups": {_OFFERS: 1}} if config.free_running else {}
        kind = ray.remote(num_cpus=1, max_restarts=0, **offers)(RemoteActor)

        def make(index: int) -> Any:
            mine = range(index * share, (index + 1) * share)
            return kind.remote(config, spec, mine, session.runtime.precision, threads)

        self._newest: Any = None  # a reference to the newest weights, of `--free-running`
        self._open("actor", actors, make)
        self.began = self.get_state()

    def offer(self, weights: Versioned) -> None:
        """Gives the newest weights to all actors."""
        self._newest = ray.put(weights)
        self.look()

    def look(self) -> None:
        """Gives the weights once more, because a new process has none."""
        super().look()
        for actor in self._actors if self._newest is not None else ():
            actor.process.offer.options(concurrency_group=_OFFERS).remote(self._newest)

    def begin(self, number: int, weights: Versioned | None) -> None:
        """Orders rollout `number` from all actors, with `weights`; None: with the newest weights."""
        self.cluster.check()
        reference = None if weights is None else ray.put(weights)
        for actor in self._actors:
            actor.order("collect", number, reference)

    def take(self) -> Rollout:
        """Waits for the oldest ordered rollout. The next call reuses its buffers."""
        with self.session.together():
            results = [actor.oldest() for actor in self._actors]
        self.began = self.get_state()  # a new process may have begun new episodes
        for actor, result in zip(self._actors, results, strict=True):  # a stop may come before all are there
            actor.settle(result.after)
        collected = [result.rollout for result in results]
        if self._rollout is None:
            remembered = collected[0].memory
            self._rollout = Rollout.empty(
                *self._size,
                observation=self.observation_spec,
                action=self.action_spec,
                memory=0 if remembered is None else remembered.shape[-1],
                levels=collected[0].levels is not None,
            )
            for name, array in collected[0].extras.items():
                self._rollout.extras[name] = np.zeros((*self._size, *array.shape[3:]), np.float32)
        _join(collected, self._rollout)
        return self._rollout


def _join(collected: Sequence[Rollout], whole: Rollout) -> None:
    """Copies rollouts [1, T, b] of neighbouring envs into one rollout of all envs, [R, T, B]."""
    replicas, _, each = whole.rewards.shape
    arrays = ["observations", "actions", "rewards", "first", "truncated"]
    arrays += [name for name in ("memory", "levels") if getattr(whole, name) is not None]
    whole.final_observations = {}
    begin = 0
    for part in collected:
        end = begin + part.rewards.shape[2]
        pairs = [(getattr(whole, name), getattr(part, name)) for name in arrays]
        pairs += [(whole.extras[name], array) for name, array in part.extras.items()]
        for r in range(replicas):
            first, last = max(begin, r * each), min(end, (r + 1) * each)
            for target, source in pairs if first < last else ():
                target[r, :, first - r * each : last - r * each] = source[0, :, first - begin : last - begin]
        for (_, t, b), observation in part.final_observations.items():
            whole.final_observations[(begin + b) // each, t, (begin + b) % each] = observation
        begin = end
    places = np.cumsum([0, *(part.rewards.shape[2] for part in collected)]).tolist()
    shares = [slice(first, last) for first, last in itertools.pairwise(places)]
    whole.info = joined([(p.info, share) for p, share in zip(collected, shares, strict=True)], places[-1])
    slowest = max(collected, key=lambda part: part.seconds)
    whole.seconds, whole.env_wait_seconds = slowest.seconds, slowest.env_wait_seconds
    whole.idle_seconds = float(np.mean([part.idle_seconds for part in collected]))
    whole.version = float(np.mean([part.version for part in collected]))


# Observers


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
    """The envs of a run in several processes on Ray; see `tfrl.experience.observer.Observer`."""

    def __init__(self, config: reinforce.Config, spec: EnvSpec, session: Session) -> None:
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
        """`Observer.step` with actions [N, *shape] and `playing` bool [N] for all N envs.

        Raises, like `settle`: TrainingError if Ray has died, or an observer again and again; EnvError;
        Stopped. After an error of `settle`, all envs are still before the episode.
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

    def settle(self) -> Sums:
        """Notes the states of the envs, at which the replacement of a process that dies begins.

        Returns the sums of the envs' infos of the update.
        """
        for actor in self._actors:
            actor.order("take_info")
        sums = [actor.newest() for actor in self._actors]
        for actor in self._actors:
            actor.order("get_state")
        places = [actor.newest() for actor in self._actors]
        for actor, place in zip(self._actors, places, strict=True):  # a stop may come before all are there
            actor.settle(place)
        self._show()  # a replaced process may have begun new episodes
        return joined(list(zip(sums, self._slices, strict=True)), len(self.observation))

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index. States of other envs are ignored."""
        super().set_state(states)
        self._show()
