"""Phasic policy gradient (Cobbe et al. 2021, arXiv:2009.04416): PPO, and between its phases an auxiliary one.

A policy phase is N updates of PPO. The auxiliary phase then passes over all of their rollouts with

    L = 1/2 (V_aux - R)^2 + beta_clone KL(pi_old, pi) + 1/2 (V - R)^2

so that the actor's torso learns what values need, the policy stays as it was, and the critic gets more
training. R are the value targets of the policy phase. Which rollouts and in what order is the business of
`tfrl.training.phasic`; here are its steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfrl.agents.ppo import PPOAgent
from tfrl.cli import words
from tfrl.config.ppg import Config
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, optimizers
from tfrl.ops.graph import compiled
from tfrl.ops.lazy import tf
from tfrl.workers.data_parallel import GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

AUXILIARY = ("train/aux_value_loss", "train/aux_policy_kl", "train/aux_critic_loss", "train/aux_grad_norm")
"""The metrics of an auxiliary step."""


class PPGAgent(PPOAgent):
    """PPO's updates, and the steps of the auxiliary phase.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.

    Attributes:
      targets: the value targets of the last update's rollout, float32 [R, T, B].
    """

    metric_names = (*PPOAgent.metric_names, *AUXILIARY)
    charts = PPOAgent.charts | {
        "auxiliary phase": {
            "auxiliary and true value (half the squared error)": (AUXILIARY[0], AUXILIARY[2]),
            "how far the policy moves (KL, nats)": (AUXILIARY[1],),
        }
    }

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self._policy_pass = self.network.policy_pass(on_gpu=runtime.uses_gpu, at_once=runtime.parts_at_once)
        self.targets: np.ndarray | None = None

    def make_steps(self) -> dict[str, GradientStep]:
        """PPO's, and one of the auxiliary phase, which has an optimizer of its own."""
        config, learned = self._config, (*self.network.learned, "auxiliary")
        auxiliary = GradientStep(
            learned=learned,
            rates=(config.aux_lr,) * len(learned),
            loss=self._auxiliary_loss,
            metrics=AUXILIARY[:3],
            optimizer=optimizers.of_settings(config, uncorrected_epsilon=True),
            batch_rows=config.auxiliary_rows,
            part_rows=self._runtime.micro_batch(config.auxiliary_step(self._runtime.replicas)),
            max_norm=config.max_grad_norm,
            prefix="auxiliary_phase/",
        )
        return super().make_steps() | {"auxiliary": auxiliary}

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of a phase, by title."""
        config, each = self._config, self._config.policy_updates
        phases = f"{config.num_updates // each} in all, one every {each} updates"
        passes = f"{config.aux_epochs} epochs of minibatches of {config.auxiliary_rows:,}"
        disk = f"up to {words.size(config.disk_bytes)} of rollouts in {config.run_dir / 'phase'}"
        return super().summary | {"auxiliary phase": f"{phases}: {passes}", "disk": disk}

    def _estimates(self, rollout: Rollout, values: np.ndarray, rows: Any) -> tuple[Any, ...]:
        estimated = super()._estimates(rollout, values, rows)
        flat = np.stack([x.numpy() for x in self._runtime.local_results(estimated[1])])
        self.targets = flat.reshape(rollout.rewards.shape)
        return estimated

    # The auxiliary phase

    def logits(self, observations: np.ndarray) -> np.ndarray:
        """The policy's logits by the weights of now, float32 [R, b, A], of observations [R, b, *shape]."""
        results = self._logits(self._runtime.per_replica(observations))
        return np.stack([x.numpy() for x in self._runtime.local_results(results)])

    @compiled(reduce_retracing=True)
    def _logits(self, observations: Any) -> Any:
        def on_replica(own: tf.Tensor) -> tf.Tensor:
            return self._policy_pass(self.learning.weights(self.network.acting), own)

        return self._runtime.strategy.run(on_replica, args=(observations,))

    def auxiliary_step(
        self, observations: np.ndarray, targets: np.ndarray, old_logits: np.ndarray
    ) -> np.ndarray:
        """One gradient step of the auxiliary phase, a collective.

        Args:
          observations: [R, b, *shape], in the order of the global envs.
          targets: float32 [R, b], R.
          old_logits: float32 [R, b, A], of the policy when the phase began.

        Returns:
          The metrics of `AUXILIARY`, float32 [4], the same on every worker; they may be no numbers.
        """
        self.acting.forget()
        batch = (self._runtime.per_replica(x) for x in (observations, targets, old_logits))
        return self._runtime.first(self._auxiliary_steps(*batch)).numpy()

    @compiled(reduce_retracing=True)
    def _auxiliary_steps(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._auxiliary_step_on_replica, args=batch)

    def _auxiliary_step_on_replica(self, *batch: tf.Tensor) -> tf.Tensor:
        outcome = self.learning.gradient_step("auxiliary", batch, (), tf.constant(1.0))
        return tf.concat([outcome.means, [outcome.norm]], axis=0)

    def _auxiliary_loss(self, weights: Weights, rows: tuple[tf.Tensor, ...], _shared: Any) -> Losses:
        """L of the module's docstring, of some rows."""
        observations, targets, old_logits = rows
        logits, values, auxiliary = self.network.with_auxiliary(weights, observations)
        joint = losses.joint_auxiliary(auxiliary, targets, old_logits, logits, self._config.beta_clone)
        of_critic = losses.value_error(values, targets)
        metrics = (
            losses.value_error(auxiliary, targets),
            losses.categorical_kl(old_logits, logits),
            of_critic,
        )
        return Losses(joint + of_critic, dict(zip(AUXILIARY[:3], metrics, strict=True)))
