"""The limit that arithmetic alone sets: additions and multiplications, at the rate of a large matrix product.

No program in the same precision is faster on the same cores, whatever it is written in.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def _passes(algorithm: str, config: Any) -> tuple[float, float]:
    """Passes of a transition in a gradient step, in forward passes of the actor and of a critic (DQN: of Q).

    A backward pass to the weights and the inputs counts twice a forward one, to the inputs alone once.
    """
    if algorithm == "dqn":
        return 0.0, 1 + 3 + config.double  # the target's; with its gradient; the choice of double Q-learning
    if algorithm == "sac":
        return 1 + 3, 2 + 6 + 4
    critics, every = 1 + (algorithm == "td3"), config.policy_delay
    return 1 + 3 / every, critics * (1 + 3) + 2 / every  # the slow ones', the learned ones', the actor's loss


def product_rate(precision: str, seconds: float) -> float:
    """Additions and multiplications a second of a product of 2,048 x 2,048 on all cores, the best of many."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import tensorflow as tf  # isort: skip

    size, dtype = 2048, tf.bfloat16 if precision == "bfloat16" else tf.float32
    left, right = (tf.cast(tf.random.stateless_normal((size, size), (0, k)), dtype) for k in (1, 2))
    product = tf.function(lambda: tf.matmul(left, right)[0, 0], autograph=False)
    product().numpy()
    least, end = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or not np.isfinite(least):
        start = time.perf_counter()
        product().numpy()
        least = min(least, time.perf_counter() - start)
    return 2 * size**3 / least


def gradient_step(algorithm: str, config: Any) -> float:
    """Additions and multiplications of a gradient step of an algorithm with replay, on vectors."""
    from tfrl.envs import registry

    observation, action = registry.specs(config)
    hidden = [int(units) for units in config.hidden.split(",")]
    inputs, of_actor, of_critic = observation.shape[0], *_passes(algorithm, config)
    if algorithm == "dqn":
        return of_critic * config.batch_size * _forward([inputs, *hidden, action.n])
    size, outputs = action.shape[0], action.shape[0] * (2 if algorithm == "sac" else 1)
    actor, critic = _forward([inputs, *hidden, outputs]), _forward([inputs + size, *hidden, 1])
    return config.batch_size * (of_actor * actor + of_critic * critic)


def _forward(units: list[int]) -> float:
    return 2.0 * sum(a * b for a, b in zip(units, units[1:], strict=False))
