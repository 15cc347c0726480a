"""The common part of DQN, DDPG, TD3 and SAC: gradient steps on batches from replay, in a compiled loop.

An algorithm describes its gradient steps, and names the networks that have target networks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np

from tfrl.algorithms.algorithm import Agent, check_finite
from tfrl.algorithms.exploring import ExploringNetwork
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, POSITIVE, Range, flag
from tfrl.config.distributed import DistributedSettings
from tfrl.config.run import ENVS, ScheduledLearning
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Box
from tfrl.experience.replay import Batch, BufferSettings, in_words
from tfrl.networks.weights import AGENT_PREFIX, weights_of
from tfrl.ops import q_learning
from tfrl.ops.graph import asynchronous, tf, tf_function
from tfrl.ops.optimizers import learning_rate
from tfrl.workers.data_parallel import TARGET, DataParallel, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

_PART_ROWS = 128
_ENVS_OF_ACTORS = 8
_MAX_AT_ONCE = 256  # gradient steps; more in a call would not be faster
_MAX_AT_ONCE_OF_IMAGES = 16  # a stop waits for the end of a call, and such a step may take seconds


@dataclass(frozen=True)
class ReplayLearning(ScheduledLearning):
    """Experience replay and the gradient steps from it."""

    num_envs: Annotated[int | None, ENVS] = None  # type: ignore[assignment]  # complete() fills it in
    """Envs, all workers together; must be divisible by the number of replicas. None: 1. With --actors:
    8, or one for each actor if --actors does not divide 8. A resumed run keeps its number."""
    iteration_steps: Annotated[int, COUNT] = 1000
    """Env steps of an iteration, all workers together: one row of progress.csv, and the unit of --eval-every
    and --checkpoint-every. A stop saves the run within the iteration."""
    replay_size: Annotated[int, Range(2, 1e12)] = 1_000_000
    """Transitions in the replay, all workers together; each env has an equal share."""
    learning_starts: Annotated[int, COUNT] = 5000
    """Env steps with random actions before the first gradient step."""
    batch_size: Annotated[int, COUNT] = 256
    """Transitions of a gradient step, all workers together. Each env gives the same number."""
    updates_per_step: Annotated[float, Range(0, 1000, above=True)] = 1.0
    """Gradient steps for each env step; may be a fraction."""
    train_every: Annotated[int, COUNT] = 1
    """Learn once in this many env steps, and then take all gradient steps that are due. Several at once are
    faster. --updates-per-step still decides their number."""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """Rewards that a target sums before it adds the critic's value (n-step return)."""
    critic_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate of the critics, for algorithms with an actor; None: --lr."""
    huber_delta: Annotated[float | None, POSITIVE] = None
    """A critic's loss grows linearly beyond this error (Huber); None: half the squared error."""
    max_grad_norm: Annotated[float | None, POSITIVE] = None
    """Clip the gradient of each network to this norm; None: no clipping."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Update of a target network: target += tau (learned - target). 1: a copy."""
    target_every: Annotated[int | None, COUNT] = None
    """Gradient steps between updates of the target networks. None: 1; with DDPG and TD3, --policy-delay."""
    dataset: str | None = None
    """A set of recorded episodes (docs/offline.md), which gives half of the transitions of each batch. None:
    all are from the replay."""


OF_ENVS: Mapping[str, str] = {
    "Pendulum-v1": "pendulum",
    "InvertedDoublePendulum-v5": "inverted-double-pendulum",
    "InvertedDoublePendulum-v4": "inverted-double-pendulum",
    "MountainCarContinuous-v0": "mountain-car",
    "HalfCheetah-v5": "half-cheetah",
}
"""The default presets of single envs."""


@dataclass(frozen=True)
class ReplaySettings(ReplayLearning, DistributedSettings, BufferSettings):
    """The settings of every algorithm with replay.

    Attributes:
      presets_of_envs: the presets that envs take by themselves.
    """

    presets_of_envs: ClassVar[Mapping[str, str]] = OF_ENVS
    action_spaces: ClassVar[tuple[type[ActionSpec], ...]] = (Box,)
    if TYPE_CHECKING:
        num_envs: int = 1  # complete() has filled it in

    @property
    def steps_per_update(self) -> int:
        """Env steps of one iteration, all workers together."""
        return self.iteration_steps

    @property
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""
        return self.batch_size

    @property
    def part_rows(self) -> int:
        """The number of rows of a part of a batch, the same on any topology.

        The number of parts is the largest power of two, up to 4, that divides --num-envs, or larger if parts
        would be large. It is a power of two, so 1, 2 and 4 replicas add the parts in the same pairs.
        """
        if self.micro_batch:
            return self.micro_batch
        if self.has_one_topology:
            return self.batch_size
        parts = math.gcd(self.num_envs, 4)
        while self.batch_size % (2 * parts) == 0 and self.batch_size // parts > _PART_ROWS:
            parts *= 2
        return self.batch_size // parts

    @property
    def whole_batches(self) -> bool:
        """True if a whole batch is one part, which then uses all cores."""
        return self.has_one_topology

    @property
    def max_gradient_steps_per_call(self) -> int:
        """The largest number of gradient steps of one call, whose batches are in memory together."""
        due = math.ceil(max(self.train_every, self.num_envs) * self.updates_per_step)
        return min(max(1, due), _MAX_AT_ONCE if self.small_network else _MAX_AT_ONCE_OF_IMAGES)

    def gradient_steps_due(self, env_steps: int) -> int:
        """The number of gradient steps that are due after `env_steps` env steps, exactly: 90 x 0.7 is 63."""
        return math.floor((env_steps - self.learning_starts) * Fraction(str(self.updates_per_step)))

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if the envs or a batch do not divide over workers, replicas and parts."""
        super().check_topology(workers, replicas_per_worker)
        share = self.batch_size // (workers * replicas_per_worker)
        if share % self.part_rows:
            raise UserError(
                f"--micro-batch must divide a replica's share of a batch, {share} transitions; got "
                f"{self.part_rows}."
            )

    def default_preset(self) -> str:
        """The default preset of the command: that of the env, if it has one."""
        return self.presets_of_envs.get(self.env, "default")

    def complete(self) -> Self:
        """The settings with all derived values, such as the number of envs."""
        shared = self.actors and _ENVS_OF_ACTORS % self.actors == 0
        chosen = _ENVS_OF_ACTORS if shared else self.actors or 1
        config = self if self.num_envs is not None else dataclasses.replace(self, num_envs=chosen)
        return super(ReplaySettings, config).complete()

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        for name in ("batch_size", "iteration_steps", "replay_size"):
            value = getattr(self, name)
            if value % self.num_envs:
                near = value // self.num_envs * self.num_envs or self.num_envs
                raise UserError(
                    f"{flag(name)} must be divisible by --num-envs {self.num_envs}; got {value}; use {near}."
                )
        rows = self.replay_size // self.num_envs
        if self.n_step > min(rows, self.learning_starts // self.num_envs):
            raise UserError(
                f"--replay-size {self.replay_size} and --learning-starts {self.learning_starts} must each "
                f"hold --n-step {self.n_step} steps of each of --num-envs {self.num_envs}."
            )
        if self.actors and not self.lag:
            raise UserError(
                f"--actors {self.actors} needs a --lag of 1 or more with {self.algorithm}: without a lag, "
                "its gradient steps come between env steps."
            )
        if self.dataset is not None and self.batch_size // self.num_envs % 2:
            raise UserError(
                f"--dataset gives half of each batch: --batch-size must be divisible by twice --num-envs "
                f"{self.num_envs}; got {self.batch_size}."
            )
        if self.dataset is not None and self.prioritized_replay:
            raise UserError("--dataset cannot be used with --prioritized, which draws all from the replay.")
        if self.batch_size > self.replay_size:
            raise UserError(
                f"--batch-size must be at most --replay-size {self.replay_size}; got {self.batch_size}."
            )
        steps = self.num_updates * self.iteration_steps // self.train_every * self.train_every
        if self.gradient_steps_due(steps) < 1:
            raise UserError(
                f"--learning-starts {self.learning_starts}, --train-every {self.train_every} and "
                f"--updates-per-step {self.updates_per_step:g} leave no gradient step in --total-steps "
                f"{self.total_steps}."
            )


_FLOATS = "floats"  # a field that joins all float32 fields of a batch


class Learned(NamedTuple):
    """The results of gradient steps, one on each of `count` batches.

    Attributes:
      metrics: the sums of the metrics over these steps by name, equal on every worker.
      rows: the rows of the replay that the batches have, int64 [count, B, b].
      errors: the error of each transition, float32 [count, B, b].
    """

    metrics: dict[str, float]
    rows: np.ndarray
    errors: np.ndarray


class PendingSteps:
    """Gradient steps that have begun, and that may still be under way.

    Args:
      agent: takes the steps.
      results: the tensors of `ReplayAgent._take_steps`.
      rows: the rows of the replay that the batches have, int64 [count, B, b].
      steps_done: the number of earlier gradient steps.

    Attributes:
      count: the number of these gradient steps.
    """

    def __init__(
        self, agent: ReplayAgent, results: tuple[Any, ...], rows: np.ndarray, steps_done: int
    ) -> None:
        self._agent, self._results, self._rows, self._steps_done = agent, results, rows, steps_done
        self.count = len(rows)
        self._learned: Learned | None = None

    def wait(self) -> Learned:
        """Waits for the gradient steps, after which the agent acts with the new weights.

        A second call returns the same. Raises TrainingError if a loss is not finite, which all replicas see
        at the same step.
        """
        if self._learned is None:
            done, sums, errors, vectors = self._results
            metrics = dict(zip(self._agent.reported, sums.numpy().tolist(), strict=True))
            check_finite(metrics.items(), f" (gradient step {self._steps_done + int(done)})")
            if self._agent.acts_meanwhile:
                self._agent.act_with(vectors)
            count, _, each = self._rows.shape
            parts = [e.numpy()[:count].reshape(count, -1, each) for e in errors]
            metrics = {f"train/{name}": value for name, value in metrics.items()}
            self._learned = Learned(metrics, self._rows, np.concatenate(parts, axis=1))
        return self._learned


Rows = Mapping[str, Any]
"""The tensors [b, ...] of a batch by the fields of `tfrl.experience.replay.Batch`, and `noise`."""


class ReplayAgent(Agent):
    """Networks, target networks and optimizers under a strategy; `tfrl.training.off_policy` calls it.

    A subclass has `target_networks` and `make_steps`, and perhaps `update_noise`.

    Attributes:
      steps: the gradient steps on one batch by name, in order.
      reported: the names of their metrics, in order.
      acts_meanwhile: NumPy acts while gradient steps are under way, with the weights before them.
      compiles_parts: XLA compiles the parts of a batch on CPUs, if the network is small. With a single env,
        whole gradient steps are one XLA program in any case.
    """

    compiles_parts: ClassVar[bool] = True
    _config: ReplaySettings
    acting: ExploringNetwork

    def __init__(self, config: ReplaySettings, runtime: Runtime) -> None:
        super().__init__(config, runtime)
        self.steps = self.make_steps()
        first, *_ = self.steps
        # Its errors are the priorities.
        self.steps[first] = dataclasses.replace(self.steps[first], errors="rows")
        self.reported = [name for step in self.steps.values() for name in step.metrics]
        self.metric_names = (*(f"train/{name}" for name in self.reported), *self.progress(0))
        on_gpu = runtime.uses_gpu
        self.learning = DataParallel(
            runtime,
            self.initial(),
            self.steps,
            targets=self.target_networks,
            tau=config.tau,
            compiled=on_gpu or config.small_network,
            compiles_parts=on_gpu or self.compiles_parts,
        )
        self.acting = ExploringNetwork(
            self.network,
            config,
            functools.partial(self.learning.weights, self.network.acting),
            on_gpu=on_gpu,
            at_once=runtime.parts_at_once * runtime.local_replicas,
        )
        self.acts_meanwhile = config.has_one_topology and self.acting.training_policy is not None
        self._compiled_steps = tf_function(
            self._take_steps, jit_compile=config.has_one_topology and runtime.is_one_cpu
        )
        self._traced_steps: Callable[..., Any] | None = None
        self._pending: PendingSteps | None = None  # the last call
        observation, action = registry.specs(config)
        fields = dict.fromkeys(("observation", "next_observation"), observation) | {"action": action}
        shapes = {name: spec.shape for name, spec in fields.items() if spec.dtype == "float32"}
        shapes |= dict.fromkeys(("reward", "discount", "weight"), ()) | {"noise": (self.update_noise,)}
        # The shapes of the float32 fields of a transition, in the order of a batch's fields.
        self._float_shapes = {name: shapes[name] for name in (*Batch._fields, "noise") if name in shapes}

    def make_steps(self) -> dict[str, GradientStep]:
        """Describes the gradient steps on one batch by name, in order.

        The loss of the first one also gives `errors`, which are the priorities.
        """
        raise NotImplementedError

    @property
    def target_networks(self) -> tuple[str, ...]:
        """The names of the networks that have a target network."""
        return ()

    @property
    def target_every(self) -> int:
        """Gradient steps between two moves of the target networks."""
        return self._config.target_every or 1

    @property
    def update_noise(self) -> int:
        """The number of standard normal numbers of each row of a batch."""
        return 0

    def make_step(
        self,
        learned: Sequence[str],
        loss: Callable[[Weights, Rows], Losses],
        metrics: Sequence[str],
        *,
        rates: Sequence[float],
        every: int = 1,
    ) -> GradientStep:
        """Describes a gradient step on a whole batch, by the attributes of `GradientStep`."""
        config = self._config
        return GradientStep(
            learned=tuple(learned),
            rates=tuple(rates),
            loss=lambda weights, rows, _: loss(weights, rows),
            metrics=tuple(metrics),
            optimizer=config.make_optimizer(),
            batch_size=config.batch_size,
            part_rows=config.part_rows,
            max_norm=config.max_grad_norm,
            clips_each=True,
            every=every,
        )

    def td_losses(self, qs: Sequence[tf.Tensor], target: tf.Tensor, rows: Rows) -> Losses:
        """The losses of critics.

        Args:
          qs: Q(o, a) of the actions taken, by each critic, float32 [b].
          target: the target y of all critics, float32 [b].
          rows: the transitions.

        Returns:
          The sum of the critics' losses. The metric q_loss is their mean; q_mean and the errors, y - Q, are
          those of the first critic.
        """
        delta = self._config.huber_delta
        loss = tf.add_n([q_learning.td_loss(q, target, rows["weight"], huber_delta=delta) for q in qs])
        return Losses(loss, {"q_loss": loss / len(qs), "q_mean": qs[0]}, target - qs[0])

    def initial(self) -> dict[str, np.ndarray]:
        """The initial vectors: those of the networks, and others that are learned."""
        return self.network.initial()

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of the learning, by title."""
        config = self._config
        envs = f"{config.num_envs}, random for {config.learning_starts:,} env steps"
        each = (
            f"{config.updates_per_step:g} gradient steps an env step, {config.batch_size:,} transitions each"
        )
        return {"envs": envs, "learning": each, "replay": in_words(config)}

    def concern(self, metrics: Mapping[str, float]) -> str | None:
        """A sentence for the user about what the metrics of an iteration show, or None."""
        return None

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads the weights of another run, and its target networks and optimizer if they are there.

        Raises ValueError or KeyError like `set_state`.
        """
        joined = self.network.join(weights_of(state))
        targets = {AGENT_PREFIX + TARGET + name: joined[name] for name in self.target_networks}
        super().begin_with({**targets, **state})

    # Learning

    def learning_in_background(self) -> contextlib.AbstractContextManager[None]:
        """Within it, `begin_gradient_steps` does not wait if NumPy acts meanwhile, on a CPU."""
        in_background = self.acts_meanwhile and self._runtime.is_one_cpu
        return asynchronous() if in_background else contextlib.nullcontext()

    def begin_gradient_steps(
        self, batch: Batch, noise: np.ndarray, *, steps_done: int, count: int, iteration: int
    ) -> PendingSteps:
        """Starts gradient steps on K batches of this worker's envs; does not wait for them on a CPU if NumPy
        acts meanwhile.

        These gradient steps follow those of the call before, whose end it waits for.

        With a single env, a small network acts in NumPy, and acts with the weights before these gradient
        steps until the end of `PendingSteps.wait`. Otherwise the agent acts with the newest weights at once.

        Args:
          batch: the batches.
          noise: standard normal numbers, float32 [K, B, b, update_noise].
          steps_done: the number of earlier gradient steps.
          count: how many to take, one for each of the first batches.
          iteration: decides the learning rate.

        Raises TrainingError like `PendingSteps.wait`.
        """
        config = self._config
        fields = batch._asdict() | {"noise": noise}
        del fields["rows"]
        joined = self._join(fields).items()
        rows = {name: self._runtime.per_replica(self._by_replica(x)) for name, x in joined}
        scale = learning_rate(config.lr_schedule, 1.0, iteration, config.num_updates)
        arguments = (rows, tf.constant([steps_done, count]), tf.constant(scale, tf.float32))
        if self._traced_steps is None:
            # A run has one trace, and TensorFlow's own search for it takes longer than a small network.
            # With --eager it has none.
            self._traced_steps = self._compiled_steps
            if not tf.config.functions_run_eagerly():
                self._traced_steps = self._compiled_steps.get_concrete_function(*arguments)
        if self.acts_meanwhile:
            self.acting.keep_weights()
        results = self._traced_steps(*arguments)  # they follow those of the call before
        if self._pending is not None:
            self._pending.wait()
        if not self.acts_meanwhile:
            self.act_with(results[-1])
        self._pending = PendingSteps(self, results, batch.rows[:count], steps_done)
        return self._pending

    def act_with(self, vectors: Weights) -> None:
        """Acts with the weights after gradient steps; `vectors` are those of `_vectors_to_act`."""
        if self.acting.training_policy is not None:
            self.acting.keep_weights({name: vector.numpy() for name, vector in vectors.items()})
        else:
            self.acting.forget_weights()

    def progress(self, env_steps: int) -> dict[str, float]:
        """The metrics that depend only on the number of env steps: the learning rate."""
        config = self._config
        iteration = math.ceil(env_steps / config.iteration_steps) - 1
        return {
            "train/learning_rate": learning_rate(config.lr_schedule, config.lr, iteration, config.num_updates)
        }

    def _join(self, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Joins the float32 fields among fields [K, B, b, ...]: each array costs time, its numbers little."""
        flat = [
            fields[n].reshape(*fields[n].shape[:3], math.prod(shape))
            for n, shape in self._float_shapes.items()
        ]
        others = {name: x for name, x in fields.items() if name not in self._float_shapes}
        return others | {_FLOATS: np.concatenate(flat, axis=3)}

    def _separate(self, rows: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The fields of one batch, [rows, ...] each; the inverse of `_join`."""
        others, whole = dict(rows), rows[_FLOATS]
        del others[_FLOATS]
        shapes = self._float_shapes
        parts = tf.split(whole, [math.prod(shape) for shape in shapes.values()], axis=1)
        return others | {
            name: tf.reshape(part, (whole.shape[0], *shape))
            for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }

    def _by_replica(self, x: np.ndarray) -> np.ndarray:
        """[K, B, b, ...] as [R, K, rows, ...] for R replicas."""
        return x.reshape(len(x), self._runtime.local_replicas, -1, *x.shape[3:]).swapaxes(0, 1)

    def _take_steps(
        self, rows: Mapping[str, Any], numbers: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], Weights]:
        """The gradient steps of one call, from rows [K, a replica's rows, ...].

        `numbers` are the number of earlier gradient steps, and how many to take. The results are how many
        were taken, the sums of the metrics, the errors by replica, and the new vectors if NumPy acts. The
        sums are one tensor, in the order of `reported`: a call with many small results takes longer.
        """
        steps_done, count = numbers[0], numbers[1]
        gradient_step = tf.autograph.experimental.do_not_convert(self._gradient_step)
        batches, size = self._runtime.first(rows[_FLOATS]).shape[:2]
        if batches == 1:  # a loop costs as much as the step of a small network
            metrics, kept = gradient_step(rows, tf.constant(0), steps_done, scale)
            means = tf.stack([metrics[name] for name in self.reported])
            return tf.constant(1), means, [k[None] for k in kept], self._vectors_to_act()
        done, sums, finite = tf.constant(0), tf.zeros(len(self.reported)), tf.constant(True)
        errors = [tf.zeros((batches, size)) for _ in range(self._runtime.local_replicas)]
        while done < count and finite:
            metrics, kept = gradient_step(rows, done, steps_done + done, scale)
            pairs = zip(errors, kept, strict=True)
            errors = [tf.tensor_scatter_nd_update(e, [[done]], [k]) for e, k in pairs]
            means = tf.stack([metrics[name] for name in self.reported])
            # Summed over replicas, so all hold the same numbers, and all workers stop together.
            sums, finite = sums + means, tf.reduce_all(tf.math.is_finite(means))
            done += 1
        return done, sums, errors, self._vectors_to_act()

    def _vectors_to_act(self) -> Weights:
        """The present vectors if NumPy acts: reading them after the call takes longer than the action."""
        return self.learning.weights(self.network.acting) if self.acting.training_policy is not None else {}

    def _gradient_step(
        self, rows: Mapping[str, Any], number: tf.Tensor, steps_done: tf.Tensor, scale: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], Sequence[tf.Tensor]]:
        """All steps of `make_steps` on batch `number`; the means of their metrics, each replica's errors."""
        run, first = self._runtime.strategy.run, self._runtime.first
        metrics: dict[str, tf.Tensor] = {}
        errors: Sequence[tf.Tensor] = ()
        for name, step in self.steps.items():
            take = functools.partial(run, self._step_on_replica, args=(name, rows, number, scale))
            if step.every == 1:
                means, kept = take()
                metrics |= {metric: first(mean) for metric, mean in means.items()}
                errors = errors or self._runtime.local_results(kept)  # of the first step
            else:
                metrics |= tf.cond(
                    (steps_done + 1) % step.every == 0,
                    lambda take=take, every=step.every: {
                        metric: first(mean) * float(every) for metric, mean in take()[0].items()
                    },
                    lambda step=step: {metric: tf.constant(0.0) for metric in step.metrics},
                )
        if self.target_every == 1:
            run(self.learning.move_targets)
        else:
            due = (steps_done + 1) % self.target_every == 0
            tf.cond(due, lambda: run(self.learning.move_targets), lambda: None)
        return metrics, errors

    def _step_on_replica(
        self, name: str, rows: Rows, number: tf.Tensor, scale: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], Any]:
        """Means of the metrics, and the errors of this replica's rows."""
        batch = self._separate({field: x[number] for field, x in rows.items()})
        outcome = self.learning.steps[name].step(batch, (), scale)
        return dict(outcome.metrics), outcome.errors
