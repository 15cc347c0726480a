"""The common part of DQN, DDPG, TD3 and SAC: gradient steps on batches from replay, in a compiled loop.

An algorithm gives its losses, one gradient step for each, and names the networks that have target networks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from tfrl import networks
from tfrl.algorithms.acting import ActingNetwork
from tfrl.algorithms.actor_critic import num_parameters_of, set_state_of, state_of
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import flag
from tfrl.cli.settings import COUNT, POSITIVE, Range
from tfrl.config.actors import DistributedSettings
from tfrl.config.run import ENVS, ScheduledLearning
from tfrl.envs import registry
from tfrl.envs.spec import ActionSpec, Box, Discrete
from tfrl.experience.replay import Batch, BufferSettings, in_words
from tfrl.networks.weights import weights_of
from tfrl.ops import optimizers
from tfrl.ops.graph import asynchronous, tf
from tfrl.ops.schedules import learning_rate
from tfrl.workers.data_parallel import TARGET, DataParallel, GradientStep, Losses, Weights
from tfrl.workers.strategy import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

_PART_ROWS = 128
_ENVS_OF_ACTORS = 8
_FOR_SPACES = {Discrete: "dqn or sac", Box: "sac, td3 or ddpg"}  # other algorithms, for the advice
_MOST_AT_ONCE = 256  # gradient steps; more in a call would not be faster


@dataclass(frozen=True)
class Replay(ScheduledLearning):
    """Experience replay and the gradient steps from it."""

    num_envs: Annotated[int | None, ENVS] = None  # type: ignore[assignment]  # complete() fills it in
    """Envs, all workers together; must be divisible by the number of replicas. None: 1; with --actors 8, or
    one for each actor if --actors does not divide 8. A resumed run keeps its number."""
    iteration_steps: Annotated[int, COUNT] = 1000
    """Env steps of an iteration, all workers together: one row of progress.csv, and the unit of --eval-every
    and --checkpoint-every."""
    replay_size: Annotated[int, Range(2, 1e12)] = 1_000_000
    """Transitions in the replay, all workers together; each env has an equal share."""
    learning_starts: Annotated[int, COUNT] = 5000
    """Env steps with random actions before the first gradient step."""
    batch_size: Annotated[int, COUNT] = 256
    """Transitions of a gradient step, all workers together: the same number of each env."""
    updates_per_step: Annotated[float, Range(0, 1000, above=True)] = 1.0
    """Gradient steps for each env step; may be a fraction."""
    train_every: Annotated[int, COUNT] = 1
    """Env steps between calls of the learner. A call takes all gradient steps that are due, which is faster.
    Their number stays --updates-per-step for each env step."""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """Rewards in an n-step return."""
    critic_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate of the critics, for algorithms with an actor; None: --lr."""
    huber_delta: Annotated[float | None, POSITIVE] = None
    """A critic's loss grows linearly beyond this error (Huber); None: half the squared error."""
    max_grad_norm: Annotated[float | None, POSITIVE] = None
    """The gradient of each network is clipped to this norm; None: no clipping."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Step of a target network towards the learned network: target += tau (learned - target). 1: a copy."""
    target_every: Annotated[int | None, COUNT] = None
    """Gradient steps between two steps of the target networks. None: 1; with DDPG and TD3, as for the
    actor."""


DEFAULTS: Mapping[str, Any] = {
    "total_steps": 100_000,
    "torso": "auto",
    "hidden": "256,256",
    "activation": "relu",
    "precision": "float32",
    "eval_episodes": 64,
    "eval_greedy": True,
}
"""The settings that all presets of these algorithms begin with."""

_CHEETAH = {**DEFAULTS, "env": "HalfCheetah-v5", "total_steps": 1_000_000}

TASKS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULTS,
    "pendulum": {
        **DEFAULTS,
        "env": "Pendulum-v1",
        "total_steps": 20_000,
        "learning_starts": 500,
        "train_every": 16,
        "batch_size": 128,
        "lr": 1e-3,
        "gamma": 0.98,
        "hidden": "64,64",
        "replay_size": 20_000,
    },
    "inverted-double-pendulum": {
        **DEFAULTS,
        "env": "InvertedDoublePendulum-v5",
        "learning_starts": 1000,
        "train_every": 8,
        "replay_size": 100_000,
    },
    "mountain-car": {
        **DEFAULTS,
        "env": "MountainCarContinuous-v0",
        "total_steps": 50_000,
        "learning_starts": 1000,
        "train_every": 32,
        "gamma": 0.9999,
        "tau": 0.01,
        # A car that is pushed now left, now right, stays in its valley.
        "noise_correlation": 0.98,
        "hidden": "64,64",
    },
    "half-cheetah": {**_CHEETAH, "train_every": 8},
    "cleanrl": _CHEETAH,
}
"""The settings that each preset changes in the defaults."""

SUMMARIES: Mapping[str, str] = {
    "default": "for any env",
    "pendulum": "for Pendulum-v1, which uses it by default",
    "inverted-double-pendulum": "for InvertedDoublePendulum-v5, which uses it by default",
    "mountain-car": "for MountainCarContinuous-v0, which uses it by default",
    "half-cheetah": "for HalfCheetah-v5, which uses it by default",
    "cleanrl": "CleanRL's settings for HalfCheetah-v5",
}

OF_ENVS: Mapping[str, str] = {
    "Pendulum-v1": "pendulum",
    "InvertedDoublePendulum-v5": "inverted-double-pendulum",
    "InvertedDoublePendulum-v4": "inverted-double-pendulum",
    "MountainCarContinuous-v0": "mountain-car",
    "HalfCheetah-v5": "half-cheetah",
}
"""The default presets of single envs."""


@dataclass(frozen=True)
class ReplaySettings(Replay, DistributedSettings, BufferSettings):
    """The settings of every algorithm with replay.

    Attributes:
      presets_of_envs: the presets that envs take by themselves.
      action_spaces: the action spaces that the algorithm is for.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = TASKS
    preset_summaries: ClassVar[Mapping[str, str]] = SUMMARIES
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
        """Rows of a batch whose gradients are taken at once, the same on any topology.

        As many parts as there may be replicas, four at most, and more where they would be large. Sums of a
        power of two of parts are added in the same pairs on 1, 2 and 4 replicas.
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
    def in_parts(self) -> bool:
        """False where a whole batch is one part, which then uses all cores."""
        return not self.has_one_topology

    @property
    def most_updates(self) -> int:
        """Gradient steps that are taken in one go, at most; their batches are in memory together."""
        due = math.ceil(max(self.train_every, self.num_envs) * self.updates_per_step)
        return min(max(1, due), _MOST_AT_ONCE)

    def updates_due(self, env_steps: int) -> int:
        """Gradient steps that are due after so many env steps, exactly: 90 x 0.7 are 63."""
        return math.floor((env_steps - self.learning_starts) * Fraction(str(self.updates_per_step)))

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if the envs, or a replica's share of a batch, do not divide by what there is."""
        super().check_topology(workers, replicas_per_worker)
        share = self.batch_size // (workers * replicas_per_worker)
        if share % self.part_rows:
            raise UserError(
                f"--micro-batch must divide a replica's share of a batch, {share} transitions; got "
                f"{self.part_rows}."
            )

    def default_preset(self) -> str:
        """The preset of a command that names none: the env's own, if there is one."""
        return self.presets_of_envs.get(self.env, "default")

    def complete(self) -> Self:
        """The settings with what follows from others filled in, the number of envs too."""
        shared = self.actors and _ENVS_OF_ACTORS % self.actors == 0
        chosen = _ENVS_OF_ACTORS if shared else self.actors or 1
        config = self if self.num_envs is not None else dataclasses.replace(self, num_envs=chosen)
        return super(ReplaySettings, config).complete()

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine, of those that all have."""
        super().check()
        action = registry.specs(self)[1]
        if not isinstance(action, self.action_spaces):
            needed = " or ".join(space.kind for space in self.action_spaces)
            others = _FOR_SPACES.get(type(action), "ppo")
            raise UserError(
                f"{self.algorithm} needs {needed} actions, and {self.env} has {action.kind} ones; "
                f"take {others}."
            )
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
                f"--n-step {self.n_step} needs as many steps of each of --num-envs {self.num_envs} in "
                f"--replay-size {self.replay_size} and in --learning-starts {self.learning_starts}."
            )
        if self.actors and not self.lag:
            raise UserError(
                f"--actors {self.actors} need a --lag of 1 or more with {self.algorithm}, whose envs are "
                "stepped between gradient steps otherwise."
            )
        if self.batch_size > self.replay_size:
            raise UserError(
                f"--batch-size {self.batch_size} is more than there will ever be: --replay-size is "
                f"{self.replay_size}."
            )
        steps = self.num_updates * self.iteration_steps // self.train_every * self.train_every
        if self.updates_due(steps) < 1:
            raise UserError(
                f"--learning-starts {self.learning_starts}, --train-every {self.train_every} and "
                f"--updates-per-step {self.updates_per_step:g} leave no gradient step in --total-steps "
                f"{self.total_steps}."
            )
        # What fails for one worker fails for more: their shares are fractions of its own.
        self.check_topology(workers=self.learners, replicas_per_worker=max(1, self.replicas))


PendingUpdate = Callable[[], tuple[dict[str, float], np.ndarray]]
"""Waits for gradient steps; sums of their metrics, and errors float32 [K, B, b]."""
_FLOATS = "floats"  # the field of a batch that holds all those of float32

Rows = Mapping[str, Any]
"""Tensors [b, ...] of a batch by field."""


class ReplayAgent:
    """Networks, their slow copies and optimizers under a strategy, as `tfrl.training.off_policy` asks.

    A subclass gives the class attributes and `make_steps`.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.

    Attributes:
      metric_names: as in `tfrl.algorithms.algorithm.Agent`.
      update_noise: standard normal numbers of each row of a batch.
      target_networks: the names of the networks that have one.
      target_every: gradient steps between two moves of these; the algorithm's own, or --target-every.
    """

    metric_names: tuple[str, ...]
    update_noise = 0
    target_networks: tuple[str, ...] = ()
    target_every = 1

    def __init__(self, config: ReplaySettings, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        with runtime.strategy.scope():
            self.network = networks.of_settings(config, runtime.precision)
        self.steps = self.make_steps()
        self.target_every = config.target_every or self.target_every
        on_gpu = runtime.uses_gpu
        self.learning = DataParallel(
            runtime,
            self.initial(),
            self.steps,
            targets=self.target_networks,
            tau=config.tau,
            compiled=on_gpu or config.torso == "mlp",
        )
        self.acting = ActingNetwork(
            self.network,
            lambda: self.learning.weights(self.network.acting),
            config.num_envs,
            on_gpu=on_gpu,
            at_once=runtime.parts_at_once * runtime.local_replicas,
        )
        self._is_one_program = config.has_one_topology and runtime.is_one_cpu
        self._updates = tf.function(self._take_steps, jit_compile=self._is_one_program)
        self._compiled: dict[tuple[tuple[int, ...], ...], Callable] = {}

    def make_steps(self) -> dict[str, GradientStep]:
        """The gradient steps of an update by name, in order; the errors of the first decide priorities.

        It also sets `target_networks` and `update_noise`, if they depend on the network.
        """
        raise NotImplementedError

    def gradient_step(
        self,
        learned: Sequence[str],
        loss: Callable[[Weights, Rows], Losses],
        metrics: Sequence[str],
        *,
        rates: Sequence[float],
        errors: bool = False,
        every: int = 1,
    ) -> GradientStep:
        """A gradient step on a whole batch; arguments are attributes of `GradientStep`."""
        config = self._config
        return GradientStep(
            learned=tuple(learned),
            rates=tuple(rates),
            loss=lambda weights, rows, _: loss(weights, rows),
            metrics=tuple(metrics),
            optimizer=optimizers.of_settings(config),
            batch_rows=config.batch_size,
            part_rows=config.part_rows,
            max_norm=config.max_grad_norm,
            clips_each=True,
            errors="rows" if errors else "",
            every=every,
        )

    def initial(self) -> dict[str, np.ndarray]:
        """The vectors that a run begins with: those of the networks, and what else is learned."""
        return self.network.initial()

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return num_parameters_of(self.network, self.learning)

    @property
    def steps_per_update(self) -> int:
        """Gradient steps of an iteration, once they have begun."""
        return int(self._config.iteration_steps * self._config.updates_per_step)

    @property
    def summary(self) -> dict[str, str]:
        """Descriptions of the learning, by title."""
        config = self._config
        envs = f"{config.num_envs}, random for {config.learning_starts:,} env steps"
        each = (
            f"{config.updates_per_step:g} gradient steps an env step, {config.batch_size:,} transitions each"
        )
        return {"envs": envs, "learning": each, "replay": in_words(config)}

    @property
    def results(self) -> dict[str, object]:
        """Nothing that is not in every run's results.json."""
        return {}

    def begin(self) -> None:
        """There is nothing that a run could start from."""

    def begin_with(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes the weights of another run; its target networks and optimizer where they are there.

        Raises ValueError, KeyError as `set_state`.
        """
        joined = self.network.join(weights_of(state))
        targets = {f"agent/{TARGET}{name}": joined[name] for name in self.target_networks}
        self.set_state({**self.get_state(), **targets, **state})

    # Acting

    def act(self, observations: np.ndarray, noise: np.ndarray, env_steps: int) -> np.ndarray:
        """Exploring actions [B, *shape] of observations [B, *shape], by noise [B, K] and the env steps."""
        return self.acting.act(observations, noise, self._config.exploration(env_steps))

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, K], on one device."""
        return self.acting.sample(observations, noise)

    def greedy(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """The best actions [B, *shape]; ignores `noise`."""
        return self.acting.greedy(observations)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one env's actions, float32 [steps, K]."""
        return self.network.draw_noise(generator, steps)

    # Learning

    def update(
        self, batch: Batch, noise: np.ndarray, *, first: int, count: int, iteration: int
    ) -> tuple[dict[str, float], np.ndarray]:
        """The results of `begin_update`, of the same arguments."""
        return self.begin_update(batch, noise, first=first, count=count, iteration=iteration)()

    def learning_in_background(self) -> contextlib.AbstractContextManager[None]:
        """Within it, `begin_update` returns while the gradient steps go on, where a call is one program."""
        return asynchronous() if self._is_one_program else contextlib.nullcontext()

    def begin_update(
        self, batch: Batch, noise: np.ndarray, *, first: int, count: int, iteration: int
    ) -> PendingUpdate:
        """Starts gradient steps, one for each of the first `count` of K batches.

        Args:
          batch: K batches of this worker's envs.
          noise: standard normal, float32 [K, B, b, update_noise].
          first: the gradient steps before these.
          count: how many to take.
          iteration: decides the learning rate.

        Returns:
          A function that waits for them. It gives the sums of the metrics over these steps, the same on every
          worker, and the errors of each transition, float32 [count, B, b]. It raises TrainingError if a loss
          is not finite, which all replicas see at the same step.
        """
        config = self._config
        scale = learning_rate(config.lr_schedule, 1.0, iteration, config.num_updates)
        fields = batch._asdict() | {"noise": noise}
        del fields["rows"]
        joined = self._join(fields)
        rows = {name: self._runtime.per_replica(self._by_replica(x)) for name, x in joined.items()}
        arguments = (rows, tf.constant([first, count]), tf.constant(scale, tf.float32))
        # Found by the shapes alone: to look at the arguments takes TensorFlow longer than small networks do.
        shapes = tuple(x.shape for x in joined.values())
        if shapes not in self._compiled:
            self._compiled[shapes] = self._updates.get_concrete_function(*arguments)
        done, sums, errors = self._compiled[shapes](*arguments)
        self.acting.forget()

        def results() -> tuple[dict[str, float], np.ndarray]:
            totals = dict(zip(self._reported, sums.numpy().tolist(), strict=True))
            bad = [name for name, value in totals.items() if not np.isfinite(value)]
            if bad:
                raise TrainingError(f"{bad[0]} is not a finite number (gradient step {first + int(done)})")
            rows = [e.numpy()[:count].reshape(count, -1, batch.rows.shape[2]) for e in errors]
            return {f"train/{name}": value for name, value in totals.items()}, np.concatenate(rows, axis=1)

        return results

    def progress(self, env_steps: int) -> dict[str, float]:
        """Metrics that follow from the number of env steps alone: the learning rate."""
        config = self._config
        iteration = env_steps // config.iteration_steps - 1
        return {
            "train/learning_rate": learning_rate(config.lr_schedule, config.lr, iteration, config.num_updates)
        }

    @property
    def _reported(self) -> list[str]:
        return [name for step in self.steps.values() for name in step.metrics]

    def _join(self, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Fields [K, B, b, ...] with those of float32 in one: each array costs more time than its numbers."""
        floats = {name: x for name, x in fields.items() if x.dtype == np.float32}
        self._float_shapes = {name: x.shape[3:] for name, x in floats.items()}
        flat = [x.reshape(*x.shape[:3], math.prod(x.shape[3:])) for x in floats.values()]
        others = {name: x for name, x in fields.items() if name not in floats}
        return others | {_FLOATS: np.concatenate(flat, axis=3)}

    def _separate(self, rows: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The fields of one batch, [rows, ...] each, of those that `_join` gave."""
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
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """`update` by rows [K, a replica's rows, ...]; `numbers` are the steps before and those to take."""
        first, count = numbers[0], numbers[1]
        gradient_step = tf.autograph.experimental.do_not_convert(self._gradient_step)
        batches, size = self._runtime.first(rows[_FLOATS]).shape[:2]
        if batches == 1:  # a loop costs as much as the step of a small network
            means, kept = gradient_step(rows, tf.constant(0), first, scale)
            return tf.constant(1), means, [k[None] for k in kept]
        done, sums, finite = tf.constant(0), tf.zeros(len(self._reported)), tf.constant(True)
        errors = [tf.zeros((batches, size)) for _ in range(self._runtime.local_replicas)]
        while done < count and finite:
            means, kept = gradient_step(rows, done, first + done, scale)
            pairs = zip(errors, kept, strict=True)
            errors = [tf.tensor_scatter_nd_update(e, [[done]], [k]) for e, k in pairs]
            # Summed over replicas, so all hold the same numbers, and all workers stop together.
            sums, finite = sums + means, tf.reduce_all(tf.math.is_finite(means))
            done += 1
        return done, sums, errors

    def _gradient_step(
        self, rows: Mapping[str, Any], number: tf.Tensor, taken: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """All phases on one batch, after `taken` gradient steps; means of metrics, each replica's errors."""
        run, found, errors = self._runtime.strategy.run, [], ()
        for index, (name, step) in enumerate(self.steps.items()):
            take = functools.partial(run, self._step_on_replica, args=(name, rows, number, scale))
            if step.every == 1:
                means, kept = take()
                means = self._runtime.first(means)
                errors = self._runtime.local_results(kept) if index == 0 else errors
            else:
                means = tf.cond(
                    (taken + 1) % step.every == 0,
                    lambda take=take, every=step.every: self._runtime.first(take()[0]) * float(every),
                    lambda step=step: tf.zeros(len(step.metrics)),
                )
            found.append(means)
        if self.target_every == 1:
            run(self.learning.move_targets)
        else:
            due = (taken + 1) % self.target_every == 0
            tf.cond(due, lambda: run(self.learning.move_targets), lambda: None)
        return tf.concat(found, axis=0), errors

    def _step_on_replica(
        self, name: str, rows: Rows, number: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        """Means of the metrics, and the errors of this replica's rows."""
        batch = self._separate({field: x[number] for field, x in rows.items()})
        outcome = self.learning.gradient_step(name, batch, (), scale)
        return outcome.means, outcome.errors

    # State

    def get_weights(self) -> dict[str, np.ndarray]:
        """The weights of all networks by name."""
        return self.network.split(self.learning.vectors())

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights, target networks and optimizers as arrays, the same on every worker."""
        return state_of(self.network, self.learning)

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`.

        Raises:
          ValueError, KeyError: they belong to another network.
        """
        set_state_of(self.network, self.learning, state)
        self.acting.forget()
