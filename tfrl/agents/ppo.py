"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), the same on any number of replicas.

Losses are sums divided by the global minibatch. Gradients are summed over replicas once a minibatch, together
with the metrics, and clipped after that; so N replicas or workers take the step that one would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl.cli.errors import TrainingError
from tfrl.config.ppo import Config
from tfrl.experience.rollout import Rollout
from tfrl.networks import actor_critic, torso_weights
from tfrl.ops import losses, returns
from tfrl.run import rng
from tfrl.workers.optimizers import SummedAdam
from tfrl.workers.strategy import Runtime, pairwise_sum

# What a minibatch reports, in the order of the vectors below: means over the global minibatch.
_MEANS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
_OF_UPDATES = ("explained_variance", "grad_norm", "learning_rate", "first_ratio_error")


class PPOAgent:
    """Actor, critic and optimizer under a strategy; follows `tfrl.agents.Agent`.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.
      observation_shape: (H, W, C).
      num_actions: A.
    """

    metric_names = tuple(f"train/{name}" for name in (*_MEANS, *_OF_UPDATES))

    def __init__(
        self, config: Config, runtime: Runtime, *, observation_shape: tuple[int, ...], num_actions: int
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._global_minibatch = config.batch_size // config.num_minibatches
        with runtime.strategy.scope():
            self.network = actor_critic.build(
                torso=config.torso,
                torso_options=config.torso_options,
                observation_shape=observation_shape,
                num_actions=num_actions,
                share_torso=config.share_torso,
                precision=runtime.precision,
                seed=config.seed,
            )
            if config.torso_weights is not None:
                torso_weights.start(self.network, config.torso_weights, freeze=config.freeze_torso)
            self._variables = self.network.trained_variables
            self._optimizer = SummedAdam(config.lr, epsilon=config.adam_epsilon)
            self._optimizer.build(self._variables)
        on_gpu, at_once = runtime.uses_gpu, runtime.parts_at_once
        self._forward = self.network.forward_pass(on_gpu=on_gpu, at_once=at_once)
        self._forward_alone = self.network.forward_pass(
            on_gpu=on_gpu, at_once=at_once * runtime.local_replicas
        )
        if config.critic_lr is not None and not config.share_torso:
            self._optimizer.scale_rate(self.network.critic.trainable_variables, config.critic_lr / config.lr)

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        return sum(int(np.prod(v.shape)) for v in self._variables)

    @property
    def floats_per_sum(self) -> int:
        """What a minibatch sums over replicas, in one collective: gradients, metrics, ratio errors."""
        return self.num_parameters + len(_MEANS) + self._runtime.replicas

    @property
    def sums_per_update(self) -> int:
        """One for each minibatch of each epoch, where `target_kl` does not end the update early."""
        return self._config.epochs * self._config.num_minibatches

    # Acting

    def act(
        self, observations: np.ndarray, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples actions.

        Args:
          observations: uint8 [R, B, H, W, C], B envs for each of this worker's R replicas.
          uniforms: float32 [R, B] in [0, 1): the randomness.

        Returns:
          Actions int32, their log-probabilities float32 and state values float32, each [R, B].
        """
        results = self._act(self._runtime.per_replica(observations), self._runtime.per_replica(uniforms))
        actions, log_probs, values = (np.stack(self._runtime.local_results(r)) for r in results)
        return actions, log_probs, values

    @tf.function(reduce_retracing=True)
    def _act(self, observations: Any, uniforms: Any) -> Any:
        return self._runtime.strategy.run(self._act_on_replica, args=(observations, uniforms))

    def _act_on_replica(self, observations: tf.Tensor, uniforms: tf.Tensor) -> tuple[tf.Tensor, ...]:
        logits, values = self._forward(observations)
        policy = self.network.distribution(logits)
        actions = policy.sample(uniforms)
        return actions, policy.log_prob(actions), values

    def sample(self, observations: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Actions int32 [B] of observations uint8 [B, H, W, C], by uniforms float32 [B], on one device."""
        return self._sample(tf.convert_to_tensor(observations), tf.convert_to_tensor(uniforms)).numpy()

    @tf.function(reduce_retracing=True)
    def _sample(self, observations: tf.Tensor, uniforms: tf.Tensor) -> tf.Tensor:
        return self.network.distribution(self._forward_alone(observations)[0]).sample(uniforms)

    # Learning

    def update(self, rollout: Rollout, number: int) -> dict[str, float]:
        """All epochs and minibatches of one update.

        Args:
          rollout: what the envs did, with normalised rewards.
          number: the updates before this one, which decide its minibatches and its learning rate.

        Returns:
          The `train/` metrics, the same on every worker.

        Raises:
          TrainingError: a loss or gradient is not finite. All replicas see it at the same minibatch.
        """
        config = self._config
        learning_rate = config.lr * (1.0 - number / config.num_updates if config.anneal_lr else 1.0)
        self._optimizer.learning_rate.assign(learning_rate)
        fields = [rollout.observations, rollout.actions, rollout.log_probs, rollout.values]
        fields += [rollout.last_values, rollout.rewards, rollout.first, self._minibatches(number)]
        results = self._update(*(self._runtime.per_replica(f) for f in fields))
        metrics = {name: float(value) for name, value in results.items()}
        bad = [name for name, value in metrics.items() if not np.isfinite(value)]
        if bad:
            minibatch = int(metrics["minibatches"])
            raise TrainingError(f"{bad[0]} is not a finite number (minibatch {minibatch} of the update)")
        del metrics["minibatches"]
        return {f"train/{name}": value for name, value in metrics.items()} | {
            "train/learning_rate": learning_rate
        }

    def _minibatches(self, number: int) -> np.ndarray:
        """Time steps of an update's minibatches, int32 [R, E, M, B, T / M], for B envs in each replica."""
        config, runtime = self._config, self._runtime
        steps = rng.minibatch_steps(
            config.seed,
            number,
            runtime.local_envs(config.num_envs),
            num_steps=config.num_steps,
            epochs=config.epochs,
            num_minibatches=config.num_minibatches,
        )  # [E, M, R * B, T / M]
        return np.moveaxis(steps.reshape(*steps.shape[:2], runtime.local_replicas, -1, steps.shape[-1]), 2, 0)

    @tf.function
    def _update(
        self,
        observations: Any,
        actions: Any,
        log_probs: Any,
        values: Any,
        last_values: Any,
        rewards: Any,
        first: Any,
        steps: Any,
    ) -> dict[str, tf.Tensor]:
        run, config = self._runtime.strategy.run, self._config
        batch, moments, explained = run(
            self._prepare, args=(observations, actions, log_probs, values, last_values, rewards, first, steps)
        )
        total = self.sums_per_update
        index, stop = tf.constant(0), tf.constant(False)
        sums, first_error = tf.zeros(len(_MEANS) + 1), tf.constant(0.0)
        while index < total and not stop:
            means, errors = run(self._train_step, args=(batch, moments, index))
            # Summed over replicas, so all hold the same numbers, and all workers stop together.
            means, error = self._runtime.first(means), tf.reduce_max(self._runtime.first(errors))
            stop = not tf.reduce_all(tf.math.is_finite(means))
            if config.target_kl is not None:
                stop = stop or means[_MEANS.index("approx_kl")] > config.target_kl
            if index == 0:
                first_error = error
            sums, index = sums + means, index + 1
        done = tf.cast(index, tf.float32)
        metrics = dict(zip((*_MEANS, "grad_norm"), tf.unstack(sums / done), strict=True))
        metrics |= {"explained_variance": self._runtime.first(explained), "first_ratio_error": first_error}
        return metrics | {"minibatches": done}

    def _prepare(
        self,
        observations: tf.Tensor,  # [T, B, H, W, C]
        actions: tf.Tensor,  # [T, B], like the next three
        log_probs: tf.Tensor,
        values: tf.Tensor,
        last_values: tf.Tensor,  # [B]
        rewards: tf.Tensor,  # [T, B], like `first`
        first: tf.Tensor,
        steps: tf.Tensor,  # [E, M, B, T / M]
    ) -> tuple[tuple[tf.Tensor, ...], tf.Tensor, tf.Tensor]:
        """Advantages, and the global moments that need every replica: one small collective an update."""
        config = self._config
        advantages, targets = returns.gae(
            rewards, values, last_values, first, gamma=config.gamma, lam=config.gae_lambda
        )
        num_envs = tf.shape(actions)[1]
        rows = steps * num_envs + tf.range(num_envs)[:, None]  # into the [T * B] arrays
        rows = tf.reshape(rows, (self.sums_per_update, -1))  # [E * M, b]

        def flat(x: tf.Tensor) -> tf.Tensor:
            return tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], axis=0))

        batch = (observations, actions, log_probs, values, advantages, targets)
        batch = (rows, *(flat(x) for x in batch))
        # float64: sums of squares must not depend on how the samples are spread over replicas.
        shuffled = tf.cast(tf.gather(flat(advantages), rows), tf.float64)  # [E * M, b]
        wide_targets, errors = tf.cast(targets, tf.float64), tf.cast(targets - values, tf.float64)
        sums = [_two_sums(shuffled, 1), _two_sums(wide_targets, (0, 1)), _two_sums(errors, (0, 1))]
        sums = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)
        mean, variance = _moments(sums[0], self._global_minibatch)
        moments = tf.cast(tf.stack([mean, tf.sqrt(variance)], axis=-1), tf.float32)  # [E * M, 2]
        varies, unexplained = (_moments(s, config.batch_size)[1] for s in sums[1:])
        # Of targets that do not vary, values that do explain nothing (scikit-learn's convention).
        share = tf.where(varies > 0, tf.math.divide_no_nan(unexplained, varies), tf.sign(unexplained))
        explained = 1.0 - share
        return batch, moments, tf.cast(explained, tf.float32)

    def _train_step(
        self, batch: tuple[tf.Tensor, ...], moments: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One minibatch: gradients, one all-reduce, clipping by the global norm, one step of Adam."""
        rows, data = batch[0][index], batch[1:]
        grads, sums, error = self._gradients(rows, data, moments[index])
        context = tf.distribute.get_replica_context()
        # A sum cannot carry a maximum, so each replica's error travels in a place of its own.
        place = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
        *grads, sums, errors = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [*grads, sums, tf.where(place > 0, error, 0.0)]
        )
        norm = tf.linalg.global_norm(grads)
        grads, _ = tf.clip_by_global_norm(grads, self._config.max_grad_norm, use_norm=norm)
        self._optimizer.apply(grads)
        return tf.concat([sums, [norm]], axis=0), errors

    def _gradients(
        self, rows: tf.Tensor, data: Sequence[tf.Tensor], moments: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """This replica's share of the gradients, metrics, and its largest |ratio - 1|.

        Parts of `micro_batch` rows are computed `parts_at_once` at a time, and summed in pairs of
        neighbours, pairs of those, and so on. Rows are in the order of the global envs, and replicas are
        summed in the same way, so the additions are the same ones however many replicas share them: without
        that, rounding grows to a different run within a few dozen steps of Adam.
        """
        parts = tf.reshape(rows, (-1, self._runtime.micro_batch(self._config)))
        if parts.shape[0] == 1:
            return self._part_gradients(parts[0], data, moments)
        shapes = [tf.TensorSpec(v.shape) for v in self._variables]
        grads, sums, errors = tf.map_fn(
            lambda part: self._part_gradients(part, data, moments),
            parts,
            fn_output_signature=(shapes, tf.TensorSpec([len(_MEANS)]), tf.TensorSpec([])),
            parallel_iterations=self._runtime.parts_at_once,  # whose activations are in memory together
        )
        return [pairwise_sum(g) for g in grads], pairwise_sum(sums), tf.reduce_max(errors)

    def _part_gradients(
        self, rows: tf.Tensor, data: Sequence[tf.Tensor], moments: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        config = self._config
        observations, actions, old_log_probs, old_values, advantages, targets = (
            tf.gather(x, rows) for x in data
        )
        advantages = (advantages - moments[0]) / (moments[1] + 1e-8)
        with tf.GradientTape() as tape:
            logits, values = self.network(observations, training=True)
            policy = self.network.distribution(logits)
            log_ratio = policy.log_prob(actions) - old_log_probs
            ratio = tf.exp(log_ratio)
            policy_loss = losses.clipped_surrogate(ratio, advantages, config.clip_ratio)
            if config.clip_value:
                value_loss = losses.clipped_value_error(values, old_values, targets, config.clip_ratio)
            else:
                value_loss = losses.value_error(values, targets)
            entropy = policy.entropy()
            loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
            # Divided by the global minibatch, because gradients are summed over replicas.
            loss = tf.reduce_sum(loss) / self._global_minibatch
        grads = tape.gradient(loss, [v.value for v in self._variables])
        clipped = tf.cast(tf.abs(ratio - 1.0) > config.clip_ratio, tf.float32)
        samples = [policy_loss, value_loss, entropy, losses.approx_kl(log_ratio), clipped]
        sums = tf.reduce_sum(tf.stack(samples), axis=1) / self._global_minibatch
        return grads, sums, tf.reduce_max(tf.abs(ratio - 1.0))

    # State

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights and optimizer as arrays, the same on every worker."""
        weights = {f"weights/{k}": v for k, v in self.network.get_weights().items()}
        slots = {f"optimizer/{i:03d}": v.numpy() for i, v in enumerate(self._optimizer.variables)}
        return weights | slots

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`.

        Raises:
          ValueError: they belong to another network.
        """
        prefix = "weights/"
        self.network.set_weights({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
        for i, variable in enumerate(self._optimizer.variables):
            variable.assign(state[f"optimizer/{i:03d}"])


def _two_sums(x: tf.Tensor, axis: int | tuple[int, ...]) -> tf.Tensor:
    """Sum and sum of squares, stacked in the last dimension."""
    return tf.stack([tf.reduce_sum(x, axis), tf.reduce_sum(tf.square(x), axis)], axis=-1)


def _moments(sums: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and population variance from `_two_sums`."""
    mean = sums[..., 0] / count
    return mean, tf.maximum(sums[..., 1] / count - tf.square(mean), 0.0)
