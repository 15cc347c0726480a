"""Advantages and value targets of a rollout, with the moments that need every replica."""

from __future__ import annotations

from collections.abc import Callable

from tfrl.config.ppo import Config
from tfrl.ops import returns
from tfrl.ops.lazy import tf
from tfrl.workers.data_parallel import sum_replicas


def estimate(
    config: Config,
    gae: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    rewards: tf.Tensor,
    first: tf.Tensor,
    truncated: tf.Tensor,
    values: tf.Tensor,
    last_values: tf.Tensor,
    final_values: tf.Tensor,
    rows: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Generalised advantage estimates, and one small collective. Call it in a replica's context.

    Args:
      config: the settings.
      gae: `returns.gae`, or a compiled one.
      rewards, first, truncated, values: of the replica's part of the rollout, [T, B].
      last_values: V(o_T), [B].
      final_values: V of the last observation where an episode was truncated, [T, B].
      rows: of each minibatch in the [T * B] arrays, int32 [E * M, b].

    Returns:
      Advantages float32 [T * B], value targets float32 [T * B], mean and deviation of the advantages of every
      minibatch, float32 [E * M, 2], and the explained variance and the mean of all targets, float32 [2].
    """
    rewards, discounts = returns.rewards_and_discounts(
        rewards, first, truncated, final_values, gamma=config.gamma
    )
    advantages, targets = gae(rewards, discounts, values, last_values, lam=config.gae_lambda)
    flat_advantages = tf.reshape(advantages, [-1])
    # float64: sums of squares must not depend on how the samples are spread over replicas.
    shuffled = tf.cast(tf.gather(flat_advantages, rows), tf.float64)  # [E * M, b]
    wide_targets, errors = tf.cast(targets, tf.float64), tf.cast(targets - values, tf.float64)
    sums = [_two_sums(shuffled, 1), _two_sums(wide_targets, (0, 1)), _two_sums(errors, (0, 1))]
    if config.normalize_advantages == "batch":
        sums.append(_two_sums(tf.cast(advantages, tf.float64), (0, 1)))
    sums = sum_replicas(sums)
    if config.normalize_advantages == "batch":
        mean, variance = _moments(sums.pop(), config.steps_per_update)
        mean, variance = (tf.repeat(x, tf.shape(shuffled)[0]) for x in (mean, variance))
    else:
        mean, variance = _moments(sums[0], config.rows_per_step)
    moments = tf.cast(tf.stack([mean, tf.sqrt(variance)], axis=-1), tf.float32)  # [E * M, 2]
    mean_target, varies = _moments(sums[1], config.steps_per_update)
    _, unexplained = _moments(sums[2], config.steps_per_update)
    # For constant targets, varying values score 0 (scikit-learn's convention).
    share = tf.where(varies > 0, tf.math.divide_no_nan(unexplained, varies), tf.sign(unexplained))
    of_targets = tf.cast(tf.stack([1.0 - share, mean_target]), tf.float32)
    return flat_advantages, tf.reshape(targets, [-1]), moments, of_targets


def _two_sums(x: tf.Tensor, axis: int | tuple[int, ...]) -> tf.Tensor:
    """Sum and sum of squares, stacked in the last dimension."""
    return tf.stack([tf.reduce_sum(x, axis), tf.reduce_sum(tf.square(x), axis)], axis=-1)


def _moments(sums: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and population variance from `_two_sums`."""
    mean = sums[..., 0] / count
    return mean, tf.maximum(sums[..., 1] / count - tf.square(mean), 0.0)
