"""Actor and Critic: a torso of the zoo and a linear head each, built inside the strategy's scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, ArraySpec, Discrete
from tfrl.networks.distributions import distribution_for
from tfrl.networks.weights import assign_weights, layer_names, read_weights
from tfrl.ops.graph import graph
from tfrl.workers import parts


class Head(keras.layers.Dense):
    """A float32 linear layer whose every row is computed alike, however many rows there are.

    Matrix products block their sums differently for each batch size, so 32 envs would round differently on
    one replica than 16 on each of two, and within some dozens of updates the runs would differ. Products and
    one sum per output cost little for the few outputs of a head. float32 because a rounded logit would be
    another policy.
    """

    def __init__(self, units: int, *, features: int, gain: float, seed: int, name: str = "head") -> None:
        initializer = keras.initializers.Orthogonal(gain, seed=seed)
        super().__init__(units, kernel_initializer=initializer, dtype="float32", name=name)
        self.build((None, features))

    def call(self, features: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Outputs float32 [B, units] of features float32 [B, D]."""
        products = features[:, None, :] * tf.transpose(self.kernel)  # [B, units, D]
        return tf.reduce_sum(products, axis=-1) + self.bias


class ObservationScaling(tf.Module):
    """Standardises vectors by constants that a trainer sets: clip((o - mean) * scale, -10, 10).

    They are weights that no gradient changes, so checkpoints, exports and every policy of the run have them.
    """

    def __init__(self, size: int) -> None:
        super().__init__(name="observations")
        self.mean = keras.Variable(np.zeros(size, np.float32), trainable=False, name="mean")
        self.scale = keras.Variable(np.ones(size, np.float32), trainable=False, name="scale")
        self.limit = np.float32(10.0)

    def __call__(self, observations: tf.Tensor) -> tf.Tensor:
        """Standardised vectors, float32 [B, D], of float32 [B, D]."""
        return tf.clip_by_value((observations - self.mean) * self.scale, -self.limit, self.limit)


class Actor(keras.Model):
    """Parameters of the policy's distribution, float32 [B, P], from observations [B, *shape].

    The head starts near zero (gain 0.01), so the first policy is close to uniform, or to its mean at 0. With
    `free_parameters` F, the last F of the P parameters are variables of their own, the same for all
    observations, that start at 0: the deviation of continuous actions, say.
    """

    def __init__(self, torso: keras.Model, parameters: int, *, seed: int, free_parameters: int = 0) -> None:
        super().__init__(name="actor", dtype="float32")
        self.torso = torso
        features = torso.output_shape[-1]
        self.head = Head(parameters - free_parameters, features=features, gain=0.01, seed=seed)
        self.free = (
            keras.Variable(np.zeros(free_parameters, np.float32), name="free") if free_parameters else None
        )
        self.built = True

    def call(self, observations: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Parameters of the distribution, float32 [B, P]."""
        return self.of_features(self.torso(observations, training=training))

    def of_features(self, features: tf.Tensor) -> tf.Tensor:
        """The same of the torso's features, float32 [B, D]."""
        outputs = self.head(features)
        if self.free is None:
            return outputs
        free = tf.convert_to_tensor(self.free)
        return tf.concat([outputs, tf.broadcast_to(free, (tf.shape(outputs)[0], *free.shape))], axis=-1)


class Critic(keras.Model):
    """State values float32 [B] from observations [B, *shape]; the head's gain is 1."""

    def __init__(self, torso: keras.Model, *, seed: int) -> None:
        super().__init__(name="critic", dtype="float32")
        self.torso = torso
        self.head = Head(1, features=torso.output_shape[-1], gain=1.0, seed=seed)
        self.built = True

    def call(self, observations: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Values, float32 [B]."""
        return self.head(self.torso(observations, training=training))[:, 0]


class ActorCritic(tf.Module):
    """An Actor and a Critic; a torso that they share runs once for both.

    Attributes:
      distribution: makes the policy's distribution from the actor's outputs.
      scaling: standardises observations; None where they are taken as they are.
    """

    def __init__(
        self, actor: Actor, critic: Critic, action_spec: ActionSpec, scaling: ObservationScaling | None = None
    ) -> None:
        super().__init__(name="actor_critic")
        self.actor = actor
        self.critic = critic
        self.scaling = scaling
        self.distribution = distribution_for(action_spec)
        self.shared = actor.torso is critic.torso

    def __call__(self, observations: tf.Tensor, training: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Distribution parameters float32 [B, P] and values float32 [B] of observations [B, *shape]."""
        if self.scaling is not None:
            observations = self.scaling(observations)
        if not self.shared:
            return self.actor(observations, training=training), self.critic(observations, training=training)
        features = self.actor.torso(observations, training=training)  # [B, D]
        return self.actor.of_features(features), self.critic.head(features)[:, 0]

    def parameters(self, observations: tf.Tensor) -> tf.Tensor:
        """Distribution parameters alone, float32 [B, P]."""
        return self.actor(observations if self.scaling is None else self.scaling(observations))

    def values(self, observations: tf.Tensor) -> tf.Tensor:
        """Values alone, float32 [B]."""
        return self.critic(observations if self.scaling is None else self.scaling(observations))

    @property
    def is_small(self) -> bool:
        """True if it is so small that XLA gains more than oneDNN's convolutions: an mlp."""
        return self.actor.torso.name == "mlp"

    def forward_pass(self, *, on_gpu: bool, at_once: int) -> Callable[[tf.Tensor], Sequence[tf.Tensor]]:
        """Returns `__call__` for acting: CPUs compute it in parts, `at_once` at a time."""
        signature = [tf.TensorSpec([self.distribution.parameters_size]), tf.TensorSpec([])]
        return self._in_parts(self, signature, on_gpu, at_once)

    def policy_pass(self, *, on_gpu: bool, at_once: int) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns `parameters` for acting, in such parts; a critic's own torso is not passed through."""
        signature = [tf.TensorSpec([self.distribution.parameters_size])]
        of_rows = self._in_parts(lambda rows: (self.parameters(rows),), signature, on_gpu, at_once)
        return lambda observations: of_rows(observations)[0]

    def value_pass(self, *, on_gpu: bool, at_once: int) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns `values` for acting, in such parts."""
        if (
            not self.is_small
        ):  # as it has always been: without the policy's head, convolutions round otherwise
            forward = self.forward_pass(on_gpu=on_gpu, at_once=at_once)
            return lambda observations: forward(observations)[1]
        of_rows = self._in_parts(lambda rows: (self.values(rows),), [tf.TensorSpec([])], on_gpu, at_once)
        return lambda observations: of_rows(observations)[0]

    def _in_parts(
        self, function: Callable[..., Any], signature: Sequence[tf.TensorSpec], on_gpu: bool, at_once: int
    ) -> Callable[[tf.Tensor], Sequence[tf.Tensor]]:
        if on_gpu:
            return function
        size = None
        if self.is_small:  # compiled for parts of one size
            function, size = graph(function, jit_compile=True), parts.COMPILED_ROWS
        return lambda observations: parts.map_rows(function, observations, signature, at_once, size)

    # As `tfrl.networks.policy_network.PolicyNetwork`; outputs are those of `forward_pass`

    @property
    def noise_size(self) -> int:
        """Random numbers of one action."""
        return self.distribution.noise_size

    @property
    def has_probabilities(self) -> bool:
        """True if each of a few actions has a probability."""
        return isinstance(self.distribution.action_spec, Discrete)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The numbers that choose one env's actions, float32 [steps, K]."""
        return self.distribution.draw_noise(generator, steps)

    def sample(self, outputs: Sequence[tf.Tensor], noise: tf.Tensor) -> tf.Tensor:
        """Drawn actions [B, *shape], by noise float32 [B, K]."""
        return self.distribution(outputs[0]).sample(noise)

    def greedy(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The most likely actions [B, *shape]."""
        return self.distribution(outputs[0]).mode()

    def probabilities(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The probability of each action, float32 [B, A]."""
        return tf.nn.softmax(outputs[0])

    def exported(self, outputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """The most likely `action`, the distribution's parameters, and `value`."""
        name = "logits" if self.has_probabilities else "parameters"
        return {"action": self.greedy(outputs), name: outputs[0], "value": outputs[1]}

    # Weights

    @property
    def models(self) -> dict[str, keras.Model]:
        """The actor and the critic by name, as functional Keras models, to be looked at."""
        return {
            name: keras.Model(part.torso.input, part.head(part.torso.output), name=name)
            for name, part in (("actor", self.actor), ("critic", self.critic))
        }

    @property
    def named_variables(self) -> dict[str, keras.Variable]:
        """Every weight by a name that is the same in all processes and on all topologies."""
        layers = {"torso": self.actor.torso} if self.shared else {}
        if not self.shared:
            layers |= {"actor_torso": self.actor.torso, "critic_torso": self.critic.torso}
        layers |= {"actor": self.actor.head, "critic": self.critic.head}
        named = {
            f"{part}/{name}": v for part, layer in layers.items() for name, v in layer_names(layer).items()
        }
        if self.actor.free is not None:
            named["actor/free"] = self.actor.free
        if self.scaling is not None:
            named |= {"observations/mean": self.scaling.mean, "observations/scale": self.scaling.scale}
        return named

    @property
    def trained_variables(self) -> list[keras.Variable]:
        """The variables that gradients are taken of, in the order of `named_variables`."""
        return [v for v in self.named_variables.values() if v.trainable]

    def get_weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 arrays."""
        return read_weights(self.named_variables)

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Assigns arrays from `get_weights`.

        Raises:
          ValueError: names or shapes differ from this network's.
        """
        assign_weights(self.named_variables, weights)


def of_settings(config: Any, precision: str) -> ActorCritic:
    """Makes the actor and critic that a run's settings describe. Call it inside the strategy's scope.

    Args:
      config: settings with the sections Task, Network and PPO.
      precision: "float32", or "bfloat16" for a bfloat16 torso under float32 heads.

    Raises:
      ValueError: the zoo cannot build that torso, or it would break PPO's probability ratio.
    """
    observation_spec, action_spec = registry.specs(config)
    return build(
        torso=config.torso,
        torso_options=config.torso_options,
        observation_spec=observation_spec,
        action_spec=action_spec,
        share_torso=config.share_torso,
        free_deviation=config.free_deviation,
        scale_observations=config.normalize_observations,
        precision=precision,
        seed=config.seed,
    )


def build(
    *,
    torso: str,
    torso_options: Mapping[str, Any],
    observation_spec: ArraySpec,
    action_spec: ActionSpec,
    share_torso: bool,
    precision: str,
    seed: int,
    free_deviation: bool = False,
    scale_observations: bool = False,
) -> ActorCritic:
    """Makes Actor and Critic from a torso's name. Call it inside the strategy's scope.

    Args:
      torso: a name of the zoo.
      torso_options: the torso's own options, for `resnet.build`, where they are not PPO's defaults.
      observation_spec, action_spec: of the env.
      share_torso: one torso for both heads, or one each.
      precision: "float32", or "bfloat16" for a bfloat16 torso under float32 heads.
      seed: decides the initial weights.
      free_deviation: the deviation of continuous actions is a variable, not an output.
      scale_observations: standardise vectors by constants.

    Raises:
      ValueError: the zoo cannot build that torso, or it would break PPO's probability ratio.
    """
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    options = {**resnet.ppo_options(torso), **torso_options}
    resnet.check_for_ppo(torso, options)
    shape = observation_spec.shape
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(4) >> 1]  # Keras wants int32 seeds
    actor_torso = resnet.build(torso, shape, dtype=dtype, seed=seeds[0], **options)
    critic_torso = actor_torso
    if not share_torso:
        critic_torso = resnet.build(torso, shape, dtype=dtype, seed=seeds[1], **options)
    distribution = distribution_for(action_spec)
    free = distribution.deviation_size if free_deviation else 0
    actor = Actor(actor_torso, distribution.parameters_size, seed=seeds[2], free_parameters=free)
    scaling = ObservationScaling(*shape) if scale_observations else None
    return ActorCritic(actor, Critic(critic_torso, seed=seeds[3]), action_spec, scaling)
