"""The plain networks: IMPALA's residual CNN, DQN's from Nature, a small CNN, the bare pixels, and the MLP."""

from __future__ import annotations

from collections.abc import Sequence

from keras import KerasTensor

from resnet.layers import Layers, orthogonal


def impala(images: KerasTensor, layers: Layers, *, width: int = 1, pooled: bool = False) -> KerasTensor:
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
    for stage, depth in enumerate((16, 32, 32), start=1):
        name, filters = f"stage{stage}", depth * width
        x = layers.conv(x, filters, 3, name=f"{name}_conv")
        x = layers.max_pool(x, 3, 2, f"{name}_pool")
        for block in (f"{name}_block1", f"{name}_block2"):
            branch = layers.relu(x, f"{block}_relu")
            branch = layers.conv(branch, filters, 3, name=f"{block}_conv1", activation="relu")
            branch = layers.conv(branch, filters, 3, name=f"{block}_conv2")
            x = layers.add(x, branch, f"{block}_add")
    if pooled:
        x = layers.average_pool(layers.relu(x, "head_relu"), "head_pool")
    else:
        x = layers.relu(layers.flatten(x, "head_flatten"), "head_relu")
    return layers.dense(x, 256, name="head_dense", activation="relu")


def nature(images: KerasTensor, layers: Layers) -> KerasTensor:
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


def cookbook(images: KerasTensor, layers: Layers) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, 256].

    The convolution and max pooling stack of introductory recipes: 32, 64 and 64 filters of 3 x 3, each
    followed by a pooling of 2, then a dense layer.
    """
    x = images
    for index, filters in enumerate((32, 64, 64), start=1):
        x = layers.conv(x, filters, 3, name=f"conv{index}", activation="relu")
        x = layers.max_pool(x, 2, 2, f"pool{index}")
    return layers.dense(layers.flatten(x, "head_flatten"), 256, name="head_dense", activation="relu")


def linear(images: KerasTensor, layers: Layers) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, H * W * C], the pixels: what any network has to beat."""
    return layers.flatten(images, "head_flatten")


def mlp(
    vectors: KerasTensor,
    layers: Layers,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str | Sequence[str] = "tanh",
    row_by_row: bool = False,
) -> KerasTensor:
    """Vectors [B, D] -> features [B, hidden[-1]].

    The defaults are the network of Schulman et al. 2017 (arXiv:1707.06347, section 6.1), with orthogonal
    initialisation, gain sqrt(2).

    Options:
        hidden: units of each layer.
        activation: any of Keras's, by name: one for all layers, or one for each.
        row_by_row: layers that compute a row alike in any company (`Layers.dense`), and no matrix products,
            which do only where all have one number of rows: for an mlp behind networks of images.

    Raises ValueError for no layers, a layer without units, or another number of activations.
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"mlp's hidden needs at least one layer of at least one unit, not {tuple(hidden)}.")
    x, names = vectors, [activation] * len(hidden) if isinstance(activation, str) else activation
    for index, (units, name) in enumerate(zip(hidden, names, strict=True), start=1):
        make = layers.dense if row_by_row else layers.product
        x = make(x, units, name=f"dense{index}", activation=name, initializer=orthogonal)
    return x
