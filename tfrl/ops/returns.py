"""Returns and advantages of rollouts [T, B]: T steps of B envs, time first.

All functions use one convention. Step t has the reward r_t of action a_t, and a discount d_t, which is the
weight of later rewards: gamma while the episode continues, 0 where it ends. Only `rewards_and_discounts`
deals with the ends of episodes. V_t is the value of the observation before a_t, and V_T, `last_value` [B],
that of the observation after the last action. All other arrays are float [T, B], from t = 0 to T-1.
"""

from __future__ import annotations

from tfrl.ops.graph import tf


def rewards_and_discounts(
    rewards: tf.Tensor, first: tf.Tensor, truncated: tf.Tensor, final_values: tf.Tensor, *, gamma: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rewards and discounts that the functions below take; they contain how episodes end.

        d_t  = gamma * (1 - first_{t+1})
        r'_t = r_t + gamma * V(final observation) if the episode was cut off after a_t, otherwise r_t

    A terminated episode has no more rewards. A truncated episode would have continued, so the value of its
    final observation is added to its last reward (partial-episode bootstrapping, Pardo et al. 2018,
    arXiv:1712.00378). Its discount is still 0, because the next step belongs to another episode.

    Args:
      rewards: r_t.
      first: bool [T, B], first_1 ... first_T: the observation after a_t begins a new episode.
      truncated: bool [T, B]: the episode was truncated after a_t, and did not terminate; implies `first`.
      final_values: the value of a truncated episode's final observation; other places are not read.
      gamma: discount per step.

    Returns:
      Rewards, which change only where an episode was truncated, and discounts.
    """
    discounts = gamma * (1.0 - tf.cast(first, rewards.dtype))
    return tf.where(truncated, rewards + gamma * final_values, rewards), discounts


def gae(
    rewards: tf.Tensor, discounts: tf.Tensor, values: tf.Tensor, last_value: tf.Tensor, *, lam: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        delta_t = r_t + d_t V_{t+1} - V_t
        A_t     = delta_t + lam d_t A_{t+1}

    `lam` 0 gives one-step errors, 1 gives Monte-Carlo returns minus values. Returns the advantages A_t, and
    the value targets A_t + V_t, which are the lambda-returns.
    """
    deltas = rewards + discounts * _following(values, last_value) - values
    advantages = tf.scan(
        lambda later, now: now[0] + lam * now[1] * later,
        (deltas, discounts),
        tf.zeros_like(last_value),
        reverse=True,
    )
    return advantages, advantages + values


def vtrace(
    log_ratios: tf.Tensor,
    rewards: tf.Tensor,
    discounts: tf.Tensor,
    values: tf.Tensor,
    last_value: tf.Tensor,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float = 1.0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """V-trace, for rollouts that an older policy mu made (Espeholt et al. 2018, arXiv:1802.01561).

        rho_t   = min(rho_bar, pi / mu),   c_t = lam min(c_bar, pi / mu)           of a_t
        delta_t = rho_t (r_t + d_t V_{t+1} - V_t)
        v_t     = V_t + delta_t + d_t c_t (v_{t+1} - V_{t+1}),   v_T = V_T         eq. 1, as in remark 1
        A_t     = rho_t (r_t + d_t (lam v_{t+1} + (1 - lam) V_{t+1}) - V_t)        section 4.2

    The paper's advantage is that of lam = 1. Weighted by lam as here, advantages and targets of an on-policy
    rollout (pi = mu, rho_bar >= 1, c_bar >= 1) are those of `gae` for any lam.

    Args:
      log_ratios: log pi(a_t|o_t) - log mu(a_t|o_t).
      rewards, discounts: r_t and d_t.
      values, last_value: V_t and V_T, of the weights that learn.
      rho_bar: decides the fixed point: the value of pi if it is infinite, close to that of mu if near 0.
      c_bar: limits the effect of later errors. It changes the speed of learning and not its fixed point.
      lam: shortens the traces (remark 2).

    Returns:
      Advantages A_t, which contain rho_t, and value targets v_t, both without gradients.
    """
    log_ratios, rewards, discounts, values, last_value = (
        tf.stop_gradient(x) for x in (log_ratios, rewards, discounts, values, last_value)
    )
    # Vectorised exponentials round a number by its place in the batch; rounded from float64, they do not.
    ratios = tf.cast(tf.exp(tf.cast(log_ratios, tf.float64)), rewards.dtype)
    rhos, traces = tf.minimum(ratios, rho_bar), lam * tf.minimum(ratios, c_bar)
    next_values = _following(values, last_value)
    errors = tf.scan(  # v_t - V_t
        lambda later, now: now[0] + now[1] * later,
        (rhos * (rewards + discounts * next_values - values), discounts * traces),
        tf.zeros_like(last_value),
        reverse=True,
    )
    next_errors = _following(errors, tf.zeros_like(last_value))
    advantages = rhos * (rewards + discounts * (next_values + lam * next_errors) - values)
    return advantages, errors + values


def _following(x: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    """x_1 ... x_T of x_0 ... x_{T-1} [T, B] and x_T = `last` [B]."""
    return tf.concat([x[1:], last[None]], axis=0)
