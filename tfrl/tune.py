"""python -m tfrl.tune: search over any algorithm's settings with Ray Tune, a run folder each trial.

What is done stays and what was cut off goes on, so the same command finishes an interrupted sweep.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from rich.table import Table

from tfrl.cli import command_line, endings, signals
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import nearest
from tfrl.cli.settings import COUNT, NATURAL, check_ranges, expand_home
from tfrl.cli.streams import console, tell
from tfrl.config.actors import how_to_install_ray
from tfrl.config.sweep import Sweep, plan
from tfrl.evaluation.levels import evaluation_columns
from tfrl.reporting.sweep import PLOT_FILE, cell, plot
from tfrl.run import files, lock
from tfrl.run.metrics import PROGRESS_FILE

if TYPE_CHECKING:
    from tfrl.remote.trial import Outcome

_USAGE = "python -m tfrl.tune"
_EXAMPLE = f"{_USAGE} --grid lr=5e-4,1e-3 -- ppo --env CartPole-v1"
_SUMMARY = f"""Trains one algorithm with many settings and tells which are best: {_EXAMPLE}. --grid and
--sample may be given several times. What stands after -- are an algorithm and the flags of all its trials."""
_PLAN_FILE = "sweep.yaml"
_REPEATED = ("--grid", "--sample")


@dataclass(frozen=True)
class Options:
    """The sweep."""

    grid: str | None = None
    """NAME=a,b,c: trials with each of these values."""
    sample: str | None = None
    """NAME=uniform:a,b or loguniform:a,b or choice:a,b,c: values that are drawn."""
    scheduler: Literal["none", "asha", "pbt"] = "none"
    """The way that trials are compared as they go: asha ends poor ones early, pbt has them go on from good
    ones' weights, with changed settings. Both need --eval-every after the --."""
    trials: int = 0
    """Trials of each point of the grid, where settings are drawn; 0: 8, or 1 without --sample."""
    parallel: int = 1
    """Trials side by side, which share the machine's cores."""
    metric: str = "eval_test/return"
    """The column of progress.csv that tells how good a trial is: the larger, the better."""
    seed: int = 1
    """Decides the values that are drawn."""
    logdir: str = "logs/sweep"
    """The sweep's folder, with a folder for each trial."""


def main(arguments: Sequence[str]) -> int:
    """Runs the sweep, or goes on with it; the exit code."""
    options, sweep = _read(arguments)
    logdir = Path(expand_home(options.logdir)).absolute()
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"sweeps need Ray, which is not installed: {how_to_install_ray()}")
    from tfrl.remote import sweep as on_ray  # which imports Ray Tune, of which packages may be missing

    _check_writable(logdir)
    with lock.locked(logdir, does="sweeps", instead="--logdir"):
        _claim(logdir, sweep)
        _show(f"{len(sweep.trials)} trial(s), {options.parallel} at a time, in {logdir}")
        outcomes, stopped = on_ray.run(sweep, logdir, options.parallel, _show)
        if stopped:
            _show("Stopped; the same command goes on.")
            return signals.STOP_CODES[stopped]
        return _conclude(sweep, outcomes, logdir, on_ray.command_of)


def _read(arguments: Sequence[str]) -> tuple[Options, Sweep]:
    """The flags before the --, and the sweep that they and those after it describe. Raises UserError."""
    mine = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    repeated = {name: _take(mine, name) for name in _REPEATED}
    words, options = command_line.parse(Options, mine, _USAGE, _SUMMARY)
    if words:
        raise UserError(f"{words[0]!r} is not a flag; usage: {_EXAMPLE}")
    if "--" not in arguments or arguments[-1] == "--":
        raise UserError(f"an algorithm and its flags are to stand after --: {_EXAMPLE}")
    check_ranges(options, {"trials": NATURAL, "parallel": COUNT, "seed": NATURAL})
    algorithm, *flags = arguments[arguments.index("--") + 1 :]
    sweep = plan(
        algorithm,
        flags,
        grids=repeated["--grid"],
        samples=repeated["--sample"],
        trials=options.trials or (8 if repeated["--sample"] else 1),
        seed=options.seed,
        scheduler=options.scheduler,
        metric=options.metric,
    )
    _check_metric(sweep)
    return options, sweep


def _check_metric(sweep: Sweep) -> None:
    """Raises UserError where no progress.csv can have the metric; of updates' metrics, runs will tell."""
    for config in map(sweep.config, sweep.trials):
        columns = evaluation_columns(config.level_sets)
        if sweep.metric in columns or sweep.metric.partition("/")[0] in ("rollout", "train", "time"):
            continue
        raise UserError(
            f"--metric {sweep.metric} is no column of progress.csv{nearest(sweep.metric, columns)}; "
            f"evaluations of {config.env} have {columns[0]} and its like, updates those under rollout/, "
            "train/ and time/."
        )


def _take(arguments: list[str], name: str) -> list[str]:
    """Removes a flag wherever it stands; its values."""
    values = []
    rest, tokens = [], iter(arguments)
    for token in tokens:
        if token == name:
            values.append(next(tokens, ""))
        elif token.startswith(f"{name}="):
            values.append(token.removeprefix(f"{name}="))
        else:
            rest.append(token)
    arguments[:] = rest
    return values


def _check_writable(logdir: Path) -> None:
    """Makes the sweep's folder. Raises UserError where it cannot be, or cannot be written in."""
    try:
        files.make_folder(logdir)
        with tempfile.TemporaryDirectory(dir=logdir, prefix=".tfrl-"):
            pass
    except OSError as error:
        raise UserError(f"cannot write in {logdir}: {files.reason(error)}.") from None


def _claim(logdir: Path, sweep: Sweep) -> None:
    """Takes the folder for this sweep. Raises UserError where it holds another one."""
    path, content = logdir / _PLAN_FILE, sweep.content()
    try:
        if not path.exists():
            files.write(path, yaml.safe_dump(content, sort_keys=False))
        elif yaml.safe_load(path.read_text(encoding="utf-8")) != content:
            raise UserError(f"{logdir} holds another sweep; give the same flags, or another --logdir.")
    except (ValueError, yaml.YAMLError):
        raise UserError(f"{path} is damaged; restore it, or give another --logdir.") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {files.reason(error)}.") from None


def _conclude(sweep: Sweep, outcomes: Sequence[Outcome], logdir: Path, command_of: Callable[..., str]) -> int:
    """Shows the table, the best command and where the plot is.

    Raises TrainingError if trials failed, or none has the metric.
    """
    ranked = sorted(outcomes, key=lambda o: -float("inf") if o.value is None else o.value, reverse=True)
    names = list(sweep.trials[0])
    table = Table("trial", *names, sweep.metric, "env steps", "run")
    for each in ranked:
        row = (each.name, *(cell(each.settings[name]) for name in names), cell(each.value))
        table.add_row(*row, f"{each.env_steps:,}", each.run.name if each.error is None else "failed")
    console().print(table)
    good = [each for each in ranked if each.value is not None and each.error is None]
    if good:
        plot([(each.settings, each.value) for each in good], sweep.metric, logdir / PLOT_FILE)
        _show(f"plot: {logdir / PLOT_FILE}")
        _show(f"best: {command_of(sweep, good[0].settings)}")
    failed = [f"{each.name} ({each.error})" for each in outcomes if each.error is not None]
    if failed:
        raise TrainingError(f"{len(failed)} of {len(outcomes)} trials failed: {'; '.join(failed)}")
    if not good:
        raise TrainingError(
            f"no trial has the column {sweep.metric}{_hint(sweep, outcomes)} in its progress.csv"
        )
    return 0


def _hint(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    text = files.read_text(outcomes[0].run / PROGRESS_FILE) or ""
    return nearest(sweep.metric, text.partition("\n")[0].split(","))


def _show(line: str) -> None:
    tell(line, sys.stdout)


if __name__ == "__main__":
    endings.run(main)
