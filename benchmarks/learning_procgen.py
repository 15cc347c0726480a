"""python -m benchmarks.learning_procgen: what the algorithms come to on procgen, beside the published PPO.

Trains with the defaults, which for PPO are the published settings (train-procgen, easy, 200 levels), one
seed after another, or goes on with a run that was cut off; runs that are complete are only read, those that
are kept in `benchmarks/runs` among them (`--logdir benchmarks/runs`). The mean of the last 100 raw returns is
compared with that of the three published runs of train-procgen's PPO: at the same env steps, and in means
over the ten updates before, which do not depend on the luck of a hundred episodes. The means end where the
published curves become sparse. Where there are several seeds, their mean is judged.

    python -m benchmarks.learning_procgen --envs all

trains all 16 games, one after another. With `--flags="--level-replay" --logdir logs/levels` it trains them
with level replay. A stopped benchmark continues with the same command, and `--no-train` only reads the runs
that are there. The last table has the mean normalised returns over the games, on training levels and on
unseen levels, at a quarter of a million, half a million and a million env steps, beside those of the
published runs at the same env steps. One seed for each game is enough, because such a mean has little
noise: its standard error follows from the variances within the games. The published runs give the variance
of a game that has one seed.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import command, training
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import TrainingError, UserError
from tfrl.envs.published import RANGES, published_curve, score_range
from tfrl.envs.registry import games
from tfrl.reporting.runs import StoredRun, group

_MARKS = (500_000, 1_000_000)  # env steps
_MEANS_AT = (250_000, 500_000, 1_000_000)  # env steps of the means over games
_WINDOW = 10 * 64 * 256  # env steps of ten updates of the published runs
_DENSE = 1_015_808  # env steps up to which the published curves have every update
Curve = tuple[np.ndarray, np.ndarray]  # env steps and returns, both [P]


@dataclasses.dataclass(frozen=True)
class Options:
    """The training."""

    algorithms: str = "ppo"
    """Algorithms for images and discrete actions, with commas between."""
    envs: str = "fruitbot"
    """Games, with commas between; all: the 16 games."""
    total_steps: int = 1_000_000
    """Env steps."""
    seeds: str = "1"
    """Seeds with commas between, a run each; 1..3 is the same as 1,2,3."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the torso."""
    flags: str = ""
    """More flags of the trainer, in one text: --flags="--level-replay". Give them a --logdir of their own."""
    logdir: str = "logs/learning"
    """Folder of the runs."""
    train: bool = True
    """Train the runs that are missing; --no-train: only read those that are complete."""
    ranges: Literal["paper", "rliable"] = "paper"
    """Ranges of the normalised returns: the paper's, or those of train-procgen's code and rliable."""
    plot: str | None = None
    """A PNG of our curves and the published ones."""


def main(options: Options) -> None:
    """Trains, prints the tables, draws the plot."""
    seeds, experiments = command.seeds(options.seeds), _experiments(options)
    command.check_plot(options.plot)
    found: list[StoredRun] = []
    for algorithm, env, flags in experiments:
        of_seeds = training.train(
            flags, seeds, options.logdir, algorithm=algorithm, only_read=not options.train
        )
        if not of_seeds:
            continue
        Console().print(_compare(f"{env}, {algorithm}", env, [_curve(run) for run in of_seeds]))
        found += of_seeds
    if not found:
        raise UserError(f"{options.logdir} has no complete run of these; leave --no-train out.")
    Console().print(_ends(found))
    for algorithm in dict.fromkeys(run.config.algorithm for run in found):
        of_one = [run for run in found if run.config.algorithm == algorithm]
        Console().print(_means(algorithm, of_one, options.ranges))
    if options.plot:
        from tfrl.reporting import plots

        plots.learning_curves(group(found)).savefig(options.plot, dpi=120)


def _experiments(options: Options) -> list[tuple[str, str, list[str]]]:
    """Algorithm, game and flags of each. Raises UserError for what would fail, also after the training."""
    found = []
    envs = ",".join(games()) if options.envs == "all" else options.envs
    try:
        more = shlex.split(options.flags)
    except ValueError as error:
        raise UserError(f"--flags {options.flags!r} has no words: {error}.") from None
    for env in envs.split(","):
        for algorithm in options.algorithms.split(","):
            flags = ["--env", env.strip(), "--precision", options.precision, *more]
            flags += ["--total-steps", str(options.total_steps), "--eval-every-steps", str(_MEANS_AT[0])]
            config = settings.reader(algorithm.strip()).parse([*flags, "--logdir", options.logdir])
            if config.env not in games():
                raise UserError(
                    f"no curve of {config.env} was published; there are those of {', '.join(games())}."
                )
            found.append((config.algorithm, config.env, flags))
    return found


def _curve(run: StoredRun) -> Curve:
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


def _ends(found: Sequence[StoredRun]) -> Table:
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


# Means over games


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean of normalised returns over games, and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} \u00b1 {self.error:.3f}"


def over_games(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[Mean, Mean]:
    """The means over games of our scores and the published ones, with their standard errors.

    The error of a game's mean follows from the variance of its runs. If a game has a single run, the variance
    of the published runs takes its place.

    Args:
      ours, theirs: an array of scores, one a run, for each game; at least two published runs.
    """
    squares = []
    for mine, published in zip(ours, theirs, strict=True):
        spread = np.var(mine if len(mine) > 1 else published, ddof=1)
        squares.append((spread / len(mine), np.var(published, ddof=1) / len(published)))
    errors = np.sqrt(np.sum(squares, axis=0)) / len(squares)
    means = (float(np.mean([scores.mean() for scores in group])) for group in (ours, theirs))
    mine, published = (Mean(m, float(e)) for m, e in zip(means, errors, strict=True))
    return mine, published


def _means(algorithm: str, found: Sequence[StoredRun], ranges: str) -> Table:
    """A row for each number of env steps and level set, over the games of the runs of one algorithm."""
    by_game = {run.config.env: [r for r in found if r.config.env == run.config.env] for run in found}
    names = ("env steps", "levels", "published PPO", f"ours, {algorithm}", "difference", "")
    count = f"{len(by_game)} game{'' if len(by_game) == 1 else 's'}"
    title = f"mean normalised return over {count} \u00b1 standard error (ranges: {RANGES[ranges]})"
    table = Table(*names, title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    end = min(run.env_steps for run in found)
    for mark in [mark for mark in _MEANS_AT if mark <= end] or [end]:
        for level_set in ("train", "test"):
            scores = [_scores_at(mark, env, level_set, runs, ranges) for env, runs in by_game.items()]
            if any(pair is None for pair in scores):
                continue
            mine, published = over_games(*zip(*(pair for pair in scores if pair is not None), strict=True))
            difference = Mean(mine.value - published.value, float(np.hypot(mine.error, published.error)))
            low, high = difference.value + 2 * difference.error, difference.value - 2 * difference.error
            verdict = "below" if low < 0 else "above" if high > 0 else "within two errors"
            levels = {"train": "training", "test": "unseen"}[level_set]
            table.add_row(f"{mark:,}", levels, str(published), str(mine), str(difference), verdict)
    return table


def _scores_at(
    mark: int, env: str, level_set: str, found: Sequence[StoredRun], ranges: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Normalised returns of our runs and of the published ones; None without an evaluation there.

    While training, they are means over ten updates. On unseen levels, they are those of the first evaluation
    at `mark` env steps or later, and the published runs' last 100 episodes at the same env steps.
    """
    at, published = published_curve(env, level_set)
    ours, theirs = [], []
    for run in found:
        if level_set == "train":
            step = float(mark)
            ours.append(_window_mean(step, *_curve(run)))
            theirs.append([_window_mean(step, at, curve) for curve in published])
            continue
        steps, returns = run.evaluations(level_set)
        late = np.flatnonzero(steps >= mark)
        if not late.size or steps[late[0]] > mark + _WINDOW:
            return None
        ours.append(returns[late[0]])
        theirs.append([np.interp(steps[late[0]], at, curve) for curve in published])
    low, high = score_range(env, "easy", ranges) or (0.0, 1.0)
    mine, others = (np.array(x, np.float64) for x in (ours, np.mean(theirs, axis=0)))
    return (mine - low) / (high - low), (others - low) / (high - low)


if __name__ == "__main__":
    command.run(Options, main)
