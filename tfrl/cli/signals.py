"""Signals that tell a process to stop: which they are, which of them ask anew, and when they have to wait."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator

# What tells a command to stop: Ctrl-C, SIGTERM, a terminal that closes. The exit codes of one that then does.
STOP_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
# Seconds after the first request in which another signal repeats it, and asks for nothing more.
ECHOES: dict[int, float] = {signal.SIGINT: 1.0, signal.SIGTERM: 3.0, signal.SIGHUP: math.inf}


class Requests:
    """Tells requests to stop from the echoes of the first one.

    What ends a whole job (systemd, a scheduler, a host that shuts down, Ctrl-C in a terminal) may signal all
    of its processes at once, and parents pass on what they get a moment later: a child hears it twice or
    three times. A terminal that closes may send several SIGHUPs, however long it takes.

    Attributes:
      first: the number of the first signal; 0 before it.
      again: whether a second request has come.
      heard: whether somebody heeds or has heeded them who tells what came of it.
      of_command: whether the process runs a command of ours, which a second request may end. Otherwise it is
        a user's program, or a notebook, that calls the library.
    """

    def __init__(self, *, of_command: bool = False) -> None:
        self.of_command = of_command
        self.first = 0
        self.again = False
        self.heard = False
        self._since = 0.0

    def take(self, number: int) -> bool:
        """Takes a signal of STOP_CODES that has just come; whether it is a request, the first or another."""
        now = time.monotonic()
        if not self.first:
            self.first, self._since = number, now
            return True
        if now - self._since < ECHOES[number]:
            return False
        self.again = True
        return True

    def begin(self) -> None:
        """Forgets the requests of an earlier run that a user's program has trained."""
        if not self.of_command:
            vars(self).update(vars(Requests()))


OURS = Requests()
"""The requests of this process, where no part of it has its own to keep."""


def heeded() -> list[int]:
    """The signals of STOP_CODES that a command is to heed: not SIGHUP, where nohup has it ignored."""
    return [s for s in STOP_CODES if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


_held = 0  # contexts of `held_back` that the main thread is in, before it lets signals through
_waiting: list[int] = []  # signals that came in spite of them


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Makes signals of STOP_CODES wait until the end of the context or `let_through`.

    Around what a signal would break (the import of TensorFlow), or where one would be lost: TensorFlow
    installs a SIGTERM handler of its own when it connects workers, and swallows the signal. Enter it in the
    main thread. Threads that are started inside hold signals back for ever; they cannot handle them anyway.

    They wait in the kernel, but for those that it gives to a thread from before, as a library may have.
    Python then calls the main thread's handler all the same, which is to ask `waits`.
    """
    global _held
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_CODES)
    _held += 1
    try:
        yield
    finally:
        _held = max(0, _held - 1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _raise_waiting()


def waits(number: int) -> bool:
    """True if a signal that has just come is to wait: then it comes again, where none is held back."""
    if _held:
        _waiting.append(number)
    return bool(_held)


def let_through() -> None:
    """Lets the main thread take signals again, first of all those that have waited."""
    global _held
    _held = 0
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_CODES)
    _raise_waiting()


def _raise_waiting() -> None:
    while _waiting and not _held:
        signal.raise_signal(_waiting.pop(0))
