"""Observers on Ray: they hold the envs, show them, and are told the actions; those that die are replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfrl.cli.errors import TrainingError
from tfrl.envs.spec import EnvSpec
from tfrl.experience.actor import EnvStates
from tfrl.experience.observer import Observer, Seen
from tfrl.remote.cluster import Cluster, RayError, end_with_parent, leave_stopping_to_driver, ray

_LOOK_EVERY = 1.0  # seconds between two looks at whether the run is to stop
_MOST_DEATHS = 3  # of one observer, without an episode between them

Order = tuple[np.ndarray, np.ndarray]
"""Actions [n, *shape], and which of n envs play, bool [n]: what `Observer.step` takes."""


class RemoteObserver:
    """An `Observer` in a process of its own, which needs no TensorFlow; made on Ray, by `_Seat`.

    Args:
      spec: the global vector of envs.
      indices: the global indices of its envs.
    """

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        end_with_parent()
        leave_stopping_to_driver()
        self._observer = Observer(spec, indices)

    def begin_at(self, states: Mapping[int, bytes] | None) -> _Ready:
        """Continues from states by global env index, if any."""
        if states is not None:
            self._observer.set_state(states)
        return _Ready(self.place(), self._observer.exact_state, socket.gethostname(), os.getpid())

    def play(self, orders: Sequence[Order]) -> Seen:
        """Takes the steps that are ordered, one or more; the last one's outcome."""
        for actions, playing in orders:
            seen = self._observer.step(actions, playing)
        return seen

    def place(self) -> EnvStates:
        """The envs' states of now."""
        return EnvStates(*self._observer.get_state())


class _Ready(NamedTuple):
    """Where the envs of a process stand, whether their states are exact, and where it runs."""

    place: EnvStates
    exact_state: bool
    host: str
    pid: int


class _Seat:
    """An observer's place: its envs, the present episode's orders, and the process that has them at present.

    Args:
      index: of the observer.
      make: makes its process.
      timeout: seconds that an answer may take.
      obey: raises Stopped if the run was told to stop.
      tell: gets a sentence where a process is replaced.
    """

    def __init__(
        self,
        index: int,
        make: Callable[[], Any],
        *,
        timeout: float,
        obey: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._name = f"observer {index}"
        self._make, self._timeout, self._obey, self._tell = make, timeout, obey, tell
        self._orders: list[Order] = []  # since `after`
        self._settles = False
        self._deaths = 0
        self._process = make()
        self._ready = self._answer = self._process.begin_at.remote(None)  # references
        self.after: EnvStates | None = None  # where the envs stood at the end of the last episode
        self.exact_state = False

    def wait_until_ready(self) -> None:
        """Waits until the process is there."""
        ready = self._wait()
        self.after, self.exact_state = ready.place, ready.exact_state

    def set_state(self, states: Mapping[int, bytes]) -> None:
        """Continues from states by global env index."""
        mine = {index: states[index] for index in self.after.indices}
        self._ready = self._answer = self._process.begin_at.remote(mine)
        self.after = self.after._replace(states=list(mine.values()))
        self.wait_until_ready()

    def order(self, actions: np.ndarray, playing: np.ndarray) -> None:
        """Begins a step."""
        self._orders.append((actions, playing))
        self._answer = self._process.play.remote(self._orders[-1:])

    def seen(self) -> Seen:
        """Waits for the outcome of the step."""
        return self._wait()

    def begin_to_settle(self) -> None:
        """Asks where the envs stand, now that their episodes have ended."""
        self._settles = True
        self._answer = self._process.place.remote()

    def settle(self) -> None:
        """Waits for that: from there on the envs would be played again."""
        self.after = self._wait()
        self._orders, self._settles, self._deaths = [], False, 0

    def _wait(self) -> Any:
        """The answer, of whichever process gives it."""
        began = time.monotonic()
        while True:
            try:
                return ray.get(self._answer, timeout=_LOOK_EVERY)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() - began < self._timeout:
                    continue
                reason = f"has not answered for {self._timeout:g} s"
            except ray.exceptions.RayTaskError as error:
                raise TrainingError(f"{self._name} failed: {error.cause!r}") from error
            except RayError:
                reason = "has died"
            self._replace(reason)
            began = time.monotonic()

    def _replace(self, reason: str) -> None:
        """Puts another process in the place of one that is gone, which takes the episode's steps again."""
        self._obey()  # what told the run to stop may have ended the observers first
        self._deaths += 1
        if self._deaths > _MOST_DEATHS:
            raise TrainingError(f"{self._name} {reason}, {self._deaths} times in a row within one episode")
        self._tell(f"{self._name} {reason}; another takes its place, and plays the episode again")
        self.kill()
        self._process = self._make()
        states = None if self.after is None else dict(zip(self.after.indices, self.after.states, strict=True))
        self._ready = self._answer = self._process.begin_at.remote(states)
        if self._orders:
            self._answer = self._process.play.remote(self._orders)
        if self._settles:
            self._answer = self._process.place.remote()

    def kill(self) -> None:
        """Ends the process, also one that is stopped and so cannot hear Ray, if it is on this machine."""
        with contextlib.suppress(RayError, OSError):
            ready = ray.get(self._ready, timeout=0)
            called = Path(f"/proc/{ready.pid}/cmdline").read_bytes()
            if ready.host == socket.gethostname() and called.startswith(b"ray::"):
                os.kill(ready.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Ends the process in Ray's own way, of which Ray does not complain."""
        with contextlib.suppress(RayError):
            ray.kill(self._process)


class RayObservers:
    """The envs of a run, shared out to processes on Ray; follows `tfrl.training.episodic.Observers`.

    Args:
      config: the settings, with the section Observers.
      spec: the global vector of envs.
      obey: raises Stopped if the run was told to stop.
      tell: gets a sentence where an observer is replaced.
    """

    def __init__(
        self, config: Any, spec: EnvSpec, *, obey: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self._cluster = Cluster(config.ray_address, config.observers, 0)
        share = config.num_envs // config.observers
        self._slices = [slice(i * share, (i + 1) * share) for i in range(config.observers)]
        kind = ray.remote(num_cpus=1, max_restarts=0)(RemoteObserver)
        hooks = {"timeout": config.observer_timeout, "obey": obey, "tell": tell}
        self._seats = []
        try:
            for i, mine in enumerate(self._slices):
                indices = range(config.num_envs)[mine]
                self._seats.append(_Seat(i, lambda i=indices: kind.remote(spec, list(i)), **hooks))
            for seat in self._seats:
                seat.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._show()

    def _show(self) -> None:
        self.observation = np.concatenate([seat.after.observations for seat in self._seats])
        self.exact_state = all(seat.exact_state for seat in self._seats)

    def step(self, actions: np.ndarray, playing: np.ndarray) -> Seen:
        """One step of the envs that are `playing`, in all processes that have any of them."""
        asked = [(seat, at) for seat, at in zip(self._seats, self._slices, strict=True) if playing[at].any()]
        for seat, at in asked:
            seat.order(actions[at], playing[at])
        seen = Seen(np.zeros(len(playing), np.float32), self.observation.copy(), np.zeros(len(playing), bool))
        for seat, at in asked:
            for whole, part in zip(seen, seat.seen(), strict=True):
                whole[at] = part
        self.observation = seen.observation
        return seen

    def settle(self) -> None:
        """Takes note of where the envs stand: from there on those of a process that dies are played again."""
        for seat in self._seats:
            seat.begin_to_settle()
        for seat in self._seats:
            seat.settle()

    def get_state(self) -> EnvStates:
        """Returns where the envs stood at the end of the last episodes."""
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
        self._show()

    def close(self) -> None:
        """Ends the observers, and Ray if it was started here."""
        for seat in self._seats:
            seat.end()
        self._cluster.close()
