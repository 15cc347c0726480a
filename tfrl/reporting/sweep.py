"""A sweep for people: its trials while they run, and a plot of each setting against the metric."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tfrl.cli.streams import Unbreakable

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


class Trial(Protocol):
    """The state of a trial, to be shown."""

    name: str
    state: str
    settings: Mapping[str, Any]
    env_steps: int
    episode_return: float


class Watch:
    """Shows the trials while they run: a live table on a terminal, else lines about those that have moved.

    Args:
      trials: gives all of them as they are now.
      console: where to; None: stdout.
      interval: seconds between lines.
    """

    def __init__(
        self, trials: Callable[[], Sequence[Trial]], console: Console | None = None, interval: float = 10.0
    ) -> None:
        self._trials, self._interval = trials, interval
        self._console = console or Console(file=Unbreakable(sys.stdout), markup=False, emoji=False)
        self._ended = threading.Event()

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=1, transient=True
            )
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._lines, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._thread.join()

    def _table(self) -> Table:
        trials = self._trials()
        names = list(trials[0].settings)
        table = Table("trial", "state", *names, "env steps", "return")
        for each in trials:
            settings = (cell(each.settings[name]) for name in names)
            row = (each.name, each.state, *settings, f"{each.env_steps:,}", cell(each.episode_return))
            table.add_row(*row)
        return table

    def _lines(self) -> None:
        shown: dict[str, int] = {}
        while not self._ended.wait(self._interval):
            for each in self._trials():
                if each.env_steps > shown.get(each.name, 0):
                    shown[each.name] = each.env_steps
                    settings = ", ".join(f"{name} {cell(value)}" for name, value in each.settings.items())
                    words = f"{each.env_steps:,} env steps, return {cell(each.episode_return)}"
                    print(f"{each.name} ({settings}): {words}", file=self._console.file, flush=True)
