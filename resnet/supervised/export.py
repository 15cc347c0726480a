"""What a supervised run leaves: plain arrays, a Keras model and a SavedModel, free of any strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from resnet.supervised.config import Config
from resnet.supervised.learner import build, set_weights

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
    network of their own, outside the strategy, so they load anywhere.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staged = directory / "weights.tmp.npz"
    np.savez(staged, **weights)
    staged.replace(directory / WEIGHTS_FILE)
    model = build(config, precision, image_shape=image_shape, classes=classes)
    set_weights(model, weights)
    staged = directory / "model.tmp.keras"
    model.save(staged)
    staged.replace(directory / KERAS_FILE)
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = [tf.TensorSpec((None, *image_shape), tf.uint8, name="images")]
    archive.add_endpoint("serve", lambda images: model(images, training=False), input_signature=signature)
    archive.write_out(str(directory / SAVED_MODEL), verbose=False)
