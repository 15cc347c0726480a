"""Draws networks, layer by layer, with matplotlib: Keras's own `plot_model` needs graphviz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import keras

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _COLUMN = 0.3, 6.0  # inches: the height of a layer, the width of a network


def draw(models: Mapping[str, keras.Model], path: Path) -> None:
    """Draws networks side by side into a PNG: their layers from top to bottom, with output shapes.

    Args:
      models: functional Keras models by title.
      path: the file.

    Raises OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(len(model.layers) for model in models.values()) + 2
    figure = Figure((_COLUMN * len(models), _ROW * rows))
    FigureCanvasAgg(figure)
    for column, (title, model) in enumerate(models.items()):
        axes = figure.add_axes((column / len(models), 0.0, 1.0 / len(models), 1.0))
        axes.set(xlim=(0, 1), ylim=(rows, 0))
        axes.axis("off")
        parameters = f"{model.count_params():,} parameters"
        axes.text(0.4, 0.7, f"{title}, {parameters}", ha="center", va="center", weight="bold")
        place = {id(layer): row for row, layer in enumerate(model.layers, start=2)}
        for layer in model.layers:
            row = place[id(layer)]
            shape = " x ".join(str(size) for size in layer.output.shape[1:])
            text = f"{layer.name}   {type(layer).__name__}   {shape}"
            box = {"boxstyle": "round,pad=0.2", "facecolor": "#eef3fa", "edgecolor": "#7a8ca3"}
            axes.text(0.4, row, text, ha="center", va="center", size=8, bbox=box)
            for parent in _parents(layer):
                if id(parent) in place:
                    _connect(axes, place[id(parent)], row)
    figure.savefig(path, format="png", dpi=72)


def _parents(layer: keras.Layer) -> list[keras.Layer]:
    """The layers whose outputs a layer takes, in every network that it is part of."""
    return [parent.operation for node in layer._inbound_nodes for parent in node.parent_nodes]


def _connect(axes: Axes, above: int, below: int) -> None:
    """Draws an arrow between two rows: to the next one, or around the layers between them."""
    look = {"arrowstyle": "->", "color": "#7a8ca3"}
    if below - above == 1:
        axes.annotate("", (0.4, below - 0.25), (0.4, above + 0.25), arrowprops=look)
    else:
        look["connectionstyle"] = f"arc3,rad={-min(0.5, 2 / (below - above)):g}"
        axes.annotate("", (0.7, below), (0.7, above), arrowprops=look)
