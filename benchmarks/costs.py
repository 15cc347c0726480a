"""The cost of a built network: parameters and arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resnet.__main__ import Cost

if TYPE_CHECKING:
    import keras


def cost_of(model: keras.Model) -> Cost:
    """The cost of a built model."""
    import keras

    multiply_adds = 0
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            _, height, width, _ = layer.output.shape
            multiply_adds += height * width * math.prod(layer.kernel.shape)
        elif isinstance(layer, keras.layers.Dense):
            multiply_adds += math.prod(layer.kernel.shape)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return Cost(parameters, 2.0 * multiply_adds / 1e6, model.output.shape[-1])
