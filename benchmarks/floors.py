"""Compute floors of procgen's default network: its passes alone, in TensorFlow or PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.arithmetic import product_rate
from tfrl.envs.registry import specs
from tfrl.envs.spec import EnvSpec

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic

_FORWARD_BATCHES = (32, 64)
_GRADIENT_BATCHES = (256, 512)


class Passes(NamedTuple):
    """Passes of a frame through a torso, from its env step to the last gradient of it."""

    forwards: int
    gradients: int


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
        min(_seconds(partial(function, batch), share) / batch for batch in batches)
        for function, batches in ((forward, _FORWARD_BATCHES), (gradient, gradient_batches))
    ]
    return 1.0 / (each.forwards * best[0] + each.gradients * best[1])


def _seconds(function: Callable[[], Any], seconds: float) -> float:
    """What a call takes, the median of as many as fit into `seconds`."""
    function()  # tracing, memory
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def whole_floor(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second of the network alone, in TensorFlow, each operation on all cores."""
    tf, network = build(precision)
    weights = weights_of(tf, network)
    forward = lambda images: network.outputs(weights, images)  # noqa: E731
    return _floor(forward, gradient_of(tf, network), seconds, each)


def parts_floor(precision: str, seconds: float, each: Passes) -> float:
    """The same in parts side by side, as the trainer computes on CPUs."""
    from tfrl.workers import parts

    parts.one_thread_each()  # before anything else uses TensorFlow
    tf, network = build(precision)
    return _floor(*in_parts(tf, network), seconds, each, rows_at_once())


def rows_at_once() -> list[int]:
    """Rows of a gradient that are two and four parts on each core."""
    from tfrl.workers import parts, strategy

    return [n * strategy.PART_ROWS * parts.cores() for n in (2, 4)]


def in_parts(tf: Any, network: ActorCritic) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A forward pass and gradients, by observations, in parts side by side."""
    from tfrl.workers import parts, strategy

    of_part = gradient_of(tf, network)

    def gradient(images: Any) -> Any:
        shapes = [tf.TensorSpec(network.initial()[name].shape) for name in network.learned]
        rows = tf.reshape(images, (-1, strategy.PART_ROWS, *images.shape[1:]))
        return tf.map_fn(of_part, rows, fn_output_signature=shapes, parallel_iterations=parts.cores())

    forward, weights = network.forward_pass(on_gpu=False, at_once=parts.cores()), weights_of(tf, network)
    return lambda images: forward(weights, images), gradient


def arithmetic_limit(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second if all arithmetic were as fast as a large matrix product, on all cores."""
    from resnet.costs import cost_of

    _, network = build(precision)
    rate = product_rate(precision, seconds)
    # The heads are products of 256 x 16, a thousandth of the torso.
    return rate / (
        1e6 * cost_of(network.functions["torso"].layer).mflop * (each.forwards + 3 * each.gradients)
    )


def build(precision: str) -> tuple[Any, ActorCritic]:
    """TensorFlow and IMPALA's network, as the trainer sets them up."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import tensorflow as tf  # isort: skip

    from tfrl.networks import actor_critic
    from tfrl.workers import strategy

    strategy.set_up_tensorflow()
    observation_spec, action_spec = specs(EnvSpec(env="coinrun", num_envs=1, seed=1))
    network = actor_critic.build(
        torso="impala",
        torso_options={},
        observation_spec=observation_spec,
        action_spec=action_spec,
        share_torso=True,
        precision=precision,
        seed=1,
    )
    return tf, network


def gradient_of(tf: Any, network: ActorCritic) -> Callable[[Any], Any]:
    """Gradients of something like a loss, by observations."""
    weights = weights_of(tf, network)

    def gradient(observations: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(list(weights.values()))
            logits, values = network.outputs(weights, observations)
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
