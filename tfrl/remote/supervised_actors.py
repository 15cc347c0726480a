"""Ray actors that hold envs: one that dies or hangs is replaced, and the new one plays its part again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfrl.cli.errors import EnvError, TrainingError
from tfrl.experience.collector import EnvStates
from tfrl.remote.cluster import Cluster, RayError, free_cpus, ray
from tfrl.run.stop import Stopped

_POLL_SECONDS = 1.0  # seconds between two looks at whether the run is to stop
_MAX_DEATHS = 3  # of one process, without anything done between them
_START_SECONDS = 300.0  # seconds for a process to import what it needs and make its envs, at least
_LATE_SECONDS = 15.0  # seconds after which another one that is not there yet may be waiting for a CPU


class Ready(NamedTuple):
    """The answer of a process that has its envs: where they stand, whether exactly, and where it runs."""

    place: EnvStates
    exact_state: bool
    host: str
    pid: int


def ready(place: EnvStates, exact_state: bool) -> Ready:
    """The answer of this process."""
    return Ready(place, exact_state, socket.gethostname(), os.getpid())


class Hooks:
    """The functions of a run that its supervised actors call.

    Args:
      timeout: seconds that an answer may take.
      raise_if_stopped: raises Stopped if the run was told to stop.
      tell: gets a sentence where a process is replaced.
      look: called now and then while one is waited for.
      check: raises an error where Ray itself has died.
      shared: others may have processes on this Ray, and take the CPUs that were free.
    """

    def __init__(
        self,
        *,
        timeout: float,
        raise_if_stopped: Callable[[], None],
        tell: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
        shared: bool = False,
    ) -> None:
        self.timeout, self.tell, self.look, self.check = timeout, tell, look, check
        self.shared = shared
        self._raise_if_stopped = raise_if_stopped
        self._begun = False

    def begin(self) -> None:
        """Takes note that the trainer's loop runs, which alone can stop in good order."""
        self._begun = True

    def raise_if_stopped(self) -> None:
        """Raises Stopped if the run was told to stop.

        Before its loop runs there is nothing to save: a signal ends the process; a stop file is for the loop.
        """
        try:
            self._raise_if_stopped()
        except Stopped as stopped:
            if self._begun:
                raise
            if stopped.code:
                raise SystemExit(stopped.code) from None


class SupervisedActor:
    """An actor on Ray with its envs and its open orders; another process takes over if it dies or hangs.

    The process has a method `begin_at(states or None)` that returns `Ready`. A subclass gives the orders, and
    repeats the open ones to a new process.

    Args:
      name: its name in messages.
      make: makes the process.
      hooks: the run's.

    Attributes:
      after: where the envs stood when the last order was settled.
      exact_state: true where a state that is put back goes on exactly.
    """

    part: str
    """The part of the run that another process plays again, in words."""
    span: str
    """The stretch in which a process may die three times, in words."""

    def __init__(self, name: str, make: Callable[[], Any], hooks: Hooks) -> None:
        self._name, self._make, self._hooks = name, make, hooks
        self._deaths = 0
        self.after = EnvStates([], [], np.empty(0), np.empty(0, bool))  # until it is ready
        self.exact_state = False
        self._start()

    def _start(self) -> None:
        """Makes a process, which begins where the envs stood."""
        self._started, self._told_late = time.monotonic(), False
        self._process = self._make()
        states = dict(zip(self.after.indices, self.after.states, strict=True)) or None
        self._ready = self._process.begin_at.remote(states)  # a reference

    def _order_again(self) -> None:
        """Repeats the open orders to a new process."""
        raise NotImplementedError

    def wait_until_ready(self) -> None:
        """Waits until the process is there, unless the run is to stop: Ray may have no CPU for it."""
        seconds = max(_START_SECONDS, self._hooks.timeout)
        found = self._wait(lambda: self._ready, lambda: seconds, self._look_at_start)
        self.after, self.exact_state = found.place, found.exact_state
        if self._deaths and not found.exact_state:
            self._hooks.tell(f"{self._name}'s envs cannot be restored exactly and begin new episodes")

    def _look_at_start(self) -> None:
        """Stops if the run is to stop, and reports that Ray may have no CPU: Ray notices a lost node late."""
        self._hooks.raise_if_stopped()
        waits = self._deaths or self._hooks.shared
        late = waits and time.monotonic() - self._started > _LATE_SECONDS
        if late and not self._told_late and free_cpus(1, within=0) < 1:
            self._hooks.tell(f"{self._name} still starts, or waits until Ray has a CPU free for it")
            self._told_late = True

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index, which may be of more envs than these."""
        mine = {index: states[index] for index in self.after.indices}
        self._ready = self._process.begin_at.remote(mine)
        self.after = self.after._replace(indices=list(mine), states=list(mine.values()))
        self.wait_until_ready()

    def _answer(self, reference: Callable[[], Any]) -> Any:
        """The answer to an order, whose reference is another one once the process was replaced."""
        return self._wait(reference, self._patience, lambda: None)

    def _patience(self) -> float:
        """Seconds that the answer may take, which is more where a new process plays much again."""
        return self._hooks.timeout

    def _settled(self, after: EnvStates) -> None:
        """Takes an order as done: from here on the envs would be played again."""
        self.after, self._deaths = after, 0

    def _wait(
        self, reference: Callable[[], Any], patience: Callable[[], float], look: Callable[[], None]
    ) -> Any:
        timeout = patience()
        end = time.monotonic() + timeout
        while True:
            try:
                return ray.get(reference(), timeout=_POLL_SECONDS)
            except ray.exceptions.GetTimeoutError:
                self._hooks.check()
                self._hooks.look()
                look()
                if time.monotonic() < end:
                    continue
                reason = f"has not answered for {timeout:g} s"
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, EnvError):  # its sentence is complete
                    raise error.cause from None
                raise TrainingError(f"{self._name} failed: {error.cause!r}") from error
            except RayError as error:
                if getattr(error, "actor_init_failed", False):  # and would fail again
                    raise TrainingError(f"{self._name} failed: {str(error).splitlines()[-1]}") from None
                reason = "has died"
            self._replace(reason)
            self.wait_until_ready()
            timeout = patience()
            end = time.monotonic() + timeout

    def _replace(self, reason: str) -> None:
        """Starts another process instead of one that is gone; it plays the part again."""
        self._hooks.raise_if_stopped()  # what told the run to stop may have ended the process first
        self._hooks.check()
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            raise TrainingError(f"{self._name} {reason}, {self._deaths} times in a row {self.span}")
        self._hooks.tell(f"{self._name} {reason}; another process replaces it and repeats {self.part}")
        self.kill()
        free = free_cpus(1)
        self._start()
        self._order_again()
        if free < 1:
            self._hooks.tell(f"{self._name} waits until Ray has a CPU free for it")
            self._told_late = True

    def kill(self) -> None:
        """Ends the process, also one that is stopped and so cannot hear Ray, if it is on this machine."""
        with contextlib.suppress(RayError, OSError):
            found = ray.get(self._ready, timeout=0)
            called = Path(f"/proc/{found.pid}/cmdline").read_bytes()
            if found.host == socket.gethostname() and called.startswith(b"ray::"):
                os.kill(found.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Ends the process in Ray's own way, of which Ray does not complain."""
        with contextlib.suppress(RayError):
            ray.kill(self._process)


class SupervisedActors:
    """The envs that several Ray actors share: their state as a whole, and their end.

    Args:
      cluster: the Ray.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._actors: list[Any] = []

    def _open(self, actors: Iterable[SupervisedActor]) -> None:
        """Makes the actors, and waits until all are ready."""
        try:
            self._actors.extend(actors)
            for actor in self._actors:
                actor.wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def exact_state(self) -> bool:
        """True where a state that is put back goes on exactly."""
        return all(actor.exact_state for actor in self._actors)

    def get_state(self) -> EnvStates:
        """The state of all envs after the last orders that were settled."""
        places = [actor.after for actor in self._actors]
        return EnvStates(
            [index for place in places for index in place.indices],
            [state for place in places for state in place.states],
            np.concatenate([place.observations for place in places]),
            np.concatenate([place.first for place in places]),
        )

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index, which may be of more envs than these."""
        for actor in self._actors:
            actor.set_state(states)

    def close(self) -> None:
        """Ends the processes, and Ray if it was started here."""
        for actor in self._actors:
            actor.end()
        self._cluster.close()
