"""The multi-layer perceptron, for observations that are vectors."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from resnet.layers import Layers, orthogonal


def mlp(
    vectors: keras.KerasTensor,
    layers: Layers,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
) -> keras.KerasTensor:
    """Vectors [B, D] -> features [B, hidden[-1]].

    The defaults are the network of Schulman et al. 2017 (arXiv:1707.06347, section 6.1), with orthogonal
    initialisation, gain sqrt(2).

    Options:
        hidden: units of each layer.
        activation: any of Keras's, by name.

    Raises ValueError for no layers, or a layer without units.
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"mlp's hidden needs at least one layer of at least one unit, not {tuple(hidden)}.")
    x = vectors
    for index, units in enumerate(hidden, start=1):
        x = layers.product(x, units, name=f"dense{index}", activation=activation, initializer=orthogonal)
    return x
