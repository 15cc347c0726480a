"""The agenda of a suite: which run is next, where suites on other machines, say, work through the same ones.

A run belongs to whoever holds its lock: from the moment in which a suite chooses it, before anything is
started, until the suite knows what came of it. The trainer gets the lock from its suite, and keeps it where
the suite is killed. So two suites never train the same run, and one whose machine has died is taken over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tfrl.cli.signals import STOP_CODES
from tfrl.run import files, lock

LOOK_EVERY = 5.0  # seconds between two looks at the runs that are in use elsewhere
TELL_EVERY = 600.0  # seconds between two lines about such a run
_STOPPED = ".stopped"  # in a run's folder, for the other suites: it was ended by its stop file


class Agenda:
    """The state of each run of a suite, as this process knows it. A context: after it, no lock is held.

    Args:
      folders: of the runs, in the order in which to train them.
      is_done: says of a run, by its number, whether it is complete.
      say: gets a run's number and what is to be told of it.
      shared: whether other suites may have their part in it. Workers of a cluster train each run together,
        so all of them choose in the same order, and leave the lock to the chief's trainer.

    Attributes:
      waiting: runs that are still to be done, here or elsewhere.
      failed, stopped: runs that this process will not try again: they failed here, or somebody had them
        stopped. (What failed elsewhere is tried here: it may have been that machine's fault.)
    """

    def __init__(
        self,
        folders: Sequence[Path],
        is_done: Callable[[int], bool],
        say: Callable[[int, str], None],
        *,
        shared: bool = True,
    ) -> None:
        self._folders = folders
        self._is_done = is_done
        self._say = say
        self._shared = shared
        self._locks: dict[int, IO[str] | None] = {}  # of the runs that are trained here; None: it has none
        self._elsewhere: dict[int, float] = {}  # runs that were found in use, and when it was told
        self._next_look = 0.0
        # Of stops before this moment nothing follows: the same command is how one goes on.
        self._stops_before = [_stop_mark(folder) for folder in folders]
        self.waiting = list(range(len(folders)))
        self.failed: list[int] = []
        self.stopped: list[int] = []

    def __enter__(self) -> Agenda:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in list(self._locks):
            self._release(index)

    def choose(self) -> int | None:
        """A run to train now, whose lock is held from here on; None if the others are settled or in use."""
        if time.monotonic() < self._next_look:
            return None
        for index in list(self.waiting):
            if self._take(index) and self._is_left(index):
                return index
        self._next_look = time.monotonic() + LOOK_EVERY
        return None

    def lock(self, index: int) -> IO[str] | None:
        """The lock of a run that was chosen, if it has one: for its trainer."""
        return self._locks[index]

    def ended(self, index: int, code: int) -> str:
        """Settles a run that was chosen, by its trainer's exit code; what came of it, for people."""
        if code in STOP_CODES.values():
            self.stopped.append(index)
            said = "stopped; the same command goes on with it"
        elif code:
            self.failed.append(index)
            said = f"ended with code {code}"
        elif self._is_done(index):
            said = "done"
        else:
            self.stopped.append(index)
            self._mark_stop(index)
            said = "stopped by its stop file; the same command goes on with it"
        self._release(index)
        self._next_look = 0.0
        return said

    def _take(self, index: int) -> bool:
        """Takes the run's lock, unless another has it."""
        taken = None
        if self._shared:
            try:
                taken = lock.take(self._folders[index])
            except lock.HeldError as held:
                self._tell_of_holder(index, str(held))
                return False
            except OSError:  # a disk that knows no locks, say: the trainer will tell
                pass
        self._locks[index] = taken
        self.waiting.remove(index)
        return True

    def _tell_of_holder(self, index: int, holder: str) -> None:
        """Now and then: the file server may take a machine that is gone for one that still holds the lock."""
        now = time.monotonic()
        if now - self._elsewhere.get(index, -TELL_EVERY) >= TELL_EVERY:
            self._elsewhere[index] = now
            self._say(index, f"in use by {holder}; it is looked at again later")

    def _is_left(self, index: int) -> bool:
        """Whether a run that was taken is to be trained; else it is settled."""
        mark = _stop_mark(self._folders[index])
        if self._is_done(index):
            self._say(index, "done elsewhere" if index in self._elsewhere else "done before")
        elif mark is not None and mark != self._stops_before[index]:
            self._say(index, "stopped elsewhere by its stop file; the same command goes on with it")
            self.stopped.append(index)
        else:
            with contextlib.suppress(OSError):
                (self._folders[index] / _STOPPED).unlink(missing_ok=True)
            return True
        self._release(index)
        return False

    def _mark_stop(self, index: int) -> None:
        if self._locks[index] is not None:
            with contextlib.suppress(OSError):  # a full disk: another suite will go on with it
                mark = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}\n"
                files.write(self._folders[index] / _STOPPED, mark)

    def _release(self, index: int) -> None:
        taken = self._locks.pop(index)
        if taken is not None:
            lock.give_up(self._folders[index], taken)


def _stop_mark(folder: Path) -> str | None:
    """What tells one stop of the run from another; None where there was none."""
    try:
        return (folder / _STOPPED).read_text(errors="replace")
    except OSError:
        return None
