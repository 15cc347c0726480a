"""A small network's forward pass in NumPy: for a few envs a call of TensorFlow takes longer than it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic

MOST_ENVS = 16
"""Training envs, all workers together, for which NumPy is the faster way (`benchmarks.small_networks`)."""

_ROWS = 1024  # of which a layer's outputs stay in the cache

# They work in place; gelu is missing, because NumPy has no error function.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


Layers = Sequence[tuple[np.ndarray, np.ndarray, str]]
"""Kernels [D, units], biases [units] and names of activations."""


def fits(network: ActorCritic) -> bool:
    """True if NumPy can compute the network: one or two mlps in float32. The settings alone decide it."""
    torso = network.actor.torso
    if torso.name != "mlp":
        return False
    in_float32 = torso.get_layer("dense1").compute_dtype == "float32"
    return in_float32 and all(layer.activation.__name__ in ACTIVATIONS for layer in _dense(torso))


def features(x: np.ndarray, layers: Layers) -> np.ndarray:
    """An mlp's features, float32 [B, 1, units], of vectors [B, 1, D]; each row is multiplied by itself."""
    for kernel, bias, activation in layers:
        x = x @ kernel
        x += bias
        x = ACTIVATIONS[activation](x)
    return x


class ArrayPolicy:
    """The outputs of an `ActorCritic`, by the weights that it had when this was made.

    They are TensorFlow's up to rounding. Each row is a product of a vector and a matrix of its own, so it is
    the same to the bit in any company.

    Args:
      network: one that `fits`.
    """

    def __init__(self, network: ActorCritic) -> None:
        self._scaling = None
        if network.scaling is not None:
            self._scaling = network.scaling.mean.numpy(), network.scaling.scale.numpy()
            self._limit = network.scaling.limit
        self._actor, self._critic = _layers(network.actor.torso), _layers(network.critic.torso)
        self._policy_head, self._value_head = _weights(network.actor.head), _weights(network.critic.head)
        self._free = None if network.actor.free is None else network.actor.free.numpy()

    def parameters(self, observations: np.ndarray) -> np.ndarray:
        """Parameters of the distribution, float32 [B, P], of observations float32 [B, D]."""
        outputs = self._outputs(observations, self._actor, self._policy_head)
        if self._free is None:
            return outputs
        whole = np.empty((len(outputs), outputs.shape[1] + len(self._free)), np.float32)
        whole[:, : outputs.shape[1]], whole[:, outputs.shape[1] :] = outputs, self._free
        return whole

    def values(self, observations: np.ndarray) -> np.ndarray:
        """Values, float32 [B], of observations float32 [B, D]; any B, a few rows at a time."""
        parts = [
            self._outputs(observations[start : start + _ROWS], self._critic, self._value_head)[:, 0]
            for start in range(0, len(observations), _ROWS)
        ]
        return np.concatenate(parts)

    def _outputs(
        self, observations: np.ndarray, layers: Layers, head: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        kernel, bias = head
        outputs = (features(self._scaled(observations), layers) @ kernel)[:, 0]
        outputs += bias
        return outputs

    def _scaled(self, observations: np.ndarray) -> np.ndarray:
        """[B, 1, D]: a batch of matrices of one row each, which NumPy multiplies one by one."""
        x = observations[:, None]
        if self._scaling is None:
            return x
        mean, scale = self._scaling
        x = x - mean
        x *= scale
        return np.minimum(np.maximum(x, -self._limit, out=x), self._limit, out=x)  # np.clip is slower


class Cache:
    """An `ArrayPolicy` that is made anew once it is asked for after the weights have changed.

    Args:
      network: of the weights.
      num_envs: that are acted in while training, all workers together.

    Attributes:
      fits: whether there can be one.
      acts: whether it is to act while training, too.
      extras: as `tfrl.experience.collector.ActingPolicy` has them, with or without it.
    """

    def __init__(self, network: ActorCritic, num_envs: int) -> None:
        self.fits = fits(network)
        self.acts = self.fits and num_envs <= MOST_ENVS
        later = {"parameters": (network.distribution.parameters_size,)}
        self.extras: dict[str, tuple[int, ...]] = later if self.acts else {"log_prob": (), "value": ()}
        self._network = network
        self._policy: ArrayPolicy | None = None

    def forget(self) -> None:
        """Says that the weights change."""
        self._policy = None

    def act(self, observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Drawn actions [R, B, *shape] of observations [R, B, D], and their distributions' parameters."""
        size = observations.shape[:2]
        parameters = self.policy.parameters(observations.reshape(-1, observations.shape[2]))
        actions = self._network.distribution.act(parameters, noise.reshape(-1, noise.shape[2]))
        return actions.reshape(*size, *actions.shape[1:]), {"parameters": parameters.reshape(*size, -1)}

    def said_of(
        self, observations: np.ndarray, actions: np.ndarray, parameters: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Log-probabilities and values of any steps of `act`, float32 [...], which many cost less at once.

        Args:
          observations: float32 [..., D].
          actions: [..., *shape].
          parameters: float32 [..., P].
        """
        size = parameters.shape[:-1]
        observations, parameters = (x.reshape(-1, x.shape[-1]) for x in (observations, parameters))
        actions = actions.reshape(-1, *self._network.distribution.action_spec.shape)
        log_probs = self._network.distribution.log_probs_of(parameters, actions)
        return {"log_prob": log_probs.reshape(size), "value": self.policy.values(observations).reshape(size)}

    @property
    def policy(self) -> ArrayPolicy:
        """The policy with the present weights."""
        if self._policy is None:
            self._policy = ArrayPolicy(self._network)
        return self._policy


def _layers(torso: keras.Model) -> Layers:
    return [(*_weights(layer), layer.activation.__name__) for layer in _dense(torso)]


def _dense(torso: keras.Model) -> list[keras.layers.Dense]:
    return [layer for layer in torso.layers if isinstance(layer, keras.layers.Dense)]


def _weights(layer: keras.layers.Dense) -> tuple[np.ndarray, np.ndarray]:
    return layer.kernel.numpy(), layer.bias.numpy()
