"""python -m tfrl.status [LOGDIR]: every run with its state, progress and time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfrl.cli import command_line, endings, words
from tfrl.cli.errors import UserError
from tfrl.cli.streams import console
from tfrl.reporting import runs
from tfrl.run import files, lock
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.folder import LEFT_FILE
from tfrl.run.metrics import PROGRESS_FILE

_USAGE = "python -m tfrl.status [LOGDIR]"
_SPEED_WINDOW = 8  # updates, or so many that no kind of them is left out
_GRACE_SECONDS = 600.0  # for a first update


@dataclass(frozen=True)
class Options:
    """No flags beside --help."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table; the exit code."""
    from rich import box
    from rich.table import Table

    places, _ = command_line.parse(Options, arguments, _USAGE, "List the runs in a folder (logs).")
    folder = Path(command_line.one(places or ["logs"], "folder of runs", _USAGE))
    found = runs.find([folder], deep=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", overflow="fold", min_width=len("interrupted"))
    for name in ("env steps", "done", "return", "steps/s", "left", "saved"):  # narrow: names need the room
        table.add_column(name, justify="right", no_wrap=True)
    for path in found:
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        try:
            table.add_row(name, *row(runs.load(path), time.time())[1:])
        except (UserError, OSError) as error:  # damaged, or another user's
            if path == folder:
                raise
            unreadable = (
                f"cannot be read: {files.reason(error)}" if isinstance(error, OSError) else str(error)
            )
            table.add_row(name, unreadable)
    console(markup=False, emoji=False).print(table)  # names are shown as they are
    return 0


def row(run: runs.Run, now: float) -> list[str]:
    """The cells of one run: name, state, env steps, their share, return, steps/s, time left, saved update.

    A run is running while the process that holds its lock lives; on another machine, while its rows come at
    least every few updates. `now` is a time of `time.time`.
    """
    total = run.config.run_steps
    returns = run.points("rollout/episode_return")[1]
    store = CheckpointStore(run.path / "checkpoints", keep=1)
    saved, saved_steps = store.updates(), store.env_steps()
    env_steps = max(run.env_steps, saved_steps)  # no row tells of the update that it is within
    state = _state(run, now)
    speed = run.speed(None if run.is_done else _window(run))
    left = max(0.0, (total - env_steps) / speed) if speed and state == "running" else None
    return [
        run.name,
        state,
        f"{env_steps:,}",
        f"{env_steps / total:.0%}",
        f"{returns[-1]:.2f}" if returns.size else "-",
        f"{speed:.0f}" if speed else "-",
        "-" if left is None else words.duration(left),
        str(max(saved[-1], saved_steps // run.config.steps_per_update)) if saved else "-",
    ]


def _window(run: runs.Run) -> int:
    """The updates whose speed is shown: whole phases, where the updates of one are not alike."""
    alike = run.config.updates_alike
    return alike * max(1, _SPEED_WINDOW // alike)


def _state(run: runs.Run, now: float) -> str:
    if run.is_done:
        return "done"
    held = lock.is_held(run.path)
    if held is None:  # by a process of another machine, if it still lives
        speeds = run.points(runs.SPEED)[1][-_window(run) :]
        update_seconds = run.config.steps_per_update / speeds.min() if speeds.size else 0.0
        written = (run.path / PROGRESS_FILE, run.path / lock.LOCK_FILE, run.path / "checkpoints")
        held = now - files.last_change(written) < 3 * update_seconds + _GRACE_SECONDS
    if held:
        return "running"
    return "ended early" if (run.path / LEFT_FILE).exists() else "interrupted"


if __name__ == "__main__":
    endings.run(main)
