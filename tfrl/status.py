"""python -m tfrl.status [LOGDIR]: list the runs in a folder, also those of sweeps."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.settings import SETTINGS_FILE
from tfrl.reporting import runs
from tfrl.reporting.runs import StoredRun
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import duration
from tfrl.run.folder import FAILED_FILE, LEFT_FILE, holds_run, is_held
from tfrl.run.metrics import PROGRESS_FILE

if TYPE_CHECKING:
    from tfrl.reporting.supervised import SupervisedRun

_USAGE = "python -m tfrl.status [LOGDIR]"
_WIDE = 10_000  # characters
_NAME, _OTHERS = 20, 70  # characters of a name at least, and of the other columns on a wide terminal
_LONG = 1e6  # larger returns are written like 8.28e+30
Run: TypeAlias = "StoredRun | SupervisedRun"


@dataclass(frozen=True)
class Options:
    """No flags beside --help."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    places, _ = flags.parse(Options, arguments, _USAGE, "List the runs in a folder (logs).")
    folder = Path(flags.one(places or ["logs"], "folder of runs", _USAGE))
    found = _runs(folder)
    if not found:
        raise UserError(f"there is no run in {folder} or in a folder below.")
    rows, loaded = [], []
    for path in found:
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        try:
            run = _load(path)
            rows.append([name, *row(run)])
            loaded.append(run)
        except UserError as error:
            rows.append([name, str(error)])
        except OSError as error:
            rows.append([name, f"cannot be read: {files.reason(error)}"])
    # Names are shown as they are, and in a pipe or a file each run is one line.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDE
    console = Console(markup=False, emoji=False, width=wide)
    longest = max(len(name) for name, *_ in rows)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run", overflow="fold", width=max(3, min(longest, max(_NAME, console.width - _OTHERS))))
    table.add_column("state", overflow="fold", min_width=7)  # "running"
    steps, score, speed = _titles(loaded)
    for title in (steps, "done", score, speed):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("time left", "last row"):
        table.add_column(title, justify="right", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    return 0


def _runs(folder: Path) -> list[Path]:
    """The folder if it is a run, otherwise those below; a run's own folders are not searched."""
    if (folder / SETTINGS_FILE).is_file():
        return [folder]
    if holds_run(folder) or not folder.is_dir():  # a run without its settings
        return []
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    return [run for path in below for run in _runs(path)]


def _load(path: Path) -> Run:
    """The run in a folder, of any trainer. Raises UserError if it cannot be read."""
    if not runs.is_supervised(path):
        return runs.load(path)
    from tfrl.reporting import supervised  # matplotlib takes a second

    return supervised.load(path)


def _titles(loaded: Sequence[Run]) -> list[str]:
    """The titles of the steps, the scores and the speeds of these runs."""
    of_env, of_images = ("env steps", "return", "steps/s"), ("images", "accuracy", "images/s")
    kinds = [(run.config.counts, *of_env[1:]) if isinstance(run, StoredRun) else of_images for run in loaded]
    return [",\n".join(dict.fromkeys(titles)) for titles in zip(*kinds or [of_env], strict=True)]


def row(run: Run) -> list[str]:
    """The cells of a run: state, steps, share done, score, steps/s, time left, age of the last row.

    The score is the return (on recorded data, of the last evaluation), or the accuracy of the last test. The
    time left is that to the end at the latest, at the mean speed so far; only a run with an end that may go
    on has one.

    A run is "running" while a process holds its lock. Some file systems do not show the locks of other
    machines; there the age of the last row tells more. A run that was stopped within an iteration has the env
    steps of its checkpoint.
    """
    if is_held(run.path):
        state = "running"
    elif run.is_done:
        state = "done"
    elif (run.path / LEFT_FILE).exists():
        state = "ended early"
    elif reason := files.read_text(run.path / FAILED_FILE):
        state = f"failed: {' '.join(reason.split())}"
    else:
        state = "not running"
    done, score, left = run.share_done, "-", "-"
    if isinstance(run, StoredRun):
        steps = max(run.env_steps, CheckpointStore(run.path / "checkpoints", keep=1).env_steps())
        done = max(done, min(1.0, steps / run.config.run_steps))
        returned = "rollout/episode_return" if run.config.counts == "env steps" else "eval_test/return"
        returns = run.points(returned)[1]
        if returns.size:
            score = f"{returns[-1]:.2f}" if abs(returns[-1]) < _LONG else f"{returns[-1]:.3g}"
    else:
        steps, accuracy = run.images, run.last("test/accuracy")
        if not math.isnan(accuracy):
            score = f"{accuracy:.2%}"
    endless = isinstance(run, StoredRun) and run.config.is_endless and not run.config.max_episodes
    may_go_on = state in ("running", "not running") and not endless
    if run.speed and 0 < done < 1 and may_go_on:
        left = duration(steps / run.speed * (1 - done) / done)
    written = files.last_change([run.path / PROGRESS_FILE])
    return [
        state,
        f"{steps:,}",
        "endless" if endless and done < 1 else f"{math.floor(100 * done)}%",
        score,
        f"{run.speed:.0f}" if run.speed else "-",
        left,
        f"{duration(time.time() - written)} ago" if written else "-",
    ]


if __name__ == "__main__":
    endings.run(main)
