"""Returns and advantages."""

from __future__ import annotations

import tensorflow as tf


def gae(
    rewards: tf.Tensor,
    values: tf.Tensor,
    last_value: tf.Tensor,
    first: tf.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        delta_t = r_t + gamma * (1 - first_{t+1}) * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * (1 - first_{t+1}) * A_{t+1}

    Args:
      rewards: float [T, B], r_0 ... r_{T-1}: what action a_t earned.
      values: float [T, B], V_0 ... V_{T-1}.
      last_value: float [B], V_T, the value of the observation after the last action.
      first: bool [T, B], first_1 ... first_T: observation t + 1 begins a new episode.
      gamma: discount per step.
      lam: 0 gives one-step errors, 1 gives Monte-Carlo returns minus values.

    Returns:
      Advantages [T, B] and value targets A_t + V_t [T, B], of the dtype of `rewards`.
    """
    rewards, values, last_value, first = map(tf.convert_to_tensor, (rewards, values, last_value, first))
    rewards.shape.assert_has_rank(2)
    values.shape.assert_is_compatible_with(rewards.shape)
    first.shape.assert_is_compatible_with(rewards.shape)
    last_value.shape.assert_is_compatible_with(rewards.shape[1:])

    discounts = gamma * (1.0 - tf.cast(first, rewards.dtype))  # [T, B]
    next_values = tf.concat([values[1:], last_value[None]], axis=0)  # [T, B]
    deltas = rewards + discounts * next_values - values

    def step(advantage: tf.Tensor, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        delta, discount = inputs
        return delta + lam * discount * advantage

    advantages = tf.scan(step, (deltas, discounts), tf.zeros_like(last_value), reverse=True)
    return advantages, advantages + values
