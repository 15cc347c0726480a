"""TD3 (Fujimoto et al. 2018, arXiv:1802.09477): DDPG with twin critics, smoothed targets, a delayed actor."""

from __future__ import annotations

import tensorflow as tf

from tfrl.agents.ddpg import DDPGAgent
from tfrl.agents.replay_agent import TARGET, Phase, Rows, Weights
from tfrl.ops import q_learning


class TD3Agent(DDPGAgent):
    """An actor and two critics, and their slow copies."""

    def make_phases(self) -> tuple[Phase, ...]:
        """DDPG's, and noise for the smoothed targets."""
        self.update_noise = self.network.noise_size
        return super().make_phases()

    def next_values(self, weights: Weights, rows: Rows) -> tf.Tensor:
        """The least of the slow critics' values of the slow actor's actions, with noise; float32 [b]."""
        config, observations = self._config, rows["next_observation"]
        actions = q_learning.smoothed_action(
            self.actions(weights, TARGET, observations),
            rows["noise"],
            scale=config.target_noise,
            clip=config.target_noise_clip,
        )
        return tf.reduce_min(self.qs(weights, TARGET, observations, actions), axis=0)
