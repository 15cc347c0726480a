"""Labelled images by name, in memory, and their batches.

The order of an epoch and the augmentation of an image depend only on (seed, epoch) and the image's place in
the set, and not on the number of replicas that share a batch.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import requests
import tensorflow as tf
from rich import filesize

from resnet.config import OWN
from tfrl.cli.errors import UserError
from tfrl.run.rng import Use, generator
from tfrl.workers import machine

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

    from tfrl.workers.strategy import Runtime

MARGIN = 4
"""Pixels of padding that a crop is cut from."""

_PREFETCH = 4  # batches
_TIMEOUTS = (3.0, 20.0)  # seconds of a download: to connect, and between two pieces


@dataclass(frozen=True)
class Split:
    """Images uint8 [N, H, W, C], a tensor on the CPU (tf.data would copy an array), and labels int32 [N]."""

    images: np.ndarray | tf.Tensor
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
        return tuple(self.train.images.shape[1:])


# Loading


def prepare(name: str, say: Callable[[str], None] | None = None) -> None:
    """Downloads or makes a set, unless it is in tfds's folder (TFDS_DATA_DIR). `say` gets a sentence first.

    Raises UserError if it has no labels, no such configuration, or cannot be downloaded.
    """
    with _quiet():
        builder = _builder(name)
    _check_kind(builder, name)
    if say is not None and not builder.is_prepared():
        say(f"Preparing {name} in {builder.data_dir}, once; it takes a minute or more")
    try:
        with _quiet():
            _fail_quickly()
            builder.download_and_prepare()
    except Exception as error:  # requests, urllib, TensorFlow, tfds: each has its own
        reason = _first_line(error)
        if isinstance(error, requests.RequestException) and error.request is not None:
            host = urlsplit(str(error.request.url)).hostname
            reason = f"{host} cannot be reached: {type(error).__name__}"
        raise UserError(
            f"the data set {name} is not in {builder.data_dir} and could not be downloaded ({reason}); "
            f"download it on a machine with a network and copy the folder, or use --dataset {OWN}."
        ) from error


def _check_kind(builder: tfds.core.DatasetBuilder, name: str) -> None:
    """Raises UserError if it has no images, or not one class for each."""
    import tensorflow_datasets as tfds

    keys = builder.info.supervised_keys or ()
    features = [builder.info.features[key] for key in keys] if all(isinstance(k, str) for k in keys) else []
    kinds = tfds.features.Image, tfds.features.ClassLabel
    if len(features) != 2 or not all(map(isinstance, features, kinds)):
        raise UserError(f"the data set {name} has no images with a class each; choose a classification set.")


@functools.cache
def _fail_quickly() -> None:
    """Makes tfds give up within seconds if a host does not answer.

    tfds sets no time-outs, and tries ten times. `_open_url` and `MAX_RETRIES` are private names of tfds; a
    test checks that they exist.
    """
    from tensorflow_datasets.core.download import downloader

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would report every attempt
    open_url = functools.partial(downloader._open_url, timeout=_TIMEOUTS)
    vars(downloader).update(_open_url=open_url, MAX_RETRIES=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def sizes(name: str, image_size: int = 0) -> tuple[tuple[int, ...], int]:
    """The shape (H, W, C) of the images of a set and the number of its classes; it may be not prepared yet.

    Raises UserError for a set without labels, or for images of different sizes.
    """
    with _quiet():
        builder = _builder(name)
    _check_kind(builder, name)
    image, label = (builder.info.features[key] for key in builder.info.supervised_keys)
    shape = (image_size, image_size, image.shape[2]) if image_size else tuple(image.shape)
    if None in shape:
        raise UserError(f"the images of {name} differ in size; a run needs --image-size.")
    return shape, label.num_classes


def load(name: str, image_size: int = 0) -> Dataset:
    """Reads a prepared set into memory. `image_size` resizes images to a square; 0 leaves them.

    The test set is the split `test`, else `validation`, else the last tenth of `train`. A split without
    labels, which are -1, does not count.

    Raises UserError for images of different sizes, or more of them than fit in memory.
    """
    with _quiet():
        builder = _builder(name)
        splits = builder.info.splits
        if splits and "train" not in splits:
            raise UserError(f"the data set {name} has no split train, only {', '.join(splits)}.")
        named = [part for part in ("test", "validation") if part in splits]
        whole = "train" if named else "train[:90%]"
        train = _read(builder, whole, name, image_size)
        for part in named or ["train[90%:]"]:
            test = _read(builder, part, name, image_size, held=int(np.prod(train.images.shape)))
            if test.labels.min() >= 0:
                break
        for split, place in ((train, whole), (test, part)):
            if split.labels.min() < 0:
                raise UserError(f"the split {place} of the data set {name} has images without a label.")
    classes = builder.info.features[builder.info.supervised_keys[1]].names
    return Dataset(train, test, tuple(classes))


def load_on_all(name: str, image_size: int, runtime: Runtime, say: Callable[[str], None]) -> Dataset:
    """`load` on all workers. The chief prepares the set first, in a folder that all may share.

    Raises UserError if the workers have different images: their epochs may differ in length.
    """
    failure = None
    if runtime.is_chief:
        try:
            prepare(name, say)
        except UserError as error:
            failure = error
    if not runtime.all_agree(failure is None):
        raise failure or UserError(f"the chief could not prepare {name}; its output says why")
    prepare(name)  # without a shared folder, each worker prepares its own
    dataset = load(name, image_size)
    labels = zlib.crc32(dataset.test.labels.data, zlib.crc32(dataset.train.labels.data))
    if np.ptp(runtime.gather_envs(np.array([labels]))):
        raise UserError(
            f"the workers have different images of {name}: set the same TFDS_DATA_DIR on all of them"
        )
    return dataset


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
        raise UserError(f"the data set {name} cannot be opened: {_first_line(error)}") from None


def _read(builder: tfds.core.DatasetBuilder, part: str, name: str, image_size: int, held: int = 0) -> Split:
    """Reads a split into memory, where `held` bytes are taken already."""
    import tensorflow_datasets as tfds

    # One file after another: the examples' order is part of a run.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    data = builder.as_dataset(split=part, as_supervised=True, shuffle_files=False, read_config=order)
    if (kind := data.element_spec[0].dtype) != np.uint8:
        raise UserError(
            f"the images of {name} are {kind.name}; only images with 8 bits per channel are supported."
        )
    if image_size:
        size = (image_size, image_size)

        def resized(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8), label

        data = data.map(resized, num_parallel_calls=machine.cores())
    shape = data.element_spec[0].shape
    if None in shape[:2]:
        raise UserError(
            f"the images of {name} differ in size; resize them with --image-size, for example --image-size "
            "64."
        )
    count = max(0, int(data.cardinality()))  # negative where it is not known
    needed, there = held + count * int(np.prod(shape)), machine.memory()
    if needed > 0.4 * there:  # while it is read it is in memory twice
        raise UserError(
            f"the images of {name} need {filesize.decimal(needed)} of memory, and this machine has "
            f"{filesize.decimal(there)}; choose a smaller --image-size."
        )
    batches = list(_untuned(data.batch(256).prefetch(1)))
    if not batches:
        raise UserError(f"the split {part} of the data set {name} is empty.")
    with tf.device("CPU:0"):
        images, labels = (tf.concat(columns, 0) for columns in zip(*batches, strict=True))
    return Split(images, labels.numpy().astype(np.int32))


def _quiet() -> contextlib.AbstractContextManager:
    """Hides what tfds prints."""
    return contextlib.redirect_stdout(io.StringIO())


# Batches


@dataclass(frozen=True)
class Pass:
    """One pass over all N images of a split.

    order: the images, int64 [N]; shifts int64 [N, 2] and flips bool [N]: the augmentation of each image.
    """

    order: np.ndarray
    shifts: np.ndarray | None = None
    flips: np.ndarray | None = None


def training_pass(augment: str, seed: int, epoch: int, count: int) -> Pass:
    """An epoch of a training set of `count` images; `augment` as in the settings."""
    draw = generator(seed, Use.AUGMENTATION, epoch)
    shifts, flips = draw.integers(0, 2 * MARGIN + 1, (count, 2)), draw.random(count) < 0.5
    return Pass(
        generator(seed, Use.IMAGE_ORDER, epoch).permutation(count),
        shifts if augment != "none" else None,
        flips if augment == "crop-flip" else None,
    )


@dataclass(frozen=True)
class ImageBatch:
    """One worker's part of a batch, for each of its R replicas.

    Images uint8 [R, b, H, W, C], labels int32 [R, b], weights float32 [R, b]: 1, or 0 for images
    that only fill up the last batch. `count` images of the whole batch, of all workers, have weight 1.
    """

    images: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    count: int


@dataclass(frozen=True)
class Share:
    """This worker's part of every batch: `replicas` of the `workers * replicas` in all."""

    batch_size: int
    worker: int = 0
    workers: int = 1
    replicas: int = 1

    def batches(self, split: Split, passes: Iterable[Pass], start: int = 0) -> Iterator[ImageBatch]:
        """This worker's part of the batches of `passes`, from batch `start` of the first pass on.

        Every image of a pass has weight 1 in exactly one place of one worker. A pass's last batch is filled
        up from its beginning, so that batch normalization gets whole batches. Threads of tf.data make the
        next batches of a pass while the caller works.
        """
        mine = self.batch_size // self.workers
        with tf.device("CPU:0"):
            images, labels = tf.convert_to_tensor(split.images), tf.convert_to_tensor(split.labels)

        def put_together(chosen: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            places = chosen["places"]
            pixels = augmented(tf.gather(images, places), chosen.get("shifts"), chosen.get("flips"))
            parts = {"images": pixels, "labels": tf.gather(labels, places), "weights": chosen["weights"]}
            parts = {k: tf.reshape(v, (self.replicas, -1, *v.shape[1:])) for k, v in parts.items()}
            return parts | {"count": chosen["count"]}

        for one in passes:
            count = len(one.order)
            begins = np.arange(start * self.batch_size, count, self.batch_size)
            indices = begins[:, None] + self.worker * mine + np.arange(mine)  # [batches, mine]
            places = one.order[indices % count]
            chosen = {"places": places, "weights": (indices < count).astype(np.float32)}
            chosen["count"] = np.minimum(self.batch_size, count - begins)
            drawn = {"shifts": one.shifts, "flips": one.flips}
            chosen |= {name: values[places] for name, values in drawn.items() if values is not None}
            with tf.device("CPU:0"):
                data = tf.data.Dataset.from_tensor_slices(chosen)
                data = data.map(put_together, num_parallel_calls=machine.cores()).prefetch(_PREFETCH)
            yield from (ImageBatch(**batch) for batch in _untuned(data).as_numpy_iterator())
            start = 0


def _untuned(data: tf.data.Dataset) -> tf.data.Dataset:
    """The same without the thread that tunes the number of threads.

    The end of an iterator that is not read any more waits for this thread, which may sleep for a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


def augmented(images: tf.Tensor, shifts: tf.Tensor | None, flips: tf.Tensor | None) -> tf.Tensor:
    """Windows of images [B, H, W, C] padded by zeros, at `shifts` int64 [B, 2], mirrored where `flips` [B].

    A shift of MARGIN moves nothing. He et al. 2015, section 4.2, do the same with CIFAR-10.
    """
    if shifts is None:
        return images
    height, width, channels = images.shape[1:]
    margins = ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0))
    pixels = tf.reshape(tf.pad(images, margins), (len(images), -1, channels))
    columns = tf.range(width, dtype=tf.int64)
    if flips is not None:
        columns = tf.where(flips[:, None], columns[::-1], columns)
    rows = shifts[:, :1] + tf.range(height, dtype=tf.int64)  # [B, H]
    columns = shifts[:, 1:] + columns  # [B, W]
    chosen = rows[:, :, None] * (width + 2 * MARGIN) + columns[:, None, :]  # [B, H, W], of the padded pixels
    return tf.gather(pixels, chosen, batch_dims=1)
