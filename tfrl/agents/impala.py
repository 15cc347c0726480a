"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): actors run ahead of the learner, V-trace puts that right.

A rollout is acted by weights that are some updates older than those that learn from it. A gradient step takes
the whole rollouts of some envs: V-trace by the present weights, in the same pass as the gradient. Were it a
stretch of time of all envs, V-trace would look no further than its end, where often only the value knows what
an action was good for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tfrl.agents.actor_critic_agent import ActorCriticAgent
from tfrl.cli.errors import TrainingError
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, optimizers, returns
from tfrl.ops.graph import compiled
from tfrl.ops.lazy import tf
from tfrl.ops.schedules import learning_rate
from tfrl.workers.data_parallel import GradientStep, Losses, Weights

# What a gradient step reports: means over its samples. The moments are of targets and of the values' errors.
_MEANS = ("policy_loss", "value_loss", "entropy", "approx_kl", "vtrace_rho")
_MOMENTS = ("target", "target_square", "error", "error_square")


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

    def make_steps(self) -> dict[str, GradientStep]:
        """One step, of the whole rollouts of some envs."""
        config = self._config
        step = GradientStep(
            learned=self.network.learned,
            rates=(config.lr,) * len(self.network.learned),
            loss=self._loss,
            metrics=(*_MEANS, *_MOMENTS),
            optimizer=optimizers.of_settings(config, uncorrected_epsilon=True),
            batch_rows=config.rows_per_step,
            part_rows=self._part_envs(config.num_envs // self._runtime.replicas // config.num_minibatches),
            max_norm=config.max_grad_norm,
        )
        return {"update": step}

    @property
    def allreduce_floats(self) -> int:
        """The number of float32 values that one gradient step sums: gradients and metrics."""
        return self.learning.allreduce_floats("update")

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
        scale = learning_rate(config.lr_schedule, 1.0, number, config.num_updates)
        self.acting.forget()
        log_probs, final_values = rollout.extras["log_prob"], self.final_values(rollout)
        fields = (rollout.observations, rollout.actions, log_probs, rollout.rewards, rollout.first)
        batch = tuple(self._runtime.per_replica(f) for f in (*fields, rollout.truncated, final_values))
        sums = np.zeros(len(_MEANS) + len(_MOMENTS) + 1)
        for index in range(config.num_minibatches):
            means = self._learn(batch, tf.constant(index), tf.constant(scale)).numpy()
            if not np.isfinite(means).all():
                names = (*_MEANS, *("value_loss",) * len(_MOMENTS), "grad_norm")
                bad = names[int(np.flatnonzero(~np.isfinite(means))[0])]
                raise TrainingError(f"{bad} is not a finite number (gradient step {index + 1} of the update)")
            sums += means
            on_step(index + 1)
        return _metrics(sums / config.num_minibatches) | {"train/learning_rate": config.lr * scale}

    @compiled()
    def _learn(self, batch: tuple, index: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """One gradient step, of the minibatch `index`; its means, moments and gradient norm."""
        return self._runtime.first(
            self._runtime.strategy.run(self._learn_on_replica, args=(*batch, index, scale))
        )

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
        scale: tf.Tensor,  # of the learning rate
    ) -> tf.Tensor:
        """The gradient step of this replica's envs."""
        config = self._config
        data = (observations, actions, log_probs, rewards, first, truncated, final_values)
        # Every n-th env: of the global envs the same ones, whichever replicas they are on.
        rows = config.num_envs // self._runtime.replicas // config.num_minibatches
        envs = index + config.num_minibatches * tf.range(rows)
        outcome = self.learning.gradient_step("update", envs, data, scale)
        return tf.concat([outcome.means, [outcome.norm]], axis=0)

    def _part_envs(self, num_envs: int) -> int:
        """Envs whose gradients are taken at once, with all their steps; they divide those of a minibatch."""
        most = max(1, self._runtime.micro_batch(self._config) // self._config.num_steps)
        return max(d for d in range(1, min(most, num_envs) + 1) if num_envs % d == 0)

    def _loss(self, weights: Weights, envs: tf.Tensor, data: Sequence[tf.Tensor]) -> Losses:
        """The losses of the samples of some envs, by their indices int32 [b]."""
        config = self._config
        observations, actions, acted_log_probs, rewards, first, truncated, final_values = (
            tf.gather(x, envs, axis=1)
            for x in data  # [T, b, ...], observations [T + 1, b, *shape]
        )
        rewards, discounts = returns.rewards_and_discounts(
            rewards, first, truncated, final_values, gamma=config.gamma
        )
        shape = (config.num_steps, observations.shape[1])
        parameters, values = self.network.outputs(weights, _flat(observations))
        values = tf.reshape(values, (shape[0] + 1, shape[1]))
        policy = self.network.distribution(parameters[: shape[0] * shape[1]])
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
        log_ratio, target, error = (_flat(x) for x in (log_ratios, targets, targets - values[:-1]))
        rho = tf.minimum(tf.exp(log_ratio), config.rho_bar)
        means = (policy_loss, value_loss, entropy, losses.approx_kl(log_ratio), rho)
        moments = (target, tf.square(target), error, tf.square(error))
        return Losses(loss, dict(zip((*_MEANS, *_MOMENTS), (*means, *moments), strict=True)))


def _metrics(means: np.ndarray) -> dict[str, float]:
    """The metrics of an update, of the means of its gradient steps."""
    named = dict(zip(_MEANS, means.tolist(), strict=False))
    target, target_square, error, error_square, norm = means[len(_MEANS) :].tolist()
    varies, unexplained = max(0.0, target_square - target**2), max(0.0, error_square - error**2)
    # For constant targets, varying values score 0 (scikit-learn's convention).
    share = unexplained / varies if varies > 0 else float(unexplained > 0)
    named |= {"explained_variance": 1.0 - share, "grad_norm": norm}
    return {f"train/{name}": value for name, value in named.items()}


def _flat(x: tf.Tensor) -> tf.Tensor:
    """[U, b, ...] as [U * b, ...]."""
    return tf.reshape(x, (-1, *x.shape[2:]))
