"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), the same on any number of replicas.

A loss is a sum divided by the size of the global minibatch. Once in each minibatch, gradients and metrics are
summed over all replicas. The sum is then clipped. So N replicas or workers take the same step as one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from tfrl.algorithms.actor_critic import ActorCriticAgent, Rollouts, RolloutSettings, flat, units_of_part
from tfrl.algorithms.algorithm import check_finite
from tfrl.cli.errors import UserError
from tfrl.cli.flags import FRACTION, NATURAL, NOT_NEGATIVE, POSITIVE, Range
from tfrl.cli.settings import preset_files
from tfrl.config.distributed import DISTRIBUTED_SECTIONS
from tfrl.config.run import NetworkSettings, Task
from tfrl.envs import registry
from tfrl.experience.levels import MAX_LEVELS, LevelReplay
from tfrl.experience.rollout import Rollout
from tfrl.ops import losses, returns
from tfrl.ops.graph import compiled, graph, tf, tf_function
from tfrl.ops.optimizers import learning_rate
from tfrl.run import rng
from tfrl.workers.data_parallel import GradientStep, Losses, Weights, sum_replicas
from tfrl.workers.strategy import Runtime

_OF_ENVS: Mapping[str, str] = {"Pendulum-v1": "pendulum"}
"""The default presets of envs whose rewards need other settings than the rest of their family."""


# The classes of settings are the groups of --help. `Config` joins their fields. The text under a field is its
# help.


@dataclass(frozen=True)
class PPO(Rollouts):
    """The hyperparameters of PPO."""

    epochs: Annotated[int, Range(1, 1000)] = 3
    """Passes over each rollout."""
    minibatch_size: Annotated[int, NATURAL] = 0
    """Samples of a gradient step, instead of --num-minibatches: a multiple of --num-envs. Samples that do not
    fill the last minibatch are omitted from the pass. 0: --num-minibatches decides."""
    lr: Annotated[float, POSITIVE] = 5e-4
    """Learning rate (aliases --learning-rate and --actor-lr)."""
    critic_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate of the critic; it implies --no-share-torso. None: --lr."""
    anneal_lr: bool = False
    """The same as --lr-schedule linear."""
    clip_ratio: Annotated[float, Range(0, 1, above=True)] = 0.2
    """PPO's clip range: the loss clips the ratio of new to old action probability to 1 ± this."""
    clip_value: bool = True
    """Clip the change of the value by --clip-ratio as well. Only for --value-loss squared."""
    value_loss: Literal["squared", "huber"] = "squared"
    """squared: half the squared error of the value; huber: it grows linearly beyond an error of 1."""
    gae_lambda: Annotated[float, FRACTION] = 0.95
    """Lambda of generalised advantage estimation: 0 uses the critic's values, 1 uses the returns."""
    normalize_advantages: Literal["minibatch", "batch"] = "minibatch"
    """Normalise advantages by the mean and deviation of each minibatch, or of the whole rollout (batch)."""
    renew_advantages: bool = False
    """Compute values and advantages again before every epoch, with the current weights."""
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Share of the torso's features that are dropped in training, before the heads of policy and value. For
    each env step, acting and learning drop the same features. Evaluations drop none."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of the value loss, which is half the squared error (see --clip-value and --value-loss)."""
    target_kl: Annotated[float | None, POSITIVE] = None
    """End the passes of an update when the approximate KL (nats) from the old policy exceeds this; None:
    never."""


# The fields of a dataclass begin with those of its last base class.
@dataclass(frozen=True)
class Config(PPO, LevelReplay, RolloutSettings):
    """All settings of a PPO run; the defaults are the preset openai-easy. One field a flag."""

    algorithm: str = "ppo"
    sections: ClassVar[tuple[type, ...]] = (Task, PPO, LevelReplay, NetworkSettings, *DISTRIBUTED_SECTIONS)
    aliases: ClassVar[Mapping[str, str]] = {
        **RolloutSettings.aliases,
        "update_freq": "num_steps",
        "actor_lr": "lr",
    }

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.minibatch_size or self.steps_per_update // self.num_minibatches

    @property
    def steps_per_epoch(self) -> int:
        """Gradient steps of one pass over a rollout."""
        return self.steps_per_update // self.rows_per_step

    @property
    def minibatch_epochs(self) -> int:
        """Passes of an update over the minibatches."""
        return self.epochs

    @property
    def sequence_steps(self) -> int:
        """The length of the sequences that the network learns from; 1 without memory."""
        return 1 if self.memory == "none" else self.sequence_length or self.num_steps

    @property
    def envs_per_block(self) -> int:
        """The least number of neighbouring envs whose sequences fill all minibatches evenly; with memory."""
        return self.num_minibatches // math.gcd(self.num_minibatches, self.num_steps // self.sequence_steps)

    @property
    def min_parts(self) -> int:
        """The least number of equal parts of a minibatch on CPUs. For small networks, the largest number of
        replicas, up to 4, that can share the envs.
        """
        return math.gcd(4, self.num_envs) if self.small_network else 4

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if envs or minibatches do not divide over workers, replicas and parts."""
        super().check_topology(workers, replicas_per_worker)
        if self.memory != "none":
            self._check_sequences(workers * replicas_per_worker)
        share = self.rows_per_step // (workers * replicas_per_worker)
        if self.micro_batch and share % self.micro_batch:
            raise UserError(
                f"--micro-batch must divide a replica's minibatch of {share} samples; got {self.micro_batch}."
            )

    def _check_sequences(self, replicas: int) -> None:
        """Raises UserError if minibatches or their parts are not whole sequences."""
        block, length = self.envs_per_block, self.sequence_steps
        if self.num_envs % (replicas * block):
            of_replicas = f" on each of {replicas} replicas" if replicas > 1 else ""
            raise UserError(
                f"--num-minibatches {self.num_minibatches} with sequences of {length} steps needs "
                f"--num-envs to be a multiple of {block}{of_replicas}; got {self.num_envs}."
            )
        if self.micro_batch % length:
            raise UserError(
                f"--micro-batch must be whole sequences of {length} steps with --memory {self.memory}; got "
                f"{self.micro_batch}."
            )

    def default_preset(self) -> str:
        """The default preset of the command: that of the env, or of its family.

        Gymnasium envs with images get the preset of games.
        """
        of_env = _OF_ENVS.get(registry.own_name(self.env), "")
        preset = of_env if of_env in preset_files(type(self)) else registry.family(self.env).preset
        return "openai-easy" if preset == "gymnasium" and self.shows_images else preset

    @classmethod
    def derive(cls, given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that follow from the given ones and replace those of the preset. Raises UserError."""
        found = super().derive(given, over)
        if "anneal_lr" in given:
            found["lr_schedule"] = "linear" if given["anneal_lr"] else "constant"
        if "num_minibatches" in given:
            found["minibatch_size"] = 0
        if given.get("critic_lr") is not None:
            found["share_torso"] = False
        if given.get("normalize_observations") is False:
            found["normalize_random_steps"] = 0
        return found

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.anneal_lr and self.lr_schedule != "linear":
            raise UserError(
                f"--anneal-lr means --lr-schedule linear, but --lr-schedule is {self.lr_schedule}; give "
                "one of the two."
            )
        if (self.rows_per_step if self.normalize_advantages == "minibatch" else self.steps_per_update) == 1:
            raise UserError(
                f"a {self.normalize_advantages} of one sample normalises its advantage to 0, so nothing is "
                "learned: give fewer --num-minibatches, or more --num-steps or --num-envs."
            )
        if self.critic_lr is not None and self.share_torso:
            raise UserError(
                f"--critic-lr {self.critic_lr} needs --no-share-torso: a shared torso uses only --lr."
            )
        if self.minibatch_size % self.num_envs:
            raise UserError(
                f"--minibatch-size must be a multiple of --num-envs {self.num_envs}; got "
                f"{self.minibatch_size}."
            )
        if self.minibatch_size > self.steps_per_update:
            raise UserError(
                f"--minibatch-size {self.minibatch_size} is more than a whole rollout: --num-envs "
                f"{self.num_envs} x --num-steps {self.num_steps} = {self.steps_per_update}."
            )
        if self.level_replay:
            self._check_levels()
        if self.dropout and self.memory != "none":
            raise UserError(f"--dropout {self.dropout} is not for --memory {self.memory}; leave one out.")
        if self.memory != "none" and self.minibatch_size:
            raise UserError(
                f"--minibatch-size cannot be used with --memory {self.memory}, whose minibatches are whole "
                "sequences; give --num-minibatches."
            )
        if self.memory == "none" and not self.minibatch_size and self.num_steps % self.num_minibatches:
            raise UserError(
                f"--num-steps must be divisible by --num-minibatches {self.num_minibatches}; got "
                f"{self.num_steps}."
            )

    def _check_levels(self) -> None:
        """Raises UserError if there are no levels to choose from."""
        if not registry.family(self.env).chooses_levels:
            raise UserError(
                f"--level-replay needs an env whose levels can be chosen, and {self.env} is none: leave it "
                "out."
            )
        if not self.num_levels:
            raise UserError("--level-replay needs training levels: give their number as --num-levels.")
        if self.num_levels > MAX_LEVELS:
            raise UserError(
                f"--level-replay keeps scores of at most {MAX_LEVELS:,} levels; got --num-levels "
                f"{self.num_levels}."
            )
        if self.distribution_mode == "exploration":
            raise UserError("--level-replay needs several levels, and exploration is a single level.")

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason."""
        names = [field.name for field in dataclasses.fields(LevelReplay) if field.name != "level_replay"]
        found = {} if self.level_replay else dict.fromkeys(names, "without --level-replay")
        if self.clip_value and self.value_loss == "huber":
            found["clip_value"] = "with --value-loss huber"
        return super().ineffective | found


def _two_sums(x: tf.Tensor, axis: int | tuple[int, ...]) -> tf.Tensor:
    """The sum and the sum of squares, stacked in the last dimension."""
    return tf.stack([tf.reduce_sum(x, axis), tf.reduce_sum(tf.square(x), axis)], axis=-1)


def _moments(sums: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean and population variance from `_two_sums`."""
    mean = sums[..., 0] / count
    return mean, tf.maximum(sums[..., 1] / count - tf.square(mean), 0.0)


UPDATE = "update"
"""The name of PPO's gradient step."""
# Samples times parameters of one compiled call: about a second for a small network, so the progress line
# moves often.
_WORK_A_CALL, _GPU_WORK_A_CALL = 10**9, 3 * 10**10


class Samples(NamedTuple):
    """The samples of a minibatch, [b, ...], with normalised advantages; or those of a rollout, [T, B, ...].

    Attributes:
      observations: in shape and dtype of the env's spec.
      actions: int32 or float32; those of a Box are in [-1, 1].
      log_probs, values: float32; log pi(a | o) and V(o) of the policy that acted, or of IMPACT's target
        policy.
      advantages: float32, of `_advantages`.
      targets: float32, of the values: values + advantages before these are normalised.
      extra: of `PPOAgent._extra_inputs`.
      memory: `Sequences` of a recurrent network, the factors of dropout, or None; for a rollout,
        `started_memory` and `keeps`, the kept features, or ().
    """

    observations: tf.Tensor
    actions: tf.Tensor
    log_probs: tf.Tensor
    values: tf.Tensor
    advantages: tf.Tensor
    targets: tf.Tensor
    extra: tuple[tf.Tensor, ...]
    memory: Any


class Estimates(NamedTuple):
    """The estimates of a rollout, for each replica.

    Attributes:
      advantages, targets: float32 [T, B].
      moments: the baseline (see `_advantage_weights`; for PPO the mean) and the deviation of the advantages
        of every minibatch, float32 [E * M, 2].
      target_statistics: the explained variance and the mean of all targets, float32 [2].
    """

    advantages: tf.Tensor
    targets: tf.Tensor
    moments: tf.Tensor
    target_statistics: tf.Tensor


class Inputs(NamedTuple):
    """The inputs of all minibatches of an update, for each replica.

    Attributes:
      samples: those of the rollout.
      moments: of `Estimates`, float32 [E * M, 2].
      starts: the first rows of the sequences of every minibatch, of `_minibatches`, int32 [E * M, q].
      scale: multiplies the learning rates, float32 [].
    """

    samples: Samples
    moments: tf.Tensor
    starts: tf.Tensor
    scale: tf.Tensor


class Shared(NamedTuple):
    """The data that all parts of a minibatch share.

    Attributes:
      rollout: the samples of the replica's rollout, [T * B, ...].
      moments: of `Estimates`, for this minibatch, float32 [2].
      index: the number of the minibatch in the update, int32 [].
    """

    rollout: Samples
    moments: tf.Tensor
    index: tf.Tensor


class Taken(NamedTuple):
    """The minibatches of an update that one kind of gradient step has taken so far.

    Attributes:
      begin, end: the numbers of the first minibatch and of the next one, counted over the update.
      sums: the sums of the metrics over these minibatches by name, float32 []. A call continues the sums of
        the call before, so the number of minibatches of a call does not change them.
      ended: True if a minibatch ended the passes.
      first_error: the largest |ratio - 1| of the update's first minibatch.
    """

    begin: int
    end: int
    sums: Mapping[str, tf.Tensor]
    ended: bool = False
    first_error: float = 0.0

    def means(self) -> dict[str, float]:
        """The means of the metrics by name."""
        count = np.float32(self.end - self.begin)
        return {name: float(total.numpy() / count) for name, total in self.sums.items()}


class PPOAgent(ActorCriticAgent):
    """Train PPO, an actor-critic whose policy changes little in an update.

    An algorithm with another loss extends this class and overrides `_losses`, `_extra_inputs`, `_advantages`
    or `means`.

    Attributes:
      means: the names of the metrics that `_losses` gives, in the order of progress.csv.
    """

    settings = Config
    _config: Config
    means: tuple[str, ...] = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")

    def __init__(self, config: Config, runtime: Runtime) -> None:
        if config.target_kl is not None and "approx_kl" not in self.means:
            raise UserError(f"--target-kl needs approx_kl among the means of {type(self).__name__}.")
        super().__init__(config, runtime)
        of_update = ("explained_variance", "grad_norm", "learning_rate", "first_ratio_error")
        self.metric_names = tuple(f"train/{name}" for name in (*self.means, *of_update))
        self._compiled_steps = tf_function(
            self._take_minibatches, jit_compile=config.has_one_topology and runtime.is_one_cpu
        )
        compiles = self.uses_xla or runtime.uses_gpu  # on a GPU each step of the scan would launch kernels
        self._gae = graph(returns.gae, jit_compile=True) if compiles else returns.gae

    @property
    def uses_xla(self) -> bool:
        """True for small networks."""
        return self._config.small_network

    def make_steps(self) -> dict[str, GradientStep]:
        """One gradient step, from a minibatch."""
        config = self._config
        critic_rate = config.lr if config.critic_lr is None or config.share_torso else config.critic_lr
        rates = [critic_rate if name.startswith("critic") else config.lr for name in self.network.learned]
        step = GradientStep(
            learned=self.network.learned,
            rates=tuple(rates),
            loss=self._minibatch_loss,
            metrics=self.means,
            optimizer=config.make_optimizer(uncorrected_epsilon=True),
            batch_size=config.rows_per_step,
            part_rows=self._part_rows(),
            norm="grad_norm",
            max_norm=config.max_grad_norm,
            errors="largest",
        )
        return {UPDATE: step}

    def _part_rows(self) -> int:
        """The number of sequences of a part."""
        config = self._config
        share = config.rows_per_step // config.sequence_steps // self._runtime.replicas
        return units_of_part(share, config.sequence_steps, self._runtime.micro_batch(config))

    @property
    def gradient_steps_per_update(self) -> int:
        """One gradient step for each minibatch of each epoch; `target_kl` may end the update earlier."""
        return self._config.minibatch_epochs * self._config.steps_per_epoch

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
        """Takes the gradient steps of all epochs and minibatches; as `ActorCriticAgent.update`."""
        config = self._config
        scale = learning_rate(config.lr_schedule, 1.0, number, config.num_updates)
        self.acting.forget_weights()
        samples, starts = self._samples(rollout, number), self._runtime.per_replica(self._minibatches(number))
        estimated, explained = self._first_estimates(rollout, starts)
        taken = self._nothing_taken(UPDATE)
        for epoch in range(config.epochs):
            if taken.ended:
                break
            if epoch > 0 and config.renew_advantages:
                started = None if rollout.memory is None else rollout.started_memory
                values = self.values(rollout.observations, rollout.observations.shape[3:], started)
                estimated = self._estimates(rollout, values, starts)
            samples = samples._replace(advantages=estimated.advantages, targets=estimated.targets)
            inputs = Inputs(samples, estimated.moments, starts, tf.constant(scale))
            taken = self._take((UPDATE,), inputs, taken, (epoch + 1) * config.steps_per_epoch, on_step)
        metrics = taken.means() | {"explained_variance": explained, "first_ratio_error": taken.first_error}
        check_finite(metrics.items(), f" (minibatch {taken.end} of the update)")
        metrics["learning_rate"] = config.lr * scale
        return {f"train/{name}": value for name, value in metrics.items()}

    # Many minibatches

    def _nothing_taken(self, *steps: str, begin: int = 0) -> Taken:
        """No minibatches so far, before the minibatch `begin`, for the gradient steps with these names."""
        names = [name for step in steps for name in self.learning.steps[step].description.reported]
        return Taken(begin, begin, {name: tf.constant(0.0) for name in names})

    def _take(
        self, steps: tuple[str, ...], inputs: Inputs, taken: Taken, until: int, on_step: Callable[[int], None]
    ) -> Taken:
        """Takes the minibatches up to `until`, or fewer if one ends the passes, in several compiled calls.

        Args:
          steps: the names of the gradient steps from each minibatch, in order.
          inputs: those of all minibatches of the update.
          taken: the minibatches so far.
          until: the end, a number of minibatches of the update.
          on_step: called with the number of finished minibatches of the update.
        """
        while taken.end < until and not taken.ended:
            begin, end = taken.end, min(taken.end + self._minibatches_a_call(), until)
            index, ended, sums, error = self._compiled_steps(
                steps, inputs, tf.constant(begin), tf.constant(end), dict(taken.sums)
            )
            first_error = float(error) if begin == 0 else taken.first_error
            taken = Taken(taken.begin, int(index), sums, bool(ended), first_error)
            on_step(taken.end)
        return taken

    def _take_minibatches(
        self,
        steps: tuple[str, ...],
        inputs: Inputs,
        index: tf.Tensor,
        end: tf.Tensor,
        sums: dict[str, tf.Tensor],
    ) -> tuple[tf.Tensor, ...]:
        """Takes the minibatches `index` to `end` - 1 of the update, or fewer if one of them ends the passes.

        Returns the number of minibatches of the update so far, True if the passes end, the sums of all
        metrics so far (`sums` are those before the call), and the largest |ratio - 1| of the first minibatch
        of the update.
        """
        target_kl = self._config.target_kl
        on_replica = tf.autograph.experimental.do_not_convert(self._take_minibatch)
        ended, first_error = tf.constant(False), tf.constant(0.0)
        while index < end and not ended:
            outcome = self._runtime.strategy.run(on_replica, args=(steps, inputs, index))
            # These are sums over all replicas, so all workers stop together.
            metrics, error = tf.nest.map_structure(self._runtime.first, outcome)
            ended = not tf.reduce_all(tf.math.is_finite(list(metrics.values())))
            if target_kl is not None and "approx_kl" in metrics:
                ended = ended or metrics["approx_kl"] > target_kl
            if index == 0:
                first_error = error
            sums, index = {name: sums[name] + metrics[name] for name in sums}, index + 1
        return index, ended, sums, first_error

    def _take_minibatch(
        self, steps: tuple[str, ...], inputs: Inputs, index: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Takes the gradient steps from one minibatch, on a replica; the metrics by name, and the largest
        |ratio - 1|.
        """
        shared = Shared(tf.nest.map_structure(flat, inputs.samples), inputs.moments[index], index)
        metrics: dict[str, tf.Tensor] = {}
        for name in steps:
            outcome = self.learning.steps[name].step(inputs.starts[index], shared, inputs.scale)
            metrics |= outcome.metrics
        return metrics, outcome.errors

    def _minibatches_a_call(self) -> int:
        """The number of minibatches of one compiled call.

        It depends only on settings and the device, because it must be equal on all workers. TensorFlow
        matches the all-reduces by loop iteration, so loops of different lengths would wait for ever.
        """
        work = _GPU_WORK_A_CALL if self._runtime.uses_gpu else _WORK_A_CALL
        return max(1, work // (self._config.rows_per_step * self.num_parameters))

    # One minibatch

    def _minibatch_loss(self, weights: Weights, starts: tf.Tensor, shared: Shared) -> Losses:
        """The losses of the samples of the sequences that begin at rows int32 [q] of the rollout's arrays."""
        found = self._losses(weights, self._minibatch(starts, shared), shared.index)
        if isinstance(found, Losses):
            return found
        loss, metrics, ratio = found  # an earlier form: metrics in the order of `means`, and the ratio
        if len(metrics) != len(self.means):
            raise UserError(
                f"{type(self).__name__} has {len(self.means)} `means`, and its `_losses` returns "
                f"{len(metrics)} metrics."
            )
        return Losses(loss, dict(zip(self.means, metrics, strict=True)), tf.abs(ratio - 1.0))

    def _minibatch(self, starts: tf.Tensor, shared: Shared) -> Samples:
        """The samples of the sequences that begin at rows int32 [q], with normalised advantages."""
        rows = starts if self._config.sequence_steps == 1 else self._rows(starts[None])[0]
        samples = self.gather(shared.rollout, rows)
        baseline, deviation = shared.moments[0], shared.moments[1]
        advantages = (samples.advantages - self._weighted(baseline, samples)) / (deviation + 1e-8)
        memory = None
        if self.network.state_size:
            remembered, keep = samples.memory
            memory = self.network.sequences(remembered, keep, starts.shape[0])
        elif self.network.dropped_size:
            memory = self.network.factors(samples.memory[0])
        return samples._replace(advantages=advantages, memory=memory)

    def _losses(
        self, weights: Weights, samples: Samples, index: tf.Tensor, outputs: Sequence[tf.Tensor] | None = None
    ) -> Losses:
        """The loss of each sample, its metrics, and its |ratio - 1| as `errors`; [b] each.

        `index` is the number of the minibatch in the update, int32. `outputs` are those of the network for
        these samples, if they are known already.
        """
        config = self._config
        parameters, values, *_ = outputs or self.network.outputs(
            weights, samples.observations, samples.memory
        )
        policy = self.network.distribution(parameters)
        log_ratio = policy.log_prob(samples.actions) - samples.log_probs
        ratio = tf.exp(log_ratio)
        policy_loss = losses.clipped_surrogate(ratio, samples.advantages, config.clip_ratio)
        value_loss = self._value_loss(values, samples.values, samples.targets)
        entropy = policy.entropy()
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": losses.approx_kl(log_ratio),
            "clip_fraction": tf.cast(tf.abs(ratio - 1.0) > config.clip_ratio, tf.float32),
        }
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        return Losses(loss, metrics, tf.abs(ratio - 1.0))

    def _value_loss(self, values: tf.Tensor, old_values: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        config = self._config
        if config.value_loss == "huber":
            return losses.huber_value_error(values, targets)
        if config.clip_value:
            return losses.clipped_value_error(values, old_values, targets, config.clip_ratio)
        return losses.value_error(values, targets)

    def _rows(self, starts: tf.Tensor) -> tf.Tensor:
        """Rows [n, L * q] of all steps of sequences from the rows of their first steps, int32 [n, q]."""
        if self._config.sequence_steps == 1:
            return starts
        num_envs = self._config.num_envs // self._runtime.replicas
        rows = starts[:, None] + num_envs * tf.range(self._config.sequence_steps)[:, None]
        return tf.reshape(rows, (starts.shape[0], -1))

    # The samples of an update

    def _samples(self, rollout: Rollout, number: int) -> Samples:
        """The samples of a rollout for each replica, without advantages and targets."""
        per_replica = self._runtime.per_replica
        samples = Samples(
            observations=per_replica(rollout.observations[:, : self._config.num_steps]),
            actions=per_replica(rollout.actions),
            log_probs=per_replica(rollout.extras["log_prob"]),
            values=per_replica(rollout.extras["value"]),
            advantages=(),
            targets=(),
            extra=tuple(map(per_replica, self._extra_inputs(rollout, number))),
            memory=(),
        )
        if rollout.memory is not None:
            memory = rollout.started_memory[:, :-1], rollout.keeps[:, :-1]
            samples = samples._replace(memory=tuple(map(per_replica, memory)))
        if self.network.dropped_size:
            samples = samples._replace(memory=(per_replica(self._kept_features(rollout, number)),))
        return samples

    def _kept_features(self, rollout: Rollout, number: int) -> np.ndarray:
        """True for the features that dropout kept when the rollout was collected, bool [R, T, B, D]."""
        envs = self._runtime.local_envs(self._config.num_envs)
        return rollout.by_replica(self.network.kept(self.acting.draw(number, envs)))

    def _minibatches(self, number: int) -> np.ndarray:
        """The first rows of all sequences of each gradient step, int32 [R, E * M, q].

        They are rows of a replica's [T * B] arrays. Without memory, a sequence is a single step.
        """
        config, runtime = self._config, self._runtime
        envs = runtime.local_envs(config.num_envs)
        share = len(envs) // runtime.local_replicas
        each = config.num_steps // config.sequence_steps
        block = config.envs_per_block if self.network.state_size else 1
        rows = []
        for begin in range(0, len(envs), share):
            found = rng.minibatch_sequences(
                config.seed,
                number,
                envs[begin : begin + share],
                each=each,
                epochs=config.minibatch_epochs,
                num_minibatches=config.steps_per_epoch,
                size=config.rows_per_step // config.sequence_steps * block // config.num_envs,
                block=block,
            )
            env, place = np.divmod(found, each)
            rows.append(place * (config.sequence_steps * share) + env)
        return np.stack(rows).reshape(len(rows), self.gradient_steps_per_update, -1)

    # Advantages and value targets

    def _first_estimates(self, rollout: Rollout, starts: Any) -> tuple[Estimates, float]:
        """Estimates by the values of the weights that acted, and the explained variance of the targets."""
        values = np.concatenate([rollout.extras["value"], self.last_values(rollout)[:, None]], axis=1)
        estimated = self._estimates(rollout, values, starts)
        explained, mean_target = self._runtime.first(estimated.target_statistics).numpy().tolist()
        if rollout.levels is not None:
            local = self._runtime.local_results(estimated.advantages)
            self.advantages = np.stack([x.numpy() for x in local])
        self._begin_update(mean_target)
        return estimated, explained

    def _estimates(self, rollout: Rollout, values: np.ndarray, starts: Any) -> Estimates:
        """Generalised advantage estimates of a rollout, and one small collective.

        Args:
          rollout: the steps of the envs.
          values: float32 [R, T + 1, B], by the weights that acted, or by the present weights if advantages
            are computed again. The values of o_T and of the last observations of truncated episodes always
            come from the present weights.
          starts: the result of `_minibatches` for each replica.
        """
        final_values = self.final_values(rollout)
        fields = (rollout.rewards, rollout.first, rollout.truncated, values[:, :-1], values[:, -1])
        per_replica = self._runtime.per_replica
        correction = map(per_replica, self._correction(rollout))
        return self._estimate(*map(per_replica, (*fields, final_values)), starts, *correction)

    @compiled()
    def _estimate(self, *fields: Any) -> Any:
        return self._runtime.strategy.run(self._estimate_on_replica, args=fields)

    def _estimate_on_replica(
        self,
        rewards: tf.Tensor,  # [T, B], like the next three
        first: tf.Tensor,
        truncated: tf.Tensor,
        values: tf.Tensor,
        last_values: tf.Tensor,  # [B]
        final_values: tf.Tensor,  # [T, B]
        starts: tf.Tensor,  # of `_minibatches`, [E * M, q]
        *correction: tf.Tensor,  # of `_correction`, [T, B]
    ) -> Estimates:
        config = self._config
        rewards, discounts = returns.rewards_and_discounts(
            rewards, first, truncated, final_values, gamma=config.gamma
        )
        advantages, targets = self._advantages(rewards, discounts, values, last_values, *correction)
        # float64, because sums of squares must not depend on the distribution of samples over replicas.
        weighed = advantages, self._advantage_weights(advantages, *correction)
        shuffled, weights = (tf.cast(tf.gather(flat(x), self._rows(starts)), tf.float64) for x in weighed)
        wide_targets, errors = tf.cast(targets, tf.float64), tf.cast(targets - values, tf.float64)
        sums = [_two_sums(wide_targets, (0, 1)), _two_sums(errors, (0, 1))]
        sums += [_two_sums(shuffled, 1), tf.reduce_sum(weights, 1)]  # of minibatches, [E * M, b]
        count = config.rows_per_step
        if config.normalize_advantages == "batch":
            wide, weights = (tf.cast(x, tf.float64) for x in weighed)
            sums[2:] = [_two_sums(wide, (0, 1))[None], tf.reduce_sum(weights)[None]]
            count = config.steps_per_update
        of_targets, of_errors, of_advantages, weight = sum_replicas(sums)
        mean, variance = _moments(of_advantages, count)
        moments = tf.stack([mean * (count / weight), tf.sqrt(variance)], axis=-1)
        moments = tf.cast(tf.broadcast_to(moments, (starts.shape[0], 2)), tf.float32)
        mean_target, varies = _moments(of_targets, config.steps_per_update)
        _, unexplained = _moments(of_errors, config.steps_per_update)
        # For constant targets, varying values score 0 (scikit-learn's convention).
        share = tf.where(varies > 0, tf.math.divide_no_nan(unexplained, varies), tf.sign(unexplained))
        target_statistics = tf.cast(tf.stack([1.0 - share, mean_target]), tf.float32)
        return Estimates(advantages, targets, moments, target_statistics)

    # A subclass may override these

    def _advantages(
        self,
        rewards: tf.Tensor,  # [T, B], like the next two
        discounts: tf.Tensor,
        values: tf.Tensor,
        last_values: tf.Tensor,  # [B]
        *correction: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The advantages and value targets of a replica's rollout, float32 [T, B] each: GAE."""
        return self._gae(rewards, discounts, values, last_values, lam=self._config.gae_lambda)

    def _advantage_weights(self, advantages: tf.Tensor, *correction: tf.Tensor) -> tf.Tensor:
        """The importance weights that the advantages contain, float32 [T, B]: 1.

        The normalisation subtracts a baseline b times these weights, so that it does not change the expected
        gradient: sum(advantages) = b sum(weights).
        """
        return tf.ones_like(advantages)

    def _weighted(self, baseline: tf.Tensor, samples: Samples) -> tf.Tensor:
        """The baseline times the same weights of a minibatch, float32 [b] or []."""
        return baseline

    def _correction(self, rollout: Rollout) -> tuple[np.ndarray, ...]:
        """Further inputs of `_advantages`, [R, T, B] each."""
        return ()

    def _begin_update(self, mean_target: float) -> None:
        """Called before the first gradient step with the mean value target of all replicas."""

    def _extra_inputs(self, rollout: Rollout, number: int) -> tuple[np.ndarray, ...]:
        """Further inputs of the losses for each sample, [R, T, B, ...] each."""
        return ()
