"""Processes on Ray that step envs, in lockstep with the learner. One that dies is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.algorithms import acting
from tfrl.config import actors as actors_settings
from tfrl.config.actors import LEARNER, DistributedSettings
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience import exploration, memory
from tfrl.experience.collector import Collected, Collector, EnvActor, Versioned
from tfrl.experience.rollout import Rollout
from tfrl.ops.graph import tf
from tfrl.remote.cluster import Cluster, RayError, end_with_parent, leave_stopping_to_driver, ray, store_bytes
from tfrl.remote.supervised_actors import Hooks, Ready, SupervisedActor, SupervisedActors, ready
from tfrl.workers import machine, parts
from tfrl.workers.strategy import set_up_tensorflow

if TYPE_CHECKING:
    from tfrl.run.session import Session


class RemoteActor:
    """An `EnvActor` in a process of its own, on Ray.

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
        end_with_parent()
        leave_stopping_to_driver()
        set_up_tensorflow()
        parts.one_thread_each()
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        correlated = functools.partial(exploration.correlated_noise, config)
        remembered = functools.partial(memory.of_settings, config)
        steps = config.steps_per_env
        collector = Collector(
            spec, indices, replicas=1, num_steps=steps, correlated=correlated, memory=remembered
        )
        self._actor = EnvActor(collector, acting.of_settings(config, precision, at_once=threads))
        self._lag = config.lag or 0

    def collect(self, number: int, weights: Versioned | None, server: Any = None) -> Collected:
        """Collects rollout `number` with `weights`; None: with the newest weights of a parameter server.

        Then it waits until the server has weights that are not too old.
        """
        if weights is None:
            weights = ray.get(server.wait_for.remote(max(0, number - self._lag)))
        return self._actor.collect(number, weights)

    def begin_at(self, states: Mapping[int, bytes] | None) -> Ready:
        """Continues from states by global env index, if any."""
        envs = self._actor.collector
        if states is not None:
            envs.set_state(states)
        return ready(envs.get_state(), envs.exact_state)


class ParameterServer:
    """Holds the newest weights for `--free-running` actors, in a process of its own on Ray.

    After its death, Ray makes another one, which has no weights until the next `push`. Calls wait for that.
    """

    def __init__(self) -> None:
        end_with_parent()
        leave_stopping_to_driver()
        self._newest: Versioned | None = None
        self._pushed = asyncio.Condition()

    async def push(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Takes weights, float32 by name, unless it has newer ones."""
        async with self._pushed:
            if self._newest is None or version >= self._newest.version:
                self._newest = Versioned(version, weights)
            self._pushed.notify_all()

    async def wait_for(self, version: int) -> Versioned:
        """The newest weights, once they are of this version or a later one."""
        async with self._pushed:
            while self._newest is None or self._newest.version < version:
                await self._pushed.wait()
            return self._newest


def serve_weights() -> Any:
    """Starts a `ParameterServer` on Ray, which needs no CPU; returns its handle."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    options["max_concurrency"] = 4096
    return ray.remote(**options)(ParameterServer).remote()


class RayCollector(SupervisedActors):
    """The envs of a run in several processes on Ray; follows `tfrl.training.prefetch.PrefetchCollector`.

    Args:
      config: the settings, with the section Actors.
      spec: the global vector of envs.
      session: that of this learner, which has the actors of its envs. Its watchdog gets steps while it waits,
        because actors have a time-out of their own.
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
        self._session = session
        self.indices = indices = list(session.runtime.local_envs(config.num_envs))
        self.observation_spec, self.action_spec = registry.specs(config)
        self._size = (replicas, config.steps_per_env, len(indices) // replicas)
        self._rollout: Rollout | None = None
        share = config.num_envs // config.actors
        actors = range(indices[0] // share, (indices[-1] + 1) // share)
        # The launcher of --learners has already counted the CPUs.
        needs = {} if LEARNER in os.environ else {"--actors": len(actors)}
        store = store_bytes(config, len(indices))
        super().__init__(Cluster(actors_settings.ray_address(config), needs, store))
        threads = max(1, machine.cores() // config.actors)
        kind = ray.remote(num_cpus=1, max_restarts=0)(RemoteActor)

        def make(index: int) -> Any:
            mine = range(index * share, (index + 1) * share)
            return kind.remote(config, spec, mine, session.runtime.precision, threads)

        self._newest: Versioned | None = None
        self._server: Any = serve_weights() if config.free_running else None
        stop = session.raise_if_stopped_here
        hooks = Hooks(config.actor_timeout, stop, session.console.warn, self._cluster, self._look)
        self._open(SupervisedActor(f"actor {i}", functools.partial(make, i), hooks) for i in actors)
        self.began = self.get_state()

    def offer(self, weights: Versioned) -> None:
        """Gives the newest weights to the parameter server."""
        self._newest = weights
        self._look()

    def _look(self) -> None:
        """Gives the weights once more, because a server that died came back without any."""
        self._session.watchdog.beat()
        if self._newest is not None:
            self._server.push.remote(*self._newest)

    def begin(self, number: int, weights: Versioned | None) -> None:
        """Orders rollout `number` from all actors, with `weights`; None: with the newest weights."""
        self._cluster.check()
        reference = None if weights is None else ray.put(weights)
        for actor in self._actors:
            actor.order("collect", number, reference, self._server)

    def take(self) -> Rollout:
        """Waits for the oldest ordered rollout. The next call reuses its buffers."""
        with self._session.together():
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
                extras={name: array.shape[3:] for name, array in collected[0].extras.items()},
                memory=0 if remembered is None else remembered.shape[-1],
            )
        _join(collected, self._rollout)
        return self._rollout

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        if self._server is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._server)
        super().close()


def _join(collected: Sequence[Rollout], whole: Rollout) -> None:
    """Copies rollouts [1, T, b] of neighbouring envs into one rollout of all envs, [R, T, B]."""
    replicas, _, each = whole.rewards.shape
    arrays = ["observations", "actions", "rewards", "first", "truncated"]
    arrays += [] if whole.memory is None else ["memory"]
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
    slowest = max(collected, key=lambda part: part.seconds)
    whole.seconds, whole.env_wait_seconds = slowest.seconds, slowest.env_wait_seconds
    whole.idle_seconds = float(np.mean([part.idle_seconds for part in collected]))
    whole.version = float(np.mean([part.version for part in collected]))
