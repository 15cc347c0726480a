"""The networks of the algorithms with replay, and of REINFORCE.

DQN has a network for the values of all actions; DDPG, TD3 and SAC have an actor and one or two critics Q(o,
a); REINFORCE has only an actor. They share no torso, so each is a Keras model from observations to outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import resnet
from tfrl.config.run import RLSettings
from tfrl.envs import callables, registry
from tfrl.envs.observations import FORBIDDEN, ArraySpec
from tfrl.envs.spec import ActionSpec, Discrete
from tfrl.networks.distributions import distribution_for
from tfrl.networks.entrance import Unpack, torso_of_rows
from tfrl.networks.network import Functional, Head, Network, seeds_of
from tfrl.ops import q_learning
from tfrl.workers.data_parallel import Weights


class ActorAndCritics(Network):
    """An actor, whose outputs are a distribution's parameters, and critics `critic1`, `critic2` and so on.

    Critics compute Q(o, a) from observations and actions, float32 [B]; for discrete actions, the values of
    all actions from observations, float32 [B, A].

    Args:
      config: the run's settings.
      precision: of the torsos, "float32" or "bfloat16".
      critics: the number of critics.
      outputs: the number of the actor's outputs; None: the distribution's parameters.

    Raises:
      ValueError: the zoo cannot build a torso.
    """

    def __init__(
        self, config: RLSettings, precision: str, *, critics: int, outputs: int | None = None
    ) -> None:
        observation_spec, action_spec = registry.specs(config)
        seeds = seeds_of(config.seed, 1 + critics)
        size = distribution_for(action_spec).parameters_size if outputs is None else outputs
        torso = torso_of_rows(config, observation_spec, precision, seeds[0])
        models = {"actor": _headed(torso, size, 0.01, seeds[0])}
        for i, seed in enumerate(seeds[1:], start=1):
            models[f"critic{i}"] = _critic(config, observation_spec, action_spec, precision, seed)
        super().__init__(models, acting=["actor"], observation_spec=observation_spec, action_spec=action_spec)
        self.critics = tuple(models)[1:]

    def qs(self, weights: Weights, prefix: str, *inputs: tf.Tensor) -> tf.Tensor:
        """The values of all critics, float32 [N, B], or [N, B, A] for discrete actions.

        Args:
          weights: the vectors of all networks, by name.
          prefix: "" for the critics themselves, `TARGET` for their target networks.
          inputs: observations [B, ...]; for continuous actions also actions in [-1, 1], float32 [B, D].
        """
        return tf.stack([self.functions[name](weights[prefix + name], *inputs) for name in self.critics])


class DeterministicActor(ActorAndCritics):
    """An actor of continuous actions, float32 [B, D], which are tanh of its outputs, and its critics.

    `noise_scale` is the standard deviation of the exploration noise; see `ActorAndCritics` for the rest.
    """

    def __init__(self, config: RLSettings, precision: str, *, critics: int, noise_scale: float) -> None:
        super().__init__(config, precision, critics=critics, outputs=registry.specs(config)[1].shape[0])
        self.noise_scale = noise_scale

    @property
    def has_deviation(self) -> bool:
        """False: the deviation of the exploration is a setting."""
        return False

    def sample(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tf.Tensor:
        """The best actions with added Gaussian noise, float32 [B, D] in [-1, 1]."""
        return tf.clip_by_value(self.greedy(outputs) + self.noise_scale * noise, -1.0, 1.0)

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The best actions, float32 [B, D] in [-1, 1]."""
        # In float64, because vectorised functions round a float32 by its place in the batch.
        return tf.cast(tf.tanh(tf.cast(outputs[0], tf.float64)), tf.float32)

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The best `action`."""
        return {"action": self.greedy(outputs)}


class ActorAlone(Network):
    """REINFORCE's actor, which has no critics. It acts without dropout.

    Args:
      config: the run's settings.
      precision: of the torso, "float32" or "bfloat16".
      dropout: the share of the torso's features that are dropped in training.

    Raises:
      ValueError: the zoo cannot build the torso.
    """

    def __init__(self, config: RLSettings, precision: str, *, dropout: float) -> None:
        observation_spec, action_spec = registry.specs(config)
        seeds = seeds_of(config.seed, 2)
        torso = torso_of_rows(config, observation_spec, precision, seeds[0])
        size, features = distribution_for(action_spec).parameters_size, torso.output_shape[-1]
        head = Head(size, features=features, gain=0.01, seed=seeds[1])
        actor = keras.Model(torso.input, head(torso.output), name="actor")
        super().__init__(
            {"actor": actor}, acting=["actor"], observation_spec=observation_spec, action_spec=action_spec
        )
        factors = keras.Input((features,), name="factors")
        thinned = keras.layers.Multiply(dtype="float32", name="thinned")([torso.output, factors])
        self._thinned = Functional(keras.Model([torso.input, factors], head(thinned), name="thinned_actor"))
        self._dropout = np.float32(dropout)
        self.dropped_size = features if dropout else 0

    def draw_training_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers of `draw_noise` and, with dropout, of each feature in [0, 1), float32 [steps, K]."""
        noise = self.draw_noise(generator, steps)
        return np.concatenate([noise, generator.random((steps, self.dropped_size), np.float32)], axis=1)

    def parameters(self, weights: tf.Tensor, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        """Parameters of the distribution, float32 [B, P], with the dropout of the noise.

        This is inverted dropout (Srivastava et al. 2014): the kept features are divided by their share.

        Args:
          weights: float32 [size].
          observations: [B, *shape].
          noise: of `draw_training_noise`, float32 [B, K].
        """
        if self.dropped_size:
            stays = tf.cast(noise[:, self.noise_size :] >= self._dropout, tf.float32)
            parameters = self._thinned(weights, observations, stays / (1.0 - self._dropout))
        else:
            parameters = self.functions["actor"](weights, observations)
        return self.entrance.mask(observations, parameters)


class Dueling(keras.layers.Layer):
    """Action values from the value of an observation and the advantages of actions (`q_learning.dueling`)."""

    def call(self, value: tf.Tensor, advantages: tf.Tensor) -> tf.Tensor:
        """Values float32 [B, A] from float32 [B, 1] and [B, A]."""
        return q_learning.dueling(value[:, 0], advantages)


class QNetwork(Network):
    """Q(o, a) of A actions, float32 [B, A].

    Args:
      config: the run's settings.
      precision: of the torso, "float32" or "bfloat16".
      dueling: two heads give the value of the observation and the advantages of the actions (`Dueling`).
      epsilon: the share of random actions of `sample`.
      each: the outputs of the model for each action, side by side. If there are several, such as quantiles,
        the method `outputs` of a subclass makes the values of them.

    Raises:
      ValueError: the zoo cannot build the torso.
    """

    def __init__(
        self, config: RLSettings, precision: str, *, dueling: bool, epsilon: float, each: int = 1
    ) -> None:
        observation_spec, action_spec = registry.specs(config)
        seeds = seeds_of(config.seed, 3)
        torso = torso_of_rows(config, observation_spec, precision, seeds[0])
        self.num_actions, features = action_spec.encoded_size, torso.output_shape[-1]
        q = Head(each * self.num_actions, features=features, gain=1.0, seed=seeds[1])(torso.output)
        if dueling:
            value = Head(1, features=features, gain=1.0, seed=seeds[2], name="value")(torso.output)
            q = Dueling(name="dueling", dtype="float32")(value, q)
        model = keras.Model(torso.input, q, name="q")
        super().__init__(
            {"q": model},
            acting=["q"],
            observation_spec=observation_spec,
            action_spec=action_spec,
            signature=[tf.TensorSpec([self.num_actions])],
        )
        self.noise_size = 2
        self.epsilon, self.each = epsilon, each
        self._masked = bool(observation_spec.num_actions)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """Uniform numbers in [0, 1), float32 [steps, 2].

        The first number decides whether the action is random, the second number decides the random action.
        """
        return generator.random((steps, 2), np.float32)

    def sample(
        self, outputs: Sequence[tf.Tensor], noise: tf.Tensor, epsilon: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Actions int32 [B]: random ones with probability epsilon, the best ones otherwise."""
        epsilon = self.epsilon if epsilon is None else epsilon
        if self._masked:
            allowed = tf.cast(outputs[0] > FORBIDDEN / 2, tf.int32)
            count = tf.reduce_sum(allowed, axis=1)
            wanted = tf.minimum(tf.cast(noise[:, 1] * tf.cast(count, tf.float32), tf.int32), count - 1)
            passed = tf.cumsum(allowed, axis=1) <= wanted[:, None]
            at_random = tf.reduce_sum(tf.cast(passed, tf.int32), axis=1)
        else:
            at_random = tf.cast(noise[:, 1] * self.num_actions, tf.int32)
            # The largest float32 below 1 may round up.
            at_random = tf.minimum(at_random, self.num_actions - 1)
        return tf.where(noise[:, 0] < epsilon, at_random, self.greedy(outputs))

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The best actions, int32 [B]."""
        return tf.argmax(outputs[0], axis=-1, output_type=tf.int32)

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The probability of each action of `sample`, float32 [B, A]."""
        best = tf.one_hot(self.greedy(outputs), self.num_actions)
        allowed = tf.cast(outputs[0] > FORBIDDEN / 2, tf.float32)
        at_random = allowed / tf.reduce_sum(allowed, axis=1, keepdims=True)
        return (1.0 - self.epsilon) * best + self.epsilon * at_random

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The best `action`, and `q` of all actions."""
        return {"action": self.greedy(outputs), "q": outputs[0]}


def _critic(
    config: RLSettings, observation_spec: ArraySpec, action_spec: ActionSpec, precision: str, seed: int
) -> keras.Model:
    """A critic Q(o, a): actions join the observation, or an image's features, before the hidden layers."""
    if isinstance(action_spec, Discrete):
        torso = torso_of_rows(config, observation_spec, precision, seed, critic=True)
        return _headed(torso, action_spec.n, 1.0, seed)
    observations = keras.Input(observation_spec.shape, dtype=observation_spec.dtype, name="observations")
    actions = keras.Input(action_spec.shape, name="actions")
    if observation_spec.image_shapes or callables.is_name(config.critic_torso or config.torso):
        features = torso_of_rows(config, observation_spec, precision, seed, critic=True)(observations)
    elif observation_spec.parts:
        (features,) = Unpack(observation_spec)(observations)
    else:
        features = observations
    both = keras.layers.Concatenate(dtype="float32", name="both")([features, actions])
    hidden = resnet.build("mlp", both.shape[1:], seed=seed, **config.hidden_options)
    head = Head(1, features=hidden.output_shape[-1], gain=1.0, seed=seed, by_row=False)
    q = keras.layers.Reshape((), dtype="float32", name="q")(head(hidden(both)))
    return keras.Model([observations, actions], q, name="critic")


def _headed(torso: keras.Model, outputs: int, gain: float, seed: int) -> keras.Model:
    head = Head(outputs, features=torso.output_shape[-1], gain=gain, seed=seed)
    return keras.Model(torso.input, head(torso.output), name="headed")


def state_value(config: RLSettings, precision: str) -> Functional:
    """A network V(o), float32 [B, 1]. Raises ValueError if the zoo cannot build its torso."""
    seed = seeds_of(config.seed, 4)[3]
    torso = torso_of_rows(config, registry.specs(config)[0], precision, seed, critic=True)
    return Functional(_headed(torso, 1, 1.0, seed))
