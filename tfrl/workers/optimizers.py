"""Optimizers' steps on the variables of a strategy, by gradients that are already summed over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfrl.ops.graph import compiled
from tfrl.ops.optimizers import Optimizer


class VariablesOptimizer:
    """An optimizer of some variables; make it in the strategy's scope.

    Keras's own optimizers clip gradients before they sum them over replicas, so that the clipped norm depends
    on the number of replicas. Here the caller sums first, together with its metrics, in one collective.

    Args:
      optimizer: takes the step of one variable.
      variables: the trained variables.
      rate: the learning rate at first.
      scales: of the rate, one for each variable; None: all 1.

    Attributes:
      learning_rate: a variable, which the caller may assign; no part of the state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        variables: Sequence[keras.Variable],
        rate: float,
        scales: Sequence[float] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._variables = [v.value for v in variables]
        self._scales = [1.0] * len(variables) if scales is None else list(scales)
        self.learning_rate = tf.Variable(rate, trainable=False, dtype=tf.float32)
        zeros = [np.zeros(tuple(v.shape), np.float32) for v in variables]
        self._slots = [
            {name: tf.Variable(value, trainable=False) for name, value in optimizer.initial(zero).items()}
            for zero in zeros
        ]

    def apply(
        self, gradients: Sequence[tf.Tensor], max_norm: float | None = None, *, compiled: bool = False
    ) -> tf.Tensor:
        """Takes a step on this replica's variables, in its context; the gradients' global norm, float32 [].

        Args:
          gradients: one for each variable, the same on all replicas.
          max_norm: the gradients are clipped to this global norm first; None: not at all.
          compiled: compile the step by XLA.
        """
        slots = [{name: _own(v) for name, v in each.items()} for each in self._slots]
        take = self._take_compiled if compiled else self._take
        return take(
            list(gradients), list(map(_own, self._variables)), slots, _own(self.learning_rate), max_norm
        )

    def _take(
        self,
        gradients: list[tf.Tensor],
        variables: list[tf.Variable],
        slots: list[dict[str, tf.Variable]],
        learning_rate: tf.Variable,
        max_norm: float | None,
    ) -> tf.Tensor:
        norm = tf.linalg.global_norm(gradients)
        if max_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, max_norm, use_norm=norm)
        for gradient, variable, own, scale in zip(gradients, variables, slots, self._scales, strict=True):
            before = {name: v.read_value() for name, v in own.items()}
            weights, after = self._optimizer.step(
                variable.read_value(), before, gradient, learning_rate * scale
            )
            variable.assign(weights)
            for name, value in after.items():
                own[name].assign(value)
        return norm

    _take_compiled = compiled(jit_compile=True)(_take)

    def get_state(self, name: str = "optimizer") -> dict[str, np.ndarray]:
        """All slots as arrays by name, the same on every worker."""
        return {
            f"{name}/{n}/{i:03d}": v.numpy() for i, each in enumerate(self._slots) for n, v in each.items()
        }

    def set_state(self, state: Mapping[str, np.ndarray], name: str = "optimizer") -> None:
        """Continues from `get_state`; other arrays are ignored. Raises KeyError where some are missing."""
        for i, each in enumerate(self._slots):
            for n, variable in each.items():
                variable.assign(state[f"{name}/{n}/{i:03d}"])


def _own(variable: tf.Variable) -> tf.Variable:
    """This replica's copy of a variable."""
    context = tf.distribute.get_replica_context()
    copies = context.strategy.experimental_local_results(variable)
    return copies[int(tf.get_static_value(context.replica_id_in_sync_group)) % len(copies)]
