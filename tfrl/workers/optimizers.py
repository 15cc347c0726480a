"""Optimizers for gradients that are already summed over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfrl.ops.graph import graph


class _Summed(keras.optimizers.Optimizer):
    """Takes gradients as they are.

    Keras optimizers sum gradients over replicas themselves, after clipping, which makes the clipped norm
    depend on the number of replicas. Here the caller sums first (together with its metrics, in one
    collective), clips, and applies. `_all_reduce_sum_gradients` is Keras's own hook, though a protected one:
    tests/workers/test_optimizers.py holds it against one replica.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: list) -> list:
        return list(grads_and_vars)

    def get_state(self, name: str = "optimizer") -> dict[str, np.ndarray]:
        """All its numbers as arrays by name, the same on every worker."""
        return {f"{name}/{i:03d}": v.numpy() for i, v in enumerate(self.variables)}

    def set_state(self, state: Mapping[str, np.ndarray], name: str = "optimizer") -> None:
        """Continues from `get_state`; other arrays are ignored. Raises KeyError where some are missing."""
        for i, variable in enumerate(self.variables):
            variable.assign(state[f"{name}/{i:03d}"])


class SummedSGD(_Summed, keras.optimizers.SGD):
    """Gradient descent with momentum, for summed gradients."""


class SummedRMSprop(_Summed, keras.optimizers.RMSprop):
    """RMSProp (Tieleman & Hinton 2012) for summed gradients: g / sqrt(mean square + epsilon)."""


class SummedAdam(_Summed, keras.optimizers.Adam):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) for summed gradients."""

    def __init__(self, learning_rate: float, *, epsilon: float) -> None:
        super().__init__(learning_rate, epsilon=epsilon)
        self._rate_scales: dict[str, float] = {}

    def scale_rate(self, variables: Sequence[keras.Variable], scale: float) -> None:
        """Gives `variables` their own learning rate: the optimizer's times `scale`."""
        self._rate_scales |= {self._var_key(v): scale for v in variables}

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """One variable's step, at its own rate."""
        scale = self._rate_scales.get(self._var_key(variable), 1.0)
        super().update_step(gradient, variable, learning_rate * scale)

    def compiled_step(self, gradients: Sequence[tf.Tensor], max_norm: float) -> tf.Tensor:
        """Clips by the global norm and takes the step, compiled by XLA; the norm before clipping.

        Call it in a replica's context. Keras applies gradients outside of any, where XLA cannot follow, so
        this is its arithmetic (Kingma & Ba 2015, section 2, last paragraph) on the replica's own variables.
        """
        variables = self._trainable_variables
        scales = [self._rate_scales.get(self._var_key(v), 1.0) for v in variables]
        own = [[_own(v) for v in kind] for kind in (variables, self._momentums, self._velocities)]
        return self._step(
            list(gradients), *own, _own(self.iterations), _own(self._learning_rate), scales, max_norm
        )

    @graph(jit_compile=True)
    def _step(
        self,
        gradients: list[tf.Tensor],
        variables: list[tf.Variable],
        momentums: list[tf.Variable],
        velocities: list[tf.Variable],
        iterations: tf.Variable,
        learning_rate: tf.Variable,
        scales: list[float],
        max_norm: float,
    ) -> tf.Tensor:
        norm = tf.linalg.global_norm(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, max_norm, use_norm=norm)
        count = tf.cast(iterations.assign_add(1), tf.float32)
        rate = learning_rate * tf.sqrt(1.0 - self.beta_2**count) / (1.0 - self.beta_1**count)
        for gradient, variable, m, v, scale in zip(
            gradients, variables, momentums, velocities, scales, strict=True
        ):
            mean = m.assign_add((gradient - m) * (1.0 - self.beta_1))
            square = v.assign_add((tf.square(gradient) - v) * (1.0 - self.beta_2))
            variable.assign_sub(rate * scale * mean / (tf.sqrt(square) + self.epsilon))
        return norm


def _own(variable: keras.Variable) -> tf.Variable:
    """This replica's copy of a variable."""
    context = tf.distribute.get_replica_context()
    copies = context.strategy.experimental_local_results(variable.value)
    return copies[int(tf.get_static_value(context.replica_id_in_sync_group)) % len(copies)]
