"""The networks: IMPALA's residual CNN, DQN's CNN, a small CNN, the pixels, the MLP, and ResNets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import keras
from keras import KerasTensor

from resnet.layers import Initializer, Layers, check_choice, he_normal, orthogonal

NORMALIZATIONS = ("batch", "group", "none")


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
    """Images [B, H, W, C] in [0, 1] -> features [B, H * W * C], the pixels: a baseline for all networks."""
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
        row_by_row: uses `Layers.dense` and no matrix products, so that a row does not depend on the number of
            rows; for an mlp behind image networks.

    Raises ValueError for no layers, a layer without units, or another number of activations.
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"mlp's hidden needs at least one layer of at least one unit, not {tuple(hidden)}.")
    x, names = vectors, [activation] * len(hidden) if isinstance(activation, str) else activation
    for index, (units, name) in enumerate(zip(hidden, names, strict=True), start=1):
        make = layers.dense if row_by_row else layers.product
        x = make(x, units, name=f"dense{index}", activation=name, initializer=orthogonal)
    return x


@dataclass
class Blocks:
    """Makes the parts of a residual network (He et al. 2015, arXiv:1512.03385).

    All parts take and return images [B, H, W, C].

    Without batch normalization, deep networks are trainable because their blocks start as the identity.
    `normalization="group"` starts the scale of each residual branch's last normalization at zero, as its
    paper does (Wu and He 2018, arXiv:1803.08494, section 4). `normalization="none"` starts the last
    convolution of each branch at zero and scales the others down with the number of blocks, as in Fixup
    (Zhang et al. 2019, arXiv:1901.09321), without its scalar multipliers: starting near the identity is what
    counts (SkipInit, De and Smith 2020, arXiv:2002.10444).

    A strided convolution is padded equally on both sides, as in the paper. TensorFlow's "same" would pad even
    sizes only on the right, and shift the branch against its shortcut by a pixel.

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
        """A convolution and its normalization, or its bias; `last`: it ends a residual branch."""
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
            arXiv:1803.08494: an image's features do not depend on its batch) or "none"
            (`Blocks`).
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
    arXiv:1706.02677); depths 18 and 34 have basic blocks. The shortcuts are the paper's option B. Options and
    errors are those of `cifar`; group normalization has 32 groups.
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
