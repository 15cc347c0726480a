"""Optimizers for gradients that are already summed over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf


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
