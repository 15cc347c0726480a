"""python -m benchmarks.learning: our learning curve beside the published runs'.

Trains with the defaults, which are the published settings (train-procgen, easy, 200 levels), or goes on with
the run if it was cut off, and compares `rollout/episode_return`, the mean of the last 100 raw returns, with
that of the three published runs: at the same env steps, and in means over the ten updates before, which
do not depend on the luck of a hundred episodes. The means end where the published curves become sparse.
"""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Literal

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tfrl.envs.games import published_curve  # noqa: E402

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
    plot: Path | None = None
    """A PNG of our curve and the published ones."""


def main(options: Options) -> None:
    """Trains, prints the table, draws the plot."""
    name = f"{options.env}-{options.precision}" + (f"-seed{options.seed}" if options.seed != 1 else "")
    command = [sys.executable, "-m", "tfrl.ppo_procgen", "--env", options.env, "--seed", str(options.seed)]
    command += ["--total-steps", str(options.total_steps), "--precision", options.precision]
    command += ["--logdir", options.logdir, "--run-name", name, "--checkpoint-every", "1"]
    subprocess.run(command, check=True)
    steps, returns = _read(Path(options.logdir) / name / "progress.csv")
    Console().print(_compare(options.env, steps, returns))
    if options.plot:
        _plot(options, steps, returns)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Env steps and returns of the updates after the first finished episode, both [P]."""
    with path.open() as file:
        rows = [r for r in csv.DictReader(file) if r["rollout/episode_return"]]
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


def _plot(options: Options, steps: np.ndarray, returns: np.ndarray) -> None:
    at, published = published_curve(options.env, "train")
    shown = slice(0, np.searchsorted(at, steps[-1]) + 1)  # up to the first published point after our last
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    label = "published, 3 runs (train-procgen)"
    axes.fill_between(
        at[shown], published[:, shown].min(0), published[:, shown].max(0), color="0.8", label=label
    )
    axes.plot(at[shown], published[:, shown].mean(0), color="0.4", linestyle="--", label="their mean")
    axes.plot(steps, returns, color="black", label="tfrl, 1 run")
    axes.set(xlabel="env steps", ylabel="return, last 100 episodes", title=f"{options.env}, easy, 200 levels")
    axes.legend()
    figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Options))
