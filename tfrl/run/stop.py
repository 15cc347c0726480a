"""Being told to stop: Ctrl-C, SIGTERM, a terminal that closes (SIGHUP), the run's `stop` file.

And how all workers come to obey the same one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli import signals
from tfrl.cli.endings import end_at_once
from tfrl.cli.signals import STOP_CODES

_CODES = (143, 130, 0)  # SIGTERM or SIGHUP, Ctrl-C, the file
NUM_VOTES = len(_CODES)


def stop_code(votes: Sequence[float] | np.ndarray) -> int | None:
    """The exit code that all workers leave with, by the sum of their votes [NUM_VOTES]; None: go on."""
    return next((code for code, count in zip(_CODES, votes, strict=True) if count > 0), None)


class Stopped(Exception):  # noqa: N818  # no error: the loop is told to end
    """Raised on every worker at the same place when the run must stop.

    Attributes:
      code: the exit code of all workers after they have saved.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StopRequest:
    """Stores a request to stop until the loop reads it.

    Attributes:
      exit_code: the exit code of the first signal, 130 or 143; 0 without a signal.
      saved: set by the loop when everything is saved, so that ending loses nothing.
    """

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file
        self.exit_code = 0
        self.saved = False
        self._since = 0.0  # when the first signal came

    @contextlib.contextmanager
    def listening(self, on_first: Callable[[str], None], on_second: Callable[[], None]) -> Iterator[None]:
        """Heeds SIGINT, SIGTERM and SIGHUP inside, and those that `signals.held_back` has kept waiting.

        A second request (`signals.Requests` says what is one) ends the process at once, whatever it is in.
        In a user's program a second Ctrl-C raises KeyboardInterrupt instead. In another thread than the main
        one, where Python allows no handlers, nothing is heeded: the program's own handlers stay.

        Enter it after the strategy is made: TensorFlow installs a SIGTERM handler of its own, which swallows
        the signal.

        A handler of Python's runs in the main thread, between two lines of it: not before a long call of
        TensorFlow's returns, and maybe while that thread holds the lock of a stream. So ours sets a number
        and does nothing else. What people see is done by threads, which the interpreter's C code wakes.

        Args:
          on_first: told the first signal's name, in a thread of its own.
          on_second: the same before the process ends with something unsaved; the exit code is the first's.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals.OURS.begin()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._note) for number in signals.heeded()}
        with signals.held_back():  # from that thread for ever: handlers run in this one
            _start(self._listen, reader, on_first, on_second)
        signals.OURS.heard = True
        signals.let_through()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)  # which ends the thread

    def _note(self, number: int, _frame: Any) -> None:
        again = self.exit_code and time.monotonic() - self._since >= signals.ECHOES[number]
        if again and number == signal.SIGINT and not signals.OURS.of_command:
            raise KeyboardInterrupt  # the listening thread leaves it to us
        if not self.exit_code:
            self.exit_code, self._since = STOP_CODES[number], time.monotonic()

    def _listen(self, reader: int, on_first: Callable[[str], None], on_second: Callable[[], None]) -> None:
        """Reads the numbers of signals, a byte each, as they come."""
        requests = signals.OURS
        while data := os.read(reader, 1):
            if data[0] not in STOP_CODES or not requests.take(data[0]):
                continue
            if requests.again and data[0] == signal.SIGINT and not requests.of_command:
                continue
            if requests.again and self.saved:
                os._exit(STOP_CODES[requests.first])
            if requests.again:
                end_at_once(STOP_CODES[requests.first], on_second)
            name = signal.Signals(requests.first).name
            _start(on_first, name)  # not here: it may have to wait for a stream
        os.close(reader)

    @property
    def signalled(self) -> bool:
        """True once a signal came, which, unlike the file, cannot go away again: the run will stop."""
        return bool(self.exit_code)

    def requested(self) -> bool:
        """True if this worker was told to stop."""
        return self.signalled or self._stop_file.is_file()

    def forget_file(self) -> None:
        """Removes the `stop` file, if there is one. A folder of that name asks for nothing."""
        if self._stop_file.is_file():
            self._stop_file.unlink(missing_ok=True)

    def votes(self) -> np.ndarray:
        """This worker's wish to stop, float32 [NUM_VOTES]: a 1 at the way in which it was told."""
        wanted = self.requested()
        return np.array([wanted and self.exit_code == code for code in _CODES], np.float32)


def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="signals", daemon=True)
    thread.start()
    return thread
