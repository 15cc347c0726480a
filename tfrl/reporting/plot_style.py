"""The style of the report's pictures, readable in black and white too, and the parts that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tfrl.reporting.comparison import Group

# Okabe and Ito's colours, from dark to light; each variant has a marker and a dash of its own as well. After
# six, colours come again with the next marker and dash.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2, 2, 2)), (0, (2, 2)))
GREY = "#8A8A8A"
"""The colour of published results."""
_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "figure.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 110,
    "text.parse_math": False,  # a run may be called 2$^$
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


def color_of(variant: int) -> str:
    """The colour of a variant, by its place among them."""
    return _COLORS[variant % len(_COLORS)]


def marker_of(variant: int) -> str:
    """The marker of a variant, by its place among them."""
    return _MARKERS[(variant + variant // len(_COLORS)) % len(_MARKERS)]


def dash_of(variant: int) -> str | tuple[int, tuple[float, ...]]:
    """The dash of a variant's lines, by its place among them."""
    return _DASHES[(variant + variant // len(_COLORS)) % len(_DASHES)]


def dot(color: str, marker: str, label: str, filled: bool = True) -> Line2D:
    """A legend's handle for a marker without a line, `filled` or white inside."""
    style = {"color": color, "marker": marker, "markerfacecolor": color if filled else "white"}
    return Line2D([], [], markeredgewidth=1.4, linestyle="", label=label, **style)


def tick(label: str) -> Line2D:
    """A legend's handle for the tick of a single run."""
    return Line2D([], [], color="black", marker="|", markersize=9, linestyle="", label=label)


def panels(count: int, *, width: float, height: float, columns: int = 4) -> tuple[Figure, list[Axes]]:
    """A new figure with `count` panels of the given size in inches, at most `columns` side by side."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    # A single panel gets the room that its legend needs.
    size = (max(7.6, width * columns), height * rows + 1.1 + (1.0 if count == 1 else 0.0))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    return figure, list(axes.flat[:count])


def legend(figure: Figure, handles: Sequence[Line2D | Patch]) -> None:
    """Puts a legend above all panels, in as many columns as have room, and makes room for many rows."""
    lengths = [len(str(handle.get_label())) for handle in handles]
    for columns in (4, 3, 2, 1):
        parts = [part for part in np.array_split(lengths, columns) if part.size]  # as matplotlib fills them
        if sum(0.65 + 0.071 * part.max() for part in parts) < figure.get_figwidth():  # inches
            break
    figure.set_figheight(figure.get_figheight() + 0.22 * max(0, len(parts[0]) - 3))
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns)


def several_seeds(groups: Sequence[Group]) -> bool:
    """True if any group has more than one run."""
    return any(len(g.runs) > 1 for g in groups)
