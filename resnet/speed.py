"""The env steps a second that a network leaves PPO, by the time of its passes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import tensorflow as tf

EPOCHS = 3  # of train-procgen's PPO: each env step is acted once and learned from so often
_ROUNDS = 3


def env_steps_per_second(model: keras.Model, rows: int) -> float:
    """The ceiling that forward passes and gradients set: envs, optimizer and heads are not in it.

    Args:
      model: a torso.
      rows: images of a pass.
    """
    size, dtype = (rows, *model.input_shape[1:]), model.inputs[0].dtype
    images = tf.cast(tf.random.stateless_uniform(size, (0, 0), maxval=256, dtype=tf.int32), dtype)

    @tf.function(autograph=False)
    def forward() -> tf.Tensor:
        return tf.reduce_sum(model(images))

    @tf.function(autograph=False)
    def learn() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(model(images, training=True))
        grads = tape.gradient(total, [v.value for v in model.trainable_variables])
        return [tf.reduce_sum(g) for g in grads]  # so that none is left out, and little is copied

    return rows / (_seconds(forward) + EPOCHS * _seconds(learn))


def _seconds(call: Callable[[], object]) -> float:
    """The least of a few calls after the first, which traces."""
    call()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        tf.nest.map_structure(lambda x: x.numpy(), call())
        times.append(time.perf_counter() - start)
    return min(times)
