"""The common part of DQN, DDPG, TD3 and SAC: weights as vectors, and gradient steps in a compiled loop.

An algorithm is a list of `Phase`s, one for each loss, and says which networks have slow copies. Losses are
sums over parts of a batch, divided by the global batch; parts are summed in pairs, then over replicas. What
is compiled is the gradient of one part and the step that follows, the same programs on every topology, so
that N replicas or workers take the steps that one would, bit for bit on a CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfrl import networks
from tfrl.agents.player import Player
from tfrl.cli.errors import TrainingError
from tfrl.experience.replay import Batch
from tfrl.experience.replay_memory import in_words
from tfrl.networks.weights import PREFIX, weights_of
from tfrl.ops import optimizers
from tfrl.ops.graph import graph, not_inlined
from tfrl.ops.q_learning import polyak
from tfrl.ops.schedules import learning_rate
from tfrl.workers.gradients import sum_parts, sum_replicas
from tfrl.workers.strategy import Runtime

TARGET = "target_"
"""Prefix of a network's name that gives the name of its slow copy."""

_FLOATS = "floats"  # the field of a batch that holds all those of float32

Weights = Mapping[str, tf.Tensor]
Rows = Mapping[str, tf.Tensor]
Losses = tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class Phase:
    """One gradient step of one loss.

    Attributes:
      learned: the names of the vectors that it moves; they go by `rates`, each the learning rate.
      loss: gives, of all vectors and some rows of a batch, the loss of each row, float32 [b], what to report
        the mean of, by name, [b] each, and the errors that decide priorities, [b].
      metrics: the names of what it reports.
      every: gradient steps of the first phase for one of this.
    """

    learned: tuple[str, ...]
    loss: Callable[[Weights, Rows], Losses]
    metrics: tuple[str, ...]
    rates: tuple[float, ...]
    every: int = 1


class ReplayAgent:
    """Networks, their slow copies and optimizers under a strategy, as `tfrl.training.off_policy` asks.

    A subclass gives the class attributes and `make_phases`.

    Args:
      config: the settings.
      runtime: the strategy and this worker's place in it.

    Attributes:
      metric_names, charts: as in `tfrl.agents.agent.Agent`.
      update_noise: standard normal numbers of each row of a batch.
      slow: the networks that have slow copies.
      target_every: gradient steps between two moves of these; the algorithm's own, or --target-every.
    """

    metric_names: tuple[str, ...]
    charts: Mapping[str, Mapping[str, tuple[str, ...]]]
    update_noise = 0
    slow: tuple[str, ...] = ()
    target_every = 1

    def __init__(self, config: Any, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self.network = networks.of_settings(config, runtime.precision)
        self.phases = self.make_phases()
        self.target_every = config.target_every or self.target_every
        vectors = self.initial()
        vectors |= {TARGET + name: vectors[name] for name in self.slow}
        learned = [name for phase in self.phases for name in phase.learned]
        self._optimizer = optimizers.of_settings(config)
        for name in learned:
            slots = self._optimizer.initial(vectors[name])
            vectors |= {f"{name}/{slot}": value for slot, value in slots.items()}
        with runtime.strategy.scope():
            self._vectors = {name: _variable(value) for name, value in vectors.items()}
        self._learned = tuple(learned)

        on_gpu, at_once = runtime.uses_gpu, runtime.parts_at_once * runtime.local_replicas
        read = self._vectors[self.network.player].read_value
        self.player = Player(config, self.network, read, on_gpu=on_gpu, at_once=at_once)
        # XLA gains on small layers and on GPUs, and is five times as slow for convolutions on a CPU.
        compiles = on_gpu or config.torso == "mlp"
        apart = functools.partial(graph, jit_compile=True) if compiles else not_inlined
        self._gradients = [apart(functools.partial(self._part_gradients, phase)) for phase in self.phases]
        self._compiled: dict[tuple[tuple[int, ...], ...], Callable] = {}
        self._step = graph(self._optimizer_step, jit_compile=compiles)
        self._move = graph(
            lambda slow, fast: polyak(slow, fast, config.tau) if config.tau < 1 else tf.identity(fast),
            jit_compile=compiles,
        )

    def make_phases(self) -> tuple[Phase, ...]:
        """The gradient steps of an update, in order."""
        raise NotImplementedError

    def initial(self) -> dict[str, np.ndarray]:
        """The vectors that a run begins with: those of the networks, and what else is learned."""
        return {name: function.initial() for name, function in self.network.functions.items()}

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(int(np.prod(self._vectors[name].shape)) for name in self._learned)

    @property
    def floats_per_sum(self) -> int:
        """The number of float32 values that the phases of a gradient step sum over all replicas."""
        return self.num_parameters + len(self.metric_names)

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
        """Takes the weights of another run; its slow copies and optimizer where they are there.

        Raises ValueError, KeyError as `set_state`.
        """
        joined = self.network.join(weights_of(state))
        slow = {f"agent/{TARGET}{name}": joined[name] for name in self.slow}
        self.set_state({**self.get_state(), **slow, **state})

    # Acting

    def act(self, observations: np.ndarray, noise: np.ndarray, env_steps: int) -> np.ndarray:
        """Exploring actions [B, *shape] of observations [B, *shape], by noise [B, K] and the env steps."""
        return self.player.act(observations, noise, self._config.exploration(env_steps))

    def sample(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Drawn actions [B, *shape] of observations [B, *shape], by noise [B, K], on one device."""
        return self.player.sample(observations, noise)

    def greedy(self, observations: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """The best actions [B, *shape]; ignores `noise`."""
        return self.player.greedy(observations)

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one env's actions, float32 [steps, K]."""
        return self.network.draw_noise(generator, steps)

    # Learning

    def update(
        self, batch: Batch, noise: np.ndarray, *, first: int, count: int, iteration: int
    ) -> tuple[dict[str, float], np.ndarray]:
        """Gradient steps, one for each of the first `count` of K batches.

        Args:
          batch: K batches of this worker's envs.
          noise: standard normal, float32 [K, B, b, update_noise].
          first: the gradient steps before these.
          count: how many to take.
          iteration: decides the learning rate.

        Returns:
          The sums of the metrics over these steps, the same on every worker, and the errors of each
          transition, float32 [K, B, b].

        Raises:
          TrainingError: a loss is not finite. All replicas see it at the same step.
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
        self.player.forget()
        totals = dict(zip(self._reported, sums.numpy().tolist(), strict=True))
        bad = [name for name, value in totals.items() if not np.isfinite(value)]
        if bad:
            raise TrainingError(f"{bad[0]} is not a finite number (gradient step {first + int(done)})")
        errors = [e.numpy()[:count].reshape(count, -1, batch.rows.shape[2]) for e in errors]
        errors = np.concatenate(errors, axis=1)
        return {f"train/{name}": value for name, value in totals.items()}, errors

    def progress(self, env_steps: int) -> dict[str, float]:
        """Metrics that follow from the number of env steps alone: the learning rate."""
        config = self._config
        iteration = env_steps // config.iteration_steps - 1
        return {
            "train/learning_rate": learning_rate(config.lr_schedule, config.lr, iteration, config.num_updates)
        }

    @property
    def _reported(self) -> list[str]:
        return [name for phase in self.phases for name in phase.metrics]

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

    @tf.function
    def _updates(
        self, rows: Mapping[str, Any], numbers: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """`update` by rows [K, a replica's rows, ...]; `numbers` are the steps before and those to take."""
        first, count = numbers[0], numbers[1]
        batches, size = self._runtime.first(rows[_FLOATS]).shape[:2]
        if batches == 1:  # a loop costs as much as the step of a small network
            means, kept = self._gradient_step(rows, tf.constant(0), first, scale)
            return tf.constant(1), means, [k[None] for k in kept]
        done, sums, finite = tf.constant(0), tf.zeros(len(self._reported)), tf.constant(True)
        errors = [tf.zeros((batches, size)) for _ in range(self._runtime.local_replicas)]
        while done < count and finite:
            means, kept = self._gradient_step(rows, done, first + done, scale)
            pairs = zip(errors, kept, strict=True)
            errors = [tf.tensor_scatter_nd_update(e, [[done]], [k]) for e, k in pairs]
            # Summed over replicas, so all hold the same numbers, and all workers stop together.
            sums, finite = sums + means, tf.reduce_all(tf.math.is_finite(means))
            done += 1
        return done, sums, errors

    @tf.autograph.experimental.do_not_convert
    def _gradient_step(
        self, rows: Mapping[str, Any], number: tf.Tensor, taken: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """All phases on one batch, after `taken` gradient steps; means of metrics, each replica's errors."""
        run, found, errors = self._runtime.strategy.run, [], ()
        for index, phase in enumerate(self.phases):
            step = functools.partial(run, self._phase, args=(index, rows, number, scale))
            if phase.every == 1:
                means, kept = step()
                means = self._runtime.first(means)
                errors = self._runtime.local_results(kept) if index == 0 else errors
            else:
                means = tf.cond(
                    (taken + 1) % phase.every == 0,
                    lambda step=step, every=phase.every: self._runtime.first(step()[0]) * float(every),
                    lambda phase=phase: tf.zeros(len(phase.metrics)),
                )
            found.append(means)
        if self.target_every == 1:
            run(self._move_targets)
        else:
            due = (taken + 1) % self.target_every == 0
            tf.cond(due, lambda: run(self._move_targets), lambda: None)
        return tf.concat(found, axis=0), errors

    def _phase(
        self, index: int, rows: Rows, number: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """One gradient step on this replica's rows: one all-reduce, one step for each vector."""
        phase, config = self.phases[index], self._config
        weights = {name: self._vectors[name].read_value() for name in self._vectors if "/" not in name}
        specs = [tf.TensorSpec(weights[name].shape) for name in phase.learned]
        (gradients, sums), errors = sum_parts(
            lambda part: self._gradients[index](weights, part),
            self._separate({name: x[number] for name, x in rows.items()}),
            part_rows=config.part_rows,
            signature=((specs, tf.TensorSpec([len(phase.metrics)])), tf.TensorSpec([config.part_rows])),
            at_once=self._runtime.parts_at_once,
        )
        *gradients, sums = sum_replicas([*gradients, sums])
        for name, gradient, rate in zip(phase.learned, gradients, phase.rates, strict=True):
            slots = {slot: self._vectors[f"{name}/{slot}"] for slot in self._optimizer.slots}
            before = {slot: v.read_value() for slot, v in slots.items()}
            moved, after = self._step(weights[name], before, gradient, scale * rate)
            self._vectors[name].assign(moved)
            for slot, value in after.items():
                slots[slot].assign(value)
        return sums, tf.reshape(errors, [-1])

    def _part_gradients(
        self, phase: Phase, weights: Weights, rows: Rows
    ) -> tuple[tuple[list[tf.Tensor], tf.Tensor], tf.Tensor]:
        """Gradients and sums of metrics of some rows, and the rows' errors."""
        learned = [weights[name] for name in phase.learned]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(learned)
            losses, metrics, errors = phase.loss(weights, rows)
            # Divided by the global batch, because gradients are summed over replicas.
            loss = tf.reduce_sum(losses) / self._config.batch_size
        sums = tf.reduce_sum(tf.stack([metrics[name] for name in phase.metrics]), axis=1)
        return (tape.gradient(loss, learned), sums / self._config.batch_size), errors

    def _optimizer_step(
        self, weights: tf.Tensor, slots: dict[str, tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor
    ) -> optimizers.Step:
        if self._config.max_grad_norm is not None:
            gradient = tf.clip_by_norm(gradient, self._config.max_grad_norm)
        return self._optimizer.step(weights, slots, gradient, rate)

    def _move_targets(self) -> None:
        for name in self.slow:
            slow, fast = self._vectors[TARGET + name], self._vectors[name]
            slow.assign(self._move(slow.read_value(), fast.read_value()))

    # State

    def get_weights(self) -> dict[str, np.ndarray]:
        """The weights of all networks by name."""
        return self.network.split({name: self._vectors[name].numpy() for name in self.network.functions})

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights, slow copies and optimizers as arrays, the same on every worker."""
        others = {
            f"agent/{name}": v.numpy()
            for name, v in self._vectors.items()
            if name not in self.network.functions
        }
        return {f"{PREFIX}{k}": v for k, v in self.get_weights().items()} | others

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`.

        Raises:
          ValueError, KeyError: they belong to another network.
        """
        joined = self.network.join(weights_of(state))
        for name, variable in self._vectors.items():
            variable.assign(joined[name] if name in joined else state[f"agent/{name}"])
        self.player.forget()


def _variable(value: np.ndarray) -> tf.Variable:
    """A vector of which each replica has its own copy, and changes it: all compute the same."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
