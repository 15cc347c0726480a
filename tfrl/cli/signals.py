"""Signals that tell a process to stop. Repeated signals may be echoes, and signals can be held back."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator

# Exit codes by signal: Ctrl-C, SIGTERM, and a terminal that closes.
STOP_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
# Seconds after the first request in which another signal only repeats it.
ECHOES: dict[int, float] = {signal.SIGINT: 1.0, signal.SIGTERM: 3.0, signal.SIGHUP: math.inf}


class Requests:
    """Distinguishes requests to stop from the echoes of the first one.

    A tool that ends a job (systemd, a scheduler, Ctrl-C in a terminal) may signal all processes at once, and
    parents pass the signal on: a child gets it two or three times. A terminal that closes may send several
    SIGHUPs at any time.

    Attributes:
      first: the number of the first signal; 0 before it.
      again: True after a second request.
      heard: True once a run listens to signals, and prints an answer.
      of_command: True if the process runs a command of ours, which a second request may end. False in a
        user's program or a notebook that calls the library.
    """

    def __init__(self, *, of_command: bool = False) -> None:
        self.of_command = of_command
        self.first = 0
        self.again = False
        self.heard = False
        self._since = 0.0

    def take(self, number: int) -> bool:
        """Takes a signal of STOP_CODES that has just come. Returns True if it is a request, no echo."""
        now = time.monotonic()
        if not self.first:
            self.first, self._since = number, now
            return True
        if now - self._since < ECHOES[number]:
            return False
        self.again = True
        return True

    def begin(self) -> None:
        """Forgets the requests of an earlier run of a user's program."""
        if not self.of_command:
            vars(self).update(vars(Requests()))


OURS = Requests()
"""The requests of this process."""


def heeded() -> list[int]:
    """The signals of STOP_CODES that a command obeys; not SIGHUP under nohup."""
    return [s for s in STOP_CODES if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


_held = 0  # contexts of `held_back` that the main thread is in
_waiting: list[int] = []  # signals that came nevertheless


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Makes signals of STOP_CODES wait until the end of the context or `let_through`.

    Use it where a signal would break something (the import of TensorFlow) or would be lost: TensorFlow's own
    SIGTERM handler swallows the signal while it connects workers. Enter it in the main thread. Threads that
    are started inside block these signals for ever.

    The kernel holds the signals back, unless it gives one to an older thread. Python then calls the handler
    in the main thread, and the handler must ask `waits`.
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
    """True if a signal that has just come must wait. It is raised again at the end of the context."""
    if _held:
        _waiting.append(number)
    return bool(_held)


def let_through() -> None:
    """Lets the main thread take signals again, beginning with those that have waited."""
    global _held
    _held = 0
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_CODES)
    _raise_waiting()


def _raise_waiting() -> None:
    while _waiting and not _held:
        signal.raise_signal(_waiting.pop(0))
