"""Pictures of a network: the kernels of its first layer, and its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import keras
import numpy as np

from tfrl.run import files

_ZOOM = 8  # pixels a weight


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


def draw_model(model: keras.Model, path: Path, warn: Callable[[str], None]) -> None:
    """Draws the layers into a PNG; without graphviz on the machine, or on a full disk, it only warns."""
    try:
        files.make_folder(path.parent)
        with files.replacing(path) as staged:
            keras.utils.plot_model(model, str(staged), show_shapes=True, show_layer_names=True, dpi=72)
    except (ImportError, OSError, AssertionError) as error:  # the last is pydot's, where graphviz fails
        if files.is_full(error) or files.is_full(files.told_in(str(error))):
            warn(f"There is no room for the picture of the network, {path}; training goes on without it.")
            return
        warn(
            "The picture of the network needs graphviz and `pip install pydot`; training goes on without it."
        )
