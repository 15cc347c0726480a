"""Convolutions and ReLUs at the speed of the hardware: what TensorFlow does slowly, or wrongly, on CPUs.

docs/notebook/bfloat16-speed.md has the times. On GPUs all functions use TensorFlow's usual operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

_portable = contextvars.ContextVar("portable", default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """A context in which graphs get only operations that every TensorFlow has, for graphs in files."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def relu(x: tf.Tensor) -> tf.Tensor:
    """max(x, 0) (below a magnitude of 2^121), in the shape and dtype of x; NaN stays NaN.

    On CPUs TensorFlow is twice as fast in float16 as in bfloat16, which it computes in float32 with rounding.
    So a bfloat16 number is read as the float16 number of the same bits: its sign and its order are the same,
    and NaN is NaN. Inputs of a magnitude of 2^121 or more, infinities among them, are NaN in float16. So they
    pass unchanged, negative ones too.
    """
    if not _reads_as_float16(x):
        return tf.nn.relu(x)

    @tf.custom_gradient
    def of(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        y = tf.bitcast(tf.nn.relu(tf.bitcast(x, tf.float16)), tf.bfloat16)
        return y, lambda upstream: _relu_gradient(upstream, y)

    return of(x)


def _relu_gradient(upstream: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """The upstream gradient where y = relu(x) is positive, otherwise 0."""
    if not _reads_as_float16(y):
        return tf.raw_ops.ReluGrad(gradients=upstream, features=y)
    upstream, y = tf.bitcast(upstream, tf.float16), tf.bitcast(y, tf.float16)
    return tf.bitcast(tf.raw_ops.ReluGrad(gradients=upstream, features=y), tf.bfloat16)


def _reads_as_float16(x: tf.Tensor) -> bool:
    return x.dtype == tf.bfloat16 and not _portable.get() and not _has_gpu()


def convolution(
    x: tf.Tensor,
    kernel: tf.Tensor,
    bias: tf.Tensor,
    *,
    stride: int = 1,
    padding: str = "SAME",
    with_relu: bool = False,
) -> tf.Tensor:
    """conv(x) + bias, or relu(conv(x) + bias): one operation of oneDNN on CPUs.

    The addition of a residual block stays an operation of its own. TensorFlow 2.21 can fuse it, too, but two
    threads that compute the same fused operation then write into each other's memory.

    Its own gradients replace TensorFlow's where those are slow or wrong:

    - Of biases: on CPUs TensorFlow sums bfloat16 in bfloat16, so for 128 frames of 64 x 64 the sum is fifty
      times too small. oneDNN sums them in float32 beside the kernel's gradient, which takes no longer.
    - Of a dense layer, which is a 1 x 1 convolution of one pixel: matrix products, ten times as fast.
    - Of ReLU: see `relu`.

    Args:
        x: images [B, H, W, C].
        kernel: [h, w, C, D].
        bias: [D].
        stride: in both directions.
        padding: SAME or VALID.
        with_relu: applies a ReLU. If an input of the operation is not finite, so is a gradient, or without
            oneDNN the output. With oneDNN the output may be finite, because its ReLU makes 0 of NaN.

    Returns:
        [B, H', W', D], in the dtype of x.
    """
    fused = _has_onednn(x.dtype)
    settings = {"strides": [1, stride, stride, 1], "padding": padding}

    @tf.custom_gradient
    def of(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> Any:
        if fused:
            y = _fused_convolution(x, kernel, bias, with_relu=with_relu, **settings)
        else:
            y = tf.nn.bias_add(tf.nn.conv2d(x, kernel, **settings), bias)
            y = relu(y) if with_relu else y

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            if with_relu:
                upstream = _relu_gradient(upstream, y)
            if kernel.shape[:2] == upstream.shape[1:3] == x.shape[1:3] == (1, 1):
                gradients = _dense_gradients(x, kernel, upstream)
            else:
                gradients = _convolution_gradients(x, kernel, upstream, fused=fused, **settings)
            if fused and with_relu:  # a NaN in x is in the gradient of the kernel: NaN x 0 is NaN
                finite = tf.math.is_finite(tf.reduce_sum(kernel) + tf.reduce_sum(bias))
                gradients[2] += tf.where(finite, tf.zeros([], x.dtype), tf.constant(float("nan"), x.dtype))
            return gradients

        return y, gradient

    return of(x, kernel, bias)


def _dense_gradients(x: tf.Tensor, kernel: tf.Tensor, upstream: tf.Tensor) -> list[tf.Tensor]:
    """Gradients of x [B, 1, 1, C], the kernel [1, 1, C, D] and the bias, from upstream [B, 1, 1, D]."""
    rows, matrix = upstream[:, 0, 0], kernel[0, 0]
    of_x = tf.matmul(rows, matrix, transpose_b=True)[:, None, None]
    of_kernel = tf.matmul(x[:, 0, 0], rows, transpose_a=True)[None, None]
    return [of_x, of_kernel, tf.reduce_sum(rows, axis=0)]


def _convolution_gradients(
    x: tf.Tensor, kernel: tf.Tensor, upstream: tf.Tensor, *, fused: bool, **settings: Any
) -> list[tf.Tensor]:
    """Gradients of x, the kernel and the bias of a convolution."""
    of_x = tf.raw_ops.Conv2DBackpropInput(
        input_sizes=tf.shape(x), filter=kernel, out_backprop=upstream, **settings
    )
    if fused:
        return [of_x, *_fused_kernel_gradient(x, kernel.shape, upstream, **settings)]
    of_kernel = tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=tf.shape(kernel), out_backprop=upstream, **settings
    )
    return [of_x, of_kernel, tf.reduce_sum(upstream, axis=(0, 1, 2))]  # accumulates in float32


# Operations of oneDNN that TensorFlow has without a Python function. Its graph optimizer puts them in place
# of some groups of operations, but not of those that a gradient, a function or a loop divides.


def _fused_convolution(
    x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, *, with_relu: bool, **settings: Any
) -> tf.Tensor:
    """A convolution, the addition of biases, and perhaps a ReLU."""
    operations = [b"BiasAdd", b"Relu"] if with_relu else [b"BiasAdd"]
    attributes = {
        "TArgs": AttrValue(list=AttrValue.ListValue(type=[bias.dtype.as_datatype_enum])),
        "num_args": AttrValue(i=1),
        "num_host_args": AttrValue(i=0),
        "fused_ops": AttrValue(list=AttrValue.ListValue(s=operations)),
    }
    (y,) = _onednn("_MklNativeFusedConv2D", [x, kernel, bias], 1, attributes, **settings)
    return y


def _fused_kernel_gradient(
    x: tf.Tensor, shape: tf.TensorShape, upstream: tf.Tensor, **settings: Any
) -> list[tf.Tensor]:
    """Gradients of a convolution's kernel, which has that shape, and of its bias."""
    # TensorFlow believes that there are as many biases as channels of x, unless it does not know those.
    x = tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None] * 4)
    inputs = [x, tf.constant(shape.as_list(), tf.int32), upstream]
    of_kernel, of_bias = _onednn("_MklNativeConv2DBackpropFilterWithBias", inputs, 2, {}, **settings)
    of_bias.set_shape(shape[-1:])
    return [of_kernel, of_bias]


def _onednn(
    name: str,
    inputs: list[tf.Tensor],
    outputs: int,
    attributes: dict[str, AttrValue],
    *,
    strides: list[int],
    padding: str,
) -> list[tf.Tensor]:
    """An operation of oneDNN in the graph that is being traced."""
    dtype = inputs[0].dtype
    attributes |= {
        "_kernel": AttrValue(s=b"MklNameChangeOp"),  # the label under which TensorFlow registers oneDNN's
        "T": AttrValue(type=dtype.as_datatype_enum),
        "strides": AttrValue(list=AttrValue.ListValue(i=strides)),
        "padding": AttrValue(s=padding.encode()),
    }
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(name, inputs, [dtype] * outputs, name="onednn", attrs=attributes).outputs


def _has_gpu() -> bool:
    """True if TensorFlow uses a GPU: --device cpu leaves those of the machine alone."""
    return bool(tf.config.get_visible_devices("GPU"))


def _has_onednn(dtype: tf.DType) -> bool:
    """True if a graph that is being traced may use oneDNN's operations."""
    return not _portable.get() and not tf.executing_eagerly() and not _has_gpu() and _runs_onednn(dtype)


@functools.cache
def _runs_onednn(dtype: tf.DType) -> bool:
    """True if oneDNN is on, and TensorFlow's build and this CPU run its fused operations in this dtype."""
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "1":
        return False

    def try_out() -> list[tf.Tensor]:
        x, kernel, bias = (tf.zeros(shape, dtype) for shape in ((2, 4, 4, 16), (3, 3, 16, 16), (16,)))
        settings = {"strides": [1, 1, 1, 1], "padding": "SAME"}
        y = _fused_convolution(x, kernel, bias, with_relu=True, **settings)
        return _fused_kernel_gradient(x, kernel.shape, y, **settings)

    with tf.init_scope():
        try:
            tf.function(try_out, autograph=False)()
        except (tf.errors.OpError, ValueError, RuntimeError):
            return False
    return True
