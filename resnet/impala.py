"""IMPALA's residual CNN, as train-procgen builds it."""

from __future__ import annotations

import keras

from resnet.layers import Layers

DEPTHS = (16, 32, 32)


def impala(
    images: keras.KerasTensor, layers: Layers, *, width: int = 1, pooled: bool = False
) -> keras.KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, 256].

    The large network of Espeholt et al. 2018 (arXiv:1802.01561, figure 3) without its LSTM, the same as
    `build_impala_cnn` of openai/baselines that Cobbe et al. 2020 (arXiv:1912.01588) train on Procgen: Glorot
    uniform kernels, zero biases, max pooling of 3 with stride 2, and a relu between flattening and the dense
    layer.

    Options:
        width: multiplies the 16, 32 and 32 channels.

    `pooled` (the zoo's impala-pooled) averages over the image in place of flattening, which makes the dense
    layer small and the network indifferent to the image's size. Raises ValueError for a width below 1.
    """
    if width < 1:
        raise ValueError(f"impala's width must be at least 1, not {width}.")
    x = images
    for stage, depth in enumerate(DEPTHS, start=1):
        x = _stage(x, layers, depth * width, f"stage{stage}")
    if pooled:
        x = layers.average_pool(layers.relu(x, "head_relu"), "head_pool")
    else:
        x = layers.relu(layers.flatten(x, "head_flatten"), "head_relu")
    return layers.dense(x, 256, name="head_dense", activation="relu")


def _stage(x: keras.KerasTensor, layers: Layers, depth: int, name: str) -> keras.KerasTensor:
    x = layers.conv(x, depth, 3, name=f"{name}_conv")
    x = layers.max_pool(x, 3, 2, f"{name}_pool")
    for block in (1, 2):
        x = _block(x, layers, depth, f"{name}_block{block}")
    return x


def _block(x: keras.KerasTensor, layers: Layers, depth: int, name: str) -> keras.KerasTensor:
    branch = layers.relu(x, f"{name}_relu")
    branch = layers.conv(branch, depth, 3, name=f"{name}_conv1", activation="relu")
    branch = layers.conv(branch, depth, 3, name=f"{name}_conv2")
    return layers.add(x, branch, f"{name}_add")
