"""Plain networks: DQN's from Nature, a small one of introductory recipes, and none at all."""

from __future__ import annotations

import keras

from resnet.layers import Layers, orthogonal


def nature(images: keras.KerasTensor, layers: Layers) -> keras.KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, 512].

    The network of Mnih et al. 2015 (Nature 518, methods), with the orthogonal initialisation, gain sqrt(2),
    that PPO's implementations give it. Its unpadded strides of 4, 2 and 1 need 36 x 36 pixels.
    """
    x = images
    for index, (filters, size, strides) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1)), start=1):
        x = layers.conv(
            x,
            filters,
            size,
            name=f"conv{index}",
            strides=strides,
            padding="valid",
            activation="relu",
            initializer=orthogonal,
        )
    x = layers.flatten(x, "head_flatten")
    return layers.dense(x, 512, name="head_dense", activation="relu", initializer=orthogonal)


def cookbook(images: keras.KerasTensor, layers: Layers, *, dropout: float = 0.0) -> keras.KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, 256].

    The convolution and max pooling stack of introductory recipes: 32, 64 and 64 filters of 3 x 3, each
    followed by a pooling of 2, then a dense layer.

    Options:
        dropout: share of the features dropped in training. Not for PPO: it draws another policy at each pass.

    Raises ValueError for a dropout outside [0, 1).
    """
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"cookbook's dropout must be at least 0 and below 1, not {dropout}.")
    x = images
    for index, filters in enumerate((32, 64, 64), start=1):
        x = layers.conv(x, filters, 3, name=f"conv{index}", activation="relu")
        x = layers.max_pool(x, 2, 2, f"pool{index}")
    x = layers.dense(layers.flatten(x, "head_flatten"), 256, name="head_dense", activation="relu")
    if dropout:  # Even at rate 0 the layer would save a random generator's state with the model.
        x = keras.layers.Dropout(
            dropout, seed=layers.seed_of("head_dropout"), dtype=layers.dtype, name="head_dropout"
        )(x)
    return x


def linear(images: keras.KerasTensor, layers: Layers) -> keras.KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, H * W * C], the pixels: what any network has to beat."""
    return layers.flatten(images, "head_flatten")
