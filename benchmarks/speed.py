"""The speed of a trainer, ours or another's script: both are watched from outside, at the ends of updates.

Wall time is what counts on a quiet machine. Processor time says the same where other processes share it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks import command
from tfrl.cli.errors import TrainingError
from tfrl.run.metrics import PROGRESS_FILE

_LOOK_SECONDS = 0.005  # between two looks at our progress
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Mark(NamedTuple):
    """The end of an update."""

    seconds: float
    """Time of the wall clock."""
    cpu_seconds: float
    """Processor time of the process since it began, all of its threads together."""


@dataclass(frozen=True)
class Speed:
    """The speed of one run; env steps a second count from the end of the first update, which compiles."""

    median: float
    """Env steps a second, the median of the updates."""
    whole: float
    """Env steps a second up to the end of the last update, with the evaluations in between."""
    per_cpu_second: float
    """Env steps in a second of processor time, over the same span."""
    wall_seconds: float
    """Wall time of the whole process, with its imports and all that follows the last update."""
    cpu_seconds: float
    """Processor time of the same."""
    peak_memory_mb: float
    """Highest resident memory, in megabytes."""


def of_script(words: Sequence[str], steps: int, updates: int, *, lines_each: int = 1) -> Speed:
    """Runs another's script, which prints a line that begins with SPS: at the end of each update.

    Args:
      words: the command; it runs in an empty folder, for it may write there.
      steps: env steps of an update.
      updates: how many it makes.
      lines_each: lines that it prints for each; those of a phase of PPG are one update here.

    Raises:
      TrainingError: it failed, or made fewer or more of them.
    """
    marks: list[Mark] = []
    reader, writer = os.pipe()

    def watch(pid: int) -> None:
        os.close(writer)  # the script alone holds it now, so that the lines end with it
        ends = (line for line in lines if line.startswith("SPS:"))
        for number, _ in enumerate(ends, start=1):
            if number % lines_each == 0:
                marks.append(_mark(pid))

    with tempfile.TemporaryDirectory() as folder, os.fdopen(reader) as lines:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        return _measure(words, watch, marks, steps, updates, cwd=folder, env=environment, stdout=writer)


def of_trainer(module: str, flags: Sequence[str], steps: int, updates: int) -> Speed:
    """The same of a run of ours, which adds a row to progress.csv at the end of each update."""
    marks: list[Mark] = []
    with tempfile.TemporaryDirectory() as logdir:
        progress = Path(logdir) / "speed" / PROGRESS_FILE

        def watch(pid: int) -> None:
            while not _has_ended(pid):
                time.sleep(_LOOK_SECONDS)
                with contextlib.suppress(FileNotFoundError):
                    marks.extend([_mark(pid)] * (progress.read_bytes().count(b"\n") - 1 - len(marks)))

        words = [sys.executable, "-m", module, *flags, "--logdir", logdir, "--run-name", "speed"]
        return _measure(words, watch, marks, steps, updates, stdout=subprocess.DEVNULL)


def _measure(
    words: Sequence[str],
    watch: Callable[[int], None],
    marks: list[Mark],
    steps: int,
    updates: int,
    **settings: object,
) -> Speed:
    """Runs a command whose updates `watch` adds to the marks."""
    began = time.monotonic()
    usage = command.finish(words, watch, **settings)
    ended = time.monotonic()
    if len(marks) != updates or updates < 2:
        raise TrainingError(f"{' '.join(words[:3])} ... ended after {len(marks)} updates, not {updates}.")
    first, last = marks[0], marks[-1]
    counted = steps * (updates - 1)
    return Speed(
        median=steps / statistics.median(after.seconds - before.seconds for before, after in pairwise(marks)),
        whole=counted / (last.seconds - first.seconds),
        per_cpu_second=counted / max(last.cpu_seconds - first.cpu_seconds, _TICK),
        wall_seconds=ended - began,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_memory_mb=usage.ru_maxrss / 1024,
    )


def _mark(pid: int) -> Mark:
    """Now. A process that has ended has its numbers until somebody waits for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5): from the third on
    return Mark(time.monotonic(), _TICK * (int(fields[11]) + int(fields[12])))


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
