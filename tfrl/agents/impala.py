"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): actors run ahead of the learner, V-trace puts that right.

A rollout is acted by weights that are some updates older than those that learn from it. A gradient step takes
the whole rollouts of some envs: V-trace by the present weights, in the same pass as the gradient. Were it a
stretch of time of all envs, V-trace would look no further than its end, where often only the value knows what
an action was good for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfrl.agents.actor_critic_agent import ActorCriticAgent
from tfrl.cli.errors import TrainingError
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, returns
from tfrl.ops.graph import graph
from tfrl.ops.schedules import learning_rate
from tfrl.workers.gradients import sum_parts, sum_replicas

# What a gradient step reports: means over its samples. The moments are of targets and of the values' errors.
_MEANS = ("policy_loss", "value_loss", "entropy", "approx_kl", "vtrace_rho")
_MOMENTS = 4


class ImpalaAgent(ActorCriticAgent):
    """An actor-critic that learns by V-trace.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.
    """

    metric_names = tuple(
        f"train/{name}" for name in (*_MEANS, "explained_variance", "grad_norm", "learning_rate")
    )
    charts = {
        "losses": {
            "policy, and value (half the squared error)": ("train/policy_loss", "train/value_loss"),
            "entropy": ("train/entropy",),
            "how far the actors are behind": ("train/approx_kl", "train/vtrace_rho"),
        }
    }

    @property
    def floats_per_sum(self) -> int:
        """The number of float32 values that one gradient step sums: gradients and metrics."""
        return self.num_parameters + len(_MEANS) + _MOMENTS

    @property
    def steps_per_update(self) -> int:
        """One for each minibatch of envs."""
        return self._config.num_minibatches

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update, by title."""
        config = self._config
        envs = f"{config.num_envs} x {config.num_steps} steps an update, {config.num_minibatches} gradient "
        return {"envs": envs + f"steps of {config.rows_per_step:,}"}

    # Learning

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """The gradient steps of one rollout, each from other envs.

        Args:
          rollout: what the envs did, with normalised rewards, and `log_prob` of the policy that acted.
          number: the updates before this one, which decide its learning rate.
          on_step: called with the number of gradient steps done.

        Returns:
          The `train/` metrics, the same on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite. All replicas see it at the same step.
        """
        config = self._config
        rate = learning_rate(config.lr_schedule, config.lr, number, config.num_updates)
        self._optimizer.learning_rate.assign(rate)
        self._arrays.forget()
        log_probs, final_values = rollout.extras["log_prob"], self._final_values(rollout)
        fields = (rollout.observations, rollout.actions, log_probs, rollout.rewards, rollout.first)
        batch = tuple(self._runtime.per_replica(f) for f in (*fields, rollout.truncated, final_values))
        sums = np.zeros(len(_MEANS) + _MOMENTS + 1)
        for index in range(config.num_minibatches):
            means = self._learn(batch, tf.constant(index)).numpy()
            if not np.isfinite(means).all():
                names = (*_MEANS, *("value_loss",) * _MOMENTS, "grad_norm")
                bad = names[int(np.flatnonzero(~np.isfinite(means))[0])]
                raise TrainingError(f"{bad} is not a finite number (gradient step {index + 1} of the update)")
            sums += means
            on_step(index + 1)
        return _metrics(sums / config.num_minibatches) | {"train/learning_rate": rate}

    def _final_values(self, rollout: Rollout) -> np.ndarray:
        """V of the last observations of truncated episodes, by the weights of now, float32 [R, T, B]."""
        values = np.zeros_like(rollout.rewards)
        if rollout.final_observations:
            at = tuple(np.array(list(rollout.final_observations)).T)
            values[at] = self._values(np.stack(list(rollout.final_observations.values())))
        return values

    @graph
    def _learn(self, batch: tuple, index: tf.Tensor) -> tf.Tensor:
        """One gradient step, of the minibatch `index`; its means, moments and gradient norm."""
        return self._runtime.first(self._runtime.strategy.run(self._learn_on_replica, args=(*batch, index)))

    def _learn_on_replica(
        self,
        observations: tf.Tensor,  # [T + 1, B, *shape]
        actions: tf.Tensor,  # [T, B, *shape]
        log_probs: tf.Tensor,  # [T, B], like those that follow
        rewards: tf.Tensor,
        first: tf.Tensor,
        truncated: tf.Tensor,
        final_values: tf.Tensor,
        index: tf.Tensor,
    ) -> tf.Tensor:
        """Gradients of its envs, one all-reduce, clipping by the global norm, the optimizer's step."""
        config = self._config
        data = (observations, actions, log_probs, rewards, first, truncated, final_values)
        num_envs = config.num_envs // self._runtime.replicas
        # Every n-th env: of the global envs the same ones, whichever replicas they are on.
        rows = num_envs // config.num_minibatches
        envs = index + config.num_minibatches * tf.range(rows)
        (grads, sums), _ = sum_parts(
            lambda part: (self._rollout_gradients([tf.gather(x, part, axis=1) for x in data]), ()),
            envs,
            part_rows=self._part_envs(rows),
            signature=((self._gradient_specs, tf.TensorSpec([len(_MEANS) + _MOMENTS])), ()),
            at_once=self._runtime.parts_at_once,
        )
        *grads, sums = sum_replicas([*grads, sums])
        norm = self._optimizer.apply(grads, config.max_grad_norm)
        return tf.concat([sums, [norm]], axis=0)

    def _part_envs(self, num_envs: int) -> int:
        """Envs whose gradients are taken at once, with all their steps; they divide those of a minibatch."""
        most = max(1, self._runtime.micro_batch(self._config) // self._config.num_steps)
        return max(d for d in range(1, min(most, num_envs) + 1) if num_envs % d == 0)

    def _rollout_gradients(self, data: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Gradients and sums of metrics of rollouts [T, b] of some envs, observations [T + 1, b, *shape]."""
        config = self._config
        observations, actions, acted_log_probs, rewards, first, truncated, final_values = data
        rewards, discounts = returns.rewards_and_discounts(
            rewards, first, truncated, final_values, gamma=config.gamma
        )
        shape = (config.num_steps, observations.shape[1])
        with tf.GradientTape() as tape:
            parameters, values = self.network(_flat(observations), training=True)
            values = tf.reshape(values, (shape[0] + 1, shape[1]))
            acted = parameters[: shape[0] * shape[1]]
            policy = self.network.distribution(acted)
            log_probs = policy.log_prob(_flat(actions))
            log_ratios = tf.reshape(log_probs, shape) - acted_log_probs
            advantages, targets = returns.vtrace(
                *(log_ratios, rewards, discounts, values[:-1], values[-1]),
                rho_bar=config.rho_bar,
                c_bar=config.c_bar,
                lam=config.vtrace_lambda,
            )
            policy_loss = losses.policy_gradient(log_probs, _flat(advantages))
            value_loss = losses.value_error(_flat(values[:-1]), _flat(targets))
            entropy = policy.entropy()
            loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
            # Divided by the samples of all replicas, because gradients are summed over them.
            loss = tf.reduce_sum(loss) / config.rows_per_step
        grads = tape.gradient(loss, [v.value for v in self._variables])
        return grads, self._sums(policy_loss, value_loss, entropy, log_ratios, targets, values[:-1])

    def _sums(
        self,
        policy_loss: tf.Tensor,
        value_loss: tf.Tensor,
        entropy: tf.Tensor,
        log_ratios: tf.Tensor,
        targets: tf.Tensor,
        values: tf.Tensor,
    ) -> tf.Tensor:
        log_ratio, target, error = (_flat(x) for x in (log_ratios, targets, targets - values))
        rho = tf.minimum(tf.exp(log_ratio), self._config.rho_bar)
        moments = (target, tf.square(target), error, tf.square(error))
        samples = (policy_loss, value_loss, entropy, losses.approx_kl(log_ratio), rho, *moments)
        return tf.reduce_sum(tf.stack(samples), axis=1) / self._config.rows_per_step


def _metrics(means: np.ndarray) -> dict[str, float]:
    """The metrics of an update, of the means of its gradient steps."""
    named = dict(zip(_MEANS, means.tolist(), strict=False))
    target, target_square, error, error_square, norm = means[len(_MEANS) :].tolist()
    varies, unexplained = max(0.0, target_square - target**2), max(0.0, error_square - error**2)
    # Of targets that do not vary, values that do explain nothing (scikit-learn's convention).
    share = unexplained / varies if varies > 0 else float(unexplained > 0)
    named |= {"explained_variance": 1.0 - share, "grad_norm": norm}
    return {f"train/{name}": value for name, value in named.items()}


def _flat(x: tf.Tensor) -> tf.Tensor:
    """[U, b, ...] as [U * b, ...]."""
    return tf.reshape(x, (-1, *x.shape[2:]))
