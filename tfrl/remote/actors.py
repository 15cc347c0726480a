"""Envs that are stepped by processes on Ray, in lockstep with the learner; those that die are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrl.agents import behavior
from tfrl.cli.errors import TrainingError
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience.actor import Collected, EnvActor, EnvStates, Versioned
from tfrl.experience.collector import Collector
from tfrl.experience.rollout import Rollout, observation_bytes
from tfrl.remote import parameters
from tfrl.remote.cluster import Cluster, RayError, end_with_parent, free_cpus, leave_stopping_to_driver, ray
from tfrl.workers import machine, parts
from tfrl.workers.strategy import set_up_tensorflow

_LOOK_EVERY = 1.0  # seconds between two looks at whether the run is to stop
_MOST_DEATHS = 3  # of one actor, without a rollout between them
_START = 300.0  # seconds for a process to import TensorFlow and make its envs, at least


class RemoteActor:
    """An `EnvActor` in a process of its own; made on Ray, by `_Seat`.

    Args:
      config: the run's settings.
      spec: the global vector of envs.
      indices: the global indices of its envs.
      precision: of the torso, resolved.
      threads: CPU threads that its policy may use.
    """

    def __init__(
        self, config: Any, spec: EnvSpec, indices: Sequence[int], precision: str, threads: int
    ) -> None:
        end_with_parent()
        leave_stopping_to_driver()
        set_up_tensorflow()
        parts.one_thread_each()
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        collector = Collector(spec, indices, replicas=1, num_steps=config.steps_per_env)
        self._actor = EnvActor(collector, behavior.of_settings(config, precision, at_once=threads))

    def collect(self, number: int, weights: Versioned | None, server: Any = None) -> Collected:
        """Rollout `number`, acted by `weights`, or by the newest ones of a parameter server."""
        if weights is None:
            weights = ray.get(server.pull.remote())
        return self._actor.collect(number, weights)

    def begin_at(self, states: Mapping[int, bytes] | None) -> _Ready:
        """Continues from states by global env index, if any."""
        if states is not None:
            self._actor.set_state(states)
        place, exact = self._actor.get_state(), self._actor.exact_state
        return _Ready(place, exact, socket.gethostname(), os.getpid())


class _Ready(NamedTuple):
    """Where the envs of a process stand, whether their states are exact, and where it runs."""

    place: EnvStates
    exact_state: bool
    host: str
    pid: int


@dataclass
class _Order:
    arguments: tuple  # of `RemoteActor.collect`
    result: Any  # a reference


class _Seat:
    """An actor's place: its envs, what it was told to do, and the process that does it at present.

    Args:
      index: of the actor.
      make: makes its process.
      timeout: seconds that a rollout may take.
      obey: raises Stopped if the run was told to stop.
      tell: gets a sentence where a process is replaced.
      look: called now and then while it is waited for.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[], Any],
        *,
        timeout: float,
        obey: Callable[[], None],
        tell: Callable[[str], None],
        look: Callable[[], None],
    ) -> None:
        self._name = f"actor {index}"
        self._make, self._timeout = make, timeout
        self._obey, self._tell, self._look = obey, tell, look
        self._orders: deque[_Order] = deque()
        self._deaths = 0
        self._process = make()
        self._ready = self._process.begin_at.remote(None)  # a reference
        self.after: EnvStates | None = None  # the last rollout that was taken
        self.exact_state = False

    def wait_until_ready(self) -> None:
        """Waits until the process is there, unless the run is to stop: Ray may have no CPU for it."""
        ready = self._wait(lambda: self._ready, max(_START, self._timeout), self._obey)
        self.after, self.exact_state = ready.place, ready.exact_state

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        mine = {index: states[index] for index in self.after.indices}
        self._ready = self._process.begin_at.remote(mine)
        self.after = self.after._replace(indices=list(mine), states=list(mine.values()))
        self.wait_until_ready()

    def begin(self, *arguments: Any) -> None:
        """Orders a rollout by the arguments of `RemoteActor.collect`, or references to them."""
        self._orders.append(_Order(arguments, self._process.collect.remote(*arguments)))

    def oldest(self) -> Collected:
        """Waits for the oldest rollout that was ordered."""
        return self._wait(lambda: self._orders[0].result, self._timeout, lambda: None)

    def settle(self, after: EnvStates) -> None:
        """Takes the oldest rollout as done, after which the envs stand at `after`."""
        self._orders.popleft()
        self.after, self._deaths = after, 0

    def _wait(self, reference: Callable[[], Any], timeout: float, obey: Callable[[], None]) -> Any:
        """What the reference stands for, which is another one once the process was replaced."""
        end = time.monotonic() + timeout
        while True:
            try:
                return ray.get(reference(), timeout=_LOOK_EVERY)
            except ray.exceptions.GetTimeoutError:
                self._look()
                obey()
                if time.monotonic() < end:
                    continue
                reason = f"has not answered for {timeout:g} s"
            except ray.exceptions.RayTaskError as error:
                raise TrainingError(f"{self._name} failed: {error.cause!r}") from error
            except RayError:
                reason = "has died"
            self._replace(reason)
            self.wait_until_ready()
            end = time.monotonic() + timeout

    def _replace(self, reason: str) -> None:
        """Puts another process in the place of one that is gone, which plays its part again."""
        self._obey()  # what told the run to stop may have ended the actors first
        self._deaths += 1
        if self._deaths > _MOST_DEATHS:
            raise TrainingError(f"{self._name} {reason}, {self._deaths} times in a row without a rollout")
        self._tell(f"{self._name} {reason}; another takes its place, and plays its part again")
        self.kill()
        if free_cpus(1) < 1:
            self._tell(f"{self._name} waits until Ray has a CPU free for it")
        self._process = self._make()
        states = None if self.after is None else dict(zip(self.after.indices, self.after.states, strict=True))
        self._ready = self._process.begin_at.remote(states)
        for order in self._orders:
            order.result = self._process.collect.remote(*order.arguments)

    def kill(self) -> None:
        """Ends the process, also one that is stopped and so cannot hear Ray, if it is on this machine."""
        with contextlib.suppress(RayError, OSError):
            ready = ray.get(self._ready, timeout=0)
            called = Path(f"/proc/{ready.pid}/cmdline").read_bytes()
            if ready.host == socket.gethostname() and called.startswith(b"ray::"):
                os.kill(ready.pid, signal.SIGKILL)
        with contextlib.suppress(RayError):
            ray.kill(self._process)


class RayCollector:
    """The envs of a run, shared out to processes on Ray; follows `tfrl.training.ahead.AheadCollector`.

    Args:
      config: the settings, with the section Actors.
      spec: the global vector of envs.
      replicas: of the learner, which share the envs in order.
      precision: of the torso, resolved.
      obey: raises Stopped if the run was told to stop.
      tell: gets a sentence where an actor is replaced.
      beat: tells the run's watchdog that actors are waited for, which have a time-out of their own.
    """

    def __init__(
        self,
        config: Any,
        spec: EnvSpec,
        *,
        replicas: int,
        precision: str,
        obey: Callable[[], None],
        tell: Callable[[str], None],
        beat: Callable[[], None],
    ) -> None:
        self.indices = list(range(config.num_envs))
        self.observation_spec, self.action_spec = registry.specs(config.env)
        self._size = (replicas, config.steps_per_env, config.num_envs // replicas)
        self._rollout: Rollout | None = None
        size = observation_bytes(self.observation_spec, config.num_envs * (config.steps_per_env + 1))
        self._cluster = Cluster(config.ray_address, config.actors, int(1.2 * (config.lag + 2) * size))
        share = config.num_envs // config.actors
        threads = max(1, machine.cores() // config.actors)
        kind = ray.remote(num_cpus=1, max_restarts=0)(RemoteActor)

        def make(index: int) -> Any:
            mine = self.indices[index * share : (index + 1) * share]
            return kind.remote(config, spec, mine, precision, threads)

        self._beat, self._newest = beat, None
        self._server = parameters.serve() if config.free_running else None
        # A signal that comes while the first actors start, or get their states, is for the trainer's loop.
        self._obey: Callable[[], None] = lambda: None
        self._obey_later = obey
        hooks = {"timeout": config.actor_timeout, "obey": lambda: self._obey()}
        hooks |= {"tell": tell, "look": self._look}
        self._seats = [_Seat(i, lambda i=i: make(i), **hooks) for i in range(config.actors)]
        try:
            for seat in self._seats:
                seat.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.exact_state = self._seats[0].exact_state

    def offer(self, weights: Versioned) -> None:
        """Gives the newest weights to the parameter server."""
        self._newest = weights
        self._look()

    def _look(self) -> None:
        """Gives them once more: a server that has died came back without any."""
        self._beat()
        if self._newest is not None:
            self._server.push.remote(*self._newest)

    def begin(self, number: int, weights: Versioned | None) -> None:
        """Orders rollout `number`, acted by `weights` or the newest, of all actors."""
        self._obey = self._obey_later
        reference = None if weights is None else ray.put(weights)
        for seat in self._seats:
            seat.begin(number, reference, self._server)

    def take(self) -> Rollout:
        """Waits for the oldest rollout that was begun; its buffers are used again by the next call."""
        results = [seat.oldest() for seat in self._seats]
        for seat, result in zip(self._seats, results, strict=True):  # not before all are there
            seat.settle(result.after)
        collected = [result.rollout for result in results]
        if self._rollout is None:
            specs = {"observation": self.observation_spec, "action": self.action_spec}
            extras = {name: array.shape[3:] for name, array in collected[0].extras.items()}
            self._rollout = Rollout.empty(*self._size, **specs, extras=extras)
        _join(collected, self._rollout)
        return self._rollout

    def get_state(self) -> EnvStates:
        """The envs' state after the last rollout that was taken."""
        places = [seat.after for seat in self._seats]
        return EnvStates(
            [index for place in places for index in place.indices],
            [state for place in places for state in place.states],
            np.concatenate([place.observations for place in places]),
            np.concatenate([place.first for place in places]),
        )

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        for seat in self._seats:
            seat.set_state(states)

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        for seat in self._seats:
            seat.kill()
        if self._server is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._server)
        self._cluster.close()


def _join(collected: Sequence[Rollout], whole: Rollout) -> None:
    """Puts rollouts [1, T, b] of neighbouring envs into one of all envs, [R, T, B]."""
    replicas, _, each = whole.rewards.shape
    arrays = ("observations", "actions", "rewards", "first", "truncated")
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
