"""How a benchmark is started, and how it starts others: like every command, with errors of one sentence."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfrl.cli import command_line, endings, signals
from tfrl.cli.errors import TrainingError, UserError

Options = TypeVar("Options")


def run(options: type[Options], main: Callable[[Options], None]) -> None:
    """Calls `main` with the command line's flags, and ends the process.

    Args:
      options: a dataclass, one flag a field.
      main: of the module that was started, whose docstring --help shows.
    """
    module = sys.modules[main.__module__]
    usage = f"python -m {module.__spec__.name}"

    def command(arguments: Sequence[str]) -> int:
        words, given = command_line.parse(options, arguments, usage, module.__doc__)
        if words:
            raise UserError(f"{words[0]!r} is not a flag; usage: {usage} --name value ...")
        main(given)
        return 0

    endings.run(command)


def finish(command: Sequence[str], **settings: Any) -> resource.struct_rusage:
    """Runs a command to its end; what it used itself (RUSAGE_CHILDREN has the greatest child's memory).

    It is in a session of its own, so that a Ctrl-C or SIGTERM reaches it through us alone: once. A trainer
    saves then, and we end after it, by SystemExit.

    Raises:
      TrainingError: it ended by itself, with another exit code than 0.
    """
    requests, process = signals.Requests(), None

    def tell(which: int, _: Any = None) -> None:
        if requests.take(which) and process is not None:
            os.kill(process.pid, which)  # Popen's own way might reap it

    before = {which: signal.signal(which, tell) for which in signals.heeded()}
    try:
        process = subprocess.Popen(command, start_new_session=True, **settings)
        if requests.first:  # it came in between; told twice, the child hears an echo
            os.kill(process.pid, requests.first)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
    if requests.first:
        raise SystemExit(signals.STOP_CODES[requests.first])
    if process.returncode:
        raise TrainingError(f"{' '.join(command[1:4])} ... ended with code {process.returncode}.")
    return usage
