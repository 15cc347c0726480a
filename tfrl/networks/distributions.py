"""Action distributions from the outputs of an actor, for each kind of action space.

CONTRIBUTING.md says how to add an action space.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from tfrl.ops.graph import tf


class Distribution(ABC):
    """A distribution over actions for each of B envs.

    The random numbers are arguments, so an env gets the same numbers on any worker. The operations on a row
    do not depend on the batch size (docs/design.md, "The same run on any topology").
    """

    @abstractmethod
    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Actions [B, *shape] of the spec's dtype, from noise float32 [B, noise_size]."""

    @abstractmethod
    def log_prob(self, actions: tf.Tensor) -> tf.Tensor:
        """log pi(a), float32 [B], of actions [B, *shape]."""

    @abstractmethod
    def entropy(self) -> tf.Tensor:
        """-E[log pi(a)], float32 [B], in nats."""

    @abstractmethod
    def mode(self) -> tf.Tensor:
        """The deterministic actions, [B, *shape]."""


class ActionDistribution(ABC):
    """The policies over an action space. A call with an actor's outputs gives the `Distribution` of each env.

    `encoded` and `as_env_takes` compute in TensorFlow, for exports, what `ActionSpec` computes in NumPy.

    Args:
      action_spec: the action space.

    Attributes:
      parameters_size: P, the number of outputs of the actor.
      noise_size: K, the number of random numbers of a sample.
      deviation_size: the number of parameters, the last ones, that decide only the deviation of actions.
      distribution: makes a `Distribution` from an actor's outputs.
    """

    distribution: Callable[[tf.Tensor], Distribution]
    parameters_size: int
    noise_size: int
    deviation_size = 0

    def __init__(self, action_spec: ActionSpec) -> None:
        self.action_spec = action_spec

    def __call__(self, parameters: tf.Tensor) -> Distribution:
        """The distribution for the outputs of an actor, float32 [B, P]."""
        parameters.shape.assert_is_compatible_with((None, self.parameters_size))
        return self.distribution(parameters)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The random numbers of one env's actions, float32 [steps, K]: uniform in [0, 1), or a subclass's."""
        return generator.random((steps, self.noise_size), np.float32)

    def deviations(self, parameters: np.ndarray) -> np.ndarray:
        """The standard deviation of continuous actions, float64 [B]; of `TanhNormalActions` only."""
        raise NotImplementedError

    def encoded(self, actions: tf.Tensor) -> tf.Tensor:
        """`ActionSpec.encoded` of actions [B, *shape], float32 [B, A]."""
        return tf.cast(tf.reshape(actions, (-1, self.action_spec.encoded_size)), tf.float32)

    def as_env_takes(self, actions: tf.Tensor) -> tf.Tensor:
        """`ActionSpec.as_env_takes` of actions [B, *shape]."""
        return self.action_spec.as_env_takes(actions)


class Categorical(Distribution):
    """A distribution over actions 0 ... A - 1, from logits float32 [B, A].

    It is normalised in float64. Vectorised exponentials round a number by its place in the batch, so in
    float32 the log-probability of an env would depend on the number of envs of its replica.
    """

    def __init__(self, logits: tf.Tensor) -> None:
        self._wide = tf.nn.log_softmax(tf.cast(logits, tf.float64))  # [B, A]
        self.log_probs = tf.cast(self._wide, tf.float32)  # [B, A]

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Actions int32 [B] from uniform numbers float32 [B, 1], by inverting the cumulative sum."""
        noise.shape.assert_is_compatible_with((None, 1))
        cumulative = tf.cumsum(tf.exp(self._wide), axis=-1)
        # By rounding, the last sum may be slightly below 1; the last action then gets the rest.
        passed = cumulative[:, :-1] <= tf.cast(noise, tf.float64)
        return tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1)

    def log_prob(self, actions: tf.Tensor) -> tf.Tensor:
        """log pi(a), float32 [B], of actions int32 [B]."""
        actions.shape.assert_has_rank(1)
        return tf.gather(self.log_probs, actions, axis=1, batch_dims=1)

    def entropy(self) -> tf.Tensor:
        """-sum_a pi(a) log pi(a), float32 [B], in nats."""
        return -tf.reduce_sum(tf.exp(self.log_probs) * self.log_probs, axis=-1)

    def mode(self) -> tf.Tensor:
        """The most likely actions, int32 [B]."""
        return tf.argmax(self.log_probs, axis=-1, output_type=tf.int32)


class CategoricalActions(ActionDistribution):
    """The policies over `Discrete` actions: a logit for each, and one uniform number for a sample."""

    def __init__(self, action_spec: Discrete) -> None:
        super().__init__(action_spec)
        self.distribution = Categorical
        self.parameters_size, self.noise_size = action_spec.n, 1

    def encoded(self, actions: tf.Tensor) -> tf.Tensor:
        """One-hot vectors, float32 [B, A], of actions int32 [B]."""
        return tf.one_hot(actions, self.parameters_size)


class MultiCategorical(Distribution):
    """Independent categorical choices, from the logits of all of them, float32 [B, sum(counts)]."""

    def __init__(self, logits: tf.Tensor, counts: Sequence[int]) -> None:
        self._choices = [Categorical(part) for part in tf.split(logits, list(counts), axis=1)]

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Actions int32 [B, K] from uniform numbers float32 [B, K]."""
        drawn = [choice.sample(noise[:, k : k + 1]) for k, choice in enumerate(self._choices)]
        return tf.stack(drawn, axis=1)

    def log_prob(self, actions: tf.Tensor) -> tf.Tensor:
        """log pi(a), float32 [B], of actions int32 [B, K]: the sum over the choices."""
        return tf.add_n([choice.log_prob(actions[:, k]) for k, choice in enumerate(self._choices)])

    def entropy(self) -> tf.Tensor:
        """The sum of the choices' entropies, float32 [B], in nats."""
        return tf.add_n([choice.entropy() for choice in self._choices])

    def mode(self) -> tf.Tensor:
        """The most likely actions, int32 [B, K]."""
        return tf.stack([choice.mode() for choice in self._choices], axis=1)


class MultiCategoricalActions(ActionDistribution):
    """The policies over `MultiDiscrete` actions: a logit for each value of each choice."""

    def __init__(self, action_spec: MultiDiscrete) -> None:
        super().__init__(action_spec)
        counts = action_spec.counts
        self.distribution = functools.partial(MultiCategorical, counts=counts)
        self.parameters_size, self.noise_size = sum(counts), len(counts)
        self._choices = [CategoricalActions(Discrete(count)) for count in counts]
        self._ends = np.cumsum(counts)[:-1]
        self._starts, self._env_dtype = action_spec.starts, action_spec.env_dtype
        self._env_shape = action_spec.env_shape or action_spec.shape

    def encoded(self, actions: tf.Tensor) -> tf.Tensor:
        """One-hot vectors side by side, float32 [B, sum(counts)], of actions int32 [B, K]."""
        return tf.concat([choice.encoded(actions[:, k]) for k, choice in enumerate(self._choices)], axis=-1)

    def as_env_takes(self, actions: tf.Tensor) -> tf.Tensor:
        """Actions int32 [B, K], counted from `starts` and in the env's shape and type."""
        counted = tf.cast(actions, tf.int64) + np.array(self._starts, np.int64)
        return tf.cast(tf.reshape(counted, (-1, *self._env_shape)), self._env_dtype)


_MIN_STD = 0.01  # TorchRL's; an even smaller one lets PPO's ratios overflow
_STD_SHIFT = math.log(math.expm1(1.0 - _MIN_STD))  # makes the standard deviation of an output of 0 equal to 1
LARGEST = float(np.nextafter(np.float32(1), np.float32(0)))  # float32 has no number between it and 1
LOG_SQRT_2_PI = 0.5 * math.log(2.0 * math.pi)

# The trapezoidal rule for the mean over a standard normal: it converges exponentially for analytic functions
# (Trefethen and Weideman 2014, SIAM Review 56, section 5), here faster than Gauss and Hermite's.
_NODES = np.linspace(-5.5, 5.5, 24)
_WEIGHTS = np.exp(-0.5 * _NODES**2) / np.exp(-0.5 * _NODES**2).sum()


class TanhNormal(Distribution):
    """The distribution of tanh(z), z normal with independent components: float32 actions [B, D] in (-1, 1).

    The parameters, float32 [B, 2 D], are the mean of z, [B, D], and x, [B, D]. The standard deviation is
    softplus(x + c) + 0.01, which is 1 for x = 0. (If the deviation does not depend on observations, x is
    equal in all rows.) All computations are in float64, with the same instructions for each number
    (`_batch_invariant`).
    """

    def __init__(self, parameters: tf.Tensor) -> None:
        size = parameters.shape[-1] // 2
        wide = tf.cast(parameters, tf.float64)
        self._mean = wide[:, :size]
        self._std = _batch_invariant(tf.nn.softplus, wide[:, size:] + _STD_SHIFT) + _MIN_STD
        self._log_std = _batch_invariant(tf.math.log, self._std)

    def sample(self, noise: tf.Tensor) -> tf.Tensor:
        """Actions float32 [B, D] from standard normal numbers, float32 [B, D]; they have gradients."""
        noise.shape.assert_is_compatible_with(self._mean.shape)
        return _squash(self._mean + self._std * tf.cast(noise, tf.float64))

    def sample_with_log_prob(self, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The actions of `sample`, and their log pi(a), float32 [B], with the gradients that SAC needs.

        It is computed from z (Haarnoja et al. 2018, arXiv:1812.05905, appendix C), so it is exact even if
        tanh rounds to +-1.
        """
        noise.shape.assert_is_compatible_with(self._mean.shape)
        noise = tf.cast(noise, tf.float64)
        z = self._mean + self._std * noise
        return _squash(z), _sum(self._log_normal(noise) - _log_slope(z))

    def log_prob(self, actions: tf.Tensor) -> tf.Tensor:
        """log pi(a), float32 [B], of actions float32 [B, D] in [-1, 1].

            log pi(a) = sum_i log N(atanh(a_i); mean_i, std_i) - log(1 - a_i^2)

        +-1 is replaced by its neighbour in float32, as in `sample`; z is about +-8.7 there.
        """
        actions.shape.assert_is_compatible_with(self._mean.shape)
        actions = tf.cast(tf.clip_by_value(actions, -LARGEST, LARGEST), tf.float64)
        # float64 holds 1 + a exactly, and two logarithms give atanh(a) and log(1 - a^2).
        logs = _batch_invariant(tf.math.log1p, tf.concat([actions, -actions], axis=-1))
        above, below = tf.split(logs, 2, axis=-1)  # log(1 + a), log(1 - a)
        standard = (0.5 * (above - below) - self._mean) / self._std
        return _sum(self._log_normal(standard) - (above + below))

    def entropy(self) -> tf.Tensor:
        """-E[log pi(a)], float32 [B], in nats; at most D log 2, that of uniform actions.

            H = sum_i log(std_i sqrt(2 pi e)) + E[log(1 - tanh(z_i)^2)]

        The mean has no closed form. With 24 points its error is 1e-7 for std <= 1, 1e-4 for std <= 2, and 1 %
        for std = 10. Other PPO implementations use -log pi(a) of one action instead of H; its gradient is
        noisy, with mean zero if the action comes from the policy itself. Others use the normal's entropy,
        which grows with std without limit, although the actions gather at +-1.
        """
        z = self._mean[..., None] + self._std[..., None] * _NODES
        correction = tf.reduce_sum(_log_slope(z) * _WEIGHTS, axis=-1)
        return _sum(self._log_std + (LOG_SQRT_2_PI + 0.5) + correction)

    def mode(self) -> tf.Tensor:
        """tanh(mean), float32 [B, D]. This is the median; the peaks of a wide density are near +-1."""
        return _squash(self._mean)

    def _log_normal(self, standard: tf.Tensor) -> tf.Tensor:
        """The normal's log-density at mean + std * standard, float64 [B, D]."""
        return -0.5 * tf.square(standard) - self._log_std - LOG_SQRT_2_PI


class TanhNormalActions(ActionDistribution):
    """The policies over a `Box`: mean and deviation for each of D numbers, D normal numbers for a sample."""

    def __init__(self, action_spec: Box) -> None:
        super().__init__(action_spec)
        self.distribution, size = TanhNormal, action_spec.shape[0]
        self.parameters_size, self.noise_size, self.deviation_size = 2 * size, size, size
        self._low, self._high = action_spec.low, action_spec.high
        self._env_shape = action_spec.shape if action_spec.env_shape is None else action_spec.env_shape

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Standard normal numbers, float32 [steps, D]."""
        return generator.standard_normal((steps, self.noise_size), np.float32)

    def deviations(self, parameters: np.ndarray) -> np.ndarray:
        """The standard deviation of z, a mean over its D numbers, float64 [B]."""
        return mean_and_std(parameters)[1].mean(axis=1)

    def as_env_takes(self, actions: tf.Tensor) -> tf.Tensor:
        """Actions float32 [B, D] in [-1, 1], rescaled to [low, high]."""
        low, high = (np.asarray(bound, np.float32) for bound in (self._low, self._high))
        # Rounding must not exceed the float64 bounds of the env.
        low = np.where(low < self._low, np.nextafter(low, np.float32(np.inf)), low)
        high = np.where(high > self._high, np.nextafter(high, np.float32(-np.inf)), high)
        scaled = tf.clip_by_value(actions * ((high - low) / 2) + (low + high) / 2, low, high)
        return tf.reshape(scaled, (-1, *self._env_shape))


def _squash(z: tf.Tensor) -> tf.Tensor:
    """tanh(z) as float32; +-1 is replaced by its neighbour."""
    return tf.clip_by_value(tf.cast(_batch_invariant(tf.tanh, z), tf.float32), -LARGEST, LARGEST)


def mean_and_std(parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and deviation of z, float64 [B, D] each."""
    wide = parameters.astype(np.float64)
    size = wide.shape[1] // 2
    std = np.logaddexp(0.0, wide[:, size:] + _STD_SHIFT)
    std += _MIN_STD
    return wide[:, :size], std


def _log_slope(z: tf.Tensor) -> tf.Tensor:
    """log(1 - tanh(z)^2), for any z."""
    return 2.0 * (math.log(2.0) - z - _batch_invariant(tf.nn.softplus, -2.0 * z))


def _sum(log_probs: tf.Tensor) -> tf.Tensor:
    """The sum over an action's numbers, float32 [B]."""
    return tf.cast(tf.reduce_sum(log_probs, axis=-1), tf.float32)


def _batch_invariant(function: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """function(x) of float64 [..., D]; the bits of each number do not depend on its place.

    Vector instructions take eight numbers or fewer at a time. Other instructions, which round differently,
    process the remainder at the end of a tensor. Padding rows to a multiple of eight avoids a remainder.
    """
    size = x.shape[-1]
    if size % 8 == 0:
        return function(x)
    padding = [[0, 0]] * (len(x.shape) - 1) + [[0, -size % 8]]
    return function(tf.pad(x, padding, constant_values=1.0))[..., :size]


_DISTRIBUTIONS: dict[type, type[ActionDistribution]] = {
    Discrete: CategoricalActions,
    MultiDiscrete: MultiCategoricalActions,
    Box: TanhNormalActions,
}


def distribution_for(action_spec: ActionSpec) -> ActionDistribution:
    """The policies over an action space."""
    return _DISTRIBUTIONS[type(action_spec)](action_spec)
