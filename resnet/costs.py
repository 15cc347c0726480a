"""The costs of networks: parameters and arithmetic. It imports TensorFlow late."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import keras


class Cost(NamedTuple):
    """The cost of a torso for the input of its paper, as `cost_of` counts it.

    `parameters` are the trainable ones, without the moving statistics of batch normalization. `mflop` are
    millions of floating point operations of one image's forward pass: a multiply-add counts as two, and only
    those of convolutions and dense layers count, as in the papers (which count a multiply-add as one).
    `features` is the size of its output.
    """

    parameters: int
    mflop: float
    features: int


COSTS: dict[tuple[str, int], Cost] = {
    ("impala", 1): Cost(622_144, 61.2, 256),
    ("impala", 2): Cost(1_437_568, 235.7, 256),
    ("impala", 4): Cost(3_649_024, 924.3, 256),
    ("impala-pooled", 1): Cost(106_048, 60.2, 256),
    ("impala-pooled", 2): Cost(405_376, 233.6, 256),
    ("impala-pooled", 4): Cost(1_584_640, 920.2, 256),
    ("nature", 1): Cost(1_684_128, 18.7, 512),
    ("cookbook", 1): Cost(1_105_152, 65.8, 256),
    ("linear", 1): Cost(0, 0.0, 12288),
    ("mlp", 1): Cost(4_736, 0.0, 64),
    ("resnet-mini", 1): Cost(74_640, 24.5, 64),
    ("resnet20", 1): Cost(269_072, 81.1, 64),
    ("resnet32", 1): Cost(463_504, 137.7, 64),
    ("resnet44", 1): Cost(657_936, 194.3, 64),
    ("resnet56", 1): Cost(852_368, 251.0, 64),
    ("resnet110", 1): Cost(1_727_312, 505.8, 64),
    ("resnet18", 1): Cost(11_176_512, 3627.1, 512),
    ("resnet34", 1): Cost(21_284_672, 7326.5, 512),
    ("resnet50", 1): Cost(23_508_032, 8174.3, 2048),
}
"""Costs by name and width, so that a table needs no TensorFlow. A test compares them with the networks."""


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
