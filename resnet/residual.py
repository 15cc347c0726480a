"""The residual networks of He et al. 2015 (arXiv:1512.03385): blocks, CIFAR's and ImageNet's family.

Where statistics of the batch do not tame them, deep networks are kept trainable by blocks that start as the
identity. `normalization="group"` starts the scale of each residual branch's last normalization at zero, as
its paper does (Wu and He 2018, arXiv:1803.08494, section 4). `normalization="none"` starts the last
convolution of each branch at zero and scales the others down with the number of blocks, as in Fixup (Zhang et
al. 2019, arXiv:1901.09321), without its scalar multipliers: SkipInit (De and Smith 2020, arXiv:2002.10444)
shows that starting near the identity is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import keras
from keras import KerasTensor

from resnet.layers import Initializer, Layers, check_choice, he_normal

NORMALIZATIONS = ("batch", "group", "none")


@dataclass
class Blocks:
    """Makes the parts of a residual network; all take and return [B, H, W, C].

    A strided convolution is padded by the same amount on both sides, as in the paper: TensorFlow's "same"
    would pad even sizes on the right only, and shift the branch against its shortcut by a pixel.

    Attributes:
        layers: makes the layers.
        normalization: one of NORMALIZATIONS.
        groups: of group normalization.
        l2: as in keras.regularizers.L2.
        depth: in blocks, for Fixup.
    """

    layers: Layers
    normalization: str
    groups: int
    l2: float
    depth: int

    def __post_init__(self) -> None:
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        if self.l2 < 0.0:
            raise ValueError(f"l2 must be at least 0, not {self.l2}.")

    def convolution(
        self,
        x: KerasTensor,
        filters: int,
        size: int,
        name: str,
        *,
        strides: int = 1,
        initializer: Initializer = he_normal,
        last: bool = False,
    ) -> KerasTensor:
        """A convolution and its normalization, or its bias; `last` says that it ends a residual branch."""
        dtype, margin = self.layers.dtype, (size - 1) // 2
        padded = strides > 1 and margin > 0
        if padded:
            x = keras.layers.ZeroPadding2D(
                margin, data_format="channels_last", dtype=dtype, name=f"{name}_margin"
            )(x)
        x = self.layers.conv(
            x,
            filters,
            size,
            name=f"{name}_conv",
            strides=strides,
            padding="valid" if padded else "same",
            use_bias=self.normalization == "none",
            initializer=initializer,
            l2=self.l2,
        )
        settings = {"epsilon": 1e-5, "dtype": dtype, "name": f"{name}_norm"}
        if self.normalization == "batch":
            return keras.layers.BatchNormalization(momentum=0.9, **settings)(x)
        if self.normalization == "group":
            gamma = "zeros" if last else "ones"
            return keras.layers.GroupNormalization(self.groups, gamma_initializer=gamma, **settings)(x)
        return x

    def block(
        self, x: KerasTensor, shortcut: KerasTensor, shapes: Sequence[tuple[int, int, int]], name: str
    ) -> KerasTensor:
        """relu(shortcut + branch(x)), the branch being convolutions of (filters, size, strides) with relus
        between.

        With zero weights it is the identity of its (non-negative) shortcut.
        """
        for index, (filters, size, strides) in enumerate(shapes, start=1):
            part, last, initializer = f"{name}_{index}", index == len(shapes), he_normal
            if self.normalization == "none" and last:
                initializer = lambda seed: keras.initializers.Zeros()  # noqa: E731 - nothing is drawn
            elif self.normalization == "none":
                # Deviations go with sqrt(scale), which is 2 in He-normal; Fixup has L^(-1 / (2m - 2)) of it.
                scale = 2.0 * self.depth ** (-1.0 / (len(shapes) - 1))
                initializer = partial(keras.initializers.VarianceScaling, scale, "fan_in", "truncated_normal")
            x = self.convolution(x, filters, size, part, strides=strides, initializer=initializer, last=last)
            if not last:
                x = self.layers.relu(x, f"{part}_relu")
        return self.layers.relu(self.layers.add(shortcut, x, f"{name}_add"), f"{name}_relu")

    def padded_shortcut(self, x: KerasTensor, filters: int, strides: int, name: str) -> KerasTensor:
        """The paper's option A, without parameters: every strides-th pixel, new channels zero."""
        extra = filters - x.shape[-1]
        if strides > 1:
            x = self.layers.max_pool(x, 1, strides, f"{name}_stride")  # a window of one pixel only picks
        if extra:
            # "channels_first" makes the stock layer pad its last two axes, here width (by none) and channels.
            x = keras.layers.ZeroPadding2D(
                ((0, 0), (0, extra)),
                data_format="channels_first",
                dtype=self.layers.dtype,
                name=f"{name}_channels",
            )(x)
        return x

    def projected_shortcut(self, x: KerasTensor, filters: int, strides: int, name: str) -> KerasTensor:
        """The paper's option B: the identity where the shape stays, else a 1 x 1 convolution."""
        if strides == 1 and x.shape[-1] == filters:
            return x
        return self.convolution(x, filters, 1, f"{name}_shortcut", strides=strides)


def cifar(
    images: KerasTensor, layers: Layers, *, depth: int, normalization: str = "batch", l2: float = 5e-5
) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] of any size -> features [B, 64].

    Section 4.2 of He et al. 2015: 3 stages of (depth - 2) / 6 blocks with 16, 32 and 64 channels, option A
    shortcuts, which give the parameter counts of its table 6 together with a head of 10 classes.

    Options:
        normalization: "batch" (momentum 0.9, epsilon 1e-5), "group" (8 groups; Wu and He 2018,
            arXiv:1803.08494: an image's features do not depend on its batch) or "none" (this module's
            docstring).
        l2: times the sum of the squared kernels is the model's penalty (`model.losses`), as Keras has it:
            half of the paper's weight decay of 1e-4, whose penalty has a factor 1/2.

    Raises ValueError for another normalization or a negative l2.
    """
    per_stage = (depth - 2) // 6
    blocks = Blocks(layers, normalization, groups=8, l2=l2, depth=3 * per_stage)
    x = layers.relu(blocks.convolution(images, 16, 3, "stem"), "stem_relu")
    for stage, filters in enumerate((16, 32, 64), start=1):
        for index in range(1, per_stage + 1):
            strides = 2 if stage > 1 and index == 1 else 1
            name = f"stage{stage}_block{index}"
            shortcut = blocks.padded_shortcut(x, filters, strides, name)
            x = blocks.block(x, shortcut, ((filters, 3, strides), (filters, 3, 1)), name)
    return layers.average_pool(x, "head_pool")


def imagenet(
    images: KerasTensor, layers: Layers, *, depth: int, normalization: str = "batch", l2: float = 5e-5
) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] of any size -> features [B, 512], or [B, 2048] for depth 50 (table 1).

    Depth 50 has bottleneck blocks, with the stride in the 3 x 3 convolution (Goyal et al. 2017,
    arXiv:1706.02677), 18 and 34 have basic ones; the shortcuts are the paper's option B. Options and errors
    are those of `cifar`; group normalization has 32 groups.
    """
    per_stage = (2, 2, 2, 2) if depth == 18 else (3, 4, 6, 3)
    blocks = Blocks(layers, normalization, groups=32, l2=l2, depth=sum(per_stage))
    x = layers.relu(blocks.convolution(images, 64, 7, "stem", strides=2), "stem_relu")
    x = layers.max_pool(x, 3, 2, "stem_pool")
    for stage, (filters, count) in enumerate(zip((64, 128, 256, 512), per_stage, strict=True), start=1):
        for index in range(1, count + 1):
            strides = 2 if stage > 1 and index == 1 else 1
            shapes = [(filters, 3, strides), (filters, 3, 1)]  # a basic block
            if depth >= 50:  # a bottleneck
                shapes = [(filters, 1, 1), (filters, 3, strides), (4 * filters, 1, 1)]
            name = f"stage{stage}_block{index}"
            shortcut = blocks.projected_shortcut(x, shapes[-1][0], strides, name)
            x = blocks.block(x, shortcut, shapes, name)
    return layers.average_pool(x, "head_pool")
