"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), the same on any number of replicas.

Losses are sums divided by the global minibatch. Gradients are summed over replicas once a minibatch, together
with the metrics, and clipped after that; so N replicas or workers take the step that one would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrl.agents import estimates
from tfrl.agents.actor_critic_agent import ActorCriticAgent
from tfrl.agents.totals import Totals
from tfrl.cli.errors import TrainingError
from tfrl.config.ppo import Config
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, optimizers, returns
from tfrl.ops.graph import compiled, graph
from tfrl.ops.lazy import tf
from tfrl.ops.schedules import learning_rate
from tfrl.run import rng
from tfrl.workers.data_parallel import GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

_MEANS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
OF_UPDATES = ("explained_variance", "grad_norm", "learning_rate", "first_ratio_error")
# Samples times parameters of one compiled call: about a second of a small network. The terminal then moves.
_WORK_A_CALL, _GPU_WORK_A_CALL = 10**9, 3 * 10**10


class Samples(NamedTuple):
    """The samples of a minibatch, [b, ...] each; advantages are normalised."""

    observations: tf.Tensor
    actions: tf.Tensor
    log_probs: tf.Tensor
    values: tf.Tensor
    advantages: tf.Tensor
    targets: tf.Tensor
    extra: tuple[tf.Tensor, ...]  # of `PPOAgent._extra_inputs`


class PPOAgent(ActorCriticAgent):
    """An actor-critic that learns by PPO.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.

    An algorithm with another loss extends this class by its own `_losses`, `_extra_inputs` and `means`.

    Attributes:
      means: what a minibatch reports, means over all replicas.
    """

    means = _MEANS
    metric_names = tuple(f"train/{name}" for name in (*_MEANS, *OF_UPDATES))
    charts = {
        "losses": {
            "policy, and value (half the squared error, clipped with --clip-value)": (
                "train/policy_loss",
                "train/value_loss",
            ),
            "entropy": ("train/entropy",),
            "size of updates": ("train/approx_kl", "train/clip_fraction"),
        }
    }

    def __init__(self, config: Config, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        # A whole epoch is one program where a run can have no other topology: a single env on one device.
        # It is faster, and rounds otherwise than parts of it do.
        one_device = isinstance(runtime.strategy, tf.distribute.OneDeviceStrategy)
        alone = one_device and config.num_envs == 1
        self._steps = tf.function(self._take_steps, jit_compile=self.uses_xla and alone)
        self._gae = graph(returns.gae, jit_compile=True) if self.uses_xla else returns.gae

    @property
    def uses_xla(self) -> bool:
        """True for small networks on CPUs."""
        return self.network.is_small and not self._runtime.uses_gpu

    def make_steps(self) -> dict[str, GradientStep]:
        """One step, of a minibatch."""
        config = self._config
        critic_rate = config.lr if config.critic_lr is None or config.share_torso else config.critic_lr
        rates = [critic_rate if name.startswith("critic") else config.lr for name in self.network.learned]
        step = GradientStep(
            learned=self.network.learned,
            rates=tuple(rates),
            loss=self._loss,
            metrics=self.means,
            optimizer=optimizers.of_settings(config, uncorrected_epsilon=True),
            batch_rows=config.rows_per_step,
            part_rows=self._runtime.micro_batch(config),
            max_norm=config.max_grad_norm,
            errors="largest",
        )
        return {"update": step}

    @property
    def allreduce_floats(self) -> int:
        """The number of float32 values that one gradient step sums: gradients, metrics, ratio errors."""
        return self.learning.allreduce_floats("update")

    @property
    def steps_per_update(self) -> int:
        """One for each minibatch of each epoch, where `target_kl` does not end the update early."""
        return self._config.epochs * self._config.steps_per_epoch

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of an update, by title."""
        config = self._config
        envs = f"{config.num_envs} x {config.num_steps} steps an update, {config.epochs} epochs of "
        return {"envs": envs + f"{config.steps_per_epoch} minibatches of {config.rows_per_step:,}"}

    # Learning

    def update(
        self, rollout: Rollout, number: int, on_step: Callable[[int], None] = lambda done: None
    ) -> dict[str, float]:
        """All epochs and minibatches of one update.

        Args:
          rollout: what the envs did, with normalised rewards.
          number: the updates before this one, which decide its minibatches and its learning rate.
          on_step: called now and then with the number of minibatches done.

        Returns:
          The `train/` metrics, the same on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite. All replicas see it at the same minibatch.
        """
        config, per_replica = self._config, self._runtime.per_replica
        scale = learning_rate(config.schedule, 1.0, number, config.num_updates)
        self.acting.forget()
        observations = rollout.observations[:, : config.num_steps]
        kept = (observations, rollout.actions, rollout.extras["log_prob"], rollout.extras["value"])
        kept = tuple(per_replica(x) for x in (*kept, *self._extra_inputs(rollout, number)))
        rows = per_replica(self._minibatches(number))
        totals = Totals(self.means)
        for epoch in range(config.epochs):
            if epoch == 0:
                estimated = self._estimates(rollout, rollout.extras["value"], rows)
                self._begin_update(totals, self._runtime.first(estimated[-1]).numpy())
            elif config.renew_advantages:
                values = self.values(observations, observations.shape[3:])
                estimated = self._estimates(rollout, values, rows)
            self._epoch(epoch, (kept, *estimated[:-1], rows, tf.constant(scale)), totals, on_step)
            if totals.ended:
                break
        return totals.metrics() | {"train/learning_rate": config.lr * scale}

    def _begin_update(self, totals: Totals, of_targets: np.ndarray) -> None:
        """Takes note of the explained variance and the mean target, float32 [2], of all replicas."""
        totals.explained_variance = float(of_targets[0])

    def _extra_inputs(self, rollout: Rollout, number: int) -> tuple[np.ndarray, ...]:
        """What the losses need of each sample beside PPO's arrays: [R, T, B, ...] each."""
        return ()

    def _epoch(self, epoch: int, batch: tuple, totals: Totals, on_step: Callable[[int], None]) -> None:
        """The minibatches of one pass, some in each compiled call, so that the terminal moves in between.

        Raises TrainingError if the workers do not take equally many in a call.
        """
        index, end = (tf.constant((epoch + k) * self._config.steps_per_epoch) for k in (0, 1))
        while index < end and not totals.ended:
            until = tf.minimum(index + self._steps_a_call(), end)
            steps, ended, agreed, sums, error = self._steps(batch, index, until, tf.constant(totals.sums))
            if not agreed:
                raise TrainingError("the workers take different numbers of gradient steps in one call")
            totals.add(int(steps), bool(ended), sums.numpy(), float(error))
            index += steps
            on_step(int(index))

    def _steps_a_call(self) -> int:
        """The gradient steps of one compiled call.

        The settings and the device decide it, because it must be equal on all workers. TensorFlow pairs their
        sums by the turn of the loop, and loops of different lengths wait for each other for ever.
        """
        work = _GPU_WORK_A_CALL if self._runtime.uses_gpu else _WORK_A_CALL
        return max(1, work // (self._config.rows_per_step * self.num_parameters))

    def _minibatches(self, number: int) -> np.ndarray:
        """Time steps of an update's minibatches, int32 [R, E, M, B, b], for B envs in each replica."""
        config, runtime = self._config, self._runtime
        steps = rng.minibatch_steps(
            config.seed,
            number,
            runtime.local_envs(config.num_envs),
            num_steps=config.num_steps,
            epochs=config.epochs,
            num_minibatches=config.steps_per_epoch,
            steps_each=config.rows_per_step // config.num_envs,
        )  # [E, M, R * B, b]
        return np.moveaxis(steps.reshape(*steps.shape[:2], runtime.local_replicas, -1, steps.shape[-1]), 2, 0)

    def _estimates(self, rollout: Rollout, values: np.ndarray, rows: Any) -> tuple[Any, ...]:
        """Advantages and value targets [T * B], the moments of every minibatch, and those of all targets.

        Values float32 [R, T, B] are of the acting weights, or, where advantages are renewed, of the present
        ones; those of o_T and of the last observations of truncated episodes always are of the present.
        """
        final_values = self.final_values(rollout)
        last_values = self.values(rollout.observations[:, -1], rollout.observations.shape[3:])
        fields = (rollout.rewards, rollout.first, rollout.truncated, values, last_values, final_values)
        return self._prepare(*(self._runtime.per_replica(f) for f in fields), rows)

    @compiled()
    def _prepare(self, *fields: Any) -> Any:
        return self._runtime.strategy.run(self._prepare_on_replica, args=fields)

    def _prepare_on_replica(self, *fields: tf.Tensor) -> tuple[tf.Tensor, ...]:
        *experience, steps = fields
        return estimates.estimate(self._config, self._gae, *experience, self._rows(steps))

    def _rows(self, steps: tf.Tensor) -> tf.Tensor:
        """Rows of each minibatch [E * M, b] in the [T * B] arrays, of its time steps [E, M, B, b / B]."""
        num_envs = tf.shape(steps)[2]
        rows = steps * num_envs + tf.range(num_envs)[:, None]
        return tf.reshape(rows, (self.steps_per_update, -1))

    def _take_steps(
        self, batch: tuple, index: tf.Tensor, end: tf.Tensor, sums: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Minibatches `index` ... `end` - 1 of the update, or up to the one that ends it.

        Returns their number, whether the update ends, whether all workers have the same `end`, the sums of
        all metrics so far, of which `sums` are those before, and, where the first minibatch is among them,
        its largest |ratio - 1|.
        """
        config, began = self._config, index
        train_step = tf.autograph.experimental.do_not_convert(self._train_step)
        ended, agreed, first_error = tf.constant(False), tf.constant(True), tf.constant(0.0)
        while index < end and not ended:
            outcome = self._runtime.strategy.run(train_step, args=(*batch, index, end))
            # Summed over replicas, so all hold the same numbers, and all workers stop together.
            means, error, ends = (self._runtime.first(x) for x in outcome)
            agreed = tf.reduce_all(ends == tf.cast(end, tf.float32))
            ended = not agreed or not tf.reduce_all(tf.math.is_finite(means))
            if config.target_kl is not None:
                ended = ended or means[self.means.index("approx_kl")] > config.target_kl
            if index == 0:
                first_error = error
            sums, index = sums + means, index + 1
        return index - began, ended, agreed, sums, first_error

    def _train_step(
        self,
        kept: Sequence[tf.Tensor],  # [T, B, ...]: observations, actions, log-probabilities, values, further
        advantages: tf.Tensor,  # [T * B], like the next
        targets: tf.Tensor,
        moments: tf.Tensor,  # [E * M, 2]
        steps: tf.Tensor,  # [E, M, B, b]
        scale: tf.Tensor,  # of the learning rates
        index: tf.Tensor,
        end: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """One minibatch: its means with the gradient's norm, its largest |ratio - 1|, and `end`.

        The last is of every replica, float32 [replicas].
        """
        kept = [_flat(x) for x in kept]
        data = [*kept[:4], advantages, targets, *kept[4:]]
        shared = (data, moments[index], index)
        outcome = self.learning.gradient_step(
            "update", self._rows(steps)[index], shared, scale, gathered=(tf.cast(end, tf.float32),)
        )
        (ends,) = outcome.gathered
        return tf.concat([outcome.means, [outcome.norm]], axis=0), outcome.errors, ends

    def _loss(self, weights: Weights, rows: tf.Tensor, shared: Any) -> Losses:
        """The losses of some samples, by their rows int32 [b] in the arrays of the rollout."""
        data, moments, index = shared
        *fields, advantages, targets = (tf.gather(x, rows) for x in data[:6])
        advantages = (advantages - moments[0]) / (moments[1] + 1e-8)
        extra = tuple(tf.gather(x, rows) for x in data[6:])
        samples = Samples(*fields, advantages, targets, extra)
        losses_, metrics, ratio = self._losses(weights, samples, index)
        return Losses(losses_, dict(zip(self.means, metrics, strict=True)), tf.abs(ratio - 1.0))

    def _losses(
        self, weights: Weights, samples: Samples, index: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor]:
        """The loss of each sample, its metrics in the order of `means`, and its ratio; [b] each.

        `index` is the minibatch's in the update, int32.
        """
        return self._losses_of(samples, *self.network.outputs(weights, samples.observations))

    def _losses_of(
        self, samples: Samples, parameters: tf.Tensor, values: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor]:
        """The same of the network's outputs for these samples."""
        config = self._config
        policy = self.network.distribution(parameters)
        log_ratio = policy.log_prob(samples.actions) - samples.log_probs
        ratio = tf.exp(log_ratio)
        policy_loss = losses.clipped_surrogate(ratio, samples.advantages, config.clip_ratio)
        value_loss = self._value_loss(values, samples.values, samples.targets)
        entropy = policy.entropy()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        clipped = tf.cast(tf.abs(ratio - 1.0) > config.clip_ratio, tf.float32)
        return loss, [policy_loss, value_loss, entropy, losses.approx_kl(log_ratio), clipped], ratio

    def _value_loss(self, values: tf.Tensor, old_values: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        config = self._config
        if config.value_loss == "huber":
            return losses.huber_value_error(values, targets)
        if config.clip_value:
            return losses.clipped_value_error(values, old_values, targets, config.clip_ratio)
        return losses.value_error(values, targets)


def _flat(x: tf.Tensor) -> tf.Tensor:
    """[T, B, ...] as [T * B, ...]."""
    return tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], axis=0))
