"""Exports of a supervised run: plain arrays, a Keras model and a SavedModel, free of any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from resnet.supervised.config import Config
from resnet.supervised.learner import build, set_weights
from tfrl.run import files
from tfrl.run.arrays import encode

WEIGHTS_FILE = "weights.npz"
KERAS_FILE = "model.keras"
SAVED_MODEL = "saved_model"


def export(
    directory: Path,
    config: Config,
    weights: Mapping[str, np.ndarray],
    *,
    precision: str,
    image_shape: tuple[int, ...],
    classes: int,
) -> None:
    """Writes `weights.npz` (float32, no pickle), `model.keras` and `saved_model/`.

    Both models map uint8 images [B, H, W, C] to probabilities float32 [B, classes]. They are made from a
    network of their own, outside the strategy, so they load anywhere. All of it is on the disk on return.

    Raises OSError.
    """
    files.make_folder(directory)
    files.write(directory / WEIGHTS_FILE, encode(weights))
    model = build(config, precision, image_shape=image_shape, classes=classes)
    set_weights(model, weights)
    with files.replacing(directory / KERAS_FILE) as staged:
        model.save(staged)
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = [tf.TensorSpec((None, *image_shape), tf.uint8, name="images")]
    archive.add_endpoint("serve", lambda images: model(images, training=False), input_signature=signature)
    with files.replacing(directory / SAVED_MODEL) as staged, files.tensorflow_writes():
        archive.write_out(str(staged), verbose=False)
