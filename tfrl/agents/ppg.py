"""Phasic policy gradient (Cobbe et al. 2021, arXiv:2009.04416): PPO, and between its phases an auxiliary one.

A policy phase is N updates of PPO. The auxiliary phase then passes over all of their rollouts with

    L = 1/2 (V_aux - R)^2 + beta_clone KL(pi_old, pi) + 1/2 (V - R)^2

so that the actor's torso learns what values need, the policy stays as it was, and the critic gets more
training. R are the value targets of the policy phase. Which rollouts and in what order is the business of
`tfrl.training.phasic`; here are its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl.agents.ppo import PPOAgent
from tfrl.cli import words
from tfrl.config.ppg import Config
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses
from tfrl.ops.graph import graph
from tfrl.workers.gradients import sum_parts, sum_replicas
from tfrl.workers.strategy import Runtime

AUXILIARY = ("train/aux_value_loss", "train/aux_policy_kl", "train/aux_critic_loss", "train/aux_grad_norm")
"""The metrics of an auxiliary step."""
_OPTIMIZER = "auxiliary_optimizer"


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
        self._policy = self.network.policy_pass(on_gpu=runtime.uses_gpu, at_once=runtime.parts_at_once)
        with runtime.strategy.scope():
            self._all_variables = self.network.auxiliary_phase_variables
            self._auxiliary_optimizer = self._make_optimizer(self._all_variables, config.aux_lr)
        self._all_specs = [tf.TensorSpec(v.shape) for v in self._all_variables]
        self.targets: np.ndarray | None = None

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(int(np.prod(v.shape)) for v in self._all_variables)

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

    @graph(reduce_retracing=True)
    def _logits(self, observations: Any) -> Any:
        return self._runtime.strategy.run(self._policy, args=(observations,))

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
        self._arrays.forget()
        batch = (self._runtime.per_replica(x) for x in (observations, targets, old_logits))
        return self._runtime.first(self._auxiliary_steps(*batch)).numpy()

    @graph(reduce_retracing=True)
    def _auxiliary_steps(self, *batch: Any) -> Any:
        return self._runtime.strategy.run(self._auxiliary_step_on_replica, args=batch)

    def _auxiliary_step_on_replica(self, *batch: tf.Tensor) -> tf.Tensor:
        (grads, sums), _ = sum_parts(
            self._auxiliary_gradients,
            batch,
            part_rows=self._runtime.micro_batch(self._config.auxiliary_step(self._runtime.replicas)),
            signature=((self._all_specs, tf.TensorSpec([3])), tf.TensorSpec([])),
            at_once=self._runtime.parts_at_once,
        )
        *grads, sums = sum_replicas([*grads, sums])
        norm = self._auxiliary_optimizer.apply(grads, self._config.max_grad_norm)
        return tf.concat([sums, [norm]], axis=0)

    def _auxiliary_gradients(
        self, batch: tuple[tf.Tensor, ...]
    ) -> tuple[tuple[list[tf.Tensor], tf.Tensor], tf.Tensor]:
        """Gradients and sums of metrics of some rows; nothing is kept apart."""
        observations, targets, old_logits = batch
        rows, beta = self._config.auxiliary_rows, self._config.beta_clone
        with tf.GradientTape() as tape:
            logits, values, auxiliary = self.network.with_auxiliary(observations, training=True)
            joint = losses.joint_auxiliary(auxiliary, targets, old_logits, logits, beta)
            of_critic = losses.value_error(values, targets)
            # Divided by the global minibatch, because gradients are summed over replicas.
            loss = tf.reduce_sum(joint + of_critic) / rows
        grads = tape.gradient(loss, [v.value for v in self._all_variables])
        samples = [
            losses.value_error(auxiliary, targets),
            losses.categorical_kl(old_logits, logits),
            of_critic,
        ]
        sums = tf.reduce_sum(tf.stack(samples), axis=1) / rows
        return (grads, sums), tf.constant(0.0)

    # State

    def get_state(self) -> dict[str, np.ndarray]:
        """PPO's, and the auxiliary phase's optimizer."""
        return super().get_state() | self._auxiliary_optimizer.get_state(_OPTIMIZER)

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`. Raises ValueError or KeyError as PPO's does."""
        super().set_state(state)
        self._auxiliary_optimizer.set_state(state, _OPTIMIZER)
