"""Losses of policy-gradient methods, per sample: the caller sums and divides by the global batch."""

from __future__ import annotations

import tensorflow as tf


def clipped_surrogate(ratio: tf.Tensor, advantage: tf.Tensor, clip_ratio: float) -> tf.Tensor:
    """PPO's clipped surrogate, negated to be minimised (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        L = -min(rho * A, clip(rho, 1 - eps, 1 + eps) * A)

    Args:
      ratio: float [B], rho = pi(a|o) / pi_old(a|o).
      advantage: float [B].
      clip_ratio: eps.

    Returns:
      float [B].
    """
    ratio, advantage = tf.convert_to_tensor(ratio), tf.convert_to_tensor(advantage)
    ratio.shape.assert_has_rank(1)
    advantage.shape.assert_is_compatible_with(ratio.shape)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return -tf.minimum(ratio * advantage, clipped * advantage)


def value_error(value: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Half the squared error, [B]."""
    value, target = tf.convert_to_tensor(value), tf.convert_to_tensor(target)
    value.shape.assert_has_rank(1)
    target.shape.assert_is_compatible_with(value.shape)
    return 0.5 * tf.square(value - target)


def clipped_value_error(
    value: tf.Tensor, old_value: tf.Tensor, target: tf.Tensor, clip_ratio: float
) -> tf.Tensor:
    """The larger of the plain error and that of a value kept within `clip_ratio` of the old one.

        L = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2)

    As in OpenAI Baselines' ppo2, which the published procgen results were made with.

    Args:
      value: float [B], V of the weights being trained.
      old_value: float [B], V when the rollout was made.
      target: float [B], R.
      clip_ratio: eps, in the units of the value.

    Returns:
      float [B].
    """
    clipped = old_value + tf.clip_by_value(value - old_value, -clip_ratio, clip_ratio)
    return tf.maximum(value_error(value, target), value_error(clipped, target))


def approx_kl(log_ratio: tf.Tensor) -> tf.Tensor:
    """Per-sample estimate of KL(pi_old, pi): (rho - 1) - log rho, unbiased and never negative.

    John Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, k3.
    """
    return tf.exp(log_ratio) - 1.0 - log_ratio
