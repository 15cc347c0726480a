"""Compute floors of procgen's default network: its passes alone, in TensorFlow, Keras or PyTorch.

With memory, a recurrent layer stands behind the torso. Gradients are then of whole sequences.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.arithmetic import product_rate

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic

_FORWARD_BATCHES = (32, 64)
_GRADIENT_BATCHES = (256, 512)
_KERAS_BATCHES = (512, 2048)  # PPO's minibatch at once, or in parts


class Passes(NamedTuple):
    """Passes of a frame through a torso, from its env step to the last gradient of it.

    Attributes:
      forwards, gradients: how many.
      memory: the kind of the recurrent layer behind the torso, or "none".
      steps: of the sequences that it learns from.
    """

    forwards: int
    gradients: int
    memory: str = "none"
    steps: int = 1


def _best(
    forward: Callable[[int], Any],
    gradient: Callable[[int], Any],
    seconds: float,
    each: Passes,
    gradient_batches: Sequence[int] = _GRADIENT_BATCHES,
) -> float:
    """Env steps a second from functions that take a batch size and do one call on it."""
    share = seconds / (len(_FORWARD_BATCHES) + len(gradient_batches))
    best = [
        min(seconds_of(partial(function, batch), share) / batch for batch in batches)
        for function, batches in ((forward, _FORWARD_BATCHES), (gradient, gradient_batches))
    ]
    return 1.0 / (each.forwards * best[0] + each.gradients * best[1])


def seconds_of(function: Callable[[], Any], seconds: float) -> float:
    """Seconds of a call: the median of as many calls as fit into `seconds`."""
    function()  # tracing, memory
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def whole_floor(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second of the network alone, in TensorFlow, each operation on all cores."""
    tf, network = build(precision, each.memory)
    weights = weights_of(tf, network)
    forward = lambda images: network.outputs(weights, *remembering(tf, network, images))  # noqa: E731
    batches = _GRADIENT_BATCHES if each.memory == "none" else [n * each.steps for n in (1, 4, 8)]
    return _floor(forward, gradient_of(tf, network, each.steps), seconds, each, batches)


def parts_floor(precision: str, seconds: float, each: Passes) -> float:
    """The same in parts side by side, as the trainer computes on CPUs."""
    from tfrl.workers import machine

    machine.one_thread_each()  # before anything else uses TensorFlow
    tf, network = build(precision, each.memory)
    return _floor(*in_parts(tf, network, each.steps), seconds, each, rows_at_once(each.steps))


def keras_floor(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second of `keras_network`, each operation on all cores. Without memory."""
    return _floor(*keras_network(precision), seconds, each, _KERAS_BATCHES)


def keras_network(precision: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A forward pass and gradients, by images, as anyone would write them: with stock Keras layers alone.

    TensorFlow has its own settings.
    """
    import os

    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # off by default on some CPUs, where it is slower
    import keras
    import tensorflow as tf

    if precision == "bfloat16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    layers = keras.layers
    x = inputs = keras.Input((64, 64, 3), dtype="uint8")
    x = layers.Rescaling(1 / 255)(x)
    for depth in (16, 32, 32):
        x = layers.MaxPooling2D(3, 2, padding="same")(layers.Conv2D(depth, 3, padding="same")(x))
        for _ in range(2):
            branch = layers.Conv2D(depth, 3, padding="same")(layers.ReLU()(x))
            x = layers.Add()([x, layers.Conv2D(depth, 3, padding="same")(layers.ReLU()(branch))])
    x = layers.Dense(256, activation="relu")(layers.ReLU()(layers.Flatten()(x)))
    outputs = [layers.Dense(units, dtype="float32")(x) for units in (15, 1)]
    model = keras.Model(inputs, outputs)

    def gradient(images: Any) -> Any:
        with tf.GradientTape() as tape:
            logits, values = model(images, training=True)
            loss = tf.reduce_sum(tf.square(logits)) + tf.reduce_sum(tf.square(values))
        return tape.gradient(loss, model.trainable_variables)

    return lambda images: model(images, training=False), gradient


def rows_at_once(steps: int) -> list[int]:
    """Rows of a gradient that are two and four parts on each core."""
    from tfrl.workers import machine

    return [n * _part_rows(steps) * machine.threads() for n in (2, 4)]


def _part_rows(steps: int) -> int:
    """Rows of a part, which has whole sequences of so many steps."""
    from tfrl.workers import strategy

    return max(1, strategy.PART_ROWS // steps) * steps


def in_parts(tf: Any, network: ActorCritic, steps: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A forward pass and gradients, by observations, in parts side by side."""
    from tfrl.workers import machine

    of_part, vectors = gradient_of(tf, network, steps), network.initial()
    shapes = [tf.TensorSpec(vectors[name].shape) for name in network.learned]

    def gradient(images: Any) -> Any:
        rows = tf.reshape(images, (-1, _part_rows(steps), *images.shape[1:]))
        return tf.map_fn(of_part, rows, fn_output_signature=shapes, parallel_iterations=machine.threads())

    forward, weights = network.forward_pass(on_gpu=False, at_once=machine.threads()), weights_of(tf, network)
    return lambda images: forward(weights, *remembering(tf, network, images)), gradient


def remembering(tf: Any, network: ActorCritic, images: Any) -> list[Any]:
    """Images, and an empty memory for each where the network is recurrent."""
    return [images, *([tf.zeros((images.shape[0], network.memory_size))] if network.memory_size else [])]


def arithmetic_limit(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second if all arithmetic were as fast as a large matrix product, on all cores."""
    from benchmarks.costs import cost_of

    _, network = build(precision, each.memory)
    rate = product_rate(precision, seconds)
    # The heads are products of 256 x 16, a thousandth of the torso.
    products = 1e6 * cost_of(network.functions["torso"].layer).mflop
    if each.memory != "none":
        products += 2 * network.functions["core"].num_parameters  # each weight takes part in one
    return rate / (products * (each.forwards + 3 * each.gradients))


def build(precision: str, memory: str = "none") -> tuple[Any, ActorCritic]:
    """TensorFlow and IMPALA's network, as the trainer sets them up."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import tensorflow as tf  # isort: skip

    from tfrl.algorithms.registry import reader
    from tfrl.workers import strategy

    strategy.set_up_tensorflow()
    return tf, reader("ppo").parse(["--env", "coinrun", "--memory", memory]).make_network(precision)


def gradient_of(tf: Any, network: ActorCritic, steps: int) -> Callable[[Any], Any]:
    """Gradients of something like a loss, by observations, which are of sequences of so many steps."""
    weights = weights_of(tf, network)

    def gradient(observations: Any) -> Any:
        rows, memory = observations.shape[0], []
        if network.memory_size:
            empty = tf.zeros((rows, network.memory_size))
            memory = [network.sequences(empty, tf.ones(rows), rows // steps)]
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            logits, values, *_ = network.outputs(weights, observations, *memory)
            loss = tf.reduce_sum(tf.square(logits)) + tf.reduce_sum(tf.square(values))
        return tape.gradient(loss, [weights[name] for name in network.learned])

    return gradient


def weights_of(tf: Any, network: ActorCritic) -> dict[str, Any]:
    """The initial weights as tensors."""
    return {name: tf.constant(vector) for name, vector in network.initial().items()}


def _floor(
    forward: Callable[[Any], Any],
    gradient: Callable[[Any], Any],
    seconds: float,
    each: Passes,
    gradient_batches: Sequence[int] = _GRADIENT_BATCHES,
) -> float:
    """Env steps a second from TensorFlow functions of observations."""
    import tensorflow as tf

    images = {n: tf.constant(frames(n)) for n in {*_FORWARD_BATCHES, *gradient_batches}}
    forward, gradient = tf.function(forward), tf.function(gradient)
    calls = (lambda n: forward(images[n])[1].numpy(), lambda n: gradient(images[n])[0].numpy())
    return _best(*calls, seconds, each, gradient_batches)


def frames(count: int) -> np.ndarray:
    """Observations of nothing, uint8 [count, 64, 64, 3]."""
    return np.random.default_rng(count).integers(0, 256, (count, 64, 64, 3), np.uint8)


def torch_floor(precision: str, seconds: float, each: Passes) -> float:
    """The same in PyTorch, float32, channels last (its faster layout on CPUs)."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(channels, channels, 3, padding=1)
            self.second = nn.Conv2d(channels, channels, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(torch.relu(self.first(torch.relu(x))))

    layers: list[nn.Module] = []
    channels = 3
    for depth in (16, 32, 32):
        layers += [nn.Conv2d(channels, depth, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [Block(depth), Block(depth)]
        channels = depth
    layers += [nn.Flatten(), nn.ReLU(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 16)]
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def images(n: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (n, 3, 64, 64), dtype=torch.uint8)
        return raw.contiguous(memory_format=torch.channels_last)

    cache = {n: images(n) for n in {*_FORWARD_BATCHES, *_GRADIENT_BATCHES}}

    def forward(n: int) -> None:
        with torch.inference_mode():
            network(cache[n].float() / 255.0)

    def gradient(n: int) -> None:
        network.zero_grad()
        network(cache[n].float() / 255.0).square().sum().backward()

    return _best(forward, gradient, seconds, each)
