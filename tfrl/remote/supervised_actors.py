"""Ray actors that hold envs. An actor that dies or hangs is replaced, and the new one repeats its part."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfrl.cli.endings import Stopped
from tfrl.cli.errors import EnvError, TrainingError
from tfrl.experience.collector import EnvStates
from tfrl.remote.cluster import Cluster, RayError, free_cpus, ray

if TYPE_CHECKING:
    from tfrl.run.session import Session

_POLL_SECONDS = 1.0  # between two checks of Ray and of a stop of the run
_MAX_DEATHS = 3  # of one actor in a row
_START_SECONDS = 300.0  # for a process to import its modules and make its envs, at least
_LATE_SECONDS = 15.0  # a process that is not ready by then may be waiting for a CPU


class Ready(NamedTuple):
    """The answer of a process that has its envs: their state, whether it is exact, and where it runs."""

    place: EnvStates
    exact_state: bool
    host: str
    pid: int


def ready(place: EnvStates, exact_state: bool) -> Ready:
    """The answer of this process."""
    return Ready(place, exact_state, socket.gethostname(), os.getpid())


class _GoneError(Exception):
    """A process has died or hangs; the text says which, as the second half of a sentence."""


class SupervisedActor:
    """An actor on Ray with its envs and its open orders. If its process dies or hangs, another takes over.

    An order is a call of a method of the process. Orders stay open until they are settled: a new process
    begins at the last settled state and repeats the open orders.

    Args:
      name: its name in messages.
      make: makes the process. It has a method `begin_at(states or None)` that returns `Ready`.
      group: all such actors of the run.

    Attributes:
      process: Ray's handle of the present process.
      after: the state of the envs after the last settled order.
      exact_state: True if envs continue exactly from such a state.
    """

    def __init__(self, name: str, make: Callable[[], Any], group: SupervisedActors) -> None:
        self._name, self._make, self._group = name, make, group
        self._tell = group.session.console.warn
        self._deaths = 0
        self._orders: list[tuple[str, tuple[Any, ...]]] = []  # open: methods and arguments
        self._results: list[Any] = []  # of these: references
        self._answered = 0  # open orders that this process has done
        self.after = EnvStates([], [], np.empty(0), np.empty(0, bool))  # until it is ready
        self.exact_state = False
        self._start()

    def _start(self) -> None:
        """Makes a process, whose envs begin at the last settled state."""
        self._started, self._told_late = time.monotonic(), False
        self.process = self._make()
        self._placed = self.process.__ray_ready__.remote()  # a reference, answered once it has a CPU
        states = dict(zip(self.after.indices, self.after.states, strict=True)) or None
        self._ready = self.process.begin_at.remote(states)  # a reference

    def order(self, method: str, *arguments: Any) -> None:
        """Orders a call, by arguments or references to them; returns at once."""
        self._group.has_begun = True
        self._orders.append((method, arguments))
        self._results.append(getattr(self.process, method).remote(*arguments))

    def oldest(self) -> Any:
        """Waits for the result of the oldest open order."""
        return self._result(0)

    def newest(self) -> Any:
        """Waits for the result of the newest open order."""
        return self._result(len(self._orders) - 1)

    def _result(self, number: int) -> Any:
        """The result of an open order. Each order before it has its own time, also if it is repeated."""
        while True:
            at = min(self._answered, number)
            try:
                result = self._wait(self._results[at], self._group.timeout)
            except _GoneError as gone:
                self._replace(str(gone))
                self.wait_until_ready()
                continue
            self._answered = max(self._answered, at + 1)
            if at == number:
                return result
            self._results[at] = None  # frees its memory

    def settle(self, after: EnvStates) -> None:
        """Settles the orders that have been waited for: a new process would begin at `after`."""
        del self._orders[: self._answered], self._results[: self._answered]
        self.after, self._answered, self._deaths = after, 0, 0

    def wait_until_ready(self) -> None:
        """Waits until the process is ready, or the run was told to stop: Ray may have no CPU for it."""
        while True:
            try:
                found = self._wait(self._ready, max(_START_SECONDS, self._group.timeout), self._look_at_start)
                break
            except _GoneError as gone:
                self._replace(str(gone))
        self.after, self.exact_state = found.place, found.exact_state
        if self._deaths and not found.exact_state:
            self._tell(f"{self._name}'s envs cannot be restored exactly and begin new episodes")

    def _look_at_start(self) -> bool:
        """True if the process has no CPU yet. Ends the wait if the run was told to stop."""
        self._group.raise_if_stopped()
        late = time.monotonic() - self._started > _LATE_SECONDS
        if late and not self._told_late and free_cpus(1, within=0) < 1:  # others may have taken its CPU
            self._tell(f"{self._name} still starts, or waits until Ray has a CPU free for it")
            self._told_late = True
        return not ray.wait([self._placed], timeout=0)[0]

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index. States of other envs are ignored."""
        mine = {index: states[index] for index in self.after.indices}
        self._ready = self.process.begin_at.remote(mine)
        self.after = self.after._replace(indices=list(mine), states=list(mine.values()))
        self.wait_until_ready()

    def _wait(self, reference: Any, timeout: float, look: Callable[[], bool] = lambda: False) -> Any:
        """The answer of the process. Raises _GoneError if it has died or takes longer than `timeout`.

        The time begins anew while `look` returns True.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                # A get that times out would make Ray begin the transfer from another node anew.
                if ray.wait([reference], timeout=_POLL_SECONDS)[0]:
                    return ray.get(reference, timeout=timeout)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, EnvError):  # its sentence is complete
                    raise error.cause from None
                raise TrainingError(f"{self._name} failed: {error.cause!r}") from error
            except RayError as error:
                if getattr(error, "actor_init_failed", False):  # and would fail again
                    raise TrainingError(f"{self._name} failed: {str(error).splitlines()[-1]}") from None
                raise _GoneError("has died") from None
            self._group.cluster.check()
            self._group.look()
            if look():
                end = time.monotonic() + timeout
            if time.monotonic() >= end:
                raise _GoneError(f"has not answered for {timeout:g} s")

    def _replace(self, reason: str) -> None:
        """Starts another process in place of one that is gone; it repeats the open orders."""
        self._group.raise_if_stopped()  # a signal to all processes may have ended this one first
        self._group.cluster.check()
        self._deaths += 1
        if self._deaths > _MAX_DEATHS:
            raise TrainingError(f"{self._name} {reason}, {self._deaths} times in a row without a result")
        self._tell(f"{self._name} {reason}; another process replaces it and repeats its part")
        self.kill()
        self._start()
        self._answered = 0
        self._results = [getattr(self.process, name).remote(*given) for name, given in self._orders]

    def kill(self) -> None:
        """Ends the process; on this machine also one that is stopped (SIGSTOP) and cannot hear Ray."""
        with contextlib.suppress(RayError, OSError):
            found = ray.get(self._ready, timeout=0)
            called = Path(f"/proc/{found.pid}/cmdline").read_bytes()
            if found.host == socket.gethostname() and called.startswith(b"ray::"):
                os.kill(found.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Ends the process in Ray's own way, so that Ray reports no death."""
        with contextlib.suppress(RayError):
            ray.kill(self.process)


class SupervisedActors:
    """The envs of several Ray actors: their common state, and their end.

    Args:
      cluster: the Ray, whose `check` raises an error if it has died.
      session: that of the run. Its watchdog gets steps while an actor is waited for.
      timeout: the seconds that an answer may take.

    Attributes:
      has_begun: True once the trainer's loop runs. Only the loop can stop with everything saved.
    """

    def __init__(self, cluster: Cluster, session: Session, timeout: float) -> None:
        self.cluster, self.session, self.timeout = cluster, session, timeout
        self.has_begun = False
        self._actors: list[SupervisedActor] = []

    def _open(self, name: str, indices: Iterable[int], make: Callable[[int], Any]) -> None:
        """Makes the actors, and waits until all are ready."""
        try:
            for index in indices:
                self._actors.append(SupervisedActor(f"{name} {index}", functools.partial(make, index), self))
            for actor in self._actors:
                actor.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """Called at intervals while an actor is waited for."""
        self.session.watchdog.beat()

    def raise_if_stopped(self) -> None:
        """Raises Stopped if the run was told to stop.

        Before its loop runs, there is nothing to save: then a signal ends the process by SystemExit, and a
        stop file has to wait for the loop.
        """
        try:
            self.session.raise_if_stopped_here()
        except Stopped as stopped:
            if self.has_begun:
                raise
            if stopped.code:
                raise SystemExit(stopped.code) from None

    @property
    def exact_state(self) -> bool:
        """True if envs continue exactly from their state."""
        return all(actor.exact_state for actor in self._actors)

    def get_state(self) -> EnvStates:
        """The state of all envs after the last settled orders."""
        places = [actor.after for actor in self._actors]
        return EnvStates(
            [index for place in places for index in place.indices],
            [state for place in places for state in place.states],
            np.concatenate([place.observations for place in places]),
            np.concatenate([place.first for place in places]),
        )

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index. States of other envs are ignored."""
        for actor in self._actors:
            actor.set_state(states)

    def close(self) -> None:
        """Ends the processes, and Ray if it was started here."""
        for actor in self._actors:
            actor.end()
        self.cluster.close()
