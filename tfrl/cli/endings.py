"""How every command of tfrl ends: one sentence on stderr and an exit code, no traceback for bad input."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.streams import open_missing, surviving, tell

# What tells a command to stop: Ctrl-C, SIGTERM, a terminal that closes. The exit codes of one that then does.
STOP_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
_LAST_WORDS = 1.0  # seconds for what a process that ends at once still has to say


def heeded_signals() -> list[signal.Signals]:
    """Those of STOP_CODES that a command is to heed: not SIGHUP, where nohup has it ignored."""
    return [s for s in STOP_CODES if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs `main(arguments)` and exits with what it returns, or with its error's code and sentence."""
    open_missing()
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except PeerError as error:
        # TensorFlow's own way out waits for peers that are gone, and complains of it.
        sentence = f"error: {error}"
        end_at_once(error.exit_code, lambda: (tell(sentence), _flush()))
    except (UserError, TrainingError) as error:
        tell(f"error: {error}")
        code = error.exit_code
    except MemoryError as error:
        tell(f"error: out of memory; {str(error) or 'a smaller problem may fit'}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of a pipe (head, say) has seen enough
        code = 0
    _flush()
    sys.exit(code)


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
