"""Convolutions and ReLUs with gradients of their own: against float64, row by row, and with NaN in them."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import resnet
from resnet import networks, operations
from resnet.operations import convolution, portable, relu
from tfrl.algorithms import registry as settings
from tfrl.networks.weights import export

NAN = {"positive": 0x7FC0, "negative": -0x40}  # the bits of bfloat16

in_graph = tf.function(autograph=False)


def drawn(*shape, dtype="float64", seed=0):
    """Normal numbers that bfloat16 holds exactly."""
    numbers = np.random.default_rng([seed, *shape]).normal(size=shape)
    return tf.cast(tf.cast(numbers, tf.bfloat16), dtype)


def of_tensorflow(x, kernel, bias, *, stride=1, padding="SAME", with_relu=False):
    y = tf.nn.conv2d(x, kernel, stride, padding) + bias
    return tf.nn.relu(y) if with_relu else y


def output_and_gradients(function, arrays, **options):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        y = function(*arrays, **options)
        loss = tf.reduce_sum(tf.cast(y, tf.float64) * (1 + drawn(*y.shape, seed=1)))
    gradients = tape.gradient(loss, arrays)
    # Also while traced: a gradient step joins gradients, whose sizes it must know.
    assert [gradient.shape for gradient in gradients] == [array.shape for array in arrays]
    return y, *gradients


CASES = [
    ((16, 64, 64, 3), (3, 3, 3, 16), {}),
    ((8, 16, 16, 16), (3, 3, 16, 32), {"with_relu": True}),
    ((8, 16, 16, 32), (3, 3, 32, 32), {}),
    ((4, 20, 20, 4), (8, 8, 4, 32), {"stride": 4, "padding": "VALID", "with_relu": True}),
    ((64, 1, 1, 256), (1, 1, 256, 64), {"with_relu": True}),  # a dense layer
    ((64, 1, 1, 256), (1, 1, 256, 64), {}),
]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "kernel", "options"), CASES)
def test_convolutions_and_their_gradients_are_those_of_float64(shape, kernel, options, dtype, traced):
    arrays = [drawn(*shape), drawn(*kernel) / 16, drawn(kernel[-1])]
    expected = output_and_gradients(of_tensorflow, arrays, **options)
    run = in_graph(output_and_gradients) if traced else output_and_gradients
    found = run(convolution, [tf.cast(array, dtype) for array in arrays], **options)
    for name, one, other in zip(("y", "x", "kernel", "bias"), found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        error = np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
        # CPUs without bfloat16 also add in it.
        digits = 0.03 if operations._runs_onednn(tf.bfloat16) else 0.06
        assert error < (1e-5 if dtype == "float32" else digits), f"{name}: {error}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_relu_and_its_gradient_are_tensorflows(dtype):
    x, upstream = drawn(3, 7, 5, dtype=dtype), drawn(3, 7, 5, dtype=dtype, seed=1)
    for function in (relu, in_graph(relu)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        np.testing.assert_array_equal(y, tf.nn.relu(x))
        expected = np.where(np.asarray(x, np.float32) > 0, np.asarray(upstream, np.float32), 0)
        np.testing.assert_array_equal(tf.cast(tape.gradient(y, x, upstream), tf.float32), expected)


@pytest.mark.parametrize("bits", NAN.values(), ids=NAN)
def test_relu_keeps_nan(bits):
    x = tf.fill([100], tf.bitcast(tf.constant(bits, tf.int16), tf.bfloat16))
    assert np.isnan(tf.cast(relu(x), tf.float32)).all()


@pytest.mark.parametrize("options", [{"with_relu": True}, {}], ids=str)
def test_an_image_has_the_same_bits_in_every_batch(options):
    """So that a frame that was acted on is learned from with a ratio of 1."""
    kernel, bias = drawn(3, 3, 16, 32, dtype="bfloat16"), drawn(32, dtype="bfloat16")
    run = in_graph(lambda x: convolution(x, kernel, bias, **options))
    x = drawn(128, 16, 16, 16, dtype="bfloat16")
    whole = run(x)
    for count in (2, 3, 8):
        np.testing.assert_array_equal(run(x[:count]), whole[:count])


@pytest.mark.parametrize("place", ["x", "kernel", "bias"])
@pytest.mark.parametrize("bits", NAN.values(), ids=NAN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_before_a_relu_is_in_the_gradients(place, bits, dtype):
    """oneDNN's ReLU makes 0 of it."""
    nan = tf.bitcast(tf.constant(bits, tf.int16), tf.bfloat16)
    arrays = {"x": drawn(2, 8, 8, 16), "kernel": drawn(3, 3, 16, 16), "bias": drawn(16)}
    flat = tf.cast(tf.reshape(arrays[place], [-1]), tf.bfloat16)
    flat = tf.concat([flat[:3], [nan], flat[4:]], axis=0)
    arrays[place] = tf.reshape(flat, arrays[place].shape)
    arrays = [tf.cast(array, dtype) for array in arrays.values()]
    y, _, *of_weights = in_graph(output_and_gradients)(convolution, arrays, with_relu=True)
    found = of_weights if operations._runs_onednn(tf.as_dtype(dtype)) else [y]  # TensorFlow's ReLU keeps NaN
    assert not all(np.isfinite(tf.cast(array, tf.float32)).all() for array in found)


@pytest.mark.parametrize("name", ["impala", "nature"])
def test_nan_planted_in_any_activation_is_found(name, monkeypatch):
    """After each convolution and each ReLU; the loss or the norm of the gradient ends a run.

    Max pooling ignores a single NaN, in TensorFlow's operations as well, so whole images are NaN before it.
    """
    model = resnet.build(name, (40, 40, 3), dtype="mixed_bfloat16", seed=1)
    images = np.random.default_rng(0).integers(0, 256, (4, 40, 40, 3), np.uint8)
    calls = itertools.count()

    def planting(function):
        def planted(*args, **options):
            outputs, index = function(*args, **options), next(calls)
            pooled = name == "impala" and index in (0, 7, 14)
            flat, count = tf.reshape(outputs, [-1]), outputs[0].shape.num_elements() if pooled else 1
            with_nan = tf.concat([tf.fill([count], value), flat[count:]], axis=0)
            return tf.where(place == index, tf.reshape(with_nan, outputs.shape), outputs)

        return planted

    for function in ("convolution", "relu"):
        monkeypatch.setattr(networks, function, planting(getattr(networks, function)))
    for layer in model.layers:
        if getattr(layer, "call", None) is relu:
            layer.call = networks.relu

    @in_graph
    def norm(place_, bits):
        nonlocal place, value
        place, value = place_, tf.bitcast(tf.cast(bits, tf.int16), tf.bfloat16)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images, training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return tf.linalg.global_norm([loss, *gradients])

    place = value = None
    assert np.isfinite(norm(tf.constant(-1), tf.constant(0)))
    count = next(calls)
    assert count == (23 if name == "impala" else 4)
    for index, bits in itertools.product(range(count), NAN.values()):
        assert not np.isfinite(norm(tf.constant(index), tf.constant(bits))), f"activation {index}"


def test_a_graph_of_the_network_has_fused_operations():
    """15 convolutions, 6 of them with the ReLU behind them, and the dense layer."""
    if not operations._runs_onednn(tf.bfloat16):
        pytest.skip("needs oneDNN in bfloat16")
    model = resnet.build("impala", (16, 16, 3), dtype="mixed_bfloat16")
    graph = tf.function(lambda x: model(x), autograph=False).get_concrete_function(
        tf.TensorSpec([2, 16, 16, 3], tf.uint8)
    )
    fused = [
        tuple(op.get_attr("fused_ops"))
        for op in graph.graph.get_operations()
        if op.type == "_MklNativeFusedConv2D"
    ]
    assert fused.count((b"BiasAdd", b"Relu")) == 7 and fused.count((b"BiasAdd",)) == 9
    with portable():
        plain = tf.function(lambda x: model(x), autograph=False).get_concrete_function(
            tf.TensorSpec([2, 16, 16, 3], tf.uint8)
        )
    assert not any("Mkl" in op.type for op in plain.graph.get_operations())


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_threads_that_share_operations_give_the_bits_of_one_thread(dtype):
    """The parts of a minibatch are computed side by side, by the same operations of a graph."""
    model = resnet.build("impala", (32, 32, 3), dtype=dtype)
    images = np.random.default_rng(1).integers(0, 256, (32, 8, 32, 32, 3), np.uint8)
    shapes = [tf.TensorSpec(variable.shape) for variable in model.trainable_variables]

    def of_part(part):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(part), tf.float32) ** 2)
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    def of_parts(parts, at_once):
        return tf.map_fn(of_part, parts, fn_output_signature=shapes, parallel_iterations=at_once)

    alone, together = (in_graph(lambda x, n=n: of_parts(x, n)) for n in (1, 8))
    expected = alone(images)
    for _ in range(5):
        for one, other in zip(together(images), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_exported_policy_has_no_operations_of_this_build(tmp_path):
    config = settings.reader("ppo").parse(["--env", "catch", "--torso", "cookbook", "--num-levels", "0"])
    network = config.make_network("bfloat16")
    weights = network.split(network.initial())
    export(tmp_path, config, weights, precision="bfloat16", env_steps=1)
    assert b"Mkl" not in (tmp_path / "policy" / "saved_model.pb").read_bytes()
