"""python -m benchmarks.learning_procgen: what the algorithms come to on procgen, beside the published PPO.

Trains with the defaults, which for PPO are the published settings (train-procgen, easy, 200 levels), one
seed after another, or goes on with a run that was cut off; runs that are complete are only read, those that
are kept in `benchmarks/runs` among them (`--logdir benchmarks/runs`). The mean of the last 100 raw returns is
compared with that of the three published runs of train-procgen's PPO: at the same env steps, and in means
over the ten updates before, which do not depend on the luck of a hundred episodes. The means end where the
published curves become sparse. Where there are several seeds, their mean is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import command, training
from tfrl import config as settings
from tfrl.cli.errors import TrainingError, UserError
from tfrl.envs.published import published_curve
from tfrl.envs.registry import games
from tfrl.reporting.runs import Run, group

_MARKS = (500_000, 1_000_000)  # env steps
_WINDOW = 10 * 64 * 256  # env steps of ten updates of the published runs
_DENSE = 1_015_808  # env steps up to which the published curves have every update
Curve = tuple[np.ndarray, np.ndarray]  # env steps and returns, both [P]


@dataclasses.dataclass(frozen=True)
class Options:
    """The training."""

    algorithms: str = "ppo"
    """Algorithms for images and discrete actions, with commas between."""
    envs: str = "fruitbot"
    """Games, with commas between."""
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
    """Trains, prints the tables, draws the plot."""
    seeds, experiments = command.seeds(options.seeds), _experiments(options)
    command.check_plot(options.plot)
    found: list[Run] = []
    for algorithm, env, flags in experiments:
        of_seeds = training.train(flags, seeds, options.logdir, algorithm=algorithm)
        Console().print(_compare(f"{env}, {algorithm}", env, [_curve(run) for run in of_seeds]))
        found += of_seeds
    Console().print(_ends(found))
    if options.plot:
        from tfrl.reporting import plots

        plots.learning_curves(group(found)).savefig(options.plot, dpi=120)


def _experiments(options: Options) -> list[tuple[str, str, list[str]]]:
    """Algorithm, game and flags of each. Raises UserError for what would fail, also after the training."""
    found = []
    for env in options.envs.split(","):
        for algorithm in options.algorithms.split(","):
            flags = ["--env", env.strip(), "--precision", options.precision]
            flags += ["--total-steps", str(options.total_steps)]
            config = settings.reader(algorithm.strip()).parse([*flags, "--logdir", options.logdir])
            if config.env not in games():
                raise UserError(
                    f"no curve of {config.env} was published; there are those of {', '.join(games())}."
                )
            found.append((config.algorithm, config.env, flags))
    return found


def _curve(run: Run) -> Curve:
    """Of the updates after the first finished episode. Raises TrainingError where there is none."""
    at, returns = run.points("rollout/episode_return")
    if not len(at):
        raise TrainingError(f"no episode has ended in {run.path} yet; train for more --total-steps.")
    return at, returns


def _compare(title: str, env: str, curves: Sequence[Curve]) -> Table:
    """Our curves: every ten updates, at round numbers, and where the shortest ends."""
    at, published = published_curve(env, "train")
    end = min(steps[-1] for steps, _ in curves)
    windows = np.arange(_WINDOW, end, _WINDOW)
    columns = ("env steps", "published", "ours", "", "ten updates: published", "ours", "")
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
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


def _ends(found: Sequence[Run]) -> Table:
    """A row a run: its end while training, and its evaluations there on training and on unseen levels."""
    title = (
        f"mean return: over the last {_WINDOW:,} env steps while training, and of the evaluations at the end"
    )
    names = ("game", "algorithm", "seed", "env steps", "while training", "training levels", "unseen levels")
    table = Table(*names, title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for run in found:
        returns = [
            _window_mean(run.env_steps, *_curve(run)),
            run.final_return("train"),
            run.final_return("test"),
        ]
        about = (run.config.env, run.config.algorithm, str(run.config.seed), f"{run.env_steps:,}")
        table.add_row(*about, *(f"{value:.2f}" for value in returns))
    return table


if __name__ == "__main__":
    command.run(Options, main)
