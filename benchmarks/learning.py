"""python -m benchmarks.learning: our learning curve beside the published runs'.

Trains with the defaults, which are the published settings (train-procgen, easy, 200 levels), or goes on with
the run if it was cut off, and compares `rollout/episode_return`, the mean of the last 100 raw returns, with
that of the three published runs: at the same env steps, and in means over the ten updates before, which
do not depend on the luck of a hundred episodes. The means end where the published curves become sparse.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import sys
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl import config
from tfrl.config import Config
from tfrl.envs.games import games, published_curve
from tfrl.errors import TrainingError, UserError

_MARKS = (500_000, 1_000_000)  # env steps
_WINDOW = 10 * 64 * 256  # env steps of ten updates of the published runs
_DENSE = 1_015_808  # env steps up to which the published curves have every update


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train."""

    env: str = "fruitbot"
    """The game."""
    total_steps: int = 1_000_000
    """Env steps."""
    seed: int = 1
    """Of the run."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the torso."""
    logdir: str = "logs/learning"
    """Where the run's folder is."""
    plot: str | None = None
    """A PNG of our curve and the published ones."""


def main(options: Options) -> None:
    """Trains, prints the table, draws the plot."""
    flags = ["--env", options.env, "--seed", str(options.seed), "--precision", options.precision]
    flags += ["--total-steps", str(options.total_steps), "--logdir", options.logdir]
    run = config.parse(flags)
    name = f"{run.env}-{run.precision}" + (f"-seed{run.seed}" if run.seed != 1 else "")
    run = dataclasses.replace(run, run_name=name)
    _check(run, options.plot)
    flags += ["--run-name", name, "--checkpoint-every", "1"]
    command.finish([sys.executable, "-m", "tfrl.ppo_procgen", *flags])
    steps, returns = _read(run.run_dir / "progress.csv")
    Console().print(_compare(run.env, steps, returns))
    if options.plot:
        _plot(run.env, steps, returns, options.plot)


def _check(run: Config, plot: str | None) -> None:
    """Raises UserError for what would fail after the training."""
    if run.env not in games():
        raise UserError(f"no curve of {run.env} was published; there are those of {', '.join(games())}.")
    if plot is None:
        return
    if not plot.endswith(".png") or Path(plot).is_dir():
        raise UserError(f"--plot must be the name of a PNG file; got {plot!r}.")
    if not os.access(Path(plot).parent, os.W_OK):
        raise UserError(f"--plot {plot} cannot be written: {Path(plot).parent} is no folder to write in.")


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Env steps and returns of the updates after the first finished episode, both [P]."""
    with path.open() as file:
        rows = [r for r in csv.DictReader(file) if r["rollout/episode_return"]]
    if not rows:
        raise TrainingError(f"no episode has ended in {path.parent} yet; train for more --total-steps.")
    columns = ("env_steps", "rollout/episode_return")
    return tuple(np.array([float(r[c]) for r in rows]) for c in columns)


def _compare(env: str, steps: np.ndarray, returns: np.ndarray) -> Table:
    """Every ten updates, at the round numbers, and at our end."""
    at, published = published_curve(env, "train")
    windows = np.arange(_WINDOW, steps[-1], _WINDOW)
    table = Table("env steps", "published runs", "this run", "", "ten updates: published", "this run", "")
    for step in sorted({*windows, *(s for s in _MARKS if s < steps[-1]), steps[-1]}):
        here = _verdict([np.interp(step, at, run) for run in published], np.interp(step, steps, returns))
        means = ("-",) * 3
        if step <= _DENSE:
            theirs = [_window_mean(step, at, run) for run in published]
            means = _verdict(theirs, _window_mean(step, steps, returns))
        table.add_row(f"{step:,.0f}", *here, *means)
    return table


def _window_mean(step: float, at: np.ndarray, returns: np.ndarray) -> float:
    """Mean of the points [P] in the window that ends at an env step."""
    return float(returns[(at > step - _WINDOW) & (at <= step)].mean())


def _verdict(theirs: list[float], ours: float) -> tuple[str, str, str]:
    """The published runs' range, our return, and where it lies."""
    low, high = min(theirs), max(theirs)
    where = "above" if ours > high else "within" if ours >= low else "below"
    return f"{low:.2f} ... {high:.2f}", f"{ours:.2f}", where


def _plot(env: str, steps: np.ndarray, returns: np.ndarray, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at, published = published_curve(env, "train")
    shown = slice(0, np.searchsorted(at, steps[-1]) + 1)  # up to the first published point after our last
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    label = "published, 3 runs (train-procgen)"
    axes.fill_between(
        at[shown], published[:, shown].min(0), published[:, shown].max(0), color="0.8", label=label
    )
    axes.plot(at[shown], published[:, shown].mean(0), color="0.4", linestyle="--", label="their mean")
    axes.plot(steps, returns, color="black", label="tfrl, 1 run")
    axes.set(xlabel="env steps", ylabel="return, last 100 episodes", title=f"{env}, easy, 200 levels")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    command.run(Options, main)
