"""Plots of runs: curves against env steps, and final scores. They are readable in black and white."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from tfrl.envs.published import published_curve
from tfrl.envs.registry import LEVEL_SETS, TRAIN, level_set_title
from tfrl.reporting import scores as statistics
from tfrl.reporting.runs import Group, StoredRun, over_games, read_levels, run_names, steps_title, variants
from tfrl.run import files
from tfrl.run.folder import RESULTS_FILE
from tfrl.run.metrics import PROGRESS_FILE

PUBLISHED = "train-procgen's PPO (published)"
"""The name of the published curves and scores."""
GREY = "#8A8A8A"
"""The colour of published results."""
# Okabe and Ito's colours, from dark to light. Each variant also has its own marker and dash; after six, the
# colours repeat with the next marker and dash.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2, 2, 2)), (0, (2, 2)))
_PUBLISHED_DASHES = {"train": "-", "test": (0, (2, 1.5))}
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "figure.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a run may be called 2$^$
}
"""The style of all pictures. Nothing here uses pyplot, so the process keeps its own style and backend."""
_OF_ALL_ALGORITHMS = {
    "rollout/episode_length": "episode length (env steps)",
    "time/env_steps_per_second": "throughput (env steps/s)",
}
_MAX_LINES = 6  # that have a style each
_FEW_POINTS = 20  # with markers, because a line of one point is invisible


# Style


def line_style(variant: int) -> dict[str, Any]:
    """The colour and the dash of a variant's lines, by its number."""
    place = variant + variant // len(_COLORS)
    return {"color": _COLORS[variant % len(_COLORS)], "linestyle": _DASHES[place % len(_DASHES)]}


def marker_style(variant: int) -> dict[str, Any]:
    """The colour and the marker of a variant's points."""
    place = variant + variant // len(_COLORS)
    marker = _MARKERS[place % len(_MARKERS)]
    return {"color": _COLORS[variant % len(_COLORS)], "marker": marker, "linestyle": ""}


_PUBLISHED_POINT = {"color": GREY, "marker": "d", "linestyle": ""}
_PUBLISHED_POINT["label"] = f"{PUBLISHED} at as many env steps"
_BAND, _DEVIATION = "band: least to greatest seed", "band: a deviation of its episodes"
_HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 1.4}


def _legend(figure: Figure, title: str = "") -> None:
    """Puts a legend above all panels, in as many columns as fit, and makes the figure higher for it.

    The title is to the right of the legend.
    """
    if title:
        figure.suptitle(title, x=0.99, horizontalalignment="right")
    room = figure.get_figwidth() - 0.11 * len(title)  # inches
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(textwrap.fill(label, 90), handle)
    lengths = [max(map(len, label.splitlines())) for label in handles]
    for columns in (4, 3, 2, 1):
        parts = [part for part in np.array_split(lengths, columns) if part.size]  # as matplotlib fills them
        if sum(0.65 + 0.071 * part.max() for part in parts) < room:
            break
    figure.set_figheight(figure.get_figheight() + 0.22 * max(0, len(parts[0]) - 3))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)


def _panels(
    count: int, runs: Iterable[StoredRun], *, width: float, height: float, columns: int
) -> tuple[Figure, list[Axes]]:
    """A new figure with panels over the runs' steps, of this size in inches, at most `columns` in a row."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    # A single panel gets more room for its legend.
    size = (max(7.6, width * columns), height * rows + 1.1 + (1.0 if count == 1 else 0.0))
    figure = Figure(figsize=size)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    for ax in axes.flat[:count]:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    figure.supxlabel(steps_title(runs))
    return figure, list(axes.flat[:count])


# Curves


@matplotlib.rc_context(STYLE)
def learning_curves(groups: Sequence[Group]) -> Figure | None:
    """Draws episode return against env steps, one panel for each env, with the published curves."""
    games: dict[tuple[str, str], list[Group]] = {}
    for g in groups:
        games.setdefault((g.env, g.mode), []).append(g)
    figure, axes = _panels(
        len(games), [run for g in groups for run in g.runs], width=4.6, height=3.1, columns=4
    )
    names = variants(groups)
    levels = all(TRAIN in g.level_sets for g in groups)
    titles = ("training levels", "unseen levels (evaluation)") if levels else ("while training", "evaluation")
    for ax, ((env, mode), members) in zip(axes, games.items(), strict=True):
        end = max(run.env_steps for g in members for run in g.runs)
        for level_set in LEVEL_SETS if any(g.reproduces_published for g in members) else ():
            steps, runs = published_curve(env, level_set)
            if steps[0] > end:
                continue
            shown = slice(0, max(2, int(np.searchsorted(steps, end * 1.03, side="right"))))
            steps, runs = steps[shown], runs[:, shown]
            style: dict[str, Any] = {"linestyle": _PUBLISHED_DASHES[level_set], "linewidth": 1.3}
            style["label"] = f"{PUBLISHED}, {level_set_title(env, level_set)}"
            ax.fill_between(steps, runs.min(0), runs.max(0), color=GREY, alpha=0.22, linewidth=0, label=_BAND)
            ax.plot(steps, runs.mean(0), color=GREY, **style)
        for g in members:
            _draw_seeds(ax, g, names.index(g.label), titles)
        _draw_data(ax, [run for g in members for run in g.runs])
        ax.set_title(env if mode == "easy" else f"{env} ({mode})")
        ax.set_xlim(0, end * 1.03 or 1)
        if (place := ax.get_subplotspec()) is not None and place.is_first_col():
            ax.set_ylabel("episode return (raw reward)")
    _legend(figure)
    return figure


def _draw_data(ax: Axes, runs: Sequence[StoredRun]) -> None:
    """Draws the mean return of the recorded episodes that runs learn from, and a band of a deviation."""
    sets = {found["name"]: found for run in runs if (found := run.data) is not None}
    for number, (name, found) in enumerate(sets.items()):
        mean, deviation = found["return_mean"], found["return_std"]
        style: dict[str, Any] = {"color": GREY, "linewidth": 1.3}
        style["linestyle"] = _DASHES[number % len(_DASHES)]
        ax.axhline(mean, label=f"recorded episodes of {name}", **style)
        ax.axhspan(mean - deviation, mean + deviation, color=GREY, alpha=0.12, linewidth=0)


def _draw_seeds(ax: Axes, g: Group, v: int, titles: tuple[str, str]) -> None:
    """Draws mean and band of a group's seeds, and their evaluations with bars to the extreme seeds."""
    training, evaluated = (f"{g.label}, {title}" for title in titles)
    curves = [run.points("rollout/episode_return") for run in g.runs]
    steps, mean, low, high = statistics.over_seeds(curves)
    ax.plot(steps, mean, marker="." if len(steps) == 1 else "", label=training, **line_style(v))
    if len(g.runs) > 1:
        ax.fill_between(steps, low, high, color=line_style(v)["color"], alpha=0.18, linewidth=0, label=_BAND)
    if len({run.env_steps for run in g.runs}) > 1:
        for curve in curves:
            ax.plot(*curve, label="thin line: one seed", **line_style(v) | {"linewidth": 0.6})
    evaluations = [run.evaluations("test") for run in g.runs]
    steps, values = statistics.at_shared_steps(evaluations)
    style = marker_style(v) | _HOLLOW | {"clip_on": False, "zorder": 4}
    if len(steps):
        mean = values.mean(axis=0)
        spread = [mean - values.min(axis=0), values.max(axis=0) - mean] if len(g.runs) > 1 else None
        ax.errorbar(steps, mean, spread, capsize=2, label=evaluated, **style)
    for at, alone in evaluations:
        others = ~np.isin(at, steps)
        if others.any():  # the layout fails for an empty, unclipped line
            ax.plot(at[others], alone[others], markersize=3.5, **style)


@matplotlib.rc_context(STYLE)
def learning_curve(run: StoredRun) -> Figure:
    """Draws one run: mean reward, longest episode, returns and episode lengths against env steps."""
    panels = {
        "rollout/mean_reward": "training: mean reward of an env step",
        "rollout/longest_episode": "training: longest episode of an update (env steps)",
        "rollout/episode_return": "episode return (raw reward)",
        "rollout/episode_length": "episode length (env steps)",
    }
    if run.data is not None:  # there are no training episodes
        losses = [name for name in run.progress if name.startswith(("train/", "validation/"))]
        of_episodes = list(panels.items())[2:]
        panels = {name: name.replace("/", ": ").replace("_", " ") for name in losses[:2]}
        panels |= dict(of_episodes)
    figure, axes = _panels(len(panels), [run], width=4.6, height=3.0, columns=2)
    for ax, (name, title) in zip(axes, panels.items(), strict=True):
        ax.plot(*run.points(name), label="while training", **line_style(0))
        ax.set(title=title, xlim=(0, run.env_steps * 1.03 or 1))
    returns, lengths = axes[-2:]
    if run.data is not None:
        _draw_data(returns, [run])
    for v, level_set in enumerate(reversed(run.config.level_sets), start=1):
        title = level_set_title(run.config.env, level_set)
        label = title if title == "evaluation" else f"evaluation, {title}"
        style = marker_style(v) | line_style(v) | {"markersize": 4, "label": label}
        returns.plot(*run.evaluations(level_set), **style)
        lengths.plot(*run.points(f"eval_{level_set}/episode_length"), **style)
        at, mean = run.points(f"eval_{level_set}/return")
        there, deviation = run.points(f"eval_{level_set}/return_std")
        if len(at) > 1 and np.array_equal(at, there):
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0, "label": _DEVIATION}
            returns.fill_between(at, mean - deviation, mean + deviation, **band)
    _legend(figure, f"{run.config.env}, seed {run.config.seed}")
    return figure


def save_learning_curve(run: StoredRun) -> Path:
    """Writes `plots/learning_curve.png` in the run's folder, unless a newer one than the progress exists.

    Returns its path. Raises OSError.
    """
    path = run.path / "plots" / "learning_curve.png"
    if files.last_change([path]) <= files.last_change(run.path / n for n in (PROGRESS_FILE, RESULTS_FILE)):
        files.make_folder(path.parent)
        with files.replacing(path) as staged:
            learning_curve(run).savefig(staged)
    return path


@matplotlib.rc_context(STYLE)
def training(groups: Sequence[Group]) -> Figure | None:
    """Draws losses, KL, entropy and throughput against env steps, one line for each run."""
    runs, labels = [run for g in groups for run in g.runs], [g.label for g in groups for _ in g.runs]
    if len(runs) <= _MAX_LINES:
        labels = run_names(runs)
    counts = Counter(labels)
    places = {label: v for v, label in enumerate(counts)}
    names = {label: label if count == 1 else f"{label}, {count} runs" for label, count in counts.items()}
    titles = {
        name: _OF_ALL_ALGORITHMS.get(name, name.removeprefix("train/").replace("_", " "))
        for run in runs
        for name in (*run.progress, *_OF_ALL_ALGORITHMS)
        if name.startswith("train/") or name in _OF_ALL_ALGORITHMS
        if any(other.points(name)[0].size for other in runs)
    }
    figure, axes = _panels(len(titles), runs, width=3.7, height=2.5, columns=3)
    end = max(run.env_steps for run in runs)
    for ax, (column, title) in zip(axes, titles.items(), strict=True):
        for run, label in zip(runs, labels, strict=True):
            weight = max(0.3, min(1.0, 3 / counts[label]))  # a variant of many runs is thin
            style = line_style(places[label]) | {"linewidth": 0.6 + 0.6 * weight, "alpha": weight}
            style["label"] = names[label]
            steps, values = run.points(column)
            ax.plot(steps, values, marker="." if len(steps) < _FEW_POINTS else "None", **style)
        _leave_out_spikes(ax)
        ax.set_title(title)
        ax.set_xlim(0, end * 1.03)
    _legend(figure)
    return figure


def _leave_out_spikes(ax: Axes) -> None:
    """Leaves the most extreme hundredth of values out of the y axis if it would flatten the rest."""
    values = np.concatenate([line.get_ydata() for line in ax.lines])
    low, high = np.quantile(values, [0.005, 0.995])
    bottom, top = ax.get_ylim()
    if top - bottom > 2 * (high - low) > 0:
        margin = 0.1 * (high - low)
        ax.set_ylim(max(bottom, low - margin), min(top, high + margin))


# Recorded data


@matplotlib.rc_context(STYLE)
def histogram(values: np.ndarray, title: str) -> Figure:
    """Draws how often numbers fall into each of up to 40 equal ranges, with their mean."""
    figure = Figure(figsize=(6.4, 3.4))
    ax = figure.subplots()
    ax.hist(values, bins=min(40, max(5, len(values) // 5)), color=line_style(0)["color"])
    ax.axvline(values.mean(), label=f"mean {values.mean():.2f}", **line_style(1))
    ax.set(title=title, xlabel="return of an episode (raw reward)", ylabel="episodes")
    ax.legend()
    return figure


# Final scores


@matplotlib.rc_context(STYLE)
def final_scores(groups: Sequence[Group]) -> Figure | None:
    """Draws final normalised scores on unseen levels by game, with seeds, intervals and the IQM."""
    names, shared = variants(groups), over_games(groups, ["test"])
    groups = [g for g in groups if g.scores("test").size]
    if not groups:
        return None
    # Label, variant, statistic, scores and published scores: first by game, then over games.
    rows: list[tuple[str, int, statistics.Statistic, list[np.ndarray], list[np.ndarray]]] = []
    for g in groups:
        published = [found["test"] for found in [g.published_scores()] if found]
        label = _row_label(g.env, g.label, groups)
        rows.append((label, names.index(g.label), statistics.mean, [g.scores("test")], published))
    for name in variants(shared) if len({g.env for g in shared}) > 1 else ():
        members = [g for g in shared if g.label == name]
        scores, found = [g.scores("test") for g in members], [g.published_scores() for g in members]
        published = [of_game["test"] for of_game in found] if all(found) else []
        label = _row_label("IQM over games", name, groups)
        rows.append((label, names.index(name), statistics.iqm, scores, published))
    figure, ax = _rows_of_scores([label for label, *_ in rows])
    figure.supxlabel("normalised score on unseen levels (0: no useful play, 1: perfect play)")
    text = "mean over seeds" if any(len(g.runs) > 1 for g in groups) else "one seed"
    for y, (_, v, statistic, scores, published) in enumerate(rows):
        style = marker_style(v) | {"label": f"{names[v]}, {text}"}
        _draw_interval(ax, y + 0.12, scores, statistic, style)
        if published:
            _draw_interval(ax, y - 0.2, published, statistic, _PUBLISHED_POINT)
    if len(rows) > len(groups):
        ax.axhline(len(groups) - 0.5, color="black", linewidth=0.8)
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    _legend(figure)
    return figure


@matplotlib.rc_context(STYLE)
def level_gap(groups: Sequence[Group]) -> Figure | None:
    """Draws final normalised scores on training and on unseen levels, and their distance, by game.

    None if no group has both: where training plays all levels, no level is unseen.
    """
    names = variants(groups)
    groups = [g for g in groups if g.config.has_unseen_levels and all(g.scores(s).size for s in LEVEL_SETS)]
    if not groups:
        return None
    figure, ax = _rows_of_scores([_row_label(g.env, g.label, groups) for g in groups])
    for y, g in enumerate(groups):
        style = marker_style(names.index(g.label)) | {"label": g.label}
        drawn = [(y + 0.12, {s: g.scores(s) for s in LEVEL_SETS}, style)]
        if published := g.published_scores():
            drawn.append((y - 0.2, published, _PUBLISHED_POINT))
        for height, of_sets, style in drawn:
            train, test = (float(of_sets[s].mean()) for s in LEVEL_SETS)
            ax.plot([train, test], [height, height], color=style["color"], linewidth=1.4, zorder=2)
            for place, further, title in ((train, {}, "training levels"), (test, _HOLLOW, "unseen levels")):
                label = {"label": f"{style['label']}, {title}"}
                ax.plot(place, height, markersize=7, **style | further | label)
        gap = g.scores("train").mean() - g.scores("test").mean()
        text = f"gap {round(gap, 2) + 0.0:+.2f}"  # no -0.00
        ax.text(1.01, y, text, transform=ax.get_yaxis_transform(), verticalalignment="center")
    figure.supxlabel("normalised score (0: no useful play, 1: perfect play); mean over seeds")
    ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
    _legend(figure)
    return figure


@matplotlib.rc_context(STYLE)
def performance_profiles(groups: Sequence[Group]) -> Figure | None:
    """Draws the share of runs above each normalised score, on training and on unseen levels.

    None unless each variant has at least `scores.ENOUGH` runs.
    """
    order, groups = variants(groups), over_games(groups, LEVEL_SETS)
    counts = {name: sum(len(g.scores("test")) for g in groups if g.label == name) for name in order}
    places = {name: v for v, name in enumerate(order) if counts[name] >= statistics.ENOUGH}
    groups = [g for g in groups if g.label in places]
    if not groups:
        return None
    # Each game once, however many variants it has.
    games = {(g.env, g.mode): g.published_scores() for g in reversed(groups)}
    published: dict[str, list[np.ndarray]] = {
        s: [found[s] for found in games.values()] if all(games.values()) else [] for s in LEVEL_SETS
    }
    every = np.concatenate([g.scores(s) for g in groups for s in LEVEL_SETS] + sum(published.values(), []))
    least, most = min(0.0, float(every.min())), max(0.05, float(every.max()))
    margin = 0.05 * (most - least)
    thresholds = np.linspace(least - margin, most + margin, 201)
    figure = Figure(figsize=(9.2, 4.2))
    for ax, level_set in zip(figure.subplots(1, 2, sharey=True), LEVEL_SETS, strict=True):
        if published[level_set]:
            share = statistics.performance_profile(published[level_set], thresholds)
            label = _PUBLISHED_POINT["label"]
            ax.step(thresholds, share, color=GREY, linewidth=2.6, where="post", label=label)
        for name, v in places.items():
            style, scores = line_style(v), [g.scores(level_set) for g in groups if g.label == name]
            share = statistics.performance_profile(scores, thresholds)
            ax.step(thresholds, share, where="post", label=f"{name}, {counts[name]} runs", **style)
            low, high = statistics.profile_band(scores, thresholds)
            if np.isfinite(low).all():
                band = {"alpha": 0.18, "linewidth": 0, "label": "band: 95% stratified bootstrap interval"}
                ax.fill_between(thresholds, low, high, step="post", color=style["color"], **band)
        ax.set(title=level_set_title(groups[0].env, level_set), xlabel="normalised score \u03c4")
        ax.set_ylim(-0.02, 1.02)
    figure.axes[0].set_ylabel("share of runs with a score above \u03c4")
    _legend(figure)
    return figure


def _rows_of_scores(labels: Sequence[str]) -> tuple[Figure, Axes]:
    """A new figure with a row for each label, from the top."""
    figure = Figure(figsize=(8.2, 1.7 + 0.48 * len(labels)))
    ax = figure.subplots()
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    return figure, ax


def _draw_interval(
    ax: Axes, y: float, scores: list[np.ndarray], statistic: statistics.Statistic, style: dict[str, Any]
) -> None:
    """Draws a statistic with its bootstrap interval, and a tick for each run of a single game."""
    low, high = statistics.interval_of_runs(scores, statistic)
    ax.plot(statistic(np.concatenate(scores)), y, markersize=7, **style)
    label = "95% stratified bootstrap interval" if np.isfinite(low) else None
    ax.plot([low, high], [y, y], color=style["color"], linewidth=1.4, label=label)
    if len(scores) == 1 and len(scores[0]) > 1:
        seeds = {"color": style["color"], "markersize": 9, "label": "one seed"}
        ax.plot(scores[0], np.full(len(scores[0]), y), "|", **seeds)


def _row_label(name: str, variant: str, groups: Sequence[Group]) -> str:
    return name if len(variants(groups)) == 1 else f"{name}\n{variant}"


# Levels


@matplotlib.rc_context(STYLE)
def level_scores(groups: Sequence[Group]) -> Figure | None:
    """Draws the scores of level replay and the episodes of each level, a panel for the first run of a group.

    None if no run has level replay.
    """
    found = [(g, levels) for g in groups if (levels := read_levels(g.runs[0].path)) is not None]
    if not found:
        return None
    columns = min(3, len(found))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(max(7.6, 4.6 * columns), 3.2 * rows + 0.6))
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(found) :]:
        ax.set_visible(False)
    for ax, (g, levels) in zip(axes.flat, found, strict=False):
        scores = np.where(levels["seen"] > 0, levels["score"], np.nan)  # last in the order
        order = np.argsort(-scores, kind="stable")
        place = np.arange(1, len(order) + 1)
        ax.plot(place, scores[order], color=_COLORS[0], label="score: mean |advantage|")
        ax.set_title(f"{g.env}, {g.label}, seed {g.runs[0].config.seed}")
        of_episodes = ax.twinx()
        of_episodes.grid(visible=False)
        of_episodes.plot(place, levels["episodes"][order], ".", color=_COLORS[1], label="episodes (right)")
    figure.supxlabel("levels, from the highest score to the lowest; then those that were not seen")
    _legend(figure)
    return figure
