"""Counts of a model: parameters and arithmetic."""

from __future__ import annotations

import math

import keras


def parameters(model: keras.Model) -> int:
    """The number of trainable parameters, without the moving statistics of batch normalization."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def mflop(model: keras.Model) -> float:
    """Millions of floating point operations of one image's forward pass.

    A multiply-add counts as two, and only those of convolutions and dense layers count, as in the papers
    (which count a multiply-add as one).
    """
    multiply_adds = 0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            _, height, width, _ = layer.output.shape
            multiply_adds += height * width * math.prod(layer.kernel.shape)
        elif isinstance(layer, keras.layers.Dense):
            multiply_adds += math.prod(layer.kernel.shape)
    return 2.0 * multiply_adds / 1e6
