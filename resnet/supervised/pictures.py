"""Pictures of a network: the kernels of its first layer, and its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import keras
import numpy as np

from resnet.drawing import draw
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
    """Draws the layers into a PNG; where it cannot be written, on a full disk say, it only warns."""
    try:
        files.make_folder(path.parent)
        with files.replacing(path) as staged:
            draw({model.name: model}, staged)
    except OSError as error:
        reason = files.reason(error)
        warn(f"The picture of the network, {path}, cannot be written ({reason}). Training goes on.")
