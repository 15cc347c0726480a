"""The end of every command of tfrl: one sentence on stderr and an exit code, no traceback for bad input."""

from __future__ import annotations

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

_PLAIN = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)  # errors that say all that there is to say
_LAST_WORDS = 1.0  # seconds for what a process that ends at once still has to say


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs `main(arguments)` and exits with what it returns, or with its error's code and sentence.

    A signal that tells it to stop ends `main` by SystemExit, with its code of STOP_CODES, unless `main` has
    handlers of its own; a second one ends the process at once.
    """
    open_missing()
    signals.OURS.of_command = True
    _on_signals(_end)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone(sys.stdout):
            raise
        code = 0  # the reader (head, say) has seen enough
    except PeerError as error:
        # TensorFlow's own way out waits for peers that are gone, and complains of it.
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
    except SystemExit as end:  # --help, a signal
        code = int(end.code or 0)
    _on_signals(lambda *_: os._exit(code))  # a signal does not change any more how the command has ended
    _flush()
    sys.exit(code)


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Tells of it where a signal ends the process inside, before a session listens to signals.

    Raises SystemExit at its end, too, for a signal that has come: what `_end` raises while a library is
    imported the library may swallow.
    """
    try:
        yield
        if signals.OURS.first and not signals.OURS.heard:
            raise SystemExit(signals.STOP_CODES[signals.OURS.first])
    except SystemExit:
        if signals.OURS.first and not signals.OURS.heard:
            tell("Stopped before training began: there is nothing to save.")
        raise


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in signals.heeded():
        signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    if not signals.waits(number) and signals.OURS.take(number):
        code = signals.STOP_CODES[signals.OURS.first]
        if signals.OURS.again:
            os._exit(code)
        raise SystemExit(code)


def _reader_is_gone(stream: IO[str]) -> bool:
    """Whether `stream` is a pipe or socket that nobody reads any more."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # an error is told in any case
    return bool(poll.poll(0))


def _flush() -> None:
    with surviving(sys.stdout):
        sys.stdout.flush()


def end_at_once(code: int, say: Callable[[], object]) -> NoReturn:
    """Ends the process from any thread, whatever the others are in, after `say()`, its last words.

    They get a thread and a second: what they are written to may be broken, or take nothing and block.
    """
    speaker = threading.Thread(target=say, name="last words", daemon=True)
    try:
        speaker.start()
        speaker.join(_LAST_WORDS)
    finally:
        os._exit(code)
