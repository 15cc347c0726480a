"""python -m tfrl.tune: search over any algorithm's settings with Ray Tune, a run folder for each trial.

The same command continues an interrupted sweep.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tfrl.cli import command_line, endings, signals
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import flag, nearest
from tfrl.cli.settings import COUNT, NATURAL, expand_home
from tfrl.cli.streams import Unbreakable, console, tell
from tfrl.config.actors import how_to_install_ray
from tfrl.config.run import RLSettings
from tfrl.evaluation.episodes import evaluation_columns
from tfrl.remote import trial
from tfrl.remote.settings import Sweep, plan, reader_of, trial_name
from tfrl.remote.trial import Outcome
from tfrl.run import files, lock
from tfrl.run.folder import read_json
from tfrl.training import command

_USAGE = "python -m tfrl.tune"
_EXAMPLE = f"{_USAGE} --grid lr=5e-4,1e-3 -- ppo --env CartPole-v1"
_SUMMARY = f"""Trains one algorithm with many settings and prints which are best: {_EXAMPLE}. --grid and
--sample may be given several times. The algorithm and its flags, for all trials, stand after --."""
_PLAN_FILE = "sweep.json"


@dataclass(frozen=True)
class Options:
    """The sweep."""

    grid: str | None = None
    """NAME=a,b,c: trials with each of these values of a setting."""
    sample: str | None = None
    """NAME=uniform:a,b or loguniform:a,b or choice:a,b,c: draw a value of a setting for each trial."""
    scheduler: Literal["none", "asha", "pbt"] = "none"
    """asha: end poor trials early; pbt: give them good trials' weights. Both need --eval-every after --."""
    trials: Annotated[int, NATURAL] = 0
    """Trials of each point of the grid, each with its own drawn values. 0: 8 with --sample, otherwise 1."""
    parallel: Annotated[int, COUNT] = 1
    """Trials that run at the same time; they share the machine's cores."""
    metric: str = "eval_test/return"
    """The column of progress.csv that ranks the trials; larger is better."""
    seed: Annotated[int, NATURAL] = 1
    """Seed of the drawn values."""
    logdir: str = "logs/sweep"
    """The sweep's folder, with a folder for each trial."""


def main(arguments: Sequence[str]) -> int:
    """Runs or continues the sweep; returns the exit code."""
    options, sweep = _read(arguments)
    logdir = Path(expand_home(options.logdir)).absolute()
    for index, settings in enumerate(sweep.trials):
        config = sweep.config(settings)
        _check_metric(sweep.metric, config)
        command.check(dataclasses.replace(config, logdir=str(logdir), run_name=trial_name(index)))
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"sweeps need Ray, which is not installed: {how_to_install_ray()}")
    from tfrl.remote import sweep as on_ray  # imports Ray Tune, which may lack packages

    os.umask(os.umask(0) | 0o022)
    files.make_folder(logdir)
    check_owner(logdir)

    def outcomes() -> list[Outcome]:
        return [trial.outcome(sweep, logdir, index) for index in range(len(sweep.trials))]

    with lock.locked(logdir, does="sweeps", instead="--logdir"):
        _claim(logdir, sweep)
        _show(f"{len(sweep.trials)} trial(s), {options.parallel} at a time, in {logdir}")
        with Watch(outcomes):
            stopped = on_ray.run(sweep, logdir, options.parallel, _show)
        if stopped:
            _show("Stopped; the same command continues.")
            return signals.STOP_CODES[stopped]
        return _conclude(sweep, outcomes())


def _read(arguments: Sequence[str]) -> tuple[Options, Sweep]:
    """The sweep's own flags, and the sweep with its trials. Raises UserError."""
    mine, trials = _split(arguments)
    grids, samples = (
        [t.partition("=")[2] for t in command_line.take(mine, [n])] for n in ("--grid", "--sample")
    )
    words, options = command_line.parse(Options, mine, _USAGE, _SUMMARY)
    if words:
        raise UserError(f"{words[0]!r} is not a flag; usage: {_EXAMPLE}")
    if not trials:
        raise UserError(f"give an algorithm and its flags: {_EXAMPLE}")
    sweep = plan(
        trials[0],
        trials[1:],
        grids=grids,
        samples=samples,
        trials=options.trials or (8 if samples else 1),
        seed=options.seed,
        scheduler=options.scheduler,
        metric=options.metric,
    )
    return options, sweep


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's own flags, and the algorithm with its flags.

    Without -- the algorithm's name divides them. Flags that only a sweep has may also follow it.
    """
    if "--" in arguments:
        end = arguments.index("--")
        return list(arguments[:end]), list(arguments[end + 1 :])
    end = 0
    while end < len(arguments) and arguments[end].startswith("-"):
        end += 1 if "=" in arguments[end] or arguments[end] in ("-h", "--help") else 2
    mine, trials = list(arguments[:end]), list(arguments[end:])
    if trials:
        own = {flag(field.name) for field in dataclasses.fields(Options)}
        mine += command_line.take(trials, own - {flag(name) for name in reader_of(trials[0]).flag_kinds})
    return mine, trials


def check_owner(logdir: Path) -> None:
    """Raises UserError if other users can write into a sweep's folder, or own a file there."""
    for path in (logdir, *logdir.iterdir()):
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
            raise UserError(
                f"other users can write {path} and could change what the sweep runs: use chown and chmod "
                "go-w on it, or give another --logdir."
            )


def _check_metric(metric: str, config: RLSettings) -> None:
    """Raises UserError if no progress.csv can have the metric. Metrics of updates are not checked."""
    columns = evaluation_columns(config.level_sets)
    if metric not in columns and metric.partition("/")[0] not in ("rollout", "train", "time"):
        raise UserError(
            f"--metric {metric} is not a column of progress.csv{nearest(metric, columns)}; use one such as "
            f"{columns[0]}, or one that begins with rollout/, train/ or time/."
        )


def _claim(logdir: Path, sweep: Sweep) -> None:
    """Takes the folder for this sweep. Raises UserError if it holds another one."""
    path = logdir / _PLAN_FILE
    if not path.exists():
        files.write(path, json.dumps(sweep.content(), indent=1))
    elif read_json(path) != sweep.content():
        raise UserError(f"{logdir} holds another sweep; give the same flags, or another --logdir.")


def _conclude(sweep: Sweep, outcomes: Sequence[Outcome]) -> int:
    """Shows the table and the best command.

    Raises TrainingError if trials failed, or none has the metric.
    """
    ranked = sorted(outcomes, key=lambda o: -float("inf") if o.value is None else o.value, reverse=True)
    names = list(sweep.trials[0])
    table = Table("trial", *names, sweep.metric, "env steps", "state", "run")
    for each in ranked:
        row = (each.name, *(_cell(each.settings[name]) for name in names), _cell(each.value))
        table.add_row(*row, f"{each.env_steps:,}", each.state, each.run.name)
    console().print(table)
    ended = [each for each in ranked if each.state in ("done", "ended early")]
    good = [each for each in ended if each.value is not None]
    if good:
        _show(f"best: {sweep.command(good[0].settings)}")
    failed = [
        f"{each.name} ({each.error or 'its process on Ray was killed'})"
        for each in outcomes
        if each not in ended
    ]
    if failed:
        raise TrainingError(f"{len(failed)} of {len(outcomes)} trials failed: {'; '.join(failed)}")
    if not good:
        raise TrainingError(f"no trial has the column {sweep.metric} in its progress.csv")
    return 0


class Watch:
    """Shows the trials while they run: a live table on a terminal, otherwise lines about changed trials.

    Args:
      trials: returns the present state of all trials.
      console: the output; None: stdout.
      interval: seconds between lines.
    """

    def __init__(
        self, trials: Callable[[], Sequence[Outcome]], console: Console | None = None, interval: float = 10.0
    ) -> None:
        self._trials, self._interval = trials, interval
        stdout: Any = Unbreakable(sys.stdout)
        self._console = console or Console(file=stdout, markup=False, emoji=False)
        self._ended = threading.Event()

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=1, transient=True
            )
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._lines, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._thread.join()

    def _table(self) -> Table:
        trials = self._trials()
        names = list(trials[0].settings)
        table = Table("trial", "state", *names, "env steps", "return")
        for each in trials:
            settings = (_cell(each.settings[name]) for name in names)
            row = (each.name, each.state, *settings, f"{each.env_steps:,}", _cell(each.episode_return))
            table.add_row(*row)
        return table

    def _lines(self) -> None:
        shown: dict[str, int] = {}
        while not self._ended.wait(self._interval):
            for each in self._trials():
                if each.env_steps > shown.get(each.name, 0):
                    shown[each.name] = each.env_steps
                    settings = ", ".join(f"{name} {_cell(value)}" for name, value in each.settings.items())
                    words = f"{each.env_steps:,} env steps, return {_cell(each.episode_return)}"
                    print(f"{each.name} ({settings}): {words}", file=self._console.file, flush=True)


def _cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)


def _show(line: str) -> None:
    tell(line, sys.stdout)


if __name__ == "__main__":
    endings.run(main)
