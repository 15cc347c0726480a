"""Conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779): SAC or, for discrete actions, DQN.

The critics are also pushed down for actions that are not recorded.

The networks are those of SAC and DQN, so `tfrl.sac` and `tfrl.dqn` go on with them by --start-from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from tfrl.algorithms import dqn, sac
from tfrl.algorithms.offline import OfflineAgent, OfflineSettings, OfflineTask, OfflineValues
from tfrl.algorithms.replay import Rows
from tfrl.algorithms.sac import SAC, SACAgent
from tfrl.cli.flags import COUNT, NOT_NEGATIVE
from tfrl.config.run import Hardware, RunSettings, Torso
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Box, Discrete
from tfrl.ops import q_learning
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import TARGET, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime


@dataclass(frozen=True)
class CQL(SAC):
    """The hyperparameters of CQL."""

    conservative_weight: Annotated[float, NOT_NEGATIVE] = 5.0
    """Weight of the conservative loss, which is low if the recorded actions have the largest values."""
    action_samples: Annotated[int, COUNT] = 10
    """Actions of each kind that estimate the conservative loss for continuous actions: uniform ones, and
    those of the policy for the observation and for the next one."""
    soft_target: bool = False
    """The critics' targets have SAC's entropy term."""
    backup_entropy: bool | None = None
    """Not for CQL: --soft-target decides."""


@dataclass(frozen=True)
class Config(CQL, OfflineValues, OfflineSettings):
    """All settings of a CQL run. One field a flag."""

    algorithm: str = "cql"
    sections: ClassVar[tuple[type, ...]] = (OfflineTask, OfflineValues, CQL, Torso, Hardware, RunSettings)
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Box, Discrete)
    dueling: ClassVar[bool] = False
    exploration_end: ClassVar[float] = 0.05  # the share of random actions of sampled actions, as in DQN
    critics_see_actions: ClassVar[bool] = True

    @property
    def is_discrete(self) -> bool:
        """True for the form of DQN."""
        try:
            return isinstance(registry.specs(self)[1], Discrete)
        except ValueError:  # `check` reports it
            return False

    def default_preset(self) -> str:
        """The default preset of the command, by the actions."""
        return "discrete" if self.is_discrete else "default"

    @property
    def network_maker(self) -> Any:
        """The method of SAC or DQN that makes the network."""
        return (dqn if self.is_discrete else sac).Config.make_network

    def make_network(self, precision: str) -> Any:
        """Makes SAC's actor and critics, or DQN's network."""
        return self.network_maker(self, precision)

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason."""
        found = super().ineffective | {"noise_correlation": "on recorded data"}
        if self.is_discrete:
            of_sac = ("alpha", "alpha_lr", "alpha_start", "entropy_target", "action_samples", "soft_target")
            names = (*of_sac, "critic_lr", "critic_torso", "critics")
            found |= dict.fromkeys(names, "where actions are discrete")
        elif self.alpha is not None:
            found |= dict.fromkeys(("entropy_target", "alpha_lr", "alpha_start"), "with a fixed --alpha")
        return found | {"backup_entropy": "here: --soft-target decides"}


class CQLAgent(OfflineAgent):
    """Train CQL, in the form of SAC or of DQN, from recorded episodes."""

    settings = Config
    _config: Config

    def __new__(cls, config: Config, runtime: Runtime) -> CQLAgent:
        """The agent for the env's actions."""
        kind = (_DiscreteCQL if config.is_discrete else _ContinuousCQL) if cls is CQLAgent else cls
        return object.__new__(kind)


class _DiscreteCQL(CQLAgent):
    """Double DQN with the conservative loss."""

    target_networks = ("q",)

    def make_steps(self) -> dict[str, GradientStep]:
        """One gradient step, of the Q-network."""
        metrics = ("q_loss", "q_mean", "conservative_loss")
        return {"q": self.make_step(("q",), self._loss, metrics, rates=(self._config.lr,))}

    def _loss(self, weights: Weights, rows: Rows) -> Losses:
        """DQN's loss, and log sum_a exp Q(o, a) - Q(o, a_recorded) (equation 4)."""
        q_of, mask = self.network.functions["q"], self.network.entrance.mask
        following = rows["next_observation"]
        next_q = mask(following, q_of(weights[TARGET + "q"], following))
        online = mask(following, q_of(weights["q"], following))
        target = q_learning.double_q_learning_target(rows["reward"], rows["discount"], next_q, online)
        qs = q_of(weights["q"], rows["observation"])
        taken = q_learning.taken_q(qs, rows["action"])
        gap = tf.reduce_logsumexp(mask(rows["observation"], qs), axis=1) - taken
        found = self.td_losses([taken], target, rows)
        metrics = {**found.metrics, "conservative_loss": gap}
        return Losses(found.losses + self._config.conservative_weight * gap, metrics, found.errors)


class _ContinuousCQL(CQLAgent, SACAgent):
    """SAC with the conservative loss."""

    settings = Config
    _config: Config  # type: ignore[assignment]  # SAC's settings by the same names

    @property
    def update_noise(self) -> int:
        """Numbers for the actions of SAC's two losses, and for those of the conservative loss."""
        return (2 + 3 * self._config.action_samples) * self.network.noise_size

    def make_steps(self) -> dict[str, GradientStep]:
        """SAC's gradient steps, the first one with another loss."""
        steps = super().make_steps()
        critics, config = self.network.critics, self._config
        metrics = ("q_loss", "q_mean", "conservative_loss")
        rates = (config.critic_lr or config.lr,) * len(critics)
        return {**steps, "critics": self.make_step(critics, self._conservative_loss, metrics, rates=rates)}

    def _actor_loss(self, weights: Weights, rows: Rows) -> Losses:
        size = self.network.noise_size
        return super()._actor_loss(weights, {**rows, "noise": rows["noise"][:, : 2 * size]})

    def _conservative_loss(self, weights: Weights, rows: Rows) -> Losses:
        """The critics' loss, and log sum_a exp Q(o, a) - Q(o, a_recorded) by importance sampling.

        Each critic has one pass over all actions of an observation, the recorded one first.
        """
        config, network, size = self._config, self.network, self.network.noise_size
        count, observations, following = config.action_samples, rows["observation"], rows["next_observation"]
        noise = tf.reshape(rows["noise"][:, 2 * size :], (-1, 3, count, size))
        uniform = tf.math.erf(noise[:, 0] / math.sqrt(2.0))  # of normal numbers
        actions = [rows["action"][:, None], uniform]  # [b, k, D] each
        log_densities = [tf.fill(tf.shape(uniform)[:2], -size * math.log(2.0))]  # [b, count] each
        of_next = network.outputs(weights, following)[0]  # the policy's parameters
        for place, parameters in ((1, network.outputs(weights, observations)[0]), (2, of_next)):
            policy: Any = network.distribution(tf.repeat(parameters, count, axis=0))
            sampled, log_prob = policy.sample_with_log_prob(tf.reshape(noise[:, place], (-1, size)))
            actions.append(tf.reshape(sampled, (-1, count, size)))
            log_densities.append(tf.reshape(log_prob, (-1, count)))
        joined = tf.stop_gradient(tf.concat(actions, axis=1))  # [b, 1 + 3 count, D]
        of_each = 1 + 3 * count
        qs = network.qs(weights, "", tf.repeat(observations, of_each, axis=0), tf.reshape(joined, (-1, size)))
        qs = tf.reshape(qs, (len(network.critics), -1, of_each))
        recorded, others = qs[:, :, 0], qs[:, :, 1:]

        next_policy: Any = network.distribution(of_next)
        next_actions, log_prob = next_policy.sample_with_log_prob(rows["noise"][:, :size])
        next_qs = network.qs(weights, TARGET, following, next_actions)
        alpha = tf.exp(weights["log_alpha"]) if config.soft_target else tf.constant(0.0)
        next_value = q_learning.soft_value(self._combined(next_qs), log_prob, alpha)
        target = q_learning.td_target(rows["reward"], rows["discount"], next_value)
        found = self.td_losses(tf.unstack(recorded), target, rows)

        weighted = others - tf.stop_gradient(tf.concat(log_densities, axis=1))
        gap = tf.reduce_logsumexp(weighted, axis=2) - math.log(3 * count) - recorded
        gap = tf.reduce_sum(gap, axis=0)
        metrics = {**found.metrics, "conservative_loss": gap / len(network.critics)}
        return Losses(found.losses + config.conservative_weight * gap, metrics, found.errors)
