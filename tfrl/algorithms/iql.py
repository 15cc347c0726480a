"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169), for continuous and discrete actions.

Actor and critics are SAC's, so `tfrl.sac --start-from` goes on with them. The value network V(o) is
IQL's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from tfrl.algorithms import sac
from tfrl.algorithms.bc import log_likelihood
from tfrl.algorithms.offline import OfflineAgent, OfflineSettings, OfflineTask, OfflineValues
from tfrl.algorithms.replay import Rows
from tfrl.cli.flags import NOT_NEGATIVE, POSITIVE, Range
from tfrl.config.run import Hardware, RunSettings, Torso
from tfrl.envs.spec import ActionSpec, Box, Discrete
from tfrl.ops import q_learning
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import TARGET, GradientStep, Losses, Weights

if TYPE_CHECKING:
    from tfrl.networks.actors import ActorAndCritics
    from tfrl.networks.network import Functional


@dataclass(frozen=True)
class IQL:
    """The hyperparameters of IQL."""

    expectile: Annotated[float, Range(0.5, 0.999)] = 0.7
    """V is this expectile of Q over the recorded actions: 0.5 is their mean, near 1 their maximum."""
    temperature: Annotated[float, NOT_NEGATIVE] = 3.0
    """Weights of the actor's loss are exp(temperature x advantage); 0: behaviour cloning."""
    advantage_clip: Annotated[float, POSITIVE] = 100.0
    """The largest of these weights."""


@dataclass(frozen=True)
class Config(IQL, OfflineValues, OfflineSettings):
    """All settings of an IQL run. One field a flag."""

    algorithm: str = "iql"
    sections: ClassVar[tuple[type, ...]] = (OfflineTask, OfflineValues, IQL, Torso, Hardware, RunSettings)
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Box, Discrete)
    critics_see_actions: ClassVar[bool] = True
    make_network = sac.Config.make_network  # it takes these settings, too


_VALUE = "value"


class IQLAgent(OfflineAgent):
    """Train IQL, an actor, two critics and a value network, from recorded episodes."""

    settings = Config
    _config: Config
    network: ActorAndCritics

    @property
    def target_networks(self) -> tuple[str, ...]:
        """The critics."""
        return self.network.critics

    @functools.cached_property
    def _value(self) -> Functional:
        from tfrl.networks import actors

        with self._runtime.strategy.scope():
            return actors.state_value(self._config, self._runtime.precision)

    def initial(self) -> dict[str, np.ndarray]:
        """The networks' vectors, and that of V."""
        return super().initial() | {_VALUE: self._value.initial()}

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return super().num_parameters - 1 + self._value.num_parameters

    def make_steps(self) -> dict[str, GradientStep]:
        """The gradient steps of V, the actor and the critics, in the order of the authors' code."""
        config, critics = self._config, self.network.critics
        rate = config.critic_lr or config.lr
        rates = (rate,) * len(critics)
        return {
            "value": self.make_step((_VALUE,), self._value_loss, ("value_loss", "value_mean"), rates=(rate,)),
            "actor": self.make_step(
                ("actor",), self._actor_loss, ("actor_loss", "advantage"), rates=(config.lr,)
            ),
            "critics": self.make_step(critics, self._critic_loss, ("q_loss", "q_mean"), rates=rates),
        }

    def _qs(self, weights: Weights, prefix: str, rows: Rows) -> tf.Tensor:
        """Q(o, a) of the recorded actions by all critics, float32 [N, b]."""
        if isinstance(self.network.distribution.action_spec, Discrete):
            qs = tf.unstack(self.network.qs(weights, prefix, rows["observation"]))
            return tf.stack([q_learning.taken_q(q, rows["action"]) for q in qs])
        return self.network.qs(weights, prefix, rows["observation"], rows["action"])

    def _advantage(self, weights: Weights, rows: Rows) -> tuple[tf.Tensor, tf.Tensor]:
        """min_i Q'_i(o, a) - V(o), and V(o), float32 [b] each."""
        value = self._value(weights[_VALUE], rows["observation"])[:, 0]
        return tf.stop_gradient(tf.reduce_min(self._qs(weights, TARGET, rows), axis=0)) - value, value

    def _value_loss(self, weights: Weights, rows: Rows) -> Losses:
        """|expectile - 1(u < 0)| u^2 of the advantage u (equation 5)."""
        advantage, value = self._advantage(weights, rows)
        weight = tf.where(advantage < 0, 1 - self._config.expectile, self._config.expectile)
        loss = weight * tf.square(advantage)
        return Losses(loss, {"value_loss": loss, "value_mean": value}, advantage)

    def _actor_loss(self, weights: Weights, rows: Rows) -> Losses:
        """-exp(temperature A) log pi(a | o) (equation 7)."""
        config = self._config
        advantage = tf.stop_gradient(self._advantage(weights, rows)[0])
        weight = tf.minimum(tf.exp(config.temperature * advantage), config.advantage_clip)
        policy = self.network.distribution(self.network.outputs(weights, rows["observation"])[0])
        loss = -weight * log_likelihood(policy, rows["action"])
        return Losses(loss, {"actor_loss": loss, "advantage": advantage})

    def _critic_loss(self, weights: Weights, rows: Rows) -> Losses:
        """(r + d V(o') - Q(o, a))^2 (equation 6)."""
        following = self._value(weights[_VALUE], rows["next_observation"])[:, 0]
        target = q_learning.td_target(rows["reward"], rows["discount"], following)
        # Only the errors of the first gradient step are kept.
        return self.td_losses(tf.unstack(self._qs(weights, "", rows)), target, rows)._replace(errors=None)
