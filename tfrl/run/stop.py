"""Requests to stop: Ctrl-C, SIGTERM, a terminal that closes (SIGHUP), and the run's `stop` file. All workers
agree on one of them.
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
    """The exit code of all workers from the sum of their votes [NUM_VOTES]; None: go on."""
    return next((code for code, count in zip(_CODES, votes, strict=True) if count > 0), None)


class Stopped(Exception):  # noqa: N818 - it is no error
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
        """Handles SIGINT, SIGTERM and SIGHUP within the context, also those that `signals.held_back` kept.

        A second request (`signals.Requests`) ends the process at once. In a user's program, a second Ctrl-C
        raises KeyboardInterrupt instead. Outside the main thread Python allows no handlers, so nothing is
        handled, and the program's own handlers stay.

        Enter it after the strategy is made, because TensorFlow installs its own SIGTERM handler, which
        swallows the signal.

        Python runs a handler in the main thread, after a long call of TensorFlow has returned, and perhaps
        while that thread holds the lock of a stream. So our handler only sets a number, and threads, which
        the C code of Python wakes, print the messages.

        Args:
          on_first: called with the first signal's name, in a thread.
          on_second: called before the process ends with something unsaved; the exit code is that of the
            first signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals.OURS.begin()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._note) for number in signals.heeded()}
        with signals.held_back():  # in the new thread for ever, because handlers run in this thread
            _start(self._listen, reader, on_first, on_second)
        signals.OURS.heard = True
        signals.let_through()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)  # ends the thread

    def _note(self, number: int, _frame: Any) -> None:
        again = self.exit_code and time.monotonic() - self._since >= signals.ECHOES[number]
        if again and number == signal.SIGINT and not signals.OURS.of_command:
            raise KeyboardInterrupt
        if not self.exit_code:
            self.exit_code, self._since = STOP_CODES[number], time.monotonic()

    def _listen(self, reader: int, on_first: Callable[[str], None], on_second: Callable[[], None]) -> None:
        """Reads the numbers of signals, one byte each."""
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
            _start(on_first, name)  # in a thread, because it may wait for a stream
        os.close(reader)

    @property
    def signalled(self) -> bool:
        """True after a signal: the run will stop. A stop file, however, may be removed again."""
        return bool(self.exit_code)

    def forget_file(self) -> None:
        """Removes the `stop` file. A folder of that name has no effect."""
        if self._stop_file.is_file():
            self._stop_file.unlink(missing_ok=True)

    def votes(self) -> np.ndarray:
        """This worker's vote, float32 [NUM_VOTES]: 1 for its request to stop, otherwise 0."""
        wanted = self.signalled or self._stop_file.is_file()
        return np.array([wanted and self.exit_code == code for code in _CODES], np.float32)


def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="signals", daemon=True)
    thread.start()
    return thread
