"""Policies in NumPy: with a few envs, TensorFlow takes longer for a call than for a small network's numbers.

`policy_in_numpy` says whether NumPy can act: it returns the policy of a network in NumPy, or None. Results
equal those of TensorFlow up to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfrl.envs.observations import FORBIDDEN, MASK
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete
from tfrl.networks import actor_critic, actors, entrance
from tfrl.networks.actor_critic import OBSERVATION_LIMIT, ActorCritic
from tfrl.networks.actors import DeterministicActor, QNetwork
from tfrl.networks.distributions import LARGEST, LOG_SQRT_2_PI, mean_and_std
from tfrl.networks.network import Functional, Head, Network

_KNOWN = (actor_critic.__name__, actors.__name__)
"""The modules whose networks act as the classes below do."""

Vectors = Mapping[str, np.ndarray]
"""Weight vectors, float32 [size] each, by the name of their network."""

OfRows = Callable[[np.ndarray], np.ndarray]
"""A function of observations [B, *shape], for any B. The bits of a row do not depend on other rows."""


def policy_in_numpy(network: Network) -> NumpyPolicy | None:
    """The network's policy in NumPy, or None if NumPy cannot compute it. It depends only on the settings.

    NumPy computes one or two chains of dense layers in float32, for vectors. A network class of the user may
    choose actions in its own way, so TensorFlow calls it.
    """
    if type(network).__module__ not in _KNOWN:
        return None
    if isinstance(network, ActorCritic):
        chains = all(_is_chain(network.functions[name]) for name in network.torsos)
        plain = chains and not network.state_size and not network.dropped_size
        return NumpyActorCritic(network) if plain else None
    if len(network.acting) != 1 or not _is_chain(network.functions[network.acting[0]]):
        return None
    if isinstance(network, QNetwork):
        return NumpyActionValues(network) if network.each == 1 else None
    return NumpyTanhActor(network) if isinstance(network, DeterministicActor) else NumpyPolicy(network)


class NumpyPolicy:
    """The policy of a network whose one acting model is a chain of dense layers.

    Args:
      network: the network.
    """

    def __init__(self, network: Network) -> None:
        self._network, self._spec = network, network.entrance.spec
        self._chains: dict[str, _Chain] = {}
        self.actions = actions_in_numpy(network.distribution.action_spec)

    def outputs(self, vectors: Vectors) -> OfRows:
        """Returns the first output of the network with these weights, float32 [B, P]."""
        (name,) = self._network.acting
        layers = self._layers(name, vectors)
        seen = self._spec.vectors
        if not self._spec.num_actions:
            return lambda observations: dense_outputs(seen(observations), layers)
        return lambda observations: self._masked(observations, dense_outputs(seen(observations), layers))

    def act(self, outputs: np.ndarray, noise: np.ndarray, *exploration: np.float32) -> np.ndarray:
        """Actions [B, *shape] drawn with noise float32 [B, K], from outputs float32 [B, P].

        `exploration` are further arguments of the network's `sample`.
        """
        return self.actions.act(outputs, noise)

    def act_greedily(self, outputs: np.ndarray) -> np.ndarray:
        """The most likely, or best, actions [B, *shape], from outputs float32 [B, P]."""
        return self.actions.act_greedily(outputs)

    def _layers(self, name: str, vectors: Vectors) -> DenseLayers:
        if name not in self._chains:
            self._chains[name] = _Chain(self._network.functions[name])
        return self._chains[name].layers(vectors[name])

    def _masked(self, observations: np.ndarray, outputs: np.ndarray) -> np.ndarray:
        """Outputs float32 [B, A], one for each action, with FORBIDDEN for forbidden actions."""
        return np.where(self._spec.of_rows(observations, MASK) != 0, outputs, FORBIDDEN)


class NumpyActorCritic(NumpyPolicy):
    """The policy and the values of an `ActorCritic`."""

    _network: ActorCritic

    def outputs(self, vectors: Vectors) -> OfRows:
        """Returns the distribution's parameters with these weights, float32 [B, P]."""
        of_head = self._of_head("actor", vectors)
        functions = self._network.functions
        free = functions["actor"].split(vectors["actor"]).get("free", np.zeros(0, np.float32))

        def parameters(observations: np.ndarray) -> np.ndarray:
            outputs = of_head(observations)
            if len(free):
                outputs = np.concatenate([outputs, np.broadcast_to(free, (len(outputs), len(free)))], axis=1)
            return self._masked(observations, outputs) if self._spec.num_actions else outputs

        return parameters

    def values(self, vectors: Vectors) -> OfRows:
        """Returns the values with these weights, float32 [B]."""
        values = self._of_head("critic", vectors)
        return lambda observations: values(observations)[:, 0]

    def _of_head(self, head: str, vectors: Vectors) -> OfRows:
        network, functions = self._network, self._network.functions
        torso = "torso" if network.shared else f"{head}_torso"
        arrays, seen = functions[head].split(vectors[head]), self._spec.vectors
        of_head = (arrays["head/kernel"], arrays["head/bias"], ACTIVATIONS["linear"])
        layers = [*self._layers(torso, vectors), of_head]
        if not network.constants:
            return lambda observations: dense_outputs(seen(observations), layers)
        mean, scale = functions["observations"].split(vectors["observations"]).values()

        def scaled(observations: np.ndarray) -> np.ndarray:
            vectors = seen(observations)
            x = vectors[:, : len(mean)] - mean
            x *= scale
            np.minimum(np.maximum(x, -OBSERVATION_LIMIT, out=x), OBSERVATION_LIMIT, out=x)  # faster than clip
            if len(mean) < vectors.shape[1]:
                x = np.concatenate([x, vectors[:, len(mean) :]], axis=1)
            return dense_outputs(x, layers)

        return scaled


class NumpyTanhActor(NumpyPolicy):
    """The actions of a `DeterministicActor`, float32 [B, D] in [-1, 1], from outputs float32 [B, D]."""

    _network: DeterministicActor

    def act(self, outputs: np.ndarray, noise: np.ndarray, *exploration: np.float32) -> np.ndarray:
        """The best actions with added Gaussian noise."""
        noisy = self.act_greedily(outputs) + np.float32(self._network.noise_scale) * noise
        return np.minimum(np.maximum(noisy, np.float32(-1)), np.float32(1))

    def act_greedily(self, outputs: np.ndarray) -> np.ndarray:
        """The best actions."""
        return np.tanh(outputs.astype(np.float64)).astype(np.float32)


class NumpyActionValues(NumpyPolicy):
    """The actions of a `QNetwork`, int32 [B], from the values of all actions, float32 [B, A]."""

    _network: QNetwork

    def act(self, outputs: np.ndarray, noise: np.ndarray, *exploration: np.float32) -> np.ndarray:
        """Random actions with probability epsilon, the best ones otherwise.

        `exploration` is epsilon; without it, the network's own.
        """
        (share,) = exploration or (np.float32(self._network.epsilon),)
        count = self._network.num_actions
        if self._spec.num_actions:
            at_random = Discrete(count).from_uniform(noise[:, 1:], outputs > FORBIDDEN / 2)
        else:
            at_random = np.minimum((noise[:, 1] * count).astype(np.int32), count - 1)
        return np.where(noise[:, 0] < share, at_random, self.act_greedily(outputs))

    def act_greedily(self, outputs: np.ndarray) -> np.ndarray:
        """The best actions."""
        return outputs.argmax(axis=1).astype(np.int32)


# Layers

_CACHED_ROWS = 1024  # so many that a layer's outputs stay in the cache

# These functions may work in place. Networks with other functions of Keras act with TensorFlow: gelu, for
# example, because NumPy has no error function.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda x: x,
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(0.5 * x),
    "leaky_relu": lambda x: np.maximum(x, np.float32(0.2) * x),  # Keras's slope
    "relu6": lambda x: np.clip(x, 0, 6, out=x),
    "selu": lambda x: (
        np.float32(1.05070098) * np.where(x > 0, x, np.float32(1.67326324) * np.expm1(np.minimum(x, 0)))
    ),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "softsign": lambda x: x / (1 + np.abs(x)),
}

DenseLayers = Sequence[tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]]
"""Kernels [D, units], biases [units] and activation functions."""


class _Chain:
    """The dense layers of a network."""

    def __init__(self, function: Functional) -> None:
        self._function, name = function, entrance.variable_name
        dense = [one for one in function.layers if isinstance(one, keras.layers.Dense)]
        # Found once, because Keras takes longer for a name than NumPy for an action.
        self._names = [(name(one.kernel), name(one.bias), one.activation.__name__) for one in dense]

    def layers(self, vector: np.ndarray) -> DenseLayers:
        """The layers with weights float32 [size]."""
        arrays = self._function.split(vector)
        return [(arrays[k], arrays[b], ACTIVATIONS[name]) for k, b, name in self._names]


def _is_chain(function: Functional) -> bool:
    """True if NumPy can compute a network: a chain of dense layers in float32 for vectors."""
    return _calls_once(function.layer) and all(map(_fits, function.layers))


def _calls_once(layer: Any) -> bool:
    """True if a model calls each of its layers once; `Functional.layers` has each layer once anyway."""
    return all(len(one._inbound_nodes) < 2 and _calls_once(one) for one in entrance.inner_layers(layer) or ())


def _fits(layer: Any) -> bool:
    layers = keras.layers
    if getattr(layer, "compute_dtype", "float32") != "float32":
        return False
    if type(layer) in (layers.Dense, Head):  # a subclass may compute something else
        name = getattr(layer.activation, "__name__", "")  # a layer or a partial has none
        known = name in ACTIVATIONS and layer.activation is getattr(keras.activations, name)
        return known and layer.use_bias
    if isinstance(layer, layers.Activation):
        return layer.activation is keras.activations.linear
    return isinstance(layer, layers.InputLayer) or layer.name == "unpack"


def dense_outputs(observations: np.ndarray, layers: DenseLayers) -> np.ndarray:
    """A network's outputs float32 [B, P] for vectors float32 [B, D], for any B, a few rows at a time.

    Each row is a separate product of a vector and a matrix, so its bits do not depend on other rows.
    """
    found = []
    for begin in range(0, len(observations), _CACHED_ROWS):
        # [B, 1, D]: NumPy multiplies the rows one by one.
        x = observations[begin : begin + _CACHED_ROWS, None]
        for kernel, bias, activate in layers:
            x = x @ kernel
            x += bias
            x = activate(x)
        found.append(x[:, 0])
    return found[0] if len(found) == 1 else np.concatenate(found)


# Actions


class NumpyActions(ABC):
    """The actions of an `ActionDistribution`; the methods are those of its `Distribution` in NumPy."""

    @abstractmethod
    def act(self, parameters: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] drawn with parameters float32 [B, P] and noise float32 [B, K]."""

    @abstractmethod
    def log_probs(self, parameters: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """log pi(a), float32 [B], from parameters float32 [B, P] and the actions of `act`."""

    @abstractmethod
    def act_greedily(self, parameters: np.ndarray) -> np.ndarray:
        """The deterministic actions, [B, *shape]."""


class CategoricalInNumpy(NumpyActions):
    """Actions int32 [B], from logits float32 [B, A]."""

    def act(self, parameters: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions int32 [B]."""
        probabilities = np.exp(_shifted(parameters))
        probabilities /= np.add.reduce(probabilities, axis=1, keepdims=True)
        passed = np.add.accumulate(probabilities, axis=1)[:, :-1] <= noise
        return np.add.reduce(passed, axis=1, dtype=np.int32)

    def log_probs(self, parameters: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """log pi(a), float32 [B], of actions int32 [B]."""
        wide = _shifted(parameters)
        total = np.add.reduce(np.exp(wide), axis=1)
        return (wide[np.arange(len(wide)), actions] - np.log(total)).astype(np.float32)

    def act_greedily(self, parameters: np.ndarray) -> np.ndarray:
        """The most likely actions, int32 [B]."""
        return parameters.argmax(axis=1).astype(np.int32)


def _shifted(logits: np.ndarray) -> np.ndarray:
    """Logits float64 [B, A] shifted so that the largest is 0. (`reduce` is faster than `max` and `sum`.)"""
    wide = logits.astype(np.float64)
    wide -= np.maximum.reduce(wide, axis=1, keepdims=True)
    return wide


class MultiCategoricalInNumpy(NumpyActions):
    """Actions int32 [B, K], from the logits of all choices, float32 [B, sum(counts)].

    Args:
      counts: the number of values of each choice.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._choice, self._ends = CategoricalInNumpy(), np.cumsum(counts)[:-1]

    def _split(self, parameters: np.ndarray) -> list[np.ndarray]:
        return np.split(parameters, self._ends, axis=1)

    def act(self, parameters: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions int32 [B, K]."""
        logits = enumerate(self._split(parameters))
        return np.stack([self._choice.act(x, noise[:, k : k + 1]) for k, x in logits], axis=1)

    def log_probs(self, parameters: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """log pi(a), float32 [B], of actions int32 [B, K]."""
        pairs = zip(self._split(parameters), actions.T, strict=True)
        return np.sum([self._choice.log_probs(x, own) for x, own in pairs], axis=0, dtype=np.float32)

    def act_greedily(self, parameters: np.ndarray) -> np.ndarray:
        """The most likely actions, int32 [B, K]."""
        return np.stack([self._choice.act_greedily(x) for x in self._split(parameters)], axis=1)


class TanhNormalInNumpy(NumpyActions):
    """Actions float32 [B, D], from the mean and the deviation of each number, float32 [B, 2 D]."""

    def act(self, parameters: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions float32 [B, D]."""
        mean, z = mean_and_std(parameters)
        z *= noise
        z += mean
        return _squash(z)

    def log_probs(self, parameters: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """log pi(a), float32 [B], of actions float32 [B, D] from `act`, whose values are between -1 and 1."""
        mean, std = mean_and_std(parameters)
        wide = actions.astype(np.float64)
        above, below = np.log1p(wide), np.log1p(-wide)
        standard = (0.5 * (above - below) - mean) / std
        terms = -0.5 * np.square(standard) - np.log(std) - LOG_SQRT_2_PI - (above + below)
        return terms.sum(axis=1).astype(np.float32)

    def act_greedily(self, parameters: np.ndarray) -> np.ndarray:
        """tanh(mean), float32 [B, D]."""
        return _squash(parameters[:, : parameters.shape[1] // 2].astype(np.float64))


def _squash(z: np.ndarray) -> np.ndarray:
    squashed = np.tanh(z).astype(np.float32)
    return np.minimum(np.maximum(squashed, -LARGEST, out=squashed), LARGEST, out=squashed)


def actions_in_numpy(action_spec: ActionSpec) -> NumpyActions:
    """The actions of policies over an action space. Raises TypeError for an action space without them."""
    if isinstance(action_spec, Discrete):
        return CategoricalInNumpy()
    if isinstance(action_spec, MultiDiscrete):
        return MultiCategoricalInNumpy(action_spec.counts)
    if isinstance(action_spec, Box):
        return TanhNormalInNumpy()
    raise TypeError(f"{type(action_spec).__name__} has no actions in NumPy")
