"""Starts a benchmark, and starts others for it: like every command, with errors of one sentence."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tfrl.cli import endings, flags
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import coerce

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
        words, given = flags.parse(options, arguments, usage, module.__doc__)
        if words:
            raise UserError(f"{words[0]!r} is not a flag; usage: {usage} --name value ...")
        main(given)
        return 0

    endings.run(command)


def seeds(text: str) -> list[int]:
    """The seeds of a flag --seeds: whole numbers and ranges such as 1..5, with commas between; each once.

    Raises:
      UserError: something else stands there, or nothing.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        numbers = [coerce(word.strip(), int, "--seeds") for word in ((first, last) if dots else (first,))]
        found += range(numbers[0], numbers[-1] + 1)
    if not found:
        raise UserError(f"--seeds {text} has no seed: a range goes from the smaller one to the greater.")
    return list(dict.fromkeys(found))


def answer(code: str) -> str:
    """The last word that a program of Python prints; it runs in a process of its own.

    Raises:
      TrainingError: it failed.
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TrainingError(f"a measuring process ended with code {done.returncode}: {last}")
    return done.stdout.split()[-1]


def check_plot(plot: str | None) -> None:
    """Raises UserError where a flag --plot names no PNG file that can be written; None: there is none."""
    if plot is None:
        return
    if not plot.endswith(".png") or Path(plot).is_dir():
        raise UserError(f"--plot must be the name of a PNG file; got {plot!r}.")
    if not os.access(Path(plot).parent, os.W_OK):
        raise UserError(f"--plot {plot} cannot be written: {Path(plot).parent} is no folder to write in.")


def check_program(words: str, flag: str) -> list[str]:
    """The words of a command that a flag gives, files as absolute paths.

    Raises:
      UserError: they are no command, or there is no such program or file.
    """
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise UserError(f"{flag} {words!r} is no command: {error}.") from None
    if found and shutil.which(found[0]) is None:
        raise UserError(f"{flag}: there is no program {found[0]}.")
    return [str(Path(word).absolute()) if Path(word).exists() else word for word in found]


def finish(
    command: Sequence[str], watch: Callable[[int], None] = lambda pid: None, **settings: Any
) -> resource.struct_rusage:
    """Runs a command to its end; what it used itself (RUSAGE_CHILDREN has the greatest child's memory).

    It is in a session of its own, so that a Ctrl-C or SIGTERM reaches it through us alone: once. A trainer
    saves then, and we end after it, by SystemExit.

    Args:
      command: its words.
      watch: called with the process's number while it runs, and not to raise; that the process ended is
        not taken note of before it returns, so that the number stays its own.
      settings: of Popen.

    Raises:
      TrainingError: it ended by itself, with another exit code than 0.
    """
    requests, process = endings.Requests(), None

    def tell(which: int, _: Any = None) -> None:
        if requests.take(which) and process is not None:
            os.kill(process.pid, which)  # Popen's own way might reap it

    before = {which: signal.signal(which, tell) for which in endings.heeded()}
    try:
        process = subprocess.Popen(command, start_new_session=True, **settings)
        if requests.first:  # it came in between; told twice, the child hears an echo
            os.kill(process.pid, requests.first)
        watch(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
    if requests.first:
        raise SystemExit(endings.STOP_CODES[requests.first])
    if process.returncode:
        raise TrainingError(f"{' '.join(command[1:4])} ... ended with code {process.returncode}.")
    return usage
