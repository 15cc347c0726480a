"""python -m benchmarks.learning: our learning curves beside the published runs'.

Trains with the defaults, which are the published settings (train-procgen, easy, 200 levels), one seed after
another, or goes on with a run that was cut off, and compares `rollout/episode_return`, the mean of the last
100 raw returns, with that of the three published runs: at the same env steps, and in means over the ten
updates before, which do not depend on the luck of a hundred episodes. The means end where the published
curves become sparse. Where there are several seeds, their mean is judged.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.cli.errors import TrainingError, UserError
from tfrl.config import ppo
from tfrl.config.ppo import Config
from tfrl.envs.published import published_curve
from tfrl.envs.registry import games

_MARKS = (500_000, 1_000_000)  # env steps
_WINDOW = 10 * 64 * 256  # env steps of ten updates of the published runs
_DENSE = 1_015_808  # env steps up to which the published curves have every update


@dataclasses.dataclass(frozen=True)
class Options:
    """The training."""

    env: str = "fruitbot"
    """The game."""
    total_steps: int = 1_000_000
    """Env steps."""
    seeds: str = "1"
    """Seeds with commas between, a run each; 1..3 is the same as 1,2,3."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the torso."""
    logdir: str = "logs/learning"
    """Folder of the runs."""
    plot: str | None = None
    """A PNG of our curves and the published ones."""


def main(options: Options) -> None:
    """Trains, prints the table, draws the plot."""
    runs = [_settings(options, seed) for seed in command.seeds(options.seeds)]
    env = runs[0][0].env
    _check(env, options.plot)
    for _, flags in runs:
        command.finish([sys.executable, "-m", "tfrl.ppo_procgen", *flags])
    curves = [_read(run.run_dir / "progress.csv") for run, _ in runs]
    Console().print(_compare(env, curves))
    if options.plot:
        _plot(env, curves, options.plot)


def _settings(options: Options, seed: int) -> tuple[Config, list[str]]:
    """Of one run, and the flags that give them."""
    flags = ["--env", options.env, "--seed", str(seed), "--precision", options.precision]
    flags += ["--total-steps", str(options.total_steps), "--logdir", options.logdir]
    run = ppo.parse(flags)
    name = f"{run.env}-{run.precision}" + (f"-seed{seed}" if seed != 1 else "")
    return dataclasses.replace(run, run_name=name), [*flags, "--run-name", name, "--checkpoint-every", "1"]


def _check(env: str, plot: str | None) -> None:
    """Raises UserError for what would fail after the training."""
    if env not in games():
        raise UserError(f"no curve of {env} was published; there are those of {', '.join(games())}.")
    command.check_plot(plot)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Env steps and returns of the updates after the first finished episode, both [P]."""
    with path.open() as file:
        rows = [r for r in csv.DictReader(file) if r["rollout/episode_return"]]
    if not rows:
        raise TrainingError(f"no episode has ended in {path.parent} yet; train for more --total-steps.")
    columns = ("env_steps", "rollout/episode_return")
    return tuple(np.array([float(r[c]) for r in rows]) for c in columns)


def _compare(env: str, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Table:
    """Our curves (env steps, returns): every ten updates, at round numbers, and where the shortest ends."""
    at, published = published_curve(env, "train")
    end = min(steps[-1] for steps, _ in curves)
    windows = np.arange(_WINDOW, end, _WINDOW)
    table = Table("env steps", "published runs", "ours", "", "ten updates: published", "ours", "")
    for step in sorted({*windows, *(s for s in _MARKS if s < end), end}):
        theirs = [np.interp(step, at, run) for run in published]
        here = _verdict(theirs, [np.interp(step, *curve) for curve in curves])
        means = ("-",) * 3
        if step <= _DENSE:
            theirs = [_window_mean(step, at, run) for run in published]
            means = _verdict(theirs, [_window_mean(step, *curve) for curve in curves])
        table.add_row(f"{step:,.0f}", *here, *means)
    return table


def _window_mean(step: float, at: np.ndarray, returns: np.ndarray) -> float:
    """Mean of the points [P] in the window that ends at an env step."""
    return float(returns[(at > step - _WINDOW) & (at <= step)].mean())


def _verdict(theirs: Sequence[float], ours: Sequence[float]) -> tuple[str, str, str]:
    """The published runs' range, the mean (and range) of ours, and where the mean lies."""
    low, high, mean = min(theirs), max(theirs), float(np.mean(ours))
    where = "above" if mean > high else "within" if mean >= low else "below"
    each = f" ({min(ours):.2f} ... {max(ours):.2f})" if len(ours) > 1 else ""
    return f"{low:.2f} ... {high:.2f}", f"{mean:.2f}{each}", where


def _plot(env: str, curves: Sequence[tuple[np.ndarray, np.ndarray]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at, published = published_curve(env, "train")
    end = max(steps[-1] for steps, _ in curves)
    shown = slice(0, np.searchsorted(at, end) + 1)  # up to the first published point after our last
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    label = "published, 3 runs (train-procgen)"
    axes.fill_between(
        at[shown], published[:, shown].min(0), published[:, shown].max(0), color="0.8", label=label
    )
    axes.plot(at[shown], published[:, shown].mean(0), color="0.4", linestyle="--", label="their mean")
    for k, (steps, returns) in enumerate(curves, start=1):
        axes.plot(steps, returns, label=f"tfrl, run {k}" if len(curves) > 1 else "tfrl, 1 run")
    axes.set(xlabel="env steps", ylabel="return, last 100 episodes", title=f"{env}, easy, 200 levels")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    command.run(Options, main)
