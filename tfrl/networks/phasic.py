"""The networks of phasic policy gradient: an actor with a value head of its own, and a critic."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfrl.networks import actor_critic
from tfrl.networks.actor_critic import ActorCritic, Head
from tfrl.networks.weights import layer_names


class PhasicActorCritic(ActorCritic):
    """An ActorCritic whose actor has an auxiliary value head (Cobbe et al. 2021, arXiv:2009.04416, fig. 1).

    Where actor and critic share their torso, the critic's head sees its features as constants, so that the
    value's gradient does not disturb the policy; the auxiliary head's gradient reaches the torso.

    Args:
      network: the actor and the critic.
      seed: decides the auxiliary head's initial weights.
    """

    def __init__(self, network: ActorCritic, *, seed: int) -> None:
        spec = network.distribution.action_spec
        super().__init__(network.actor, network.critic, spec, network.scaling)
        self.auxiliary = Head(1, features=network.actor.torso.output_shape[-1], gain=1.0, seed=seed)

    def __call__(self, observations: tf.Tensor, training: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Distribution parameters float32 [B, P] and the critic's values float32 [B]."""
        return self.with_auxiliary(observations, training)[:2]

    def with_auxiliary(
        self, observations: tf.Tensor, training: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The same, and the values of the actor's own head, float32 [B]."""
        if self.scaling is not None:
            observations = self.scaling(observations)
        features = self.actor.torso(observations, training=training)  # [B, D]
        if self.shared:
            seen = tf.stop_gradient(features)
        else:
            seen = self.critic.torso(observations, training=training)
        parameters, values = self.actor.of_features(features), self.critic.head(seen)[:, 0]
        return parameters, values, self.auxiliary(features)[:, 0]

    @property
    def named_variables(self) -> dict[str, keras.Variable]:
        """Every weight by a name that is the same in all processes and on all topologies."""
        own = {f"auxiliary/{name}": v for name, v in layer_names(self.auxiliary).items()}
        return super().named_variables | own

    @property
    def trained_variables(self) -> list[keras.Variable]:
        """The variables that the policy phase takes gradients of: all but the auxiliary head's."""
        return [
            v for name, v in self.named_variables.items() if v.trainable and not name.startswith("auxiliary/")
        ]

    @property
    def auxiliary_phase_variables(self) -> list[keras.Variable]:
        """The variables that the auxiliary phase takes gradients of."""
        return [v for v in self.named_variables.values() if v.trainable]


def of_settings(config: Any, precision: str) -> PhasicActorCritic:
    """Makes the network that a run's settings describe. Call it inside the strategy's scope.

    Args and errors are those of `actor_critic.of_settings`.
    """
    seed = int(np.random.SeedSequence(config.seed).generate_state(5)[4] >> 1)  # the first four are taken
    return PhasicActorCritic(actor_critic.of_settings(config, precision), seed=seed)
