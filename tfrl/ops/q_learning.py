"""Learning from replay: targets, losses and target networks, for DQN, DDPG, TD3 and SAC.

A transition (o, a, r, d, o') has the reward r and the discount d of later rewards: gamma^n after n steps, 0
if the episode terminated. If the episode was truncated, d is not 0, and o' is its final observation. `n_step`
makes r and d. All other functions are per sample: the caller sums losses and divides by the size of the
global batch. No gradient flows through a target.

Unless a docstring says otherwise, arguments and results are float [B]. Values of all A actions are [B, A],
those of N critics [N, B] or [N, B, A]. `alpha`, the temperature, is a scalar. Q' is Q of the target network.
"""

from __future__ import annotations

import numpy as np

from tfrl.ops.graph import tf
from tfrl.ops.losses import huber_value_error, value_error

# Targets


def n_step(
    rewards: np.ndarray, first: np.ndarray, truncated: np.ndarray, *, gamma: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The transition of up to n steps that begins with each row (Sutton and Barto 2018, eq. 7.1), in NumPy.

        r = r_0 + gamma r_1 + ... + gamma^(m-1) r_{m-1},   d = gamma^m, or 0 if the episode terminated

    m is n, or fewer if the episode ends before. The bootstrap value is that of the observation after m steps,
    or of the final observation if the episode was truncated.

    Args:
      rewards: float [..., n], of the actions a_0 ... a_{n-1}.
      first: bool [..., n]: the observation after that action begins a new episode.
      truncated: bool [..., n]: the episode was truncated after that action, and did not terminate; implies
        `first`.
      gamma: discount per step.

    Returns:
      Rewards r and discounts d [...] of the dtype of `rewards`, and steps m, int32 [...].
    """
    reward, discount = np.zeros_like(rewards[..., 0]), np.ones_like(rewards[..., 0])
    steps, going = np.zeros(reward.shape, np.int32), np.ones(reward.shape, bool)
    for k in range(rewards.shape[-1]):
        reward = np.where(going, reward + discount * rewards[..., k], reward)
        terminated = first[..., k] & ~truncated[..., k]
        discount = np.where(going, discount * (gamma * ~terminated).astype(rewards.dtype), discount)
        steps += going
        going &= ~first[..., k]
    return reward, discount, steps


def td_target(reward: tf.Tensor, discount: tf.Tensor, next_value: tf.Tensor) -> tf.Tensor:
    """y = r + d V(o') (Sutton and Barto 2018, eq. 6.2).

    With V(o') = Q'(o', mu'(o')) it is DDPG's (Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1).
    """
    return tf.stop_gradient(reward + discount * next_value)


def q_learning_target(reward: tf.Tensor, discount: tf.Tensor, next_q: tf.Tensor) -> tf.Tensor:
    """y = r + d max_a Q'(o', a) (Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1).

    `next_q` is Q'(o', a), float [B, A].
    """
    return td_target(reward, discount, tf.reduce_max(next_q, axis=-1))


def double_q_learning_target(
    reward: tf.Tensor, discount: tf.Tensor, next_q: tf.Tensor, next_q_online: tf.Tensor
) -> tf.Tensor:
    """y = r + d Q'(o', argmax_a Q(o', a)) (van Hasselt et al. 2016, arXiv:1509.06461, section "Double DQN").

    `next_q` is Q'(o', a), which values the action, and `next_q_online` is Q(o', a), which chooses it; [B, A].
    """
    return td_target(reward, discount, taken_q(next_q, tf.argmax(next_q_online, axis=-1)))


def smoothed_action(
    action: tf.Tensor, noise: tf.Tensor, *, scale: float = 0.2, clip: float = 0.5
) -> tf.Tensor:
    """Target policy smoothing (Fujimoto et al. 2018, arXiv:1802.09477, section 5.3).

        a' = clip(mu'(o') + clip(scale * noise, -c, c), -1, 1)

    `action` is mu'(o') of the target actor. Actions are float [B, D] in [-1, 1]; `noise` is standard normal,
    [B, D], `scale` is its deviation in the result, and `clip` is c.
    """
    return tf.clip_by_value(action + tf.clip_by_value(scale * noise, -clip, clip), -1.0, 1.0)


def soft_value(qs: tf.Tensor, log_prob: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """V(o) = min_i Q_i(o, a) - alpha log pi(a|o), a ~ pi (Haarnoja et al. 2018, arXiv:1812.05905, eq. 3).

    `td_target` of the next observation's soft value is SAC's target (eq. 5).
    """
    return tf.reduce_min(qs, axis=0) - alpha * log_prob


def discrete_soft_value(qs: tf.Tensor, log_probs: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """V(o) = sum_a pi(a|o) (min_i Q_i(o, a) - alpha log pi(a|o)): `soft_value` without sampling
    (Christodoulou 2019, arXiv:1910.07207, eq. 10), from Q_i(o, a) [N, B, A] and log pi(a|o) [B, A].
    """
    return tf.reduce_sum(_probabilities(log_probs) * soft_value(qs, log_probs, alpha), axis=-1)


# Critics


def dueling(value: tf.Tensor, advantages: tf.Tensor) -> tf.Tensor:
    """Q(o, a) = V(o) + A(o, a) - mean_a' A(o, a') (Wang et al. 2016, arXiv:1511.06581, eq. 9), [B, A]."""
    return value[:, None] + advantages - tf.reduce_mean(advantages, axis=-1, keepdims=True)


def taken_q(q: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
    """Q(o, a) [B] of the actions int [B] that were taken, from float [B, A]."""
    return tf.gather(q, actions, axis=1, batch_dims=1)


def td_loss(
    q: tf.Tensor, target: tf.Tensor, weight: tf.Tensor | float = 1.0, *, huber_delta: float | None = None
) -> tf.Tensor:
    """w l(y - Q), with l half the square, or Huber's loss (Mnih et al. 2015, Methods: "clipped" errors).

    Args:
      q: Q(o, a).
      target: y.
      weight: the importance-sampling weights of prioritised replay (Schaul et al. 2016, arXiv:1511.05952,
        section 3.4), or 1.
      huber_delta: the loss is linear for larger errors; None: half the square.
    """
    error = value_error(q, target) if huber_delta is None else huber_value_error(q, target, huber_delta)
    return weight * error


# Actors


def soft_actor_loss(qs: tf.Tensor, log_prob: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """The actor's loss of SAC (Haarnoja et al. 2018, arXiv:1812.05905, eq. 9).

        alpha log pi(a|o) - min_i Q_i(o, a),    a ~ pi

    The gradient flows through the action; the temperature is a constant here.
    """
    return -soft_value(qs, log_prob, tf.stop_gradient(alpha))


def discrete_soft_actor_loss(qs: tf.Tensor, log_probs: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """sum_a pi(a|o) (alpha log pi(a|o) - min_i Q_i(o, a)) (Christodoulou 2019, arXiv:1910.07207, eq. 12).

    The values [N, B, A] and the temperature are constants here.
    """
    return -discrete_soft_value(tf.stop_gradient(qs), log_probs, tf.stop_gradient(alpha))


def temperature_loss(log_alpha: tf.Tensor, entropy: tf.Tensor, target_entropy: float) -> tf.Tensor:
    """alpha (H - H_target), which lowers the temperature while the entropy is above its target.

    Haarnoja et al. 2018, arXiv:1812.05905, eq. 18, with H = -log pi(a|o) of a sample; Christodoulou 2019,
    arXiv:1910.07207, eq. 11, with H = -sum_a pi(a|o) log pi(a|o).

    The scalar `log_alpha` is learned, so that the temperature stays positive. `entropy` is H, a constant
    here. `target_entropy` is in nats; in the papers -D for D continuous actions, and 0.98 log A for A
    discrete actions.
    """
    return tf.exp(log_alpha) * tf.stop_gradient(entropy - target_entropy)


def categorical_entropy(log_probs: tf.Tensor) -> tf.Tensor:
    """-sum_a pi(a|o) log pi(a|o), float [B] in nats, of float [B, A]."""
    return -tf.reduce_sum(_probabilities(log_probs) * log_probs, axis=-1)


# Target networks


def polyak(target: tf.Tensor, source: tf.Tensor, tau: float) -> tf.Tensor:
    """(1 - tau) * target + tau * source (Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1).

    With tau = 1 it is the source, bit for bit, as in DQN, which copies the network every few steps.
    """
    return (1.0 - tau) * target + tau * source


def _probabilities(log_probs: tf.Tensor) -> tf.Tensor:
    """exp(log_probs), computed in float64: vectorised exponentials round by position in the batch."""
    return tf.cast(tf.exp(tf.cast(log_probs, tf.float64)), log_probs.dtype)
