"""The ends of a command of tfrl: signals, one sentence on stderr, an exit code, no traceback for bad input.

Signals that tell a process to stop may be echoes of each other, and can be held back. A run listens to them,
and to its `stop` file; all workers agree on one request.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.streams import flush, open_missing, send_nowhere, tell

_PLAIN = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # their own text is a good sentence
_LAST_WORDS = 1.0  # seconds


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs `main(arguments)`, and exits with the code that it returns, or prints its error and exits.

    A signal to stop raises SystemExit in `main` with a code of STOP_CODES, unless `main` has handlers of its
    own. A second signal ends the process at once.
    """
    open_missing()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a text stream
    OURS.of_command = True
    _on_signals(_end)
    # At the very end, Python gives up its handlers before all threads of libraries have ended.
    atexit.register(_on_signals, signal.SIG_IGN)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone(sys.stdout):
            raise
        code = 0  # the reader, such as head, has seen enough
    except PeerError as error:
        # TensorFlow's own exit would wait for dead peers, and print errors.
        sentence = f"error: {error}"

        def last_words() -> None:
            tell(sentence)
            flush(sys.stdout)

        end_at_once(error.exit_code, last_words)
    except (UserError, TrainingError) as error:
        tell(f"error: {error}")
        code = error.exit_code
    except OSError as error:
        if error.errno not in _PLAIN:
            raise
        tell(f"error: {error.filename or 'the output'}: {error.strerror}")
        if error.filename is None:
            send_nowhere(sys.stdout)
        code = 1
    except MemoryError as error:
        tell(f"error: out of memory; {str(error) or 'a smaller problem may fit'}")
        code = 1
    except SystemExit as end:  # --help, a signal; rich ends a command whose reader is gone with 1
        seen_enough = end.code == 1 and isinstance(end.__context__, BrokenPipeError)
        code = 0 if seen_enough else int(end.code or 0)
    _on_signals(lambda *_: os._exit(code))  # a late signal does not change the exit code
    flush(sys.stdout)
    sys.exit(code)


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Prints a sentence if a signal ends the process within the context, before the run listens to signals.

    After a signal, the end of the context raises SystemExit again, because a library that is being imported
    may swallow the first SystemExit.
    """
    try:
        yield
        if OURS.first and not OURS.heard:
            raise SystemExit(STOP_CODES[OURS.first])
    except SystemExit:
        if OURS.first and not OURS.heard:
            tell("Stopped before training began: there is nothing to save.")
        raise


def _on_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in heeded():
        signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    if not waits(number) and OURS.take(number):
        code = STOP_CODES[OURS.first]
        if OURS.again:
            os._exit(code)
        raise SystemExit(code)


def _reader_is_gone(stream: IO[str]) -> bool:
    """True if `stream` is a pipe or socket without a reader."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # poll reports errors in any case
    return bool(poll.poll(0))


def end_at_once(code: int, say: Callable[[], object]) -> NoReturn:
    """Ends the process from any thread, after `say()` has printed the last words.

    `say` has a thread and a second, because its stream may block.
    """
    speaker = threading.Thread(target=say, name="last words", daemon=True)
    try:
        speaker.start()
        speaker.join(_LAST_WORDS)
    finally:
        os._exit(code)


# Signals

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


# The request to stop a run

_CODES = (143, 130, 0)  # SIGTERM or SIGHUP, Ctrl-C, the file
NUM_VOTES = len(_CODES)


def stop_code(votes: Iterable[float]) -> int | None:
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
        """Handles SIGINT, SIGTERM and SIGHUP within the context, also those that `held_back` kept.

        A second request (`Requests`) ends the process at once. In a user's program, a second Ctrl-C
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
        OURS.begin()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._note) for number in heeded()}
        with held_back():  # in the new thread for ever, because handlers run in this thread
            _start(self._listen, reader, on_first, on_second)
        OURS.heard = True
        let_through()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writer)  # ends the thread

    def _note(self, number: int, _frame: Any) -> None:
        again = self.exit_code and time.monotonic() - self._since >= ECHOES[number]
        if again and number == signal.SIGINT and not OURS.of_command:
            raise KeyboardInterrupt
        if not self.exit_code:
            self.exit_code, self._since = STOP_CODES[number], time.monotonic()

    def _listen(self, reader: int, on_first: Callable[[str], None], on_second: Callable[[], None]) -> None:
        """Reads the numbers of signals, one byte each."""
        requests = OURS
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

    def votes(self) -> list[float]:
        """This worker's vote, NUM_VOTES numbers: 1 for its request to stop, otherwise 0."""
        wanted = self.signalled or self._stop_file.is_file()
        return [float(wanted and self.exit_code == code) for code in _CODES]


def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="signals", daemon=True)
    thread.start()
    return thread
