"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905).

With discrete actions it follows Christodoulou 2019 (arXiv:1910.07207), whose default temperature diverges. So
the defaults differ there: docs/algorithms.md says how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from tfrl.algorithms.replay import ReplayAgent, ReplayLearning, ReplaySettings, Rows
from tfrl.cli.errors import UserError
from tfrl.cli.flags import POSITIVE, Range
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import RLSettings, Task, Torso
from tfrl.envs import registry
from tfrl.envs.observations import FORBIDDEN
from tfrl.envs.spec import ActionSpec, Box, Discrete
from tfrl.networks.weights import AGENT_PREFIX
from tfrl.ops import q_learning
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import TARGET, GradientStep, Losses, Weights

if TYPE_CHECKING:
    from tfrl.networks.actors import ActorAndCritics


@dataclass(frozen=True)
class SAC:
    """The hyperparameters of SAC."""

    alpha: Annotated[float | None, POSITIVE] = None
    """The temperature: the weight of the entropy. None: it is learned, so that the entropy is
    --entropy-target."""
    alpha_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate of the learned temperature; None: --lr."""
    alpha_start: Annotated[float | None, POSITIVE] = None
    """The learned temperature at the start. None: 1 with continuous actions, 0.1 with discrete ones."""
    entropy_target: Annotated[float | None, Range(-1e6, 1e6)] = None
    """The policy's entropy (nats) that --alpha aims at. None: -1 for each number of a continuous action, 0.5
    log A for A allowed discrete actions."""
    backup_entropy: bool | None = None
    """The critics' targets count the entropy of later actions, as in the papers. None: only with continuous
    actions. With discrete ones it may be that no temperature reaches --entropy-target."""
    critics: Literal["auto", "min", "mean"] = "auto"
    """The value that targets and actor take: the smaller one of the two critics, as in the papers, or their
    mean. auto: min with continuous actions, mean with discrete ones."""
    noise_correlation: Annotated[float, Range(0, 0.9999)] = 0.0
    """Correlation of the exploration noise between neighbouring steps of an episode. Near 1, the agent
    explores further. 0: independent noise, as in the paper."""


@dataclass(frozen=True)
class Config(SAC, ReplaySettings):
    """All settings of a SAC run. One field a flag."""

    algorithm: str = "sac"
    sections: ClassVar[tuple[type, ...]] = (Task, ReplayLearning, SAC, Torso, *DISTRIBUTED_SECTIONS)
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Box, Discrete)
    critics_see_actions: ClassVar[bool] = True

    @property
    def ineffective(self) -> dict[str, str]:
        """The settings that have no effect in this combination, each with the reason."""
        of_learning = () if self.alpha is None else ("entropy_target", "alpha_lr", "alpha_start")
        return super().ineffective | dict.fromkeys(of_learning, "with a fixed --alpha")

    def make_network(self, precision: str) -> Any:
        """Makes an actor and two critics."""
        from tfrl.networks import actors

        return actors.ActorAndCritics(self, precision, critics=2)

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.noise_correlation and isinstance(registry.specs(self)[1], Discrete):
            raise UserError(
                f"--noise-correlation is for continuous actions, and {self.env} has discrete actions; "
                "leave it out."
            )


_LOG_ALPHA = "log_alpha"
# Of discrete actions; docs/notebook/discrete-sac.md has the runs with these and with other values.
_SHARE = 0.5  # the entropy target, as a share of the entropy of uniform actions
_ALPHA_START = 0.1
_GROWTH = 100.0  # of a temperature of which the run warns


class SACAgent(ReplayAgent):
    """Train SAC, an actor, two critics and a temperature, on an env with continuous or discrete actions."""

    settings: ClassVar[type[RLSettings]] = Config
    env = "Pendulum-v1"
    _config: Config
    network: ActorAndCritics
    _lowest_alpha: float | None = None  # since the entropy was last at its target

    @property
    def _discrete(self) -> bool:
        return isinstance(self.network.distribution.action_spec, Discrete)

    @property
    def target_networks(self) -> tuple[str, ...]:
        """The critics."""
        return self.network.critics

    @property
    def update_noise(self) -> int:
        """Numbers for the action of the actor's loss and for that of the critics' loss."""
        return 0 if self._discrete else 2 * self.network.noise_size

    def make_steps(self) -> dict[str, GradientStep]:
        """The gradient steps of the critics, and of the actor with the temperature."""
        config = self._config
        critics = self.network.critics
        learned, rates = ["actor"], [config.lr]
        if config.alpha is None:
            learned, rates = [*learned, _LOG_ALPHA], [*rates, config.alpha_lr or config.lr]
        critic_rates = (config.critic_lr or config.lr,) * len(critics)
        actor_loss = self._discrete_actor_loss if self._discrete else self._actor_loss
        metrics = ("actor_loss", "entropy", "entropy_target", "alpha")
        return {
            "critics": self.make_step(critics, self._critic_loss, ("q_loss", "q_mean"), rates=critic_rates),
            "actor": self.make_step(learned, actor_loss, metrics, rates=rates),
        }

    def initial(self) -> dict[str, np.ndarray]:
        """The networks' vectors, and the logarithm of the temperature."""
        config = self._config
        alpha = config.alpha or config.alpha_start or (_ALPHA_START if self._discrete else 1.0)
        return super().initial() | {_LOG_ALPHA: np.array(math.log(alpha), np.float32)}

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the state of another run, but not its temperature if this run has a fixed one."""
        fixed = self._config.alpha is not None
        left_out = AGENT_PREFIX + _LOG_ALPHA
        super().begin_with({n: a for n, a in state.items() if not (fixed and n == left_out)})

    def concern(self, metrics: Mapping[str, float]) -> str | None:
        """A sentence if the temperature has grown a hundredfold and the entropy stays below its target."""
        names = ("alpha", "entropy", "entropy_target")
        if self._config.alpha is not None or "train/alpha" not in metrics:
            return None
        alpha, entropy, target = (metrics[f"train/{name}"] for name in names)
        if entropy >= target:
            self._lowest_alpha = None
            return None
        lowest = self._lowest_alpha = min(alpha, self._lowest_alpha or alpha)
        if alpha < _GROWTH * lowest:
            return None
        self._lowest_alpha = alpha  # the next sentence comes after another hundredfold
        return (
            f"the temperature train/alpha has grown from {lowest:.3g} to {alpha:.3g}, and the policy's "
            f"entropy, {entropy:.3g}, is still below its target, {target:.3g}. If the temperature goes on "
            "growing, this target cannot be reached: give a lower --entropy-target, or a fixed --alpha."
        )

    def _policy(self, weights: Weights, observations: tf.Tensor) -> tf.Tensor:
        return self.network.distribution(self.network.outputs(weights, observations)[0])

    def _critic_loss(self, weights: Weights, rows: Rows) -> Losses:
        """The critics' loss of n rows, float32 [n] (Haarnoja et al. 2018, arXiv:1812.05905, equation 5).

        `rows` has the transitions of a batch by name (`observation`, `action`, `reward`, `discount`,
        `next_observation`) and `noise`. Metrics: those of `td_losses`.
        """
        alpha, policy = tf.exp(weights[_LOG_ALPHA]), self._policy(weights, rows["next_observation"])
        if self._discrete:
            qs = self.network.qs(weights, TARGET, rows["next_observation"])
            counted = alpha if self._config.backup_entropy else 0.0
            value = q_learning.discrete_soft_value(self._combined(qs), policy.log_probs, counted)
            qs = self.network.qs(weights, "", rows["observation"])
            taken = tf.unstack(tf.map_fn(lambda q: q_learning.taken_q(q, rows["action"]), qs))
        else:
            actions, log_prob = policy.sample_with_log_prob(rows["noise"][:, : self.network.noise_size])
            qs = self.network.qs(weights, TARGET, rows["next_observation"], actions)
            counted = 0.0 if self._config.backup_entropy is False else alpha
            value = q_learning.soft_value(self._combined(qs), log_prob, counted)
            taken = tf.unstack(self.network.qs(weights, "", rows["observation"], rows["action"]))
        target = q_learning.td_target(rows["reward"], rows["discount"], value)
        return self.td_losses(taken, target, rows)

    def _actor_loss(self, weights: Weights, rows: Rows) -> Losses:
        """The loss of actor and temperature for continuous actions, float32 [n] (equations 9 and 18)."""
        policy = self._policy(weights, rows["observation"])
        actions, log_prob = policy.sample_with_log_prob(rows["noise"][:, self.network.noise_size :])
        qs = self.network.qs(weights, "", rows["observation"], actions)
        loss = q_learning.soft_actor_loss(self._combined(qs), log_prob, tf.exp(weights[_LOG_ALPHA]))
        target = self._config.entropy_target
        if target is None:
            target = -float(self.network.distribution.action_spec.encoded_size)
        return self._with_temperature(weights, loss, -log_prob, target)

    def _discrete_actor_loss(self, weights: Weights, rows: Rows) -> Losses:
        """The same for discrete actions (Christodoulou 2019, arXiv:1910.07207)."""
        log_probs = self._policy(weights, rows["observation"]).log_probs
        qs = self.network.qs(weights, "", rows["observation"])
        loss = q_learning.discrete_soft_actor_loss(self._combined(qs), log_probs, tf.exp(weights[_LOG_ALPHA]))
        target = self._config.entropy_target
        if target is None and not self.network.entrance.spec.num_actions:
            target = _SHARE * math.log(self.network.distribution.action_spec.encoded_size)
        elif target is None:  # there is an action mask
            allowed = tf.reduce_sum(tf.cast(log_probs > FORBIDDEN / 2, tf.float32), axis=1)
            target = _SHARE * tf.math.log(allowed)
        return self._with_temperature(weights, loss, q_learning.categorical_entropy(log_probs), target)

    def _combined(self, qs: tf.Tensor) -> tf.Tensor:
        """The values [N, ...] of which targets and actor then take the smallest.

        Those of all critics, or one row with their mean, as --critics says.
        """
        takes_mean = self._discrete if self._config.critics == "auto" else self._config.critics == "mean"
        return tf.reduce_mean(qs, axis=0, keepdims=True) if takes_mean else qs

    def _with_temperature(
        self, weights: Weights, loss: tf.Tensor, entropy: tf.Tensor, target: float | tf.Tensor
    ) -> Losses:
        """The losses of the actor and the temperature.

        Neither has a gradient in the other's weights, because `q_learning` stops it.
        """
        log_alpha = weights[_LOG_ALPHA]
        both = loss + q_learning.temperature_loss(log_alpha, entropy, target)
        alpha, aim = (tf.broadcast_to(x, tf.shape(loss)) for x in (tf.exp(log_alpha), target))
        return Losses(both, {"actor_loss": loss, "entropy": entropy, "entropy_target": aim, "alpha": alpha})
