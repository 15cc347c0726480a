"""A sweep for people: a table of its trials, and a plot of each setting against the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLOT_FILE = "sweep.png"
_MOST_COLUMNS = 3
_WIDE = 10.0  # the ratio of the largest value to the smallest one from which a logarithmic axis tells more


def plot(trials: Sequence[tuple[Mapping[str, Any], float]], metric: str, path: Path) -> None:
    """Draws the metric against each setting that differs, one panel each.

    Args:
      trials: the settings and the metric of each.
      metric: its name.
      path: the PNG file.

    Raises:
      OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    names = [n for n in trials[0][0] if len({str(settings[n]) for settings, _ in trials}) > 1]
    names = names or list(trials[0][0])
    columns = min(_MOST_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    best = max(range(len(trials)), key=lambda i: trials[i][1])
    for panel, name in zip(axes, names, strict=False):
        values = [settings[name] for settings, _ in trials]
        at = _places(panel, values)
        panel.scatter(at, [value for _, value in trials], color="#3b6fb6", alpha=0.8)
        panel.scatter(
            at[best], trials[best][1], s=110, facecolors="none", edgecolors="#c23b22", linewidths=1.8
        )
        panel.set_xlabel(name)
        panel.set_ylabel(metric)
        panel.grid(alpha=0.3)
    for panel in axes[len(names) :]:
        panel.set_visible(False)
    figure.suptitle(f"{len(trials)} trials; the ring is the best one")
    figure.savefig(path, dpi=120)


def _places(panel: Any, values: Sequence[Any]) -> list[float]:
    """Where the values stand on a panel's axis, which is made to suit them."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        if min(values) > 0 and max(values) / min(values) >= _WIDE:
            panel.set_xscale("log")
        return [float(v) for v in values]
    names = sorted({str(v) for v in values})
    panel.set_xticks(range(len(names)), names)
    return [float(names.index(str(v))) for v in values]


def cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)
