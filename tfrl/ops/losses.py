"""Losses of policy-gradient methods, per sample: the caller sums and divides by the global batch.

Arguments and results are float [B], unless a docstring says otherwise.
"""

from __future__ import annotations

from tfrl.ops.graph import tf

_MAX_LOG_RATIO = 50.0  # of a metric: the sum of its exponentials stays finite in float32


def clipped_surrogate(ratio: tf.Tensor, advantage: tf.Tensor, clip_ratio: float) -> tf.Tensor:
    """PPO's clipped surrogate, negated to be minimised (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        L = -min(rho * A, clip(rho, 1 - eps, 1 + eps) * A)

    `ratio` is rho = pi(a|o) / pi_old(a|o), and `clip_ratio` is eps.
    """
    clipped = tf.clip_by_value(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return -tf.minimum(ratio * advantage, clipped * advantage)


def policy_gradient(log_prob: tf.Tensor, advantage: tf.Tensor) -> tf.Tensor:
    """-log pi(a|o) A, whose gradient is the policy gradient (Sutton and Barto 2018, eq. 13.11).

    IMPALA's policy loss with the advantages of `returns.vtrace`, REINFORCE's with those of returns.

    `log_prob` is that of the policy that learns; the advantage is a constant here.
    """
    return -log_prob * tf.stop_gradient(advantage)


def value_error(value: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Half the squared error."""
    return 0.5 * tf.square(value - target)


def huber_value_error(value: tf.Tensor, target: tf.Tensor, delta: float = 1.0) -> tf.Tensor:
    """The Huber loss of e = V - R: half the square up to |e| = delta, and linear with slope delta beyond it.

        L = 1/2 e^2 if |e| <= delta, else delta (|e| - 1/2 delta)

    Huber 1964, Annals of Mathematical Statistics 35, section 4; its gradient is DQN's clipped error (Mnih et
    al. 2015, Nature 518, methods). PyTorch calls it `smooth_l1` where delta is 1.

    V is `value`, and R is `target`; `delta` is in the units of the value.
    """
    distance = tf.abs(value - target)
    within = tf.minimum(distance, delta)
    return 0.5 * tf.square(within) + delta * (distance - within)


def clipped_value_error(
    value: tf.Tensor, old_value: tf.Tensor, target: tf.Tensor, clip_ratio: float
) -> tf.Tensor:
    """The larger of the error of the value and the error of the value clipped to `clip_ratio` of the old one.

        L = max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) / 2

    This is the loss of OpenAI Baselines' ppo2, which made the published procgen results.

    Args:
      value: V of the weights being trained.
      old_value: V when the rollout was made.
      target: R.
      clip_ratio: eps, in the units of the value.
    """
    clipped = old_value + tf.clip_by_value(value - old_value, -clip_ratio, clip_ratio)
    return tf.maximum(value_error(value, target), value_error(clipped, target))


def approx_kl(log_ratio: tf.Tensor) -> tf.Tensor:
    """Per-sample estimate of KL(pi_old, pi): (rho - 1) - log rho, unbiased, and never negative but
    for rounding, which is about 1e-7.

    John Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, k3.
    A log-ratio above 50 counts as 50 in the exponential, so the estimate stays finite.
    """
    return tf.exp(tf.minimum(log_ratio, _MAX_LOG_RATIO)) - 1.0 - log_ratio


def categorical_kl(logits_p: tf.Tensor, logits_q: tf.Tensor) -> tf.Tensor:
    """KL(p, q) = sum_a p(a) (log p(a) - log q(a)) of two categorical distributions, in nats.

    It is computed in float64, because vectorised exponentials round a number by its place in the batch. The
    logits are float [B, A], and the result has the dtype of `logits_q`. Gradients flow to both.
    """
    log_p, log_q = (tf.nn.log_softmax(tf.cast(x, tf.float64)) for x in (logits_p, logits_q))
    return tf.cast(tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=-1), logits_q.dtype)
