"""Weights by name: the same names in every process and on every topology, as float32 arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras


WEIGHTS_FILE = "weights.npz"
"""Name of an export's file with the weights as plain arrays."""
PREFIX = "weights/"
"""Beginning of the names of weights among a checkpoint's arrays."""


def weights_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights by name among a checkpoint's arrays."""
    return {name.removeprefix(PREFIX): a for name, a in arrays.items() if name.startswith(PREFIX)}


def assign_weights(variables: Mapping[str, keras.Variable], weights: Mapping[str, np.ndarray]) -> None:
    """Gives the variables float32 arrays by name.

    Raises:
      ValueError: names or shapes differ.
    """
    if set(variables) != set(weights):
        odd = sorted(set(variables) ^ set(weights))[0]
        raise ValueError(f"the weights are of another network: {odd} is in one of them alone")
    for name, variable in variables.items():
        if tuple(variable.shape) != weights[name].shape:
            shapes = f"{weights[name].shape}, the network needs {tuple(variable.shape)}"
            raise ValueError(f"the weights are of another network: {name} has shape {shapes}")
        variable.assign(weights[name])
