"""Small networks in NumPy. For a few envs, a call of TensorFlow takes longer than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfrl.ops.graph import tf

MOST_ENVS = 16
"""The largest number of training envs, all workers together, for which NumPy is faster
(`benchmarks.small_networks`).
"""

_ROWS = 1024  # so many that a layer's outputs stay in the cache

# These functions work in place. gelu is missing, because NumPy has no error function.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda x: x,
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def variable_name(variable: tf.keras.Variable) -> str:
    """The name of a variable, LAYER/WEIGHT or PART/LAYER/WEIGHT, equal in every process and on every
    topology.
    """
    return getattr(variable, "in_file", None) or "/".join(variable.path.split("/")[-2:])


DenseLayers = Sequence[tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]]
"""Kernels [D, units], biases [units] and activation functions."""


def fits(layer: Any) -> bool:
    """True if NumPy can compute the layer of a network of vectors."""
    layers = tf.keras.layers
    if getattr(layer, "compute_dtype", "float32") != "float32":
        return False
    if isinstance(layer, layers.Dense):
        return layer.activation.__name__ in ACTIVATIONS and layer.use_bias
    if isinstance(layer, layers.Activation):
        return layer.activation.__name__ == "linear"
    return isinstance(layer, layers.InputLayer) or layer.name == "unpack"


def layers_of(layer: tf.keras.layers.Layer) -> list[Any]:
    """The layers and operations of a model and its inner models, in order; for a layer, the layer itself."""
    inner = getattr(layer, "operations", None) or getattr(layer, "layers", None)
    return [layer] if inner is None else [found for one in inner for found in layers_of(one)]


def outputs(observations: np.ndarray, layers: DenseLayers) -> np.ndarray:
    """A network's outputs float32 [B, P] for vectors float32 [B, D], for any B, a few rows at a time.

    Each row is a separate product of a vector and a matrix, so its bits do not depend on other rows.
    """
    parts = []
    for begin in range(0, len(observations), _ROWS):
        x = observations[begin : begin + _ROWS, None]  # [B, 1, D]: NumPy multiplies the rows one by one
        for kernel, bias, activate in layers:
            x = x @ kernel
            x += bias
            x = activate(x)
        parts.append(x[:, 0])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
