"""The floor of PPO on small networks: the minibatches of an update in one compiled loop, and nothing else.

Gathering a minibatch's rows, both networks' gradients of something like a loss, clipping by the global norm
and Adam, in plain TensorFlow; no envs, no acting, no advantages, no replicas, no logging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from tfrl.algorithms.registry import reader
from tfrl.envs import registry


def floor(preset: str, seconds: float) -> dict[str, float]:
    """Env steps in a second of processor time by the way to compile: "graph" and "XLA"."""
    found = {}
    for way, compiled in (("graph", False), ("XLA", True)):
        code = "from benchmarks.update_floor import measure as f; "
        found[way] = float(command.answer(f"{code}print(f({preset!r}, {seconds}, compiled={compiled}))"))
    return found


def measure(preset: str, seconds: float, *, compiled: bool) -> float:
    """Env steps in a second of processor time, the median of as many updates as fit into `seconds`."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import tensorflow as tf  # isort: skip

    tf.config.threading.set_intra_op_parallelism_threads(1)
    config = reader("ppo").parse(["--preset", preset])
    update = _update(tf, config, compiled)
    update()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.process_time()
        update()
        times.append(time.process_time() - start)
    return config.steps_per_update / float(np.median(times))


def _update(tf: Any, config: Any, compiled: bool) -> Callable[[], Any]:
    """All minibatches of an update."""
    observation, action = registry.specs(config)
    hidden = [int(units) for units in config.hidden.split(",")]
    outputs = 1 if config.free_deviation else 2
    generator = np.random.default_rng(0)
    policy = layers(tf, generator, [*observation.shape, *hidden, outputs * action.shape[0]])
    value = layers(tf, generator, [*observation.shape, *hidden, 1])
    variables = [*policy, *value]
    learn = adam(tf, config, variables)
    rows = config.rows_per_step
    batch = tf.constant(generator.normal(size=(config.steps_per_update, *observation.shape)), tf.float32)
    orders = [generator.permutation(len(batch)) for _ in range(config.epochs)]
    orders = np.stack([order[: rows * config.steps_per_epoch].reshape(-1, rows) for order in orders])
    minibatches = tf.constant(orders.reshape(-1, rows), tf.int32)

    def step(chosen: Any, number: Any) -> None:
        inputs = tf.gather(batch, chosen)
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean(tf.square(apply(tf, net, inputs, tf.tanh))) for net in (policy, value))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), config.max_grad_norm)
        learn(gradients, number)

    @tf.function(jit_compile=compiled)
    def update() -> Any:
        for k in tf.range(len(minibatches)):
            step(minibatches[k], tf.cast(k + 1, tf.float32))
        return tf.reduce_sum(policy[-1])

    return lambda: update().numpy()


def adam(tf: Any, config: Any, variables: Sequence[Any]) -> Callable[[Sequence[Any], Any], None]:
    """A step of Adam on these variables, by their gradients and the number of the step, from 1 on."""
    means, squares = ([tf.Variable(tf.zeros_like(v)) for v in variables] for _ in range(2))

    def step(gradients: Sequence[Any], number: Any) -> None:
        rate = config.lr * tf.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        for v, m, s, g in zip(variables, means, squares, gradients, strict=True):
            m.assign_add(0.1 * (g - m))
            s.assign_add(0.001 * (g * g - s))
            v.assign_sub(rate * m / (tf.sqrt(s) + config.adam_epsilon))

    return step


def layers(tf: Any, generator: np.random.Generator, sizes: Sequence[int]) -> list[Any]:
    """Kernels [I, O] and biases [O] in turn, as variables."""
    found = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        kernel = generator.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        found += [tf.Variable(kernel.astype(np.float32)), tf.Variable(np.zeros(outputs, np.float32))]
    return found


def apply(tf: Any, of: Sequence[Any], inputs: Any, activation: Callable[[Any], Any]) -> Any:
    """Outputs [B, O] of inputs [B, I] by what `layers` gave."""
    for kernel, bias in zip(of[:-2:2], of[1:-2:2], strict=True):
        inputs = activation(inputs @ kernel + bias)
    return inputs @ of[-2] + of[-1]
