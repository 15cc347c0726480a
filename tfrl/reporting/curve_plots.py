"""Pictures of curves against env steps: returns, episode lengths, losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from tfrl.config.drac import AUGMENTATIONS, UCB
from tfrl.envs.published import published_curve
from tfrl.envs.registry import LEVEL_SETS, TRAIN, level_set_title
from tfrl.reporting import intervals
from tfrl.reporting.comparison import PUBLISHED, Group, variants
from tfrl.reporting.labels import run_names
from tfrl.reporting.plot_style import (
    GREY,
    color_of,
    dash_of,
    dot,
    legend,
    marker_of,
    panels,
    several_seeds,
    styled,
)
from tfrl.reporting.runs import Run, published_applies
from tfrl.run import files
from tfrl.run.folder import RESULTS_FILE
from tfrl.run.metrics import PROGRESS_FILE

_PUBLISHED_DASHES = {"train": "-", "test": (0, (2, 1.5))}  # of the grey curves, by level set
_PLAIN = "while training", "evaluation"  # of curves that are not all of games with levels


@styled
def learning_curves(groups: Sequence[Group]) -> Figure | None:
    """Draws episode return against env steps, a panel an env, with the published curves of the same task."""
    games = _by_game(groups)
    figure, axes = panels(len(games), width=4.6, height=3.1)
    names = variants(groups)
    for ax, ((env, mode), members) in zip(axes, games.items(), strict=False):
        end = max(run.env_steps for g in members for run in g.runs)
        for level_set in _published_level_sets(members):
            _published_curve(ax, env, level_set, end)
        for g in members:
            _own_curves(ax, g, names.index(g.label))
        ax.set_title(env if mode == "easy" else f"{env} ({mode})")
        ax.set_xlim(0, end * 1.03 or 1)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(5))
    figure.supxlabel("env steps")
    for ax in axes:
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("episode return (raw reward)")
    legend(figure, _curve_handles(groups, names))
    return figure


_OF_UPDATES = {
    "rollout/mean_reward": "training: mean reward of an env step",
    "rollout/longest_episode": "training: longest episode of an update (env steps)",
}


@styled
def learning_curve(run: Run) -> Figure:
    """Draws one run against env steps: what updates saw, and returns and episode lengths with evaluations.

    Four panels; the two of updates are left out for runs of earlier versions, which did not note it.
    """
    of_updates = {name: title for name, title in _OF_UPDATES.items() if name in run.progress}
    figure, axes = panels(len(of_updates) + 2, width=4.6, height=3.0, columns=2)
    figure.suptitle(f"{run.config.env}, seed {run.config.seed}", x=0.99, horizontalalignment="right")
    for ax, (name, title) in zip(axes, of_updates.items(), strict=False):
        ax.plot(*run.points(name), color=color_of(0))
        ax.set_title(title)
    returns, lengths = axes[-2:]
    returns.set_title("episode return (raw reward)")
    lengths.set_title("episode length (env steps)")
    for ax, name in ((returns, "return"), (lengths, "length")):
        ax.plot(*run.points(f"rollout/episode_{name}"), color=color_of(0), label="while training")
    for v, level_set in enumerate(reversed(run.config.level_sets), start=1):
        title = level_set_title(run.config.env, level_set)
        style = {"color": color_of(v), "marker": marker_of(v), "markersize": 4, "linestyle": dash_of(v)}
        _band(returns, run, level_set, color_of(v))
        label = title if title == "evaluation" else f"evaluation, {title}"
        returns.plot(*run.evaluations(level_set), label=label, **style)
        lengths.plot(*run.points(f"eval_{level_set}/episode_length"), **style)
    for ax in axes:
        ax.set_xlim(0, run.env_steps * 1.03 or 1)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel("env steps")
    band = [Patch(color="#CCCCCC", label="band: a deviation of its episodes")] if returns.collections else []
    legend(figure, returns.get_legend_handles_labels()[0] + band)
    return figure


def save_learning_curve(run: Run) -> Path:
    """Writes `plots/learning_curve.png` in the run's folder, unless it is there and newer than its progress.

    Returns its path. Raises OSError where it cannot be written.
    """
    path = run.path / "plots" / "learning_curve.png"
    if files.last_change([path]) <= files.last_change(run.path / n for n in (PROGRESS_FILE, RESULTS_FILE)):
        files.make_folder(path.parent)
        with files.replacing(path) as staged:
            learning_curve(run).savefig(staged)
    return path


def _band(ax: Axes, run: Run, level_set: str, color: str) -> None:
    """Draws a deviation of the episodes' returns on both sides of an evaluation's mean."""
    (at, mean), (there, deviation) = (
        run.points(f"eval_{level_set}/{name}") for name in ("return", "return_std")
    )
    if len(at) and np.array_equal(at, there):
        ax.fill_between(at, mean - deviation, mean + deviation, color=color, alpha=0.15, linewidth=0)


_OF_ALL_ALGORITHMS = {
    "rollout/episode_length": "episode length (env steps)",
    "time/env_steps_per_second": "throughput (env steps/s)",
}
_MOST_LINES = 6
_TITLE_WIDTH = 36  # characters that a panel has room for
_FEW_POINTS = 20  # a line of one point, of a single auxiliary phase say, would be nothing to see
_CHOICE = "train/augmentation"  # the place in AUGMENTATIONS of what a bandit chose


def _training_titles(runs: Sequence[Run]) -> dict[str, str]:
    """The metrics to draw, of those that any run has, by what the settings of each algorithm say of them."""
    found: dict[str, set[str]] = {}
    for run in runs:
        named = run.config.metric_titles
        for column in named or [name for name in run.progress if name.startswith("train/")]:
            found.setdefault(column, set()).update({named[column]} if named else ())
    titles = {column: _title(column, said) for column, said in found.items()}
    if any(map(_chooses, runs)):
        titles[_CHOICE] = "augmentation that UCB chose"
    titles |= _OF_ALL_ALGORITHMS
    known = {column for run in runs for column in titles if run.points(column)[0].size}
    return {column: title for column, title in titles.items() if column in known}


def _title(column: str, said: set[str]) -> str:
    """The title that algorithms give a metric, or its name, where none does or they do not agree."""
    if len(said) == 1:
        return next(iter(said))
    name = column.removeprefix("train/").replace("_", " ")
    return f"{name} (not the same in all runs)" if said else name


def _chooses(run: Run) -> bool:
    """True if a bandit chose the augmentation of each update."""
    return getattr(run.config, "augment", None) == UCB


@styled
def training(groups: Sequence[Group]) -> Figure | None:
    """Draws losses, KL, entropy and throughput against env steps: a line a run, by variant where many."""
    names, runs = variants(groups), [run for g in groups for run in g.runs]
    titles = _training_titles(runs)
    figure, axes = panels(len(titles), width=3.7, height=2.5, columns=3)
    end = max(run.env_steps for run in runs)
    if len(runs) > _MOST_LINES:  # no mean: runs of different games and lengths have none
        styles = [names.index(g.label) for g in groups for _ in g.runs]
        counts = [styles.count(v) for v in range(len(names))]
        labels = [n if k == 1 else f"{n}, {k} runs" for n, k in zip(names, counts, strict=True)]
    else:
        styles, labels = list(range(len(runs))), run_names(runs)
    for ax, (column, title) in zip(axes, titles.items(), strict=True):
        for run, v in zip(runs, styles, strict=True):
            if column != _CHOICE or _chooses(run):
                _metric(ax, *run.points(column), v, among=styles.count(v))
        if column == _CHOICE:
            _name_choices(ax)
        else:
            _leave_out_spikes(ax)
        ax.set_title(title if len(title) <= _TITLE_WIDTH else title.replace(" (", "\n(", 1))
        ax.set_xlim(0, end * 1.03)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    figure.supxlabel("env steps")
    lines = enumerate(labels)
    legend(
        figure, [Line2D([], [], color=color_of(v), linestyle=dash_of(v), label=label) for v, label in lines]
    )
    return figure


# Parts of panels


def _metric(ax: Axes, steps: np.ndarray, values: np.ndarray, v: int, *, among: int) -> None:
    """Draws a run's metric, weaker among many lines of its style; with markers where it has few points."""
    few = {"marker": marker_of(v), "markersize": 3} if len(steps) < _FEW_POINTS else {}
    weight = {"linewidth": 1.2 if among == 1 else 0.8, "alpha": max(0.3, min(1.0, 3 / among))}
    ax.plot(steps, values, color=color_of(v), linestyle=dash_of(v), **weight, **few)


def _leave_out_spikes(ax: Axes) -> None:
    """Ends the y axis where all but a hundredth of the values do, if the rest would flatten them."""
    values = np.concatenate([line.get_ydata() for line in ax.lines])
    low, high = np.nanquantile(values, [0.005, 0.995]) if np.isfinite(values).any() else (0.0, 0.0)
    bottom, top = ax.get_ylim()
    if top - bottom > 2 * (high - low) > 0:
        margin = 0.1 * (high - low)
        ax.set_ylim(max(bottom, low - margin), min(top, high + margin))


def _name_choices(ax: Axes) -> None:
    """Turns lines of places in AUGMENTATIONS into points beside each other, with the augmentations' names."""
    for k, line in enumerate(ax.lines):
        line.set_ydata(line.get_ydata() + 0.6 * ((k + 0.5) / len(ax.lines) - 0.5))
        line.set(linestyle="", marker="o", markersize=1.8, alpha=1)
    ax.set_yticks(range(len(AUGMENTATIONS)), [f"{name} {n}" for n, name in enumerate(AUGMENTATIONS)])
    ax.set_ylim(len(AUGMENTATIONS) - 0.5, -0.5)


def _own_curves(ax: Axes, g: Group, v: int) -> None:
    curves = [run.points("rollout/episode_return") for run in g.runs]
    steps, mean, low, high = intervals.over_seeds(curves)
    alone = {"marker": "."} if len(steps) == 1 else {}  # a line of one point would not be seen
    ax.plot(steps, mean, color=color_of(v), linestyle=dash_of(v), **alone)
    if len(g.runs) > 1:
        ax.fill_between(steps, low, high, color=color_of(v), alpha=0.18, linewidth=0)
        for curve in curves:
            ax.plot(*_beyond(curve, steps), color=color_of(v), linestyle=dash_of(v), linewidth=0.7)
    evaluations = [run.evaluations("test") for run in g.runs]
    steps, values = intervals.at_shared_steps(evaluations)
    marker = {"color": color_of(v), "marker": marker_of(v), "markerfacecolor": "white", "linestyle": ""}
    marker |= {"clip_on": False, "zorder": 4}
    mean = values.mean(axis=0)
    spread = np.stack([mean - values.min(0), values.max(0) - mean]) if len(g.runs) > 1 else None
    if len(steps):
        ax.errorbar(steps, mean, spread, markeredgewidth=1.5, capsize=2, **marker)
    for at, alone in evaluations:
        others = ~np.isin(at, steps)
        if others.any():  # unclipped, nothing at all would have no place in the layout
            ax.plot(at[others], alone[others], markersize=3.5, **marker)


def _beyond(curve: tuple[np.ndarray, np.ndarray], steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a run's curve with NaN where all seeds are, between `steps` [P], so that no line is drawn."""
    at, values = curve
    shared = (at > steps[0]) & (at < steps[-1]) if len(steps) else np.zeros(len(at), bool)
    return at, np.where(shared, np.nan, values)


def _published_curve(ax: Axes, env: str, level_set: str, end: float) -> None:
    steps, runs = published_curve(env, level_set)
    shown = slice(0, max(2, int(np.searchsorted(steps, end * 1.03, side="right"))))
    steps, runs = steps[shown], runs[:, shown]
    ax.fill_between(steps, runs.min(0), runs.max(0), color=GREY, alpha=0.22, linewidth=0)
    ax.plot(steps, runs.mean(0), color=GREY, linestyle=_PUBLISHED_DASHES[level_set], linewidth=1.3)


def _published_level_sets(groups: Sequence[Group]) -> list[str]:
    """The level sets on which the published curve of the same task begins before one of the groups ends."""
    ends = [
        (g.env, max(run.env_steps for run in g.runs)) for g in groups if published_applies(g.runs[0].config)
    ]
    return [s for s in LEVEL_SETS if any(published_curve(env, s)[0][0] <= end for env, end in ends)]


def _curve_handles(groups: Sequence[Group], names: Sequence[str]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    games = all(TRAIN in g.level_sets for g in groups)
    training, evaluated = ("training levels", "unseen levels (evaluation)") if games else _PLAIN
    for v, name in enumerate(names):
        line = Line2D([], [], color=color_of(v), linestyle=dash_of(v), label=f"{name}, {training}")
        handles += [line, dot(color_of(v), marker_of(v), f"{name}, {evaluated}", False)]
    published_env = next((g.env for g in groups if TRAIN in g.level_sets), "")
    for level_set in _published_level_sets(groups):
        label = f"{PUBLISHED}, {level_set_title(published_env, level_set)}"
        dash = _PUBLISHED_DASHES[level_set]
        handles.append(Line2D([], [], color=GREY, linestyle=dash, label=label))
    if several_seeds(groups) or len(handles) > 2 * len(names):
        handles.append(Patch(color="#CCCCCC", label="band: least to greatest seed"))
    if any(len({run.env_steps for run in g.runs}) > 1 for g in groups):
        thin = Line2D(
            [], [], color="black", linewidth=0.7, marker="o", markersize=3.5, markerfacecolor="white"
        )
        thin.set_label("thin line, small marker: one seed, where not all are")
        handles.append(thin)
    return handles


def _by_game(groups: Sequence[Group]) -> dict[tuple[str, str], list[Group]]:
    games: dict[tuple[str, str], list[Group]] = {}
    for g in groups:
        games.setdefault((g.env, g.mode), []).append(g)
    return games
