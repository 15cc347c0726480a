"""A Keras model as a pure function of its weights, which are one vector.

Agents with slow copies of their networks need it: a copy is another vector, an optimizer's step or an average
is one operation, and what is summed over replicas is one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from tfrl.envs.spec import ArraySpec
from tfrl.networks import array_policy
from tfrl.networks.weights import layer_names, read_weights
from tfrl.workers import parts


class Functional:
    """Calls a model with weights that are given.

    Args:
      model: a model without state besides its trained weights, such as batch normalisation has.

    Attributes:
      model: as given.
      size: how many numbers the weights are.
      in_float32: all is computed in float32.
    """

    def __init__(self, model: keras.Model) -> None:
        if model.non_trainable_variables:
            raise ValueError(f"{model.name} has state besides its trained weights")
        self.model = model
        self.in_float32 = all(layer.compute_dtype == "float32" for layer in model.layers)
        self._variables = model.trainable_variables
        names = {id(v): name for name, v in layer_names(model).items()}
        self.names = [names[id(v)] for v in self._variables]
        self._shapes = [tuple(v.shape) for v in self._variables]
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        self.size = sum(self._sizes)

    def __call__(self, weights: tf.Tensor, *inputs: tf.Tensor) -> tf.Tensor:
        """The model's outputs by weights float32 [size]."""
        flat = tf.split(weights, self._sizes)
        shaped = [tf.reshape(part, shape) for part, shape in zip(flat, self._shapes, strict=True)]
        arguments = inputs[0] if len(inputs) == 1 else list(inputs)
        return self.model.stateless_call(shaped, [], arguments)[0]

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in order."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.names))

    def initial(self) -> np.ndarray:
        """The weights that the model was made with, float32 [size]."""
        return self.join(read_weights(dict(zip(self.names, self._variables, strict=True))))

    def join(self, weights: Mapping[str, np.ndarray]) -> np.ndarray:
        """One vector of weights by name. Raises ValueError where they are of another network."""
        odd = sorted({*self.names} ^ weights.keys())
        if odd:
            raise ValueError(f"the weights are of another network: {odd[0]} is in one of them alone")
        for name, shape in zip(self.names, self._shapes, strict=True):
            if weights[name].shape != shape:
                shapes = f"{weights[name].shape}, the network needs {shape}"
                raise ValueError(f"the weights are of another network: {name} has shape {shapes}")
        return np.concatenate([weights[name].reshape(-1) for name in self.names]).astype(np.float32)

    def split(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """The weights of one vector by name."""
        flat = np.split(weights, np.cumsum(self._sizes)[:-1])
        named = zip(self.names, flat, self._shapes, strict=True)
        return {name: part.reshape(shape) for name, part, shape in named}


class FunctionalNetworks(tf.Module):
    """Networks by name, and the weights that they play by; a base of `PolicyNetwork`s.

    Args:
      models: by name; `player` is the one whose outputs choose actions.
      player: its name.
      outputs: of one observation, `player`'s.
    """

    def __init__(self, models: Mapping[str, keras.Model], *, player: str, outputs: int) -> None:
        super().__init__(name="networks")
        self.functions = {name: Functional(model) for name, model in models.items()}
        self._weights = {
            name: tf.Variable(f.initial(), trainable=False) for name, f in self.functions.items()
        }
        self.player = player
        self._outputs = outputs

    @property
    def models(self) -> dict[str, keras.Model]:
        """The networks by name, to be looked at."""
        return {name: function.model for name, function in self.functions.items()}

    def forward_pass(self, *, on_gpu: bool, at_once: int) -> Callable[[tf.Tensor], Sequence[tf.Tensor]]:
        """Gives the player's outputs, [float32 [B, outputs]], of observations [B, *shape]."""
        forward = self.player_pass(on_gpu=on_gpu, at_once=at_once)
        return lambda observations: forward(self._weights[self.player], observations)

    def player_pass(
        self, *, on_gpu: bool, at_once: int
    ) -> Callable[[tf.Tensor, tf.Tensor], Sequence[tf.Tensor]]:
        """The same by weights that are given first. CPUs compute it in parts, `at_once` at a time."""
        function = self.functions[self.player]
        if on_gpu:
            return lambda weights, observations: [function(weights, observations)]
        signature = [tf.TensorSpec([self._outputs])]
        return lambda weights, observations: parts.map_rows(
            lambda rows: [function(weights, rows)], observations, signature, at_once
        )

    def array_pass(
        self, weights: np.ndarray, activations: Sequence[str]
    ) -> Callable[[np.ndarray], np.ndarray]:
        """The player's outputs float32 [B, outputs] in NumPy, where it is an mlp with one head.

        Args:
          weights: float32 [size].
          activations: of its hidden layers, by name.
        """
        named = self.functions[self.player].split(weights)
        layers = []
        for name in self.functions[self.player].layers:
            kernel = named[f"{name}/kernel"]
            layers.append((kernel.reshape(kernel.shape[-2:]), named[f"{name}/bias"]))
        *hidden, (kernel, bias) = layers
        hidden = [(*layer, name) for layer, name in zip(hidden, activations, strict=True)]
        return lambda x: (array_policy.features(x[:, None], hidden) @ kernel)[:, 0] + bias

    def join(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The vectors of weights by NETWORK/NAME. Raises ValueError where they are of other networks."""
        split: dict[str, dict[str, np.ndarray]] = {name: {} for name in self.functions}
        for path, array in weights.items():
            network, _, name = path.partition("/")
            if network not in split:
                raise ValueError(f"the weights are of another network: {path} is in one of them alone")
            split[network][name] = array
        return {name: function.join(split[name]) for name, function in self.functions.items()}

    def split(self, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weights by NETWORK/NAME of all vectors."""
        return {
            f"{network}/{name}": array
            for network, function in self.functions.items()
            for name, array in function.split(vectors[network]).items()
        }

    def get_weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 arrays."""
        return self.split({name: v.numpy() for name, v in self._weights.items()})

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Assigns arrays of `get_weights`. Raises ValueError where they are of other networks."""
        for name, vector in self.join(weights).items():
            self._weights[name].assign(vector)


def torso_for(config: Any, observation_spec: ArraySpec, precision: str, seed: int) -> keras.Model:
    """The torso of the settings.

    Raises:
      ValueError: the zoo cannot build it.
    """
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    options = {**resnet.ppo_options(config.torso), **config.torso_options}
    return resnet.build(config.torso, observation_spec.shape, dtype=dtype, seed=seed, **options)


def seeds_of(seed: int, count: int) -> list[int]:
    """Seeds of the initial weights of `count` parts, in [0, 2^31), as Keras wants them."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count) >> 1]
