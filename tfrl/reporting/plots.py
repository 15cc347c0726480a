"""The report's pictures: matplotlib figures that can be told apart in black and white."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from tfrl.envs.published import published_curve
from tfrl.envs.registry import LEVEL_SETS, TRAIN, level_set_title
from tfrl.reporting import intervals
from tfrl.reporting.comparison import Group, published_scores, variants
from tfrl.reporting.runs import Run, published_applies
from tfrl.run import files
from tfrl.run.folder import RESULTS_FILE
from tfrl.run.metrics import PROGRESS_FILE

# Okabe and Ito's colours, from dark to light; each variant has a marker and a dash of its own as well.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2, 2, 2)), (0, (2, 2)))
_GREY = "#8A8A8A"
_PUBLISHED_DASHES = {"train": "-", "test": (0, (2, 1.5))}  # of the grey curves, by level set
_PLAIN = "while training", "evaluation"  # of curves that are not all of games with levels
_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 110,
}


def styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Draws under this module's matplotlib style, without changing the process's or leaving it a figure."""

    def drawing(*args: object) -> Figure | None:
        with plt.rc_context(_STYLE):
            figure = draw(*args)
        if figure is not None:
            plt.close(figure)  # pyplot would hold it for ever; it can still be saved
        return figure

    return drawing


@styled
def learning_curves(groups: Sequence[Group]) -> Figure | None:
    """Draws episode return against env steps, a panel an env, with the published curves of the same task."""
    games = _by_game(groups)
    figure, axes = _panels(len(games), width=4.6, height=3.1)
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
    figure.supylabel("episode return (raw reward)")
    _legend(figure, _curve_handles(groups, names))
    return figure


@styled
def learning_curve(run: Run) -> Figure:
    """Draws one run's returns and episode lengths against env steps, while training and in evaluations."""
    config = run.config
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.6))
    for ax, name in zip(axes, ("return", "length"), strict=True):
        ax.plot(*run.points(f"rollout/episode_{name}"), color=_color(0), label="while training")
        for v, level_set in enumerate(reversed(config.level_sets), start=1):
            title = level_set_title(config.env, level_set)
            style = {"color": _color(v), "marker": _marker(v), "markersize": 4, "linestyle": _dash(v)}
            if name == "length":
                ax.plot(*run.points(f"eval_{level_set}/episode_length"), **style)
                continue
            _band(ax, run, level_set, _color(v))
            label = title if title == "evaluation" else f"evaluation, {title}"
            ax.plot(*run.evaluations(level_set), label=label, **style)
        what = "episode return (raw reward)" if name == "return" else "episode length (env steps)"
        ax.set_title(f"{config.env}, seed {config.seed}: {what}")
        ax.set_xlim(0, run.env_steps * 1.03 or 1)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel("env steps")
    _legend(figure, axes[0].get_legend_handles_labels()[0])
    return figure


def save_learning_curve(run: Run) -> Path:
    """Writes `plots/learning_curve.png` in the run's folder, unless it is there and newer than its progress.

    Returns its path. Raises OSError where it cannot be written.
    """
    path = run.path / "plots" / "learning_curve.png"
    sources = [run.path / name for name in (PROGRESS_FILE, RESULTS_FILE)]
    newest = max((file.stat().st_mtime for file in sources if file.exists()), default=0.0)
    if not path.exists() or path.stat().st_mtime <= newest:
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


@styled
def level_gap(groups: Sequence[Group]) -> Figure | None:
    """Draws final normalised scores on training and on unseen levels, and how far apart they are, by game.

    None where no group has both: where training plays all levels, none are unseen.
    """
    groups = [g for g in groups if all(g.scores(s).size for s in LEVEL_SETS)]
    groups = [g for g in groups if g.runs[0].config.has_unseen_levels]
    if not groups:
        return None
    figure, ax = plt.subplots(figsize=(8.2, 1.5 + 0.5 * len(groups)))
    names = variants(groups)
    for y, g in enumerate(groups):
        published = published_scores(g)
        if published:
            _dumbbell(ax, y - 0.2, published, _GREY, "d", size=5)
        scores = {s: g.scores(s) for s in LEVEL_SETS}
        v = names.index(g.label)
        _dumbbell(ax, y + 0.12, scores, _color(v), _marker(v), size=8)
        gap = scores["train"].mean() - scores["test"].mean()
        ax.annotate(
            f"gap {round(gap, 2) + 0.0:+.2f}",  # no -0.00
            (1.0, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    _game_axis(ax, groups, names)
    ax.set_xlabel("normalised score (0: no useful play, 1: perfect play); mean over seeds")
    handles = [_dot(_color(v), _marker(v), f"{name}, training levels") for v, name in enumerate(names)]
    handles += [_dot(_color(v), _marker(v), f"{name}, unseen levels", False) for v, name in enumerate(names)]
    handles += _published_dots(groups)
    _legend(figure, handles)
    return figure


@styled
def final_scores(groups: Sequence[Group]) -> Figure | None:
    """Draws final normalised scores on unseen levels by game, each seed, bootstrap intervals and the IQM."""
    groups = [g for g in groups if g.scores("test").size]
    if not groups:
        return None
    names = variants(groups)
    figure, ax = plt.subplots(figsize=(8.2, 1.7 + 0.45 * (len(groups) + len(names))))
    ax.set_xlabel("normalised score on unseen levels (0: no useful play, 1: perfect play)")
    for y, g in enumerate(groups):
        published = published_scores(g)
        if published:
            _interval(ax, y - 0.2, [published["test"]], intervals.mean, _GREY, "d")
        v = names.index(g.label)
        _interval(ax, y + 0.12, [g.scores("test")], intervals.mean, _color(v), _marker(v))
    _game_axis(ax, groups, names)
    if len({g.env for g in groups}) > 1:
        _over_games(ax, groups, names)
    text = "mean over seeds" if _several_seeds(groups) else "one seed"
    handles = [_dot(_color(v), _marker(v), f"{name}, {text}") for v, name in enumerate(names)]
    if _several_seeds(groups):
        handles += [Line2D([], [], color="black", linewidth=1.4, label="95% stratified bootstrap interval")]
        handles += [_tick("one seed")]
    if any(map(published_scores, groups)):
        handles += [_dot(_GREY, "d", "train-procgen (published) at as many env steps")]
    _legend(figure, handles)
    return figure


@styled
def performance_profiles(groups: Sequence[Group]) -> Figure | None:
    """Draws the share of runs above each normalised score, on training and on unseen levels."""
    groups = [g for g in groups if all(g.scores(s).size for s in LEVEL_SETS)]
    if not groups:
        return None
    names = variants(groups)
    every = np.concatenate([g.scores(s) for g in groups for s in LEVEL_SETS])
    ends = min(0.0, float(every.min()) - 0.02), max(1.0, float(every.max()) + 0.05)
    thresholds = np.linspace(*ends, 201)
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.6), sharey=True)
    for ax, level_set in zip(axes, LEVEL_SETS, strict=True):
        published = [p[level_set] for p in map(published_scores, groups) if p]
        if published:
            share = intervals.performance_profile(published, thresholds)
            ax.step(thresholds, share, color=_GREY, linewidth=2.6, where="post")
        for v, name in enumerate(names):
            scores = [g.scores(level_set) for g in groups if g.label == name]
            share = intervals.performance_profile(scores, thresholds)
            ax.step(thresholds, share, color=_color(v), linestyle=_dash(v), where="post")
            if max(map(len, scores)) > 1:
                low, high = intervals.profile_band(scores, thresholds)
                ax.fill_between(thresholds, low, high, step="post", color=_color(v), alpha=0.18, linewidth=0)
        ax.set_title(level_set_title(groups[0].env, level_set))
        ax.set_xlabel("normalised score \u03c4")
        ax.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("share of runs with a score above \u03c4")
    handles = [Line2D([], [], color=_color(v), linestyle=_dash(v), label=n) for v, n in enumerate(names)]
    if _several_seeds(groups):
        handles.append(Patch(color="#BBBBBB", label="95% stratified bootstrap interval"))
    if any(map(published_scores, groups)):
        label = "train-procgen (published) at as many env steps"
        handles.append(Line2D([], [], color=_GREY, linewidth=2.6, label=label))
    _legend(figure, handles)
    return figure


_OF_ALL_ALGORITHMS = {
    "rollout/episode_length": "episode length (env steps)",
    "time/env_steps_per_second": "throughput (env steps/s)",
}
_MOST_LINES = 6


def _training_titles(runs: Sequence[Run]) -> dict[str, str]:
    """The metrics to draw, by what the settings of each algorithm say of them."""
    titles: dict[str, str] = {}
    for run in runs:
        of_run = run.config.metric_titles or {
            name: name.removeprefix("train/").replace("_", " ")
            for name in run.progress
            if name.startswith("train/")
        }
        for column, title in of_run.items():
            if titles.setdefault(column, title) != title:
                titles[column] = f"{title.partition(' (')[0]} (not the same in all runs)"
    return titles | _OF_ALL_ALGORITHMS


@styled
def training(groups: Sequence[Group]) -> Figure | None:
    """Draws losses, KL, entropy and throughput against env steps: a line a run, by variant where many."""
    names, runs = variants(groups), [run for g in groups for run in g.runs]
    titles = _training_titles(runs)
    figure, axes = _panels(len(titles), width=3.7, height=2.5, columns=3)
    end = max(run.env_steps for run in runs)
    if len(runs) > _MOST_LINES:  # no mean: runs of different games and lengths have none
        styles = [names.index(g.label) for g in groups for _ in g.runs]
        labels = [f"{name}, a line for each of {styles.count(v)}" for v, name in enumerate(names)]
        width = {"linewidth": 0.7, "alpha": max(0.25, min(0.6, 6 / len(runs)))}
    else:
        styles, labels, width = range(len(runs)), [run.name for run in runs], {"linewidth": 1.2}
    for ax, (column, title) in zip(axes, titles.items(), strict=True):
        for run, v in zip(runs, styles, strict=True):
            ax.plot(*run.points(column), color=_color(v), linestyle=_dash(v), **width)
        ax.set_title(title)
        ax.set_xlim(0, end * 1.03)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    figure.supxlabel("env steps")
    lines = enumerate(labels)
    _legend(figure, [Line2D([], [], color=_color(v), linestyle=_dash(v), label=label) for v, label in lines])
    return figure


# Parts of panels


def _own_curves(ax: Axes, g: Group, v: int) -> None:
    curves = [run.points("rollout/episode_return") for run in g.runs]
    steps, mean, low, high = intervals.over_seeds(curves)
    ax.plot(steps, mean, color=_color(v), linestyle=_dash(v))
    if len(g.runs) > 1:
        ax.fill_between(steps, low, high, color=_color(v), alpha=0.18, linewidth=0)
        for alone in curves:
            ax.plot(*_beyond(alone, steps), color=_color(v), linestyle=_dash(v), linewidth=0.7)
    evaluations = [run.evaluations("test") for run in g.runs]
    steps, values = intervals.at_shared_steps(evaluations)
    marker = {"color": _color(v), "marker": _marker(v), "markerfacecolor": "white", "linestyle": ""}
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
    ax.fill_between(steps, runs.min(0), runs.max(0), color=_GREY, alpha=0.22, linewidth=0)
    ax.plot(steps, runs.mean(0), color=_GREY, linestyle=_PUBLISHED_DASHES[level_set], linewidth=1.3)


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
        line = Line2D([], [], color=_color(v), linestyle=_dash(v), label=f"{name}, {training}")
        handles += [line, _dot(_color(v), _marker(v), f"{name}, {evaluated}", False)]
    published_env = next((g.env for g in groups if TRAIN in g.level_sets), "")
    for level_set in _published_level_sets(groups):
        label = f"train-procgen (published), {level_set_title(published_env, level_set)}"
        dash = _PUBLISHED_DASHES[level_set]
        handles.append(Line2D([], [], color=_GREY, linestyle=dash, label=label))
    if _several_seeds(groups) or len(handles) > 2 * len(names):
        handles.append(Patch(color="#CCCCCC", label="band: least to greatest seed"))
    if any(len({run.env_steps for run in g.runs}) > 1 for g in groups):
        thin = Line2D(
            [], [], color="black", linewidth=0.7, marker="o", markersize=3.5, markerfacecolor="white"
        )
        thin.set_label("thin line, small marker: one seed, where not all are")
        handles.append(thin)
    return handles


def _over_games(ax: Axes, groups: Sequence[Group], names: Sequence[str]) -> None:
    """Draws the interquartile mean over the games below them, a row a variant."""
    labels = [label.get_text() for label in ax.get_yticklabels()]
    for v, name in enumerate(names):
        y = len(groups) + v + 0.3
        members = [g for g in groups if g.label == name]
        published = [p["test"] for p in map(published_scores, members) if p]
        if len(published) == len(members):
            _interval(ax, y - 0.2, published, intervals.iqm, _GREY, "d")
        _interval(ax, y + 0.12, [g.scores("test") for g in members], intervals.iqm, _color(v), _marker(v))
        labels.append("IQM over games" if len(names) == 1 else f"IQM over games\n{name}")
    ax.axhline(len(groups) - 0.35, color="black", linewidth=0.8)
    ax.set_yticks([*range(len(groups)), *(len(groups) + v + 0.3 for v in range(len(names)))], labels)
    ax.set_ylim(len(groups) + len(names) - 0.1, -0.6)


def _interval(
    ax: Axes, y: float, scores: Sequence[np.ndarray], statistic: intervals.Statistic, color: str, marker: str
) -> None:
    """Draws a statistic with its bootstrap interval, and a tick for each run of a single game."""
    low, high = intervals.stratified_bootstrap(scores, statistic)
    ax.plot([low, high], [y, y], color=color, linewidth=1.4)
    ax.plot(statistic(intervals.pooled(scores)), y, color=color, marker=marker, markersize=7, linestyle="")
    if len(scores) == 1 and len(scores[0]) > 1:
        ax.plot(scores[0], np.full(len(scores[0]), y), "|", color=color, markersize=9)


def _dumbbell(
    ax: Axes, y: float, scores: dict[str, np.ndarray], color: str, marker: str, *, size: float
) -> None:
    ends = [float(scores[s].mean()) for s in LEVEL_SETS]
    ax.plot(ends, [y, y], color=color, linewidth=1.4, zorder=2)
    for x, face in zip(ends, (color, "white"), strict=True):
        ax.plot(x, y, marker=marker, color=color, markerfacecolor=face, markersize=size, markeredgewidth=1.4)


def _game_axis(ax: Axes, groups: Sequence[Group], names: Sequence[str]) -> None:
    labels = [g.env if len(names) == 1 else f"{g.env}\n{g.label}" for g in groups]
    ax.set_yticks(range(len(groups)), labels)
    ax.set_ylim(len(groups) - 0.4, -0.6)
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    ax.grid(axis="y", visible=False)


def _published_dots(groups: Sequence[Group]) -> list[Line2D]:
    if not any(map(published_scores, groups)):
        return []
    name = "train-procgen (published) at as many env steps"
    return [
        _dot(_GREY, "d", f"{name}, training levels"),
        _dot(_GREY, "d", f"{name}, unseen levels", False),
    ]


def _dot(color: str, marker: str, label: str, filled: bool = True) -> Line2D:
    style = {"color": color, "marker": marker, "markerfacecolor": color if filled else "white"}
    return Line2D([], [], markeredgewidth=1.4, linestyle="", label=label, **style)


def _tick(label: str) -> Line2D:
    return Line2D([], [], color="black", marker="|", markersize=9, linestyle="", label=label)


def _panels(count: int, *, width: float, height: float, columns: int = 4) -> tuple[Figure, list[Axes]]:
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    # A single panel gets the room that its legend needs.
    size = (max(7.6, width * columns), height * rows + 1.1 + (1.0 if count == 1 else 0.0))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    return figure, list(axes.flat[:count])


def _legend(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    columns = 2 if figure.get_figwidth() < 10 else 4
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns)


def _by_game(groups: Sequence[Group]) -> dict[tuple[str, str], list[Group]]:
    games: dict[tuple[str, str], list[Group]] = {}
    for g in groups:
        games.setdefault((g.env, g.mode), []).append(g)
    return games


def _several_seeds(groups: Sequence[Group]) -> bool:
    return any(len(g.runs) > 1 for g in groups)


def _color(variant: int) -> str:
    return _COLORS[variant % len(_COLORS)]


def _marker(variant: int) -> str:
    return _MARKERS[variant % len(_MARKERS)]


def _dash(variant: int) -> str | tuple[int, tuple[float, ...]]:
    return _DASHES[variant % len(_DASHES)]
