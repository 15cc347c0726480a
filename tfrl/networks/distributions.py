"""Action distributions: what the outputs of an actor mean.

Another space of actions is more than a class here: rollouts, random numbers, action counts, videos and data
sets hold one whole number for each env and step (CONTRIBUTING.md).
"""

from __future__ import annotations

import tensorflow as tf


class Categorical:
    """A distribution over actions 0 ... A - 1, from logits float32 [B, A].

    Normalised in float64: vectorised exponentials round a number by its place in the batch, so in float32 the
    same env's log-probability would depend on how many others its replica holds.
    """

    def __init__(self, logits: tf.Tensor) -> None:
        logits.shape.assert_has_rank(2)
        self._wide = tf.nn.log_softmax(tf.cast(logits, tf.float64))  # [B, A]
        self.log_probs = tf.cast(self._wide, tf.float32)  # [B, A]

    def sample(self, uniform: tf.Tensor) -> tf.Tensor:
        """Actions int32 [B] from uniform numbers in [0, 1), float32 [B], by inverting the cumulative sum.

        The randomness comes from outside, so that an env draws the same number wherever it is held.
        """
        uniform.shape.assert_has_rank(1)
        cumulative = tf.cumsum(tf.exp(self._wide), axis=-1)
        # Rounding may leave the last sum a little below 1: the last action takes what is left.
        passed = cumulative[:, :-1] <= tf.cast(uniform, tf.float64)[:, None]
        return tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1)

    def mode(self) -> tf.Tensor:
        """The most likely actions, int32 [B]."""
        return tf.argmax(self.log_probs, axis=-1, output_type=tf.int32)

    def log_prob(self, actions: tf.Tensor) -> tf.Tensor:
        """log pi(a), float32 [B], of actions int32 [B]."""
        actions.shape.assert_has_rank(1)
        return tf.gather(self.log_probs, actions, axis=1, batch_dims=1)

    def entropy(self) -> tf.Tensor:
        """-sum_a pi(a) log pi(a), float32 [B], in nats."""
        return -tf.reduce_sum(tf.exp(self.log_probs) * self.log_probs, axis=-1)
