"""An actor and one or more critics of actions Q(o, a), for DDPG, TD3 and SAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from tfrl.config.network import hidden_options
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, ArraySpec, Discrete
from tfrl.networks.distributions import distribution_for
from tfrl.networks.network import Head, Network, seeds_of, torso_for
from tfrl.workers.data_parallel import Weights


class _ActorAndCritics(Network):
    """The base of both kinds below, with the networks `actor`, `critic1`, `critic2` and so on."""

    def __init__(self, actor: keras.Model, critics: Sequence[keras.Model]) -> None:
        models = {"actor": actor} | {f"critic{i}": critic for i, critic in enumerate(critics, start=1)}
        signature = [tf.TensorSpec([actor.output_shape[-1]])]
        super().__init__(models, acting=["actor"], signature=signature)
        self.critics = tuple(models)[1:]

    def outputs(self, weights: Weights, observations: tf.Tensor) -> Sequence[tf.Tensor]:
        """The actor's outputs, [float32 [B, P]], of observations [B, *shape]."""
        return [self.functions["actor"](weights["actor"], observations)]


class DeterministicActor(_ActorAndCritics):
    """An actor whose actions are tanh of its outputs.

    Args:
      actor: gives float32 [B, D] of observations [B, *shape].
      critics: give Q(o, a) float32 [B] of both.
      noise_scale: standard deviation of what is added to actions that are drawn.
    """

    has_probabilities = False

    def __init__(self, actor: keras.Model, critics: Sequence[keras.Model], *, noise_scale: float) -> None:
        super().__init__(actor, critics)
        self.noise_size = actor.output_shape[-1]
        self._noise_scale = noise_scale

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Standard normal numbers, float32 [steps, D]."""
        return generator.standard_normal((steps, self.noise_size), np.float32)

    def sample(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tf.Tensor:
        """The best actions, and Gaussian noise upon them, float32 [B, D] in [-1, 1]."""
        return tf.clip_by_value(self.greedy(outputs) + self._noise_scale * noise, -1.0, 1.0)

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The best actions, float32 [B, D] in [-1, 1]."""
        # By way of float64: vectorised functions round a float32 by its place in the batch.
        return tf.cast(tf.tanh(tf.cast(outputs[0], tf.float64)), tf.float32)

    def act(self, outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The actions of `sample`, from outputs float32 [B, D], in NumPy."""
        noisy = self.act_greedily(outputs) + np.float32(self._noise_scale) * noise
        return np.minimum(np.maximum(noisy, np.float32(-1)), np.float32(1))

    def act_greedily(self, outputs: np.ndarray) -> np.ndarray:
        """The actions of `greedy`, from outputs float32 [B, D], in NumPy."""
        return np.tanh(outputs.astype(np.float64)).astype(np.float32)

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Raises TypeError: continuous actions have none."""
        raise TypeError("continuous actions have no probabilities")

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The best `action`."""
        return {"action": self.greedy(outputs)}


class StochasticActor(_ActorAndCritics):
    """An actor whose outputs are a distribution's parameters.

    Args:
      actor: gives float32 [B, P] of observations [B, *shape].
      critics: give Q(o, a): of both, float32 [B], or of discrete actions all, float32 [B, A].
      action_spec: the action space.
    """

    def __init__(self, actor: keras.Model, critics: Sequence[keras.Model], action_spec: ActionSpec) -> None:
        super().__init__(actor, critics)
        self.distribution = distribution_for(action_spec)
        self.noise_size = self.distribution.noise_size
        self.has_probabilities = isinstance(action_spec, Discrete)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers that choose one env's actions, float32 [steps, K]."""
        return self.distribution.draw_noise(generator, steps)

    def sample(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tf.Tensor:
        """Drawn actions [B, *shape], by noise float32 [B, K]."""
        return self.distribution(outputs[0]).sample(noise)

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The most likely actions [B, *shape]."""
        return self.distribution(outputs[0]).mode()

    def act(self, outputs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The actions of `sample`, from outputs float32 [B, P], in NumPy."""
        return self.distribution.act(outputs, noise)

    def act_greedily(self, outputs: np.ndarray) -> np.ndarray:
        """The actions of `greedy`, from outputs float32 [B, P], in NumPy."""
        return self.distribution.act_greedily(outputs)

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The probability of each action, float32 [B, A]."""
        return tf.nn.softmax(outputs[0])

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The most likely `action`, and the distribution's parameters."""
        return {
            "action": self.greedy(outputs),
            "logits" if self.has_probabilities else "parameters": outputs[0],
        }


def of_settings(config: Any, precision: str) -> DeterministicActor | StochasticActor:
    """Makes the networks that the settings of a DDPG, TD3 or SAC run describe.

    Raises:
      ValueError: the zoo cannot build their torso.
    """
    observation_spec, action_spec = registry.specs(config)
    num_critics = 1 if config.algorithm == "ddpg" else 2
    seeds = seeds_of(config.seed, 1 + num_critics)
    parameters = distribution_for(action_spec).parameters_size
    if config.algorithm != "sac":
        parameters = action_spec.shape[0]
    actor = _headed(torso_for(config, observation_spec, precision, seeds[0]), parameters, 0.01, seeds[0])
    critics = [_critic(config, observation_spec, action_spec, precision, seed) for seed in seeds[1:]]
    if config.algorithm == "sac":
        return StochasticActor(actor, critics, action_spec)
    return DeterministicActor(actor, critics, noise_scale=config.exploration_noise)


def _critic(
    config: Any, observation_spec: ArraySpec, action_spec: ActionSpec, precision: str, seed: int
) -> keras.Model:
    """Q(o, a): actions join what the env shows, or what a torso makes of images, before the hidden layers."""
    if isinstance(action_spec, Discrete):
        return _headed(torso_for(config, observation_spec, precision, seed), action_spec.n, 1.0, seed)
    shape, images = observation_spec.shape, len(observation_spec.shape) == 3
    observations = keras.Input(shape, dtype=observation_spec.dtype, name="observations")
    actions = keras.Input(action_spec.shape, name="actions")
    features = torso_for(config, observation_spec, precision, seed)(observations) if images else observations
    both = keras.layers.Concatenate(dtype="float32", name="both")([features, actions])
    hidden = resnet.build("mlp", both.shape[1:], seed=seed, **hidden_options(config))
    head = Head(1, features=hidden.output_shape[-1], gain=1.0, seed=seed)
    q = keras.layers.Reshape((), dtype="float32", name="q")(head(hidden(both)))
    return keras.Model([observations, actions], q, name="critic")


def _headed(torso: keras.Model, outputs: int, gain: float, seed: int) -> keras.Model:
    head = Head(outputs, features=torso.output_shape[-1], gain=gain, seed=seed)
    return keras.Model(torso.input, head(torso.output), name="headed")
