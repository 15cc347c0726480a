"""Adam as a pure function, for gradients that are already summed over replicas."""

from __future__ import annotations

import tensorflow as tf

BETA_1, BETA_2 = 0.9, 0.999


def adam(
    weights: tf.Tensor,
    mean: tf.Tensor,
    square: tf.Tensor,
    gradient: tf.Tensor,
    *,
    step: tf.Tensor,
    rate: tf.Tensor,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """One step (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1).

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        w = w - rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

    Args:
      weights, gradient: float32 [n], w and g.
      mean, square: float32 [n], the moments m and v; zeros before the first step.
      step: float32 [], t, which counts from 1.
      rate: float32 [], the learning rate.
      epsilon: keeps steps finite.

    Returns:
      The weights and the moments after the step.
    """
    mean = BETA_1 * mean + (1.0 - BETA_1) * gradient
    square = BETA_2 * square + (1.0 - BETA_2) * tf.square(gradient)
    # In float64: 1 - b2^t has few digits at the beginning.
    step = tf.cast(step, tf.float64)
    corrections = [
        tf.cast(1.0 - tf.pow(tf.constant(b, tf.float64), step), tf.float32) for b in (BETA_1, BETA_2)
    ]
    scaled = (mean / corrections[0]) / (tf.sqrt(square / corrections[1]) + epsilon)
    return weights - rate * scaled, mean, square
