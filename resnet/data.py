"""Labelled images by name, in memory, and the batches that a seed makes of them.

The order of an epoch and every image's augmentation follow from (seed, epoch) and the image's place in the
set alone, never from how many replicas share a batch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from resnet.catalog import OWN
from tfrl.errors import UserError
from tfrl.random import Use, generator

if TYPE_CHECKING:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    from tfrl.distribute import Runtime

MARGIN = 4
"""Pixels of padding that a crop is cut from."""

_PREFETCH = 4  # batches
_RETRIES = 3  # of a download: tfds's own ten take four minutes to tell that there is no network


@dataclass(frozen=True)
class Split:
    """Images uint8 [N, H, W, C] and their labels int32 [N]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A training and a test set, and the names of the classes."""

    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W, C)."""
        return self.train.images.shape[1:]


# Loading


def prepare(name: str) -> None:
    """Downloads a set, or makes it, unless it lies in tfds's folder (TFDS_DATA_DIR).

    Raises UserError if it has no labels, no such configuration, or cannot be downloaded.
    """
    with _quiet():
        builder = _builder(name)
    if builder.info.supervised_keys is None or len(builder.info.supervised_keys) != 2:
        raise UserError(f"the data set {name} has no images with labels; choose a classification set.")
    from tensorflow_datasets.core.download import downloader

    downloader.MAX_RETRIES = _RETRIES
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would report every attempt
    try:
        with _quiet():
            builder.download_and_prepare()
    except Exception as error:  # requests, urllib, TensorFlow, tfds: each has its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise UserError(
            f"the data set {name} is not in {builder.data_dir} and could not be put there ({reason}); "
            f"download it where there is a network and copy the folder, or use --dataset {OWN}."
        ) from error


def load(name: str, image_size: int = 0) -> Dataset:
    """Reads a prepared set into memory. `image_size` resizes images to a square; 0 leaves them.

    The test set is the split `test`, else `validation`, else the last tenth of `train`.

    Raises UserError for images of different sizes, or more of them than fit in memory.
    """
    with _quiet():
        builder = _builder(name)
        if "test" in builder.info.splits:
            parts = ("train", "test")
        elif "validation" in builder.info.splits:
            parts = ("train", "validation")
        else:
            parts = ("train[:90%]", "train[90%:]")
        image_key, label_key = builder.info.supervised_keys
        classes = getattr(builder.info.features[label_key], "names", None)
        if classes is None:
            raise UserError(f"the labels of {name} are not classes; choose a classification set.")
        train, test = (_read(builder, part, name, image_size) for part in parts)
    return Dataset(train, test, tuple(classes))


def load_on_all(name: str, image_size: int, runtime: Runtime, say: Callable[[str], None]) -> Dataset:
    """`load` on all workers. The chief prepares the set first, in a folder that all may share."""
    failure = None
    if runtime.is_chief:
        say(f"Preparing {name}; the first time takes a minute or more")
        try:
            prepare(name)
        except UserError as error:
            failure = error
    if not runtime.all_agree(failure is None):
        raise failure or UserError(f"the chief could not prepare {name} and says why in its own output")
    prepare(name)  # where there is no such folder, each worker makes its own
    return load(name, image_size)


def _builder(name: str) -> tfds.core.DatasetBuilder:
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    base, _, config = name.partition("/")
    if base == OWN:
        from resnet.procgen_frames import ProcgenFrames

        return ProcgenFrames(config=config)
    try:
        return tfds.builder(name, try_gcs=False)
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise UserError(f"the data set {name} cannot be opened: {reason}") from None


def _read(builder: tfds.core.DatasetBuilder, part: str, name: str, image_size: int) -> Split:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    # One file after another: the examples' order is part of a run.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    data = builder.as_dataset(split=part, as_supervised=True, shuffle_files=False, read_config=order)
    if image_size:
        size = (image_size, image_size)
        data = data.map(
            lambda image, label: (
                tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8),
                label,
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    height_width = data.element_spec[0].shape[:2]
    if None in height_width:
        raise UserError(f"the images of {name} differ in size; give --image-size 64, say, to resize them.")
    _check_memory(data, part, name)
    batches = list(tfds.as_numpy(data.batch(256).prefetch(tf.data.AUTOTUNE)))
    if not batches:
        raise UserError(f"the split {part} of the data set {name} is empty.")
    images, labels = (np.concatenate(columns) for columns in zip(*batches, strict=True))
    if images.dtype != np.uint8:
        raise UserError(f"the images of {name} are {images.dtype}; only those of 8 bits a channel are read.")
    return Split(images, labels.astype(np.int32))


def _check_memory(data: tf.data.Dataset, part: str, name: str) -> None:
    count = max(0, int(data.cardinality()))  # negative where it is not known
    needed = count * int(np.prod(data.element_spec[0].shape))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.4 * there:  # while it is read it is there twice
        raise UserError(
            f"the images of {name} ({part}) take {needed / 1e9:.0f} GB, and this machine has "
            f"{there / 1e9:.0f} GB; a smaller --image-size makes them fit."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """tfds prints what it does; our own console says it better."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


# Batches


@dataclass(frozen=True)
class Batch:
    """One worker's part of a batch, for each of its R replicas.

    Images uint8 [R, b, H, W, C], labels int32 [R, b], weights float32 [R, b]: 1, or 0 for those that only
    fill the last batch up. `count` images of the whole batch, of all workers, have weight 1.
    """

    images: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    count: int


@dataclass(frozen=True)
class Share:
    """Which part of every batch is this worker's: `replicas` of the `workers * replicas` in all."""

    batch_size: int
    worker: int = 0
    workers: int = 1
    replicas: int = 1

    def batches(
        self,
        split: Split,
        order: np.ndarray,
        start: int = 0,
        shifts: np.ndarray | None = None,
        flips: np.ndarray | None = None,
    ) -> Iterator[Batch]:
        """This worker's part of batches `start` and on of the images in `order`, int64 [N].

        Every image of `order` has weight 1 in exactly one place of one worker. The last batch is filled up
        from the beginning of `order`, so that the statistics of batch normalization see whole batches.
        `shifts` and `flips` are those of `draw_augmentation`.
        """
        mine = self.batch_size // self.workers
        for begin in range(start * self.batch_size, len(order), self.batch_size):
            places = np.arange(begin + self.worker * mine, begin + (self.worker + 1) * mine)
            chosen = order[places % len(order)]
            images = split.images[chosen]
            if shifts is not None:
                images = crop(images, shifts[chosen])
            if flips is not None:
                images = np.where(flips[chosen, None, None, None], images[:, :, ::-1], images)
            weights = (places < len(order)).astype(np.float32)
            parts = (
                x.reshape(self.replicas, -1, *x.shape[1:]) for x in (images, split.labels[chosen], weights)
            )
            yield Batch(*parts, count=min(self.batch_size, len(order) - begin))


def file_order(split: Split) -> np.ndarray:
    """Every image once, as they lie in their files: what tests use."""
    return np.arange(len(split))


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch sees `count` images: a permutation, int64 [count]."""
    return generator(seed, Use.IMAGE_ORDER, epoch).permutation(count)


def draw_augmentation(
    kind: str, seed: int, epoch: int, count: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """An epoch's shifts int64 [count, 2] and flips bool [count], by image; None for what `kind` lacks."""
    random = generator(seed, Use.AUGMENTATION, epoch)
    shifts = random.integers(0, 2 * MARGIN + 1, (count, 2))
    flips = random.random(count) < 0.5
    return shifts if kind != "none" else None, flips if kind == "crop-flip" else None


def crop(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Windows of images [B, H, W, C] padded by zeros, at `shifts` [B, 2]; a shift of MARGIN moves nothing.

    He et al. 2015, section 4.2, do the same with CIFAR-10.
    """
    margins = ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0))
    padded = np.pad(images, margins)
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:3], axis=(1, 2))
    chosen = windows[np.arange(len(images)), shifts[:, 0], shifts[:, 1]]  # [B, C, H, W]
    return np.moveaxis(chosen, 1, -1)


class Prefetched:
    """Makes the next items of an iterable in a thread, while the caller works. Close it when done.

    `wait_seconds` is the time that the caller has waited for items.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.wait_seconds = 0.0
        self._queue: queue.Queue = queue.Queue(_PREFETCH)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), name="input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            item, error = self._queue.get()
            self.wait_seconds += time.perf_counter() - began
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):  # it may wait for a place in the queue
                self._queue.get(timeout=0.01)

    def _fill(self, items: Iterable[Any]) -> None:
        try:
            for item in items:
                self._queue.put((item, None))
                if self._closed.is_set():
                    return
            self._queue.put((None, StopIteration()))
        except Exception as error:  # raised where the items are used
            self._queue.put((None, error))
