"""python -m tfrl.status [LOGDIR]: list the runs in a folder, also those of sweeps."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.settings import SETTINGS_FILE, algorithm_of
from tfrl.reporting import runs
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.console import duration
from tfrl.run.folder import FAILED_FILE, LEFT_FILE, is_held
from tfrl.run.metrics import PROGRESS_FILE

_USAGE = "python -m tfrl.status [LOGDIR]"
_WIDE = 10_000  # characters


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
    found = [path for path in _runs(folder) if algorithm_of(path / SETTINGS_FILE) != "resnet"]
    if not found:
        raise UserError(f"there is no run in {folder} or in a folder below.")
    rows, loaded = [], []
    for path in found:
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        try:
            run = runs.load(path)
            rows.append([name, *row(run)])
            loaded.append(run)
        except UserError as error:
            rows.append([name, str(error)])
        except OSError as error:
            rows.append([name, f"cannot be read: {files.reason(error)}"])
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", overflow="fold")
    for name in (
        runs.steps_title(loaded) or "env steps",
        "done",
        "return",
        "steps/s",
        "time left",
        "last row",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    # Names are shown as they are, and in a pipe or a file each run is one line.
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDE
    Console(markup=False, emoji=False, width=wide).print(table)
    return 0


def _runs(folder: Path) -> list[Path]:
    """The folder if it is a run, otherwise those below; a run's own folders are not searched."""
    if (folder / SETTINGS_FILE).is_file():
        return [folder]
    below = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return [run for path in below for run in _runs(path)]


def row(run: runs.StoredRun) -> list[str]:
    """The cells of a run: state, steps, share done, return, steps/s, time left, age of the last row.

    The time left is that to the end at the latest, at the mean speed so far.

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
    steps = max(run.env_steps, CheckpointStore(run.path / "checkpoints", keep=1).env_steps())
    done, left = max(run.share_done, min(1.0, steps / run.config.run_steps)), "-"
    if run.speed and 0 < done < 1:
        left = duration(steps / run.speed * (1 - done) / done)
    returns, written = run.points("rollout/episode_return")[1], files.last_change([run.path / PROGRESS_FILE])
    return [
        state,
        f"{steps:,}",
        f"{math.floor(100 * done)}%",
        f"{returns[-1]:.2f}" if returns.size else "-",
        f"{run.speed:.0f}" if run.speed else "-",
        left,
        f"{duration(time.time() - written)} ago" if written else "-",
    ]


if __name__ == "__main__":
    endings.run(main)
