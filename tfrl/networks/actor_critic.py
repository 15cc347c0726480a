"""Actor and Critic: a torso of the zoo and a linear head each, built inside the strategy's scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from tfrl.networks.distributions import Categorical
from tfrl.workers import parts


class Head(keras.layers.Dense):
    """A float32 linear layer whose every row is computed alike, however many rows there are.

    Matrix products block their sums differently for each batch size, so 32 envs would round differently on
    one replica than 16 on each of two, and within some dozens of updates the runs would differ. Products and
    one sum per output cost little for the few outputs of a head. float32 because a rounded logit would be
    another policy.
    """

    def __init__(self, units: int, *, features: int, gain: float, seed: int) -> None:
        initializer = keras.initializers.Orthogonal(gain, seed=seed)
        super().__init__(units, kernel_initializer=initializer, dtype="float32", name="head")
        self.build((None, features))

    def call(self, features: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Outputs float32 [B, units] of features float32 [B, D]."""
        products = features[:, None, :] * tf.transpose(self.kernel)  # [B, units, D]
        return tf.reduce_sum(products, axis=-1) + self.bias


class Actor(keras.Model):
    """Policy logits float32 [B, A] from observations uint8 [B, H, W, C].

    The head starts near zero (gain 0.01), so the first policy is close to uniform.
    """

    def __init__(self, torso: keras.Model, num_actions: int, *, seed: int) -> None:
        super().__init__(name="actor", dtype="float32")
        self.torso = torso
        self.head = Head(num_actions, features=torso.output_shape[-1], gain=0.01, seed=seed)
        self.built = True

    def call(self, observations: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Logits, float32 [B, A]."""
        return self.head(self.torso(observations, training=training))


class Critic(keras.Model):
    """State values float32 [B] from observations uint8 [B, H, W, C]; the head's gain is 1."""

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
      distribution: makes the policy from the actor's logits.
    """

    distribution = Categorical

    def __init__(self, actor: Actor, critic: Critic) -> None:
        super().__init__(name="actor_critic")
        self.actor = actor
        self.critic = critic
        self.shared = actor.torso is critic.torso

    def __call__(self, observations: tf.Tensor, training: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Logits float32 [B, A] and values float32 [B] of observations uint8 [B, H, W, C]."""
        if not self.shared:
            return self.actor(observations, training=training), self.critic(observations, training=training)
        features = self.actor.torso(observations, training=training)  # [B, D]
        return self.actor.head(features), self.critic.head(features)[:, 0]

    def forward_pass(self, *, on_gpu: bool, at_once: int) -> Callable[[tf.Tensor], Sequence[tf.Tensor]]:
        """What `__call__` gives, for acting: CPUs compute it in parts, `at_once` at a time."""
        if on_gpu:
            return self
        signature = [tf.TensorSpec([self.actor.head.units]), tf.TensorSpec([])]
        return lambda observations: parts.map_rows(self, observations, signature, at_once)

    @property
    def named_variables(self) -> dict[str, keras.Variable]:
        """Every weight by a name that is the same in all processes and on all topologies."""
        parts = {"torso": self.actor.torso} if self.shared else {}
        if not self.shared:
            parts |= {"actor_torso": self.actor.torso, "critic_torso": self.critic.torso}
        parts |= {"actor": self.actor.head, "critic": self.critic.head}
        return {
            f"{part}/{'/'.join(v.path.split('/')[-2:])}": v
            for part, layer in parts.items()
            for v in layer.variables
        }

    @property
    def trained_variables(self) -> list[keras.Variable]:
        """What gradients are taken of, in the order of `named_variables`."""
        return [v for v in self.named_variables.values() if v.trainable]

    def get_weights(self) -> dict[str, np.ndarray]:
        """All weights as float32 arrays."""
        return {name: np.asarray(v.numpy(), np.float32) for name, v in self.named_variables.items()}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Assigns arrays from `get_weights`.

        Raises:
          ValueError: names or shapes differ from this network's.
        """
        mine = self.named_variables
        if set(mine) != set(weights):
            odd = sorted(set(mine) ^ set(weights))[0]
            raise ValueError(f"the weights are of another network: {odd} is in one of them alone")
        for name, variable in mine.items():
            if tuple(variable.shape) != weights[name].shape:
                shapes = f"{weights[name].shape}, the network needs {tuple(variable.shape)}"
                raise ValueError(f"the weights are of another network: {name} has shape {shapes}")
            variable.assign(weights[name])


def build(
    *,
    torso: str,
    observation_shape: tuple[int, ...],
    num_actions: int,
    share_torso: bool,
    precision: str,
    seed: int,
    torso_options: Mapping[str, Any] = MappingProxyType({}),
) -> ActorCritic:
    """Makes Actor and Critic from a torso's name. Call it inside the strategy's scope.

    Args:
      torso: a name of the zoo.
      observation_shape: (H, W, C).
      num_actions: A.
      share_torso: one torso for both heads, or one each.
      precision: "float32", or "bfloat16" for a bfloat16 torso under float32 heads.
      seed: decides the initial weights.
      torso_options: the torso's own options, for `resnet.build`, where they are not PPO's defaults.

    Raises:
      ValueError: the zoo cannot build that torso, or it would break PPO's probability ratio.
    """
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    options = {**resnet.ppo_options(torso), **torso_options}
    resnet.check_for_ppo(torso, options)
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(4) >> 1]  # Keras wants int32 seeds
    actor_torso = resnet.build(torso, observation_shape, dtype=dtype, seed=seeds[0], **options)
    critic_torso = actor_torso
    if not share_torso:
        critic_torso = resnet.build(torso, observation_shape, dtype=dtype, seed=seeds[1], **options)
    actor = Actor(actor_torso, num_actions, seed=seeds[2])
    return ActorCritic(actor, Critic(critic_torso, seed=seeds[3]))
