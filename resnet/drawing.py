"""Pictures of networks: their layers, by matplotlib (Keras's `plot_model` needs graphviz), and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

_ROW, _COLUMN = 0.3, 6.0  # inches: the height of a layer, the width of a network
_ZOOM = 8  # pixels a weight


def draw(models: Mapping[str, keras.Model], path: Path) -> None:
    """Draws networks side by side into a PNG: their layers from top to bottom, with output shapes.

    `models` are functional Keras models by title. Raises OSError if the file cannot be written.
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
            parents = [parent.operation for node in layer._inbound_nodes for parent in node.parent_nodes]
            for parent in parents:
                above, look = place.get(id(parent)), {"arrowstyle": "->", "color": "#7a8ca3"}
                if above == row - 1:
                    axes.annotate("", (0.4, row - 0.25), (0.4, above + 0.25), arrowprops=look)
                elif above is not None:  # around the layers between
                    look["connectionstyle"] = f"arc3,rad={-min(0.5, 2 / (row - above)):g}"
                    axes.annotate("", (0.7, row), (0.7, above), arrowprops=look)
    figure.savefig(path, format="png", dpi=72)


def kernels(weights: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The filters of the first convolution over colour, side by side: uint8 [H, W, 3]; None without one."""
    found = (w for w in weights.values() if w.ndim == 4 and w.shape[2] == 3 and w.shape[0] > 1)
    kernel = next(found, None)
    if kernel is None:
        return None
    span = np.abs(kernel).max() or 1.0
    tiles = np.pad((kernel / span + 1.0) / 2.0, ((0, 1), (0, 1), (0, 0), (0, 0)))  # a dark line between them
    strip = np.concatenate(np.moveaxis(tiles, -1, 0), axis=1)
    return (255 * strip).astype(np.uint8).repeat(_ZOOM, 0).repeat(_ZOOM, 1)
