"""The ImageNet family of residual networks (He et al. 2015, arXiv:1512.03385, table 1)."""

from __future__ import annotations

import keras

from resnet.layers import Layers
from resnet.residual import Blocks

BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
FILTERS = (64, 128, 256, 512)


def imagenet(
    images: keras.KerasTensor,
    layers: Layers,
    *,
    depth: int,
    normalization: str = "batch",
    l2: float = 5e-5,
) -> keras.KerasTensor:
    """Images [B, H, W, C] in [0, 1] of any size -> features [B, 512], or [B, 2048] for depth 50.

    Depth 50 has bottleneck blocks, with the stride in the 3 x 3 convolution (Goyal et al. 2017,
    arXiv:1706.02677), 18 and 34 have basic ones; the shortcuts are the paper's option B.

    Options:
        normalization: as in `resnet.residual.cifar`, group normalization with 32 groups.
        l2: as in `resnet.residual.cifar`.

    Raises ValueError for another normalization or a negative l2.
    """
    per_stage = BLOCKS_PER_STAGE[depth]
    blocks = Blocks(layers, normalization=normalization, groups=32, l2=l2, depth=sum(per_stage))
    x = layers.relu(blocks.convolution(images, FILTERS[0], 7, "stem", strides=2), "stem_relu")
    x = layers.max_pool(x, 3, 2, "stem_pool")
    for stage, (filters, count) in enumerate(zip(FILTERS, per_stage, strict=True), start=1):
        for index in range(1, count + 1):
            strides = 2 if stage > 1 and index == 1 else 1
            shapes = _bottleneck(filters, strides) if depth >= 50 else _basic(filters, strides)
            name = f"stage{stage}_block{index}"
            shortcut = blocks.projected_shortcut(x, shapes[-1][0], strides, name)
            x = blocks.block(x, shortcut, shapes, name)
    return layers.average_pool(x, "head_pool")


def _basic(filters: int, strides: int) -> tuple[tuple[int, int, int], ...]:
    return ((filters, 3, strides), (filters, 3, 1))


def _bottleneck(filters: int, strides: int) -> tuple[tuple[int, int, int], ...]:
    return ((filters, 1, 1), (filters, 3, strides), (4 * filters, 1, 1))
