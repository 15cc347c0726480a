"""Weights and graphs for TensorBoard: histograms, pictures of kernels that see images, and the network.

They are made with TensorBoard's protocol buffers, as all of a run's event file (`tfrl.run.metrics`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.run.callbacks import Callback, RunOfCallback
from tfrl.run.session import Session

_SCALE = 6  # pixels of a kernel's number


class WeightSummaries(Callback):
    """Writes the network's graph at the start of a run, and its weights at intervals, on the chief.

    Args:
      session: this process's part of the run.
      every: updates between two summaries of the weights, the first ones before the first update; 0: none.
      channels: the channels of the images that the network sees; () if it sees none.
      graph: makes the graph, a TensorFlow GraphDef; None: no graph.
    """

    def __init__(
        self, session: Session, *, every: int, channels: Sequence[int], graph: Callable[[], Any] | None
    ) -> None:
        self._session, self._every, self._channels, self._graph = session, every, channels, graph
        self._written = -1  # the intervals at the last summaries

    def on_start(self, run: RunOfCallback) -> None:
        """Writes the graph and the first weights of a new run."""
        if self._session.found is not None:
            self._written = run.updates // max(1, self._every)
        elif run.is_chief and self._graph is not None:
            self._session.writer.graph(self._graph())
        self.on_update(run, {})

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Writes the weights if it is time."""
        if not self._every or run.updates // self._every <= self._written:
            return
        self._written = run.updates // self._every
        if run.is_chief:
            weights = run.weights()
            summaries = [*histograms(weights), *kernel_pictures(weights, self._channels)]
            self._session.writer.summaries(run.env_steps, summaries)


def histograms(weights: Mapping[str, np.ndarray]) -> list[Any]:
    """A histogram summary of each array, by the name weights/NAME."""
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    return [histogram_pb(f"weights/{name}", array) for name, array in weights.items()]


def kernel_pictures(weights: Mapping[str, np.ndarray], channels: Sequence[int]) -> list[Any]:
    """An image summary of each kernel [H, W, C, F] that sees images of one of these numbers of channels."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.image import metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    found = []
    for name, kernel in weights.items():
        if kernel.ndim != 4 or kernel.shape[2] not in channels:
            continue
        picture = kernel_picture(kernel)
        sizes = [str(size).encode() for size in picture.shape[1::-1]]
        tensor = make_tensor_proto(np.array([*sizes, _png(picture)], object))
        value = Summary.Value(
            tag=f"kernels/{name}", metadata=metadata.create_summary_metadata(None, None), tensor=tensor
        )
        found.append(Summary(value=[value]))
    return found


def kernel_picture(kernel: np.ndarray) -> np.ndarray:
    """The filters of a kernel [H, W, C, F] side by side, uint8 [height, width, 3].

    Three channels are red, green and blue. Other channels are grey, one below the other. The darkest number
    of the kernel is black and the brightest is white.
    """
    height, width, channels, filters = kernel.shape
    least, most = float(kernel.min()), float(kernel.max())
    grey = np.round((kernel - least) / (most - least or 1.0) * 255).astype(np.uint8)
    tiles = grey.transpose(3, 0, 1, 2)  # [F, H, W, C]
    if channels != 3:
        tiles = grey.transpose(3, 2, 0, 1).reshape(filters, channels * height, width, 1).repeat(3, axis=-1)
    columns = math.ceil(math.sqrt(filters))
    tall = tiles.shape[1]
    picture = np.full(((tall + 1) * -(-filters // columns), (width + 1) * columns, 3), 255, np.uint8)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        top, left = row * (tall + 1), column * (width + 1)
        picture[top : top + tall, left : left + width] = tile
    return picture.repeat(_SCALE, axis=0).repeat(_SCALE, axis=1)


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()
