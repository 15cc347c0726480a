"""python -m tfrl.tune: search over any algorithm's settings with Ray Tune, a run folder for each trial.

The same command continues an interrupted sweep.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tfrl.algorithms import registry as settings
from tfrl.cli import endings, flags
from tfrl.cli.errors import TrainingError, UserError, how_to_install
from tfrl.cli.flags import COUNT, NATURAL, SEVERAL, Range, flag, nearest
from tfrl.cli.settings import expand_home
from tfrl.cli.streams import Unbreakable, tell
from tfrl.config.distributed import check_address
from tfrl.experience.episodes import evaluation_columns
from tfrl.library import command_of
from tfrl.remote import reach_other_machines
from tfrl.remote.trials import SUPERVISED, Sweep, TrialState, difference, outcome, plan, trial_name
from tfrl.run import files
from tfrl.run.folder import locked, read_json

_USAGE = "python -m tfrl.tune"
_EXAMPLE = f"{_USAGE} --grid lr=5e-4,1e-3 -- ppo --env CartPole-v1"
_SUMMARY = f"""Trains one algorithm with many settings and prints which are best: {_EXAMPLE}. --grid and
--sample may be given several times. The algorithm and its flags, for all trials, come last; a --
before them is optional."""
_PLAN_FILE = "sweep.json"
_ENDED = ("done", "ended early")
# The columns of updates begin with these; a run has some of them.
_GROUPS = ("rollout", "train", "time", "validation", "replay", "levels", "info")
_SUPERVISED_GROUPS = ("train", "time")


@dataclass(frozen=True)
class Options:
    """The sweep."""

    grid: SEVERAL = ()
    """NAME=a,b,c: trials with each of these values of a setting."""
    sample: SEVERAL = ()
    """NAME=uniform:a,b or loguniform:a,b or choice:a,b,c: draw a value of a setting for each trial."""
    scheduler: Literal["none", "asha", "pbt"] = "none"
    """asha: end poor trials early; pbt: give them good trials' weights. Both compare evaluations
    (--eval-every after --); asha also compares a --metric of the training, such as rollout/episode_return."""
    trials: Annotated[int, NATURAL] = 0
    """Trials of each point of the grid, each with its own drawn values. 0: 8 with --sample, otherwise 1."""
    parallel: Annotated[int, COUNT] = 1
    """Trials that run at the same time; they share the machine's cores, or those of --ray-address."""
    ray_address: str | None = None
    """The address of an existing Ray, or auto: the trials run on its nodes, which all see --logdir. None: the
    sweep starts its own Ray on this machine."""
    gpus_per_trial: Annotated[float, Range(0, 1024)] = 0.0
    """GPUs that Ray gives each trial, such as 1, 2, or 0.5 for two trials on one GPU. 0: a trial uses all
    GPUs that it sees."""
    metric: str | None = None
    """The column of progress.csv that ranks the trials; larger is better. None: eval_test/return, or
    test/accuracy for resnet, the supervised trainer."""
    seed: Annotated[int, NATURAL] = 1
    """Seed of the drawn values."""
    logdir: str = "logs/sweep"
    """The sweep's folder, with a folder for each trial."""


def main(arguments: Sequence[str]) -> int:
    """Runs or continues the sweep; returns the exit code."""
    options, sweep = _read(arguments)
    if not options.logdir or "\0" in options.logdir:
        raise UserError(f"--logdir must be a folder's path; got {options.logdir!r}.")
    logdir = Path(expand_home(options.logdir)).absolute()
    follows_length = False
    for index, trial in enumerate(sweep.trials):
        config = sweep.config(trial)
        follows_length |= getattr(config, "depends_on_length", False)
        _check_metric(sweep.metric, config)
        named = dataclasses.replace(config, logdir=str(logdir), run_name=trial_name(index))
        command_of(sweep.algorithm).check(named)
    if options.gpus_per_trial > 1 and options.gpus_per_trial % 1:
        raise UserError(f"--gpus-per-trial above 1 must be a whole number; got {options.gpus_per_trial:g}.")
    if logdir.is_dir():
        check_owner(logdir)
    check_address(options.ray_address)
    if options.ray_address is not None:
        reach_other_machines()
    try:
        from tfrl.remote import sweep as on_ray
    except ImportError as error:
        raise UserError(f"sweeps need Ray Tune and its packages ({error}): {how_to_install('ray')}") from None

    os.umask(os.umask(0) | 0o022)  # what a sweep makes passes `check_owner`
    files.make_folder(logdir)

    def outcomes() -> list[TrialState]:
        return [outcome(sweep, logdir, index) for index in range(len(sweep.trials))]

    with locked(logdir, does="sweeps", instead="--logdir"):
        _claim(logdir, sweep)
        _show(f"{len(sweep.trials)} trial(s), {options.parallel} at a time, in {logdir}")
        if sweep.scheduler == "pbt" and follows_length:
            _show(
                "warning: a schedule, such as that of the learning rate, begins anew in a trial that "
                "continues from another one's weights; --lr-schedule constant makes trials comparable"
            )
        stdout: Any = Unbreakable(sys.stdout)
        with live_table(sweep, outcomes, Console(file=stdout, markup=False, emoji=False)):
            stopped = on_ray.run(
                sweep,
                logdir,
                options.parallel,
                _show,
                address=options.ray_address,
                gpus=options.gpus_per_trial,
            )
        if stopped:
            _show("Stopped; the same command continues.")
            return endings.STOP_CODES[stopped]
        return _conclude(sweep, outcomes())


def _read(arguments: Sequence[str]) -> tuple[Options, Sweep]:
    """The sweep's own flags, and the sweep with its trials. Raises UserError."""
    mine, trials = _split(arguments)
    words, options = flags.parse(Options, mine, _USAGE, _SUMMARY)
    if words:
        raise UserError(f"{words[0]!r} is not a flag; usage: {_EXAMPLE}")
    if not trials:
        raise UserError(f"give an algorithm and its flags: {_EXAMPLE}")
    sweep = plan(
        trials[0],
        trials[1:],
        grids=options.grid,
        samples=options.sample,
        trials=options.trials or (8 if options.sample else 1),
        seed=options.seed,
        scheduler=options.scheduler,
        metric=options.metric or ("test/accuracy" if trials[0] == SUPERVISED else "eval_test/return"),
    )
    return options, sweep


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's own flags, and the algorithm with its flags.

    Without -- the algorithm's name divides them. Flags that only a sweep has may also follow it.
    """
    if "--" in arguments:
        end = arguments.index("--")
        return list(arguments[:end]), list(arguments[end + 1 :])
    end = flags.leading(arguments)
    mine, trials = list(arguments[:end]), list(arguments[end : end + 1])
    rest = list(arguments[end + 1 :])
    kinds = set() if not trials else settings.reader(trials[0]).flag_kinds.keys()
    own = {flag(field.name) for field in dataclasses.fields(Options) if field.name not in kinds}
    while rest:
        size = 1 if "=" in rest[0] else 2
        if rest[0].partition("=")[0] in own:
            mine += rest[:size]
            del rest[:size]
        else:
            trials.append(rest.pop(0))
    return mine, trials


def check_owner(logdir: Path) -> None:
    """Raises UserError if other users can write into a sweep's folder, or own a file there.

    Nothing in the folder is read or run before.
    """
    for path in (logdir, *logdir.iterdir()):
        found = path.lstat()
        writable = not stat.S_ISLNK(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o022
        if found.st_uid not in (0, os.geteuid()) or writable:
            raise UserError(
                f"other users can write {path} and could change what the sweep runs: use chown and chmod "
                "go-w on it, or give another --logdir."
            )


def live_table(sweep: Sweep, trials: Callable[[], Sequence[TrialState]], console: Console) -> Live:
    """Shows the table of the trials while they run, if the console is a terminal.

    Args:
      sweep: the sweep.
      trials: returns the present state of all trials.
      console: the output.
    """
    return Live(
        get_renderable=lambda: _table(sweep, trials()),
        console=console,
        auto_refresh=console.is_terminal,
        refresh_per_second=1,
        transient=True,
    )


def _check_metric(metric: str, config: Any) -> None:
    """Raises UserError if no progress.csv can have the metric. Metrics of updates are not checked."""
    supervised = config.algorithm == SUPERVISED
    columns = ("test/accuracy", "test/loss") if supervised else evaluation_columns(config.level_sets)
    others = _SUPERVISED_GROUPS if supervised else _GROUPS
    # A callback adds columns of any name.
    if metric in columns or metric.partition("/")[0] in others or config.callbacks:
        return
    begins = f"one that begins with {'/, '.join(others[:-1])}/ or {others[-1]}/"
    if not columns:
        raise UserError(f"--metric {metric} is not a column of a run without an env; use {begins}.")
    raise UserError(
        f"--metric {metric} is not a column of progress.csv{nearest(metric, columns)}; use one such as "
        f"{columns[0]}, or {begins}."
    )


def _claim(logdir: Path, sweep: Sweep) -> None:
    """Takes the folder for this sweep. Raises UserError if it holds another one."""
    path = logdir / _PLAN_FILE
    if not path.exists():
        files.write(path, json.dumps(sweep.content(), indent=1))
    elif (there := read_json(path)) != (here := sweep.content()):
        more = difference(there, here)
        raise UserError(f"{logdir} holds another sweep{more}; give the same flags, or another --logdir.")


def _conclude(sweep: Sweep, outcomes: Sequence[TrialState]) -> int:
    """Shows the table and the best command.

    Raises TrainingError if trials failed, or none has the metric.
    """
    # A trial that still waits was killed before it could say why.
    outcomes = [each if each.state in _ENDED else each._replace(state="failed") for each in outcomes]
    ranked = sorted(outcomes, key=lambda o: -float("inf") if o.value is None else o.value, reverse=True)
    Console().print(_table(sweep, ranked))
    ended = [each for each in ranked if each.state in _ENDED]
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


def _table(sweep: Sweep, trials: Sequence[TrialState]) -> Table:
    names, supervised = list(trials[0].settings), sweep.algorithm == SUPERVISED
    columns = ("images",) if supervised else ("return", settings.reader(sweep.algorithm).kind.counts)
    table = Table("trial", *names, sweep.metric, *columns, "state", "run")
    for each in trials:
        returns = () if supervised else (each.episode_return,)
        cells = (*(each.settings[name] for name in names), each.value, *returns)
        table.add_row(each.name, *map(_cell, cells), f"{each.env_steps:,}", each.state, each.run.name)
    return table


def _cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)


def _show(line: str) -> None:
    tell(line, sys.stdout)


if __name__ == "__main__":
    endings.run(main)
