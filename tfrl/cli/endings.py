"""The end of every command of tfrl: one sentence on stderr and an exit code, no traceback for bad input."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO, NoReturn

from tfrl.cli import signals
from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.streams import open_missing, send_nowhere, surviving, tell

_PLAIN = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # their own text is a good sentence
_LAST_WORDS = 1.0  # seconds


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs `main(arguments)`, and exits with the code that it returns, or prints its error and exits.

    A signal to stop raises SystemExit in `main` with a code of STOP_CODES, unless `main` has handlers of its
    own. A second signal ends the process at once.
    """
    open_missing()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a text stream
    signals.OURS.of_command = True
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
            _flush()

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
    _flush()
    sys.exit(code)


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Prints a sentence if a signal ends the process within the context, before the run listens to signals.

    After a signal, the end of the context raises SystemExit again, because a library that is being imported
    may swallow the first SystemExit.
    """
    try:
        yield
        if signals.OURS.first and not signals.OURS.heard:
            raise SystemExit(signals.STOP_CODES[signals.OURS.first])
    except SystemExit:
        if signals.OURS.first and not signals.OURS.heard:
            tell("Stopped before training began: there is nothing to save.")
        raise


def _on_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in signals.heeded():
        signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    if not signals.waits(number) and signals.OURS.take(number):
        code = signals.STOP_CODES[signals.OURS.first]
        if signals.OURS.again:
            os._exit(code)
        raise SystemExit(code)


def _reader_is_gone(stream: IO[str]) -> bool:
    """True if `stream` is a pipe or socket without a reader."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # poll reports errors in any case
    return bool(poll.poll(0))


def _flush() -> None:
    with surviving(sys.stdout):
        sys.stdout.flush()


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
