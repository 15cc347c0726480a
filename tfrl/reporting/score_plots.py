"""Pictures of final scores: by game, on training and on unseen levels, and over all games."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tfrl.envs.registry import LEVEL_SETS, level_set_title
from tfrl.reporting import intervals
from tfrl.reporting.comparison import (
    PUBLISHED,
    Group,
    over_games,
    published_of_games,
    published_scores,
    variants,
)
from tfrl.reporting.plot_style import (
    GREY,
    color_of,
    dash_of,
    dot,
    legend,
    marker_of,
    several_seeds,
    styled,
    tick,
)


@styled
def level_gap(groups: Sequence[Group]) -> Figure | None:
    """Draws final normalised scores on training and on unseen levels, and how far apart they are, by game.

    None where no group has both: where training plays all levels, none are unseen.
    """
    places = _places(groups)
    groups = [g for g in groups if all(g.scores(s).size for s in LEVEL_SETS)]
    groups = [g for g in groups if g.runs[0].config.has_unseen_levels]
    if not groups:
        return None
    figure, ax = plt.subplots(figsize=(8.2, 1.5 + 0.5 * len(groups)))
    names = variants(groups)
    for y, g in enumerate(groups):
        published = published_scores(g)
        if published:
            _dumbbell(ax, y - 0.2, published, GREY, "d", size=5)
        scores = {s: g.scores(s) for s in LEVEL_SETS}
        v = places[g.label]
        _dumbbell(ax, y + 0.12, scores, color_of(v), marker_of(v), size=8)
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
    styles = {name: (color_of(places[name]), marker_of(places[name])) for name in names}
    handles = [dot(*style, f"{name}, training levels") for name, style in styles.items()]
    handles += [dot(*style, f"{name}, unseen levels", False) for name, style in styles.items()]
    handles += _published_dots(groups)
    legend(figure, handles)
    return figure


@styled
def final_scores(groups: Sequence[Group]) -> Figure | None:
    """Draws final normalised scores on unseen levels by game, each seed, bootstrap intervals and the IQM."""
    places = _places(groups)
    groups = [g for g in groups if g.scores("test").size]
    if not groups:
        return None
    names = variants(groups)
    figure, ax = plt.subplots(figsize=(8.2, 1.7 + 0.45 * (len(groups) + len(names))))
    ax.set_xlabel("normalised score on unseen levels (0: no useful play, 1: perfect play)")
    for y, g in enumerate(groups):
        published = published_scores(g)
        if published:
            _interval(ax, y - 0.2, [published["test"]], intervals.mean, GREY, "d")
        v = places[g.label]
        _interval(ax, y + 0.12, [g.scores("test")], intervals.mean, color_of(v), marker_of(v))
    _game_axis(ax, groups, names)
    if len({g.env for g in over_games(groups, ["test"])}) > 1:
        _over_games(ax, groups, places)
    text = "mean over seeds" if several_seeds(groups) else "one seed"
    handles = [dot(color_of(places[n]), marker_of(places[n]), f"{n}, {text}") for n in names]
    if several_seeds(groups):
        handles += [Line2D([], [], color="black", linewidth=1.4, label="95% stratified bootstrap interval")]
        handles += [tick("one seed")]
    if any(map(published_scores, groups)):
        handles += [dot(GREY, "d", f"{PUBLISHED} at as many env steps")]
    legend(figure, handles)
    return figure


@styled
def performance_profiles(groups: Sequence[Group]) -> Figure | None:
    """Draws the share of runs above each normalised score, on training and on unseen levels."""
    places, groups = _places(groups), over_games(groups, LEVEL_SETS)
    if not groups:
        return None
    styles = {name: (color_of(places[name]), dash_of(places[name])) for name in variants(groups)}
    published = {level_set: published_of_games(groups, level_set) for level_set in LEVEL_SETS}
    every = np.concatenate([g.scores(s) for g in groups for s in LEVEL_SETS] + sum(published.values(), []))
    least, most = min(0.0, float(every.min())), max(0.05, float(every.max()))
    margin = 0.05 * (most - least)
    thresholds = np.linspace(least - margin, most + margin, 201)
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.6), sharey=True)
    has_bands = False
    for ax, level_set in zip(axes, LEVEL_SETS, strict=True):
        if published[level_set]:
            share = intervals.performance_profile(published[level_set], thresholds)
            ax.step(thresholds, share, color=GREY, linewidth=2.6, where="post")
        for name, (color, dash) in styles.items():
            scores = [g.scores(level_set) for g in groups if g.label == name]
            share = intervals.performance_profile(scores, thresholds)
            ax.step(thresholds, share, color=color, linestyle=dash, where="post")
            if intervals.spread_is_known(scores):
                low, high = intervals.profile_band(scores, thresholds)
                ax.fill_between(thresholds, low, high, step="post", color=color, alpha=0.18, linewidth=0)
                has_bands = True
        ax.set_title(level_set_title(groups[0].env, level_set))
        ax.set_xlabel("normalised score \u03c4")
        ax.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("share of runs with a score above \u03c4")
    handles = [Line2D([], [], color=color, linestyle=dash, label=n) for n, (color, dash) in styles.items()]
    if has_bands:
        handles.append(Patch(color="#BBBBBB", label="95% stratified bootstrap interval"))
    if any(published.values()):
        label = f"{PUBLISHED} at as many env steps"
        handles.append(Line2D([], [], color=GREY, linewidth=2.6, label=label))
    legend(figure, handles)
    return figure


# Parts of panels


def _places(groups: Sequence[Group]) -> dict[str, int]:
    """The place of each variant among all: so its style is the same where others are left out."""
    return {name: v for v, name in enumerate(variants(groups))}


def _over_games(ax: Axes, groups: Sequence[Group], places: Mapping[str, int]) -> None:
    """Draws the interquartile mean over the games below them, a row a variant."""
    labels = [label.get_text() for label in ax.get_yticklabels()]
    names, shared = variants(groups), over_games(groups, ["test"])
    for row, name in enumerate(names):
        y, v = len(groups) + row + 0.3, places[name]
        members = [g for g in shared if g.label == name]
        published = [p["test"] for p in map(published_scores, members) if p]
        if len(published) == len(members):
            _interval(ax, y - 0.2, published, intervals.iqm, GREY, "d")
        _interval(ax, y + 0.12, [g.scores("test") for g in members], intervals.iqm, color_of(v), marker_of(v))
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
    name = f"{PUBLISHED} at as many env steps"
    return [
        dot(GREY, "d", f"{name}, training levels"),
        dot(GREY, "d", f"{name}, unseen levels", False),
    ]
