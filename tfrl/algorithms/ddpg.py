"""DDPG (Lillicrap et al. 2016, arXiv:1509.02971): a deterministic actor and a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tfrl.algorithms.replay import ReplayAgent, ReplayLearning, ReplaySettings, Rows
from tfrl.cli.flags import COUNT, NOT_NEGATIVE, Range
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import RLSettings, Task, Torso
from tfrl.ops import q_learning
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import TARGET, GradientStep, Losses, Weights

if TYPE_CHECKING:
    from tfrl.networks.actors import ActorAndCritics


@dataclass(frozen=True)
class DDPG:
    """The hyperparameters of DDPG."""

    exploration_noise: Annotated[float, NOT_NEGATIVE] = 0.1
    """Standard deviation of the noise that is added to actions; actions are between -1 and 1."""
    policy_delay: Annotated[int, COUNT] = 1
    """Gradient steps of the critics for each step of the actor and of the target networks (see
    --target-every)."""
    noise_correlation: Annotated[float, Range(0, 0.9999)] = 0.0
    """Correlation of the exploration noise between neighbouring steps of an episode. 0.85 with
    --exploration-noise 0.38 is the paper's Ornstein-Uhlenbeck process; 0 is independent noise."""


@dataclass(frozen=True)
class Config(DDPG, ReplaySettings):
    """All settings of a DDPG run. One field a flag."""

    algorithm: str = "ddpg"
    sections: ClassVar[tuple[type, ...]] = (Task, ReplayLearning, DDPG, Torso, *DISTRIBUTED_SECTIONS)
    critics_see_actions: ClassVar[bool] = True

    def make_network(self, precision: str) -> Any:
        """Makes an actor and a critic."""
        from tfrl.networks import actors

        return actors.DeterministicActor(self, precision, critics=1, noise_scale=self.exploration_noise)


class DDPGAgent(ReplayAgent):
    """Train DDPG, an actor and its critic, on an env with continuous actions."""

    settings: ClassVar[type[RLSettings]] = Config
    env = "Pendulum-v1"
    _config: Config
    network: ActorAndCritics

    @property
    def target_networks(self) -> tuple[str, ...]:
        """The actor and the critics."""
        return "actor", *self.network.critics

    @property
    def target_every(self) -> int:
        """Gradient steps between two moves of the target networks: as many as between two of the actor."""
        return self._config.target_every or self._config.policy_delay

    def make_steps(self) -> dict[str, GradientStep]:
        """The gradient steps of the critics and of the actor."""
        config, critics = self._config, self.network.critics
        critic_rates = (config.critic_lr or config.lr,) * len(critics)
        return {
            "critics": self.make_step(critics, self._critic_loss, ("q_loss", "q_mean"), rates=critic_rates),
            "actor": self.make_step(
                ("actor",), self._actor_loss, ("actor_loss",), rates=(config.lr,), every=config.policy_delay
            ),
        }

    def actions(self, weights: Weights, prefix: str, observations: tf.Tensor) -> tf.Tensor:
        """The actor's actions, float32 [b, D]. With the prefix `TARGET`, the target network's."""
        return self.network.greedy([self.network.functions["actor"](weights[prefix + "actor"], observations)])

    def next_values(self, weights: Weights, rows: Rows) -> tf.Tensor:
        """The values of the next observations by the target networks of actor and critic, float32 [b]."""
        observations = rows["next_observation"]
        return self.network.qs(weights, TARGET, observations, self.actions(weights, TARGET, observations))[0]

    def _critic_loss(self, weights: Weights, rows: Rows) -> Losses:
        target = q_learning.td_target(rows["reward"], rows["discount"], self.next_values(weights, rows))
        taken = tf.unstack(self.network.qs(weights, "", rows["observation"], rows["action"]))
        return self.td_losses(taken, target, rows)

    def _actor_loss(self, weights: Weights, rows: Rows) -> Losses:
        """-Q(o, mu(o)) of the first critic. Its gradient is the deterministic policy gradient (eq. 6)."""
        observations = rows["observation"]
        q = self.network.qs(weights, "", observations, self.actions(weights, "", observations))[0]
        return Losses(-q, {"actor_loss": -q})
