"""How every command of tfrl ends: one sentence on stderr and an exit code, no traceback for bad input."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from tfrl.errors import PeerError, TrainingError, UserError

# What tells a command to stop: Ctrl-C, SIGTERM, a terminal that closes. The exit codes of one that then does.
STOP_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def heeded_signals() -> list[signal.Signals]:
    """Those of STOP_CODES that a command is to heed: not SIGHUP, where nohup has it ignored."""
    return [s for s in STOP_CODES if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs `main(arguments)` and exits with what it returns, or with its error's code and sentence."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except (UserError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
        if isinstance(error, PeerError):
            # TensorFlow's own way out waits for peers that are gone, and complains of it.
            sys.stdout.flush()
            os._exit(code)
    except MemoryError as error:
        print(f"error: out of memory; {str(error) or 'a smaller problem may fit'}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of a pipe (head, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
