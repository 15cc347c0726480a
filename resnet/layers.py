"""The layers of all networks of the zoo, with names and seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import KerasTensor

Initializer = Callable[..., keras.initializers.Initializer]  # called with seed=<int>

glorot = keras.initializers.GlorotUniform
he_normal = keras.initializers.HeNormal
orthogonal = partial(keras.initializers.Orthogonal, gain=2**0.5)  # sqrt(2): keeps the variance through a relu


def check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, not {value!r}.")


@tf.custom_gradient
def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Adds biases [C] to x [..., C]. Their gradient is summed in float32 in any dtype.

    On CPUs, TensorFlow's own gradient sums bfloat16 in bfloat16: for 128 frames of 64 x 64 the sum is fifty
    times too small. A plain sum accumulates in float32, and is faster.
    """

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return upstream, tf.reduce_sum(upstream, axis=range(upstream.shape.rank - 1))

    return tf.nn.bias_add(x, bias), gradient


def _have_biases_learn(layer: Any, product: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Lets a layer, which computes product(inputs) + bias, add its biases by `add_bias`.

    Saved models must load without this package, so the layer keeps Keras's class. Its copies (clone_model,
    load_model) therefore have Keras's gradients; nothing here trains a copy. float32 does not change.
    """

    def call(inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        outputs = add_bias(product(inputs), tf.convert_to_tensor(layer.bias))
        return outputs if layer.activation is None else layer.activation(outputs)

    if layer.use_bias and layer.compute_dtype != "float32":
        layer.call = call


class Layers:
    """Makes layers with one dtype policy, each with a given name and a seed that follows from the name.

    With explicit names, variable paths and checkpoints do not depend on earlier models; Keras would number
    the layers. Explicit seeds give all replicas and workers the same weights without communication.
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
        x: KerasTensor,
        filters: int,
        size: int,
        *,
        name: str,
        initializer: Initializer = glorot,
        l2: float = 0.0,
        padding: str = "same",
        **settings: Any,
    ) -> KerasTensor:
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
        self, x: KerasTensor, units: int, *, name: str, initializer: Initializer = glorot, **settings: Any
    ) -> KerasTensor:
        """A dense layer [B, D] -> [B, units], as a 1 x 1 convolution; `settings` as in keras.layers.Conv2D.

        A matrix product orders its sums by the batch size, so the last bits of a row depend on the number of
        rows. A convolution computes each image separately, so an image has the same features on any number of
        replicas. This costs about 1 % of IMPALA's time.
        """
        x = keras.layers.Reshape((1, 1, x.shape[-1]), dtype=self.dtype, name=f"{name}_in")(x)
        x = self.conv(x, units, 1, name=name, initializer=initializer, **settings)
        return keras.layers.Reshape((units,), dtype=self.dtype, name=f"{name}_out")(x)

    def product(
        self, x: KerasTensor, units: int, *, name: str, activation: str, initializer: Initializer = glorot
    ) -> KerasTensor:
        """A dense layer [B, D] -> [B, units], as a matrix product, which XLA compiles well.

        A row has the same bits only in products of the same number of rows (see `dense`).
        """
        seeded = initializer(seed=self.seed_of(name))
        layer = keras.layers.Dense(
            units, activation=activation, kernel_initializer=seeded, dtype=self.dtype, name=name
        )
        _have_biases_learn(layer, lambda inputs: keras.ops.matmul(inputs, layer.kernel))
        return layer(x)

    def relu(self, x: KerasTensor, name: str) -> KerasTensor:
        """max(x, 0)."""
        return keras.layers.ReLU(dtype=self.dtype, name=name)(x)

    def add(self, x: KerasTensor, y: KerasTensor, name: str) -> KerasTensor:
        """x + y."""
        return keras.layers.Add(dtype=self.dtype, name=name)([x, y])

    def max_pool(self, x: KerasTensor, size: int, strides: int, name: str) -> KerasTensor:
        """Max pooling, padded: [B, H, W, C] -> [B, ceil(H / strides), ceil(W / strides), C]."""
        pool = keras.layers.MaxPooling2D(
            size, strides, padding="same", data_format="channels_last", dtype=self.dtype, name=name
        )
        return pool(x)

    def flatten(self, x: KerasTensor, name: str) -> KerasTensor:
        """[B, H, W, C] -> [B, H * W * C]."""
        return keras.layers.Flatten(data_format="channels_last", dtype=self.dtype, name=name)(x)

    def average_pool(self, x: KerasTensor, name: str) -> KerasTensor:
        """Mean over the image, [B, H, W, C] -> [B, C], always in float32: sums in bfloat16 lose digits."""
        return keras.layers.GlobalAveragePooling2D(data_format="channels_last", dtype="float32", name=name)(x)
