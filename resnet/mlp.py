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
    activation: str | Sequence[str] = "tanh",
) -> keras.KerasTensor:
    """Vectors [B, D] -> features [B, hidden[-1]].

    The defaults are the network of Schulman et al. 2017 (arXiv:1707.06347, section 6.1), with orthogonal
    initialisation, gain sqrt(2).

    Options:
        hidden: units of each layer.
        activation: any of Keras's, by name: one for all layers, or one for each.

    Raises ValueError for no layers, a layer without units, or another number of activations.
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"mlp's hidden needs at least one layer of at least one unit, not {tuple(hidden)}.")
    x, names = vectors, [activation] * len(hidden) if isinstance(activation, str) else activation
    for index, (units, name) in enumerate(zip(hidden, names, strict=True), start=1):
        x = layers.product(x, units, name=f"dense{index}", activation=name, initializer=orthogonal)
    return x
