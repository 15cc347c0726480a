"""The layers, inputs and heads of all networks of the zoo, with names and seeds."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from resnet import check_size

if TYPE_CHECKING:
    from resnet import Entry

Initializer = Callable[..., keras.initializers.Initializer]  # called with seed=<int>

POLICIES = ("float32", "mixed_bfloat16")  # not mixed_float16: its loss scaling watches one replica alone
INPUT_DTYPES = ("uint8", "float32")
DATA_FORMATS = ("channels_last", "channels_first")

glorot = keras.initializers.GlorotUniform
he_normal = keras.initializers.HeNormal
orthogonal = partial(keras.initializers.Orthogonal, gain=2**0.5)  # sqrt(2): keeps the variance through a relu


def check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, not {value!r}.")


@tf.custom_gradient
def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Biases [C] on x [..., C]; their gradient is summed with the digits of float32 in any dtype.

    TensorFlow's own gradient sums bfloat16 in bfloat16 on CPUs: of 128 frames of 64 x 64 it loses all but a
    fiftieth. A plain sum accumulates in float32, and is faster.
    """

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return upstream, tf.reduce_sum(upstream, axis=range(upstream.shape.rank - 1))

    return tf.nn.bias_add(x, bias), gradient


def _have_biases_learn(layer: Any, product: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Has a layer, which gives product(inputs) + bias, add its biases by `add_bias`.

    Not by a class of its own: saved models are Keras's alone. So copies (clone_model, load_model) have
    Keras's gradients again; nothing here trains one. float32 stays as Keras computes it.
    """

    def call(inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        outputs = add_bias(product(inputs), tf.convert_to_tensor(layer.bias))
        return outputs if layer.activation is None else layer.activation(outputs)

    if layer.use_bias and layer.compute_dtype != "float32":
        layer.call = call


class Layers:
    """Makes layers that share one dtype policy, each with the name given and the seed that follows from it.

    Explicit names keep variable paths (and so checkpoints) independent of what a process built before; Keras
    would count layers up. Explicit seeds give every replica and worker the same weights without any
    communication.
    """

    def __init__(self, *, dtype: str, seed: int) -> None:
        self.dtype = dtype
        self.seed = seed

    def seed_of(self, name: str) -> int:
        """A seed in [0, 2^31) for the layer `name`; a digest, as Python's hash differs between processes."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:4], "little") >> 1

    def conv(
        self,
        x: keras.KerasTensor,
        filters: int,
        size: int,
        *,
        name: str,
        initializer: Initializer = glorot,
        l2: float = 0.0,
        padding: str = "same",
        **settings: Any,
    ) -> keras.KerasTensor:
        """A square convolution [B, H, W, C] -> [B, H', W', filters]; `settings` as in keras.layers.Conv2D."""
        layer = keras.layers.Conv2D(
            filters,
            size,
            padding=padding,
            kernel_initializer=initializer(seed=self.seed_of(name)),
            kernel_regularizer=keras.regularizers.L2(l2) if l2 else None,
            data_format="channels_last",
            dtype=self.dtype,
            name=name,
            **settings,
        )
        _have_biases_learn(layer, lambda inputs: layer.convolution_op(inputs, layer.kernel))
        return layer(x)

    def dense(
        self,
        x: keras.KerasTensor,
        units: int,
        *,
        name: str,
        initializer: Initializer = glorot,
        **settings: Any,
    ) -> keras.KerasTensor:
        """A dense layer [B, D] -> [B, units], as a 1 x 1 convolution; `settings` as in keras.layers.Conv2D.

        A matrix product blocks its sums by the batch size, so a row's last bits depend on how many others
        there are; a convolution treats its images one by one. That keeps the features of an image the same
        whether 64 of them are on one replica or 16 on each of four, at about 1 % of IMPALA's time.
        """
        x = keras.layers.Reshape((1, 1, x.shape[-1]), dtype=self.dtype, name=f"{name}_in")(x)
        x = self.conv(x, units, 1, name=name, initializer=initializer, **settings)
        return keras.layers.Reshape((units,), dtype=self.dtype, name=f"{name}_out")(x)

    def product(
        self,
        x: keras.KerasTensor,
        units: int,
        *,
        name: str,
        activation: str,
        initializer: Initializer = glorot,
    ) -> keras.KerasTensor:
        """A dense layer [B, D] -> [B, units], as a matrix product, which XLA compiles well.

        Rows are the same in any company only where all products have one number of rows (see `dense`).
        """
        seeded = initializer(seed=self.seed_of(name))
        layer = keras.layers.Dense(
            units, activation=activation, kernel_initializer=seeded, dtype=self.dtype, name=name
        )
        _have_biases_learn(layer, lambda inputs: keras.ops.matmul(inputs, layer.kernel))
        return layer(x)

    def relu(self, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """max(x, 0)."""
        return keras.layers.ReLU(dtype=self.dtype, name=name)(x)

    def add(self, x: keras.KerasTensor, y: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """x + y."""
        return keras.layers.Add(dtype=self.dtype, name=name)([x, y])

    def max_pool(self, x: keras.KerasTensor, size: int, strides: int, name: str) -> keras.KerasTensor:
        """Max pooling, padded: [B, H, W, C] -> [B, ceil(H / strides), ceil(W / strides), C]."""
        pool = keras.layers.MaxPooling2D(
            size, strides, padding="same", data_format="channels_last", dtype=self.dtype, name=name
        )
        return pool(x)

    def flatten(self, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """[B, H, W, C] -> [B, H * W * C]."""
        return keras.layers.Flatten(data_format="channels_last", dtype=self.dtype, name=name)(x)

    def average_pool(self, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """Mean over the image, [B, H, W, C] -> [B, C], always in float32: sums in bfloat16 lose digits."""
        return keras.layers.GlobalAveragePooling2D(data_format="channels_last", dtype="float32", name=name)(x)


def assemble(
    name: str,
    entry: Entry,
    input_shape: tuple[int, ...],
    *,
    dtype: str,
    seed: int,
    input_dtype: str,
    data_format: str,
    standardize: bool,
    options: Mapping[str, Any],
) -> keras.Model:
    """The work behind `resnet.build`, which describes the arguments and errors."""
    rank = len(entry.input_shape)
    input_dtype = input_dtype or ("uint8" if rank == 3 else "float32")
    check_choice("dtype", dtype, POLICIES)
    check_choice("input_dtype", input_dtype, INPUT_DTYPES)
    check_choice("data_format", data_format, DATA_FORMATS)
    if len(input_shape) != rank or any(size is None or size < 1 for size in input_shape):
        wanted = "images, (height, width, channels)" if rank == 3 else "vectors, (size,)"
        raise ValueError(f"{name} takes {wanted}, not inputs of shape {input_shape}.")

    network = getattr(import_module(entry.module), entry.function)
    _check_options(name, network, entry.settings, options)
    inputs = keras.Input(input_shape, dtype=input_dtype, name="inputs")
    x = inputs
    if rank == 3 and data_format == "channels_first":
        x = keras.layers.Permute((2, 3, 1), dtype=dtype, name="to_channels_last")(x)
    if input_dtype == "uint8":
        # In float32 where the mean is taken off next: bfloat16 would round the pixels before.
        x = keras.layers.Rescaling(1.0 / 255.0, dtype="float32" if standardize else dtype, name="scale")(x)
    if standardize:
        if rank != 3:
            raise ValueError(f"{name} takes vectors, and only images can be standardised.")
        # The epsilon is the least variance of tf.image.per_image_standardization, 1 / pixels of 0 to 255.
        x = keras.layers.LayerNormalization(
            axis=(1, 2, 3),
            epsilon=1.0 / (255.0**2 * math.prod(x.shape[1:])),
            center=False,
            scale=False,
            dtype="float32",
            name="standardize",
        )(x)
    if rank == 3:
        check_size(name, *x.shape[1:3])
    x = network(x, Layers(dtype=dtype, seed=seed), **entry.settings, **options)
    features = keras.layers.Activation("linear", dtype="float32", name="features")(x)
    return keras.Model(inputs, features, name=name.replace("-", "_"))


def _check_options(
    name: str, network: Callable[..., Any], settings: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    parameters = inspect.signature(network).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in settings]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]!r}?" if near else "it has none."
            raise ValueError(f"{name} has no option {option!r}; {hint}")


def add_softmax_head(torso: keras.Model, classes: int, *, seed: int) -> keras.Model:
    """Put a float32 softmax over `classes` on a torso's features; the model shares the torso's layers."""
    regularizers = (getattr(layer, "kernel_regularizer", None) for layer in torso.layers)
    logits = keras.layers.Dense(
        classes,
        kernel_initializer=he_normal(seed=Layers(dtype="float32", seed=seed).seed_of("logits")),
        kernel_regularizer=next(filter(None, regularizers), None),
        dtype="float32",
        name="logits",
    )(torso.output)
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    return keras.Model(torso.input, probabilities, name=torso.name)
