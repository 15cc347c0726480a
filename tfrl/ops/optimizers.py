"""Optimizers as pure functions, and schedules of their learning rates.

A step takes weights and slots, and returns the new ones.

A slot is an array of the optimizer for a vector of weights; checkpoints contain it. Gradients are already
summed over replicas and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tfrl.ops.graph import tf

if TYPE_CHECKING:
    Slots = Mapping[str, tf.Tensor]
    Step = tuple[tf.Tensor, dict[str, tf.Tensor]]


class Optimizer:
    """An optimizer of one vector of weights.

    Attributes:
      slots: the names of its slots.
    """

    slots: ClassVar[tuple[str, ...]]

    def initial(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """The slots before the first step, by name, for weights float32 [n]: zeros; `step` is a scalar."""
        shapes = {name: () if name == "step" else weights.shape for name in self.slots}
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def step(self, weights: tf.Tensor, slots: Slots, gradient: tf.Tensor, rate: tf.Tensor) -> Step:
        """One step.

        Args:
          weights, gradient: float32 [n].
          slots: as `initial` or the step before gave them.
          rate: float32 [], the learning rate.

        Returns:
          The weights and the slots after the step.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1).

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        w = w - rate * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon)

    Attributes:
      epsilon: keeps steps finite.
      uncorrected_epsilon: adds epsilon to sqrt(v) before the correction of v, like the end of the paper's
        section 2, Keras, and the published results for procgen.
    """

    epsilon: float
    uncorrected_epsilon: bool = False
    beta_1: float = 0.9
    beta_2: float = 0.999
    slots: ClassVar = ("mean", "square", "step")

    def step(self, weights: tf.Tensor, slots: Slots, gradient: tf.Tensor, rate: tf.Tensor) -> Step:
        """One step, as `Optimizer.step`."""
        mean = self.beta_1 * slots["mean"] + (1.0 - self.beta_1) * gradient
        square = self.beta_2 * slots["square"] + (1.0 - self.beta_2) * tf.square(gradient)
        step = slots["step"] + 1.0
        # In float64, because 1 - b2^t has few digits at the beginning; Keras computes it in float32.
        dtype = tf.float32 if self.uncorrected_epsilon else tf.float64
        powers = [
            tf.pow(tf.constant(beta, dtype), tf.cast(step, dtype)) for beta in (self.beta_1, self.beta_2)
        ]
        corrections = [tf.cast(1.0 - power, tf.float32) for power in powers]
        if self.uncorrected_epsilon:
            moved = rate * tf.sqrt(corrections[1]) / corrections[0] * mean / (tf.sqrt(square) + self.epsilon)
        else:
            moved = rate * ((mean / corrections[0]) / (tf.sqrt(square / corrections[1]) + self.epsilon))
        return weights - moved, {"mean": mean, "square": square, "step": step}


@dataclass(frozen=True)
class Nadam(Optimizer):
    """Adam with Nesterov's momentum (Dozat 2016, ICLR workshop), with the momentum schedule of Keras 3.

    Attributes:
      epsilon: keeps steps finite.
    """

    epsilon: float
    beta_1: float = 0.9
    beta_2: float = 0.999
    slots: ClassVar = ("mean", "square", "step", "product")

    def initial(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Zeros, and 1 for the product of the momenta."""
        return super().initial(weights) | {"product": np.ones((), np.float32)}

    def step(self, weights: tf.Tensor, slots: Slots, gradient: tf.Tensor, rate: tf.Tensor) -> Step:
        """One step, as `Optimizer.step`."""
        step = slots["step"] + 1.0
        now, following = (self.beta_1 * (1.0 - 0.5 * tf.pow(0.96, step + later)) for later in (0.0, 1.0))
        product = slots["product"] * now
        mean = self.beta_1 * slots["mean"] + (1.0 - self.beta_1) * gradient
        square = self.beta_2 * slots["square"] + (1.0 - self.beta_2) * tf.square(gradient)
        ahead = following * mean / (1.0 - product * following) + (1.0 - now) * gradient / (1.0 - product)
        wide = tf.pow(tf.constant(self.beta_2, tf.float64), tf.cast(step, tf.float64))
        corrected = square / tf.cast(1.0 - wide, tf.float32)
        weights = weights - rate * ahead / (tf.sqrt(corrected) + self.epsilon)
        return weights, {"mean": mean, "square": square, "step": step, "product": product}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSProp (Tieleman and Hinton 2012).

        v = decay v + (1 - decay) g^2,   w = w - rate * g / sqrt(v + epsilon)

    Attributes:
      epsilon: keeps steps finite.
      decay: of the mean square.
    """

    epsilon: float
    decay: float = 0.9
    slots: ClassVar = ("square",)

    def step(self, weights: tf.Tensor, slots: Slots, gradient: tf.Tensor, rate: tf.Tensor) -> Step:
        """One step, as `Optimizer.step`."""
        square = self.decay * slots["square"] + (1.0 - self.decay) * tf.square(gradient)
        return weights - rate * gradient * tf.math.rsqrt(square + self.epsilon), {"square": square}


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with momentum: v = momentum v - rate * g, w = w + v.

    Attributes:
      momentum: 0 for none.
    """

    momentum: float = 0.0
    slots: ClassVar = ("velocity",)

    def step(self, weights: tf.Tensor, slots: Slots, gradient: tf.Tensor, rate: tf.Tensor) -> Step:
        """One step, as `Optimizer.step`."""
        velocity = self.momentum * slots["velocity"] - rate * gradient
        return weights + velocity, {"velocity": velocity}


def learning_rate(kind: str, highest: float, step: int, steps: int, warmup: int = 0) -> float:
    """The learning rate of a step.

    Args:
      kind: the shape of the schedule. "constant"; "linear": falls from `highest` to 0; "cosine": falls from
        `highest` to 0 like half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5); "step": a
        tenth from half of the steps on, and a hundredth from three quarters (He et al. 2015,
        arXiv:1512.03385, section 4.2).
      highest: the rate that the schedule scales.
      step: counted from 0; gradient steps or updates.
      steps: the number of steps of the run.
      warmup: the number of first steps in which the rate grows linearly; the schedule scales it meanwhile.
    """
    shape = 1.0
    if kind == "linear":
        shape = 1.0 - step / steps
    elif kind == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    elif kind == "step":
        shape = 1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01
    growth = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return highest * growth * shape
