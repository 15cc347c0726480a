"""TD3 (Fujimoto et al. 2018, arXiv:1802.09477): DDPG with twin critics, smoothed targets, a delayed actor."""

from __future__ import annotations

from tfrl.agents.ddpg import DDPGAgent
from tfrl.agents.replay_agent import Rows
from tfrl.ops import q_learning
from tfrl.ops.lazy import tf
from tfrl.workers.data_parallel import TARGET, GradientStep, Weights


class TD3Agent(DDPGAgent):
    """An actor and two critics, and their target networks."""

    def make_steps(self) -> dict[str, GradientStep]:
        """DDPG's, and noise for the smoothed targets."""
        self.update_noise = self.network.noise_size
        return super().make_steps()

    def next_values(self, weights: Weights, rows: Rows) -> tf.Tensor:
        """The least of the target critics' values of the target actor's noisy actions; float32 [b]."""
        config, observations = self._config, rows["next_observation"]
        actions = q_learning.smoothed_action(
            self.actions(weights, TARGET, observations),
            rows["noise"],
            scale=config.target_noise,
            clip=config.target_noise_clip,
        )
        return tf.reduce_min(self.qs(weights, TARGET, observations, actions), axis=0)
