"""The networks: IMPALA's residual CNN, DQN's CNN, a small CNN, the pixels, the MLP, and ResNets.

All layers have names. Then variable paths and checkpoints do not depend on earlier models; Keras would number
the layers. Their dtype policy is that of the context (`dtype_policy`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import KerasTensor

from resnet.operations import convolution, relu

NORMALIZATIONS = ("batch", "group", "none")

Initializer = Callable[..., keras.initializers.Initializer]  # called with seed=<int>

glorot = keras.initializers.GlorotUniform
he_normal = keras.initializers.HeNormal
orthogonal = partial(keras.initializers.Orthogonal, gain=2**0.5)  # sqrt(2): keeps the variance through a relu


@tf.custom_gradient
def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Adds biases [C] to x [..., C]. Their gradient is summed in float32 in any dtype (`convolution`)."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return upstream, tf.reduce_sum(upstream, axis=range(upstream.shape.rank - 1))

    return tf.nn.bias_add(x, bias), gradient


# Saved models must load without this package, so all layers keep Keras's classes, and only their `call` is
# replaced. Their copies (clone_model, load_model) therefore have Keras's operations; nothing here trains a
# copy.


def _replace_convolution(layer: keras.layers.Conv2D) -> None:
    """Lets a layer with a bias compute by `operations.convolution`."""
    with_relu = layer.activation is keras.activations.relu

    def call(inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        arrays = inputs, tf.convert_to_tensor(layer.kernel), tf.convert_to_tensor(layer.bias)
        settings = {"stride": layer.strides[0], "padding": layer.padding.upper()}
        outputs = convolution(*arrays, **settings, with_relu=with_relu)
        return outputs if with_relu else layer.activation(outputs)

    if layer.use_bias:
        layer.call = call


def _replace_dense(layer: keras.layers.Dense) -> None:
    """Lets a layer of matrix products add its biases by `add_bias`. float32 does not change."""

    def call(inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        outputs = add_bias(keras.ops.matmul(inputs, layer.kernel), tf.convert_to_tensor(layer.bias))
        return outputs if layer.activation is None else layer.activation(outputs)

    if layer.compute_dtype != "float32":
        layer.call = call


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    """A context in which new layers have this dtype policy, unless they are made with another one.

    Their images are [B, H, W, C], whatever ~/.keras/keras.json says (`image_data_format`).
    """
    policy, image_format = keras.config.dtype_policy(), keras.config.image_data_format()
    keras.config.set_dtype_policy(name)
    keras.config.set_image_data_format("channels_last")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)
        keras.config.set_image_data_format(image_format)


def preprocessed(images: KerasTensor, function: Callable[[tf.Tensor], tf.Tensor]) -> KerasTensor:
    """The images that a user's function of TensorFlow makes of images, as a layer.

    Raises ValueError if the function fails, or returns something else.
    """
    try:  # before Keras, which would hide the error
        spec = tf.TensorSpec(images.shape, images.dtype)
        made = tf.function(function, autograph=False).get_concrete_function(spec).structured_outputs
    except Exception as error:  # a user's function may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        raise ValueError(f"its preprocessing raised {type(error).__name__}: {lines[0]}") from error
    if not (
        tf.is_tensor(made)
        and (made.dtype == tf.uint8 or made.dtype.is_floating)
        and (made.shape.rank == 4 and made.shape[0] is None and made.shape[1:].is_fully_defined())
    ):
        found = f"{made.dtype.name} {made.shape}" if tf.is_tensor(made) else f"a {type(made).__name__}"
        raise ValueError(f"its preprocessing must return images, uint8 or float, not {found}.")
    return keras.layers.Lambda(function, dtype="float32", name="preprocess")(images)


class Layers:
    """Makes layers with weights, whose seeds follow from their names.

    Explicit seeds give all replicas and workers the same weights without communication.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def seed_of(self, name: str) -> int:
        """A seed in [0, 2^31) for the layer `name`; a digest, as Python's hash differs between processes."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:4], "little") >> 1

    def conv(
        self,
        x: KerasTensor,
        filters: int,
        size: int,
        *,
        name: str,
        initializer: Initializer = glorot,
        padding: str = "same",
        **settings: Any,
    ) -> KerasTensor:
        """A square convolution [B, H, W, C] -> [B, H', W', filters]; `settings` as in keras.layers.Conv2D."""
        seeded = initializer(seed=self.seed_of(name))
        layer = keras.layers.Conv2D(
            filters, size, padding=padding, kernel_initializer=seeded, name=name, **settings
        )
        _replace_convolution(layer)
        return layer(x)

    def relu(self, x: KerasTensor, *, name: str) -> KerasTensor:
        """max(x, 0), in the shape of x."""
        layer = keras.layers.ReLU(name=name)
        layer.call = relu
        return layer(x)

    def dense(
        self, x: KerasTensor, units: int, *, name: str, initializer: Initializer = glorot, **settings: Any
    ) -> KerasTensor:
        """A dense layer [B, D] -> [B, units], as a 1 x 1 convolution; `settings` as in keras.layers.Conv2D.

        A matrix product orders its sums by the batch size, so the last bits of a row depend on the number of
        rows. A convolution computes each image separately, so an image has the same features on any number of
        replicas. This costs about 1 % of IMPALA's time.
        """
        x = keras.layers.Reshape((1, 1, x.shape[-1]), name=f"{name}_in")(x)
        x = self.conv(x, units, 1, name=name, initializer=initializer, **settings)
        return keras.layers.Reshape((units,), name=f"{name}_out")(x)

    def product(
        self, x: KerasTensor, units: int, *, name: str, activation: str, initializer: Initializer = glorot
    ) -> KerasTensor:
        """A dense layer [B, D] -> [B, units], as a matrix product, which XLA compiles well.

        A row has the same bits only in products of the same number of rows (see `dense`).
        """
        seeded = initializer(seed=self.seed_of(name))
        layer = keras.layers.Dense(units, activation=activation, kernel_initializer=seeded, name=name)
        _replace_dense(layer)
        return layer(x)


def _mean_of_image(x: KerasTensor) -> KerasTensor:
    """The mean over the image, [B, H, W, C] -> [B, C], in float32, because sums in bfloat16 lose digits."""
    return keras.layers.GlobalAveragePooling2D(dtype="float32", name="head_pool")(x)


def impala(images: KerasTensor, layers: Layers, *, width: int = 1, pooled: bool = False) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, 256].

    The large network of Espeholt et al. 2018 (arXiv:1802.01561, figure 3) without its LSTM, the same as
    `build_impala_cnn` of openai/baselines that Cobbe et al. 2020 (arXiv:1912.01588) train on Procgen: Glorot
    uniform kernels, zero biases, max pooling of 3 with stride 2, and a relu between flattening and the dense
    layer.

    Options:
        width: multiplies the 16, 32 and 32 channels.

    `pooled` (the zoo's impala-pooled) averages over the image in place of flattening, which makes the dense
    layer small and the network indifferent to the image's size.
    """
    x = images
    for stage, depth in enumerate((16, 32, 32), start=1):
        name, filters = f"stage{stage}", depth * width
        x = layers.conv(x, filters, 3, name=f"{name}_conv")
        x = keras.layers.MaxPooling2D(3, 2, padding="same", name=f"{name}_pool")(x)
        for block in (f"{name}_block1", f"{name}_block2"):
            branch = layers.relu(x, name=f"{block}_relu")
            branch = layers.conv(branch, filters, 3, name=f"{block}_conv1", activation="relu")
            branch = layers.conv(branch, filters, 3, name=f"{block}_conv2")
            x = keras.layers.Add(name=f"{block}_add")([x, branch])
    if pooled:
        x = _mean_of_image(layers.relu(x, name="head_relu"))
    else:
        x = layers.relu(keras.layers.Flatten(name="head_flatten")(x), name="head_relu")
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
    x = keras.layers.Flatten(name="head_flatten")(x)
    return layers.dense(x, 512, name="head_dense", activation="relu", initializer=orthogonal)


def cookbook(images: KerasTensor, layers: Layers) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, 256].

    The convolution and max pooling stack of introductory recipes: 32, 64 and 64 filters of 3 x 3, each
    followed by a pooling of 2, then a dense layer.
    """
    x = images
    for index, filters in enumerate((32, 64, 64), start=1):
        x = layers.conv(x, filters, 3, name=f"conv{index}", activation="relu")
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool{index}")(x)
    x = keras.layers.Flatten(name="head_flatten")(x)
    return layers.dense(x, 256, name="head_dense", activation="relu")


def linear(images: KerasTensor, layers: Layers) -> KerasTensor:
    """Images [B, H, W, C] in [0, 1] -> features [B, H * W * C], the pixels: a baseline for all networks."""
    return keras.layers.Flatten(name="head_flatten")(images)


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
    """
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
        if self.normalization not in NORMALIZATIONS:
            known = ", ".join(NORMALIZATIONS)
            raise ValueError(f"normalization must be one of {known}, not {self.normalization!r}.")

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
        margin = (size - 1) // 2
        padded = strides > 1 and margin > 0
        if padded:
            x = keras.layers.ZeroPadding2D(margin, name=f"{name}_margin")(x)
        x = self.layers.conv(
            x,
            filters,
            size,
            name=f"{name}_conv",
            strides=strides,
            padding="valid" if padded else "same",
            use_bias=self.normalization == "none",
            initializer=initializer,
            kernel_regularizer=keras.regularizers.L2(self.l2) if self.l2 else None,
        )
        settings = {"epsilon": 1e-5, "name": f"{name}_norm"}
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
                x = self.layers.relu(x, name=f"{part}_relu")
        x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
        return self.layers.relu(x, name=f"{name}_relu")

    def padded_shortcut(self, x: KerasTensor, filters: int, strides: int, name: str) -> KerasTensor:
        """The paper's option A, without parameters: every strides-th pixel, new channels zero."""
        extra = filters - x.shape[-1]
        if strides > 1:
            x = keras.layers.MaxPooling2D(1, strides, name=f"{name}_stride")(
                x
            )  # picks every strides-th pixel
        if extra:
            # "channels_first" makes the stock layer pad its last two axes, here width (by none) and channels.
            padding = ((0, 0), (0, extra))
            x = keras.layers.ZeroPadding2D(padding, data_format="channels_first", name=f"{name}_channels")(x)
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

    Raises ValueError for another normalization.
    """
    per_stage = (depth - 2) // 6
    blocks = Blocks(layers, normalization, groups=8, l2=l2, depth=3 * per_stage)
    x = layers.relu(blocks.convolution(images, 16, 3, "stem"), name="stem_relu")
    for stage, filters in enumerate((16, 32, 64), start=1):
        for index in range(1, per_stage + 1):
            strides = 2 if stage > 1 and index == 1 else 1
            name = f"stage{stage}_block{index}"
            shortcut = blocks.padded_shortcut(x, filters, strides, name)
            x = blocks.block(x, shortcut, ((filters, 3, strides), (filters, 3, 1)), name)
    return _mean_of_image(x)


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
    x = layers.relu(blocks.convolution(images, 64, 7, "stem", strides=2), name="stem_relu")
    x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, (filters, count) in enumerate(zip((64, 128, 256, 512), per_stage, strict=True), start=1):
        for index in range(1, count + 1):
            strides = 2 if stage > 1 and index == 1 else 1
            shapes = [(filters, 3, strides), (filters, 3, 1)]  # a basic block
            if depth >= 50:  # a bottleneck
                shapes = [(filters, 1, 1), (filters, 3, strides), (4 * filters, 1, 1)]
            name = f"stage{stage}_block{index}"
            shortcut = blocks.projected_shortcut(x, shapes[-1][0], strides, name)
            x = blocks.block(x, shortcut, shapes, name)
    return _mean_of_image(x)
