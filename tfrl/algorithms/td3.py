"""TD3 (Fujimoto et al. 2018, arXiv:1802.09477): DDPG with twin critics, smoothed targets, a delayed actor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from tfrl.algorithms.ddpg import DDPG, DDPGAgent
from tfrl.algorithms.replay import ReplayLearning, ReplaySettings, Rows
from tfrl.cli.flags import COUNT, NOT_NEGATIVE
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import RLSettings, Task, Torso
from tfrl.ops import q_learning
from tfrl.ops.graph import tf
from tfrl.workers.data_parallel import TARGET, Weights


@dataclass(frozen=True)
class TD3(DDPG):
    """The hyperparameters of TD3."""

    policy_delay: Annotated[int, COUNT] = 2
    """Gradient steps of the critics for each step of the actor and of the target networks (see
    --target-every)."""
    target_noise: Annotated[float, NOT_NEGATIVE] = 0.2
    """Standard deviation of the noise that is added to the target actor's actions."""
    target_noise_clip: Annotated[float, NOT_NEGATIVE] = 0.5
    """Clip the noise of --target-noise to this size."""


@dataclass(frozen=True)
class Config(TD3, ReplaySettings):
    """All settings of a TD3 run. One field a flag."""

    algorithm: str = "td3"
    sections: ClassVar[tuple[type, ...]] = (Task, ReplayLearning, TD3, Torso, *DISTRIBUTED_SECTIONS)
    critics_see_actions: ClassVar[bool] = True

    def make_network(self, precision: str) -> Any:
        """Makes an actor and two critics."""
        from tfrl.networks import actors

        return actors.DeterministicActor(self, precision, critics=2, noise_scale=self.exploration_noise)


class TD3Agent(DDPGAgent):
    """Train TD3, an actor and two critics, on an env with continuous actions."""

    settings: ClassVar[type[RLSettings]] = Config
    _config: Config  # type: ignore[assignment]  # DDPG's settings by the same names

    @property
    def update_noise(self) -> int:
        """Numbers for the noise of the target actor's action."""
        return self.network.noise_size

    def next_values(self, weights: Weights, rows: Rows) -> tf.Tensor:
        """The smaller value of the two target critics for the target actor's noisy actions, float32 [b]."""
        config, observations = self._config, rows["next_observation"]
        actions = q_learning.smoothed_action(
            self.actions(weights, TARGET, observations),
            rows["noise"],
            scale=config.target_noise,
            clip=config.target_noise_clip,
        )
        return tf.reduce_min(self.network.qs(weights, TARGET, observations, actions), axis=0)
