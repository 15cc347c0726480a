"""The one gradient step of the project: the same numbers on any number of replicas and workers.

    g = sum over replicas and parts of d sum(losses(weights, rows)) / d weights / batch_size
    weights <- optimizer(g)

Each replica splits its rows of the batch into parts. It adds the gradients of the parts in pairs, in a fixed
order. One all-reduce then sums gradients and metrics over the replicas. So the order of additions does not
depend on the number of replicas. Otherwise rounding differences would change the whole run within a few dozen
steps (docs/design.md). Every replica then clips the sum and updates its copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.ops.graph import graph, not_inlined, tf
from tfrl.ops.optimizers import Optimizer
from tfrl.ops.q_learning import polyak

if TYPE_CHECKING:
    from tfrl.workers.strategy import Runtime

Weights = Mapping[str, Any]
"""Weight vectors, float32 [size] each, by the name of their network."""

TARGET = "target_"
"""Prefix of a network's name that gives the name of its target network."""


class Losses(NamedTuple):
    """The results of a loss function for some rows of a batch.

    Attributes:
      losses: of each row, float32 [n]. Their sum over the whole batch, divided by
        `GradientStep.batch_size`, is minimised.
      metrics: of each row, float32 [n] each, by name. Their means over the batch are reported.
      errors: of each row, float32 [n]; None if the step needs no errors.
      moved: new values of the vectors that `GradientStep.moved` names.
    """

    losses: tf.Tensor
    metrics: Mapping[str, tf.Tensor]
    errors: tf.Tensor | None = None
    moved: Mapping[str, tf.Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class GradientStep:
    """One gradient step of one loss.

    Attributes:
      learned: the names of the vectors that the step changes.
      rates: the learning rate of each of these vectors.
      loss: a function of all vectors, some rows of the batch, and the data that all rows share.
      metrics: the names of the metrics of the loss, in the order of progress.csv.
      optimizer: computes a new vector from a gradient.
      batch_size: the number of losses of a whole batch, all workers together.
      part_rows: the number of rows of a part; it divides a replica's share of the batch. A row is what the
        first dimension of `rows` counts: a sample or, with memory, a whole sequence of samples.
      norm: the name under which the norm of the whole gradient before clipping is reported; "": none.
      max_norm: the norm to which gradients are clipped; None: no clipping.
      clips_each: True clips the gradient of each vector by its own norm, False clips all by their common
        norm.
      errors: "rows": each replica keeps the errors of its rows; "largest": the largest error of all replicas
        is reported; "": no errors.
      prefix: a prefix for the names of the optimizer's state, if two steps learn the same vectors.
      every: one such step is taken for this many steps of the algorithm's first kind.
      moved: the names of vectors whose new values the loss computes, such as the moving statistics of batch
        normalization. They become the mean over replicas. Each replica must then have a single part.
    """

    learned: tuple[str, ...]
    rates: tuple[float, ...]
    loss: Callable[[Weights, Any, Any], Losses]
    metrics: tuple[str, ...]
    optimizer: Optimizer
    batch_size: int
    part_rows: int
    norm: str = ""
    max_norm: float | None = None
    clips_each: bool = False
    errors: str = ""
    prefix: str = ""
    every: int = 1
    moved: tuple[str, ...] = ()

    @property
    def reported(self) -> tuple[str, ...]:
        """The names of all metrics of the step, in order."""
        return (*self.metrics, self.norm) if self.norm else self.metrics

    def names(self, vector: str) -> dict[str, str]:
        """The names of a learned vector, as `weights`, and of its arrays in the optimizer, by slot."""
        return {"weights": vector} | {slot: self.slot(vector, slot) for slot in self.optimizer.slots}

    def slot(self, vector: str, slot: str) -> str:
        """The name of an array of the optimizer for a learned vector."""
        return f"{self.prefix}{vector}/{slot}"

    def check(self, losses: tf.Tensor, metrics: Mapping[str, tf.Tensor], errors: tf.Tensor | None) -> None:
        """Raises UserError if the loss of a user's algorithm gives other results than the step needs."""
        learned = " and ".join(self.learned)
        if losses.shape.rank not in (1, None):
            raise UserError(
                f"the loss of {learned} has the shape {losses.shape}; give one number for each sample, [n], "
                "without a mean."
            )
        if set(metrics) != set(self.metrics):
            raise UserError(
                f"the loss of {learned} has the metrics {', '.join(metrics)}, and its step names "
                f"{', '.join(self.metrics)}; give the same."
            )
        if self.errors and errors is None:
            raise UserError(f"the Losses of {learned} need `errors`, [n].")


class StepResult(NamedTuple):
    """The results of a gradient step on a replica.

    Attributes:
      metrics: the means over the whole batch and the gradient's norm by name, in the order of
        `GradientStep.reported`; float32 [] each, equal on every replica.
      errors: see `GradientStep.errors`: float32 [b] for this replica's rows, or [] for the largest error; 0
        if the step has no errors.
    """

    metrics: dict[str, tf.Tensor]
    errors: tf.Tensor


class DataParallel:
    """Weights, optimizers and target networks under a strategy, and the gradient steps that change them.

    Call `steps[NAME].step` and `move_targets` in a replica's context: within `strategy.run`.

    Args:
      runtime: the strategy and this worker's place in it.
      vectors: the initial weights by name, float32 [size].
      steps: the descriptions of the gradient steps, by name.
      targets: the names of the vectors that have a target network.
      tau: the step of the target networks towards the weights: target <- (1 - tau) target + tau weights.
      compiled: XLA compiles the parts and the optimizer. This is faster for small layers and on GPUs, and
        five times slower for convolutions on a CPU. On GPUs it always compiles the optimizer.
      compiles_parts: False: XLA does not compile the parts. On a CPU with as many parts as cores or more,
        TensorFlow's own operations of several parts then overlap more, and large parts are faster.

    Attributes:
      runtime: the same.
      variables: the weights, those of the target networks, and the optimizers' state, by name.
      steps: the gradient steps, by name.
    """

    def __init__(
        self,
        runtime: Runtime,
        vectors: Mapping[str, np.ndarray],
        steps: Mapping[str, GradientStep],
        *,
        targets: Sequence[str] = (),
        tau: float = 1.0,
        compiled: bool = False,
        compiles_parts: bool = True,
    ) -> None:
        self.runtime = runtime
        self._targets = tuple(targets)
        self._names = tuple(vectors)
        state = {**vectors, **{TARGET + name: vectors[name] for name in targets}}
        for step in steps.values():
            for vector in step.learned:
                initial = step.optimizer.initial(vectors[vector])
                state |= {step.slot(vector, slot): value for slot, value in initial.items()}
        with runtime.strategy.scope():
            self.variables = {name: _variable(value) for name, value in state.items()}
        parts = compiled and compiles_parts
        self.steps = {
            name: CompiledStep(step, self, compiled=compiled, compiled_parts=parts)
            for name, step in steps.items()
        }
        self._moved = graph(
            lambda pairs: [tf.identity(new) if tau == 1.0 else polyak(old, new, tau) for old, new in pairs],
            jit_compile=compiled,
        )

    def weights(self, names: Sequence[str] = ()) -> dict[str, tf.Tensor]:
        """The present vectors of these names; by default all vectors, with those of the target networks."""
        names = names or (*self._names, *(TARGET + name for name in self._targets))
        return {name: self.variables[name].read_value() for name in names}

    def vectors(self) -> dict[str, np.ndarray]:
        """The present vectors as NumPy arrays, without target networks."""
        return {name: self.variables[name].numpy() for name in self._names}

    def assign(self, name: str, vector: np.ndarray) -> None:
        """Sets one vector, or one array of an optimizer's state, on all local replicas."""
        self.variables[name].assign(vector)

    @property
    def learned(self) -> frozenset[str]:
        """The names of the vectors that the gradient steps change."""
        return frozenset(name for step in self.steps.values() for name in step.description.learned)

    def move_targets(self) -> None:
        """Moves the target networks by `tau` towards the present weights."""
        if not self._targets:
            return
        pairs = [(TARGET + name, name) for name in self._targets]
        values = self._moved([tuple(self.variables[n].read_value() for n in pair) for pair in pairs])
        for (target, _), value in zip(pairs, values, strict=True):
            self.variables[target].assign(value)

    # State

    def get_state(self) -> dict[str, np.ndarray]:
        """All arrays, with those of target networks and optimizers; equal on every worker."""
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from arrays of `get_state`.

        Raises:
          KeyError, ValueError: they belong to other networks or optimizers.
        """
        for name, variable in self.variables.items():
            variable.assign(state[name])


class CompiledStep:
    """A gradient step on the weights of a `DataParallel`, which its method `step` takes.

    Args:
      description: what the step is.
      learning: has the weights and the optimizer's state.
      compiled: XLA compiles the optimizer; on GPUs also without it.
      compiled_parts: XLA compiles the parts.

    Attributes:
      description: the same.
      part_gradients: a function of all weights, the rows of one part and the shared data; returns
        ((gradients, sums of metrics [metrics]), (errors, moved vectors)) of the part.
    """

    def __init__(
        self, description: GradientStep, learning: DataParallel, *, compiled: bool, compiled_parts: bool
    ) -> None:
        self.description = description
        self._learning = learning
        self._runtime = learning.runtime
        self.part_gradients = self._part_gradients
        self._summed = self._summed_gradients
        if compiled_parts:
            self.part_gradients = graph(self._part_gradients, jit_compile=True)
        elif not self._runtime.uses_gpu:
            # Not inlined on CPUs: within a loop over gradient steps, TensorFlow would choose between two
            # gradients of max pooling by the addresses of nodes (tfrl/ops/graph.py).
            self._summed = not_inlined(self._summed_gradients)
        # A GPU would launch a kernel for each of the optimizer's thirty operations.
        self._update = graph(self._updated, jit_compile=compiled or self._runtime.uses_gpu)

    def step(self, rows: Any, shared: Any, scale: tf.Tensor) -> StepResult:
        """Gradients of this replica's rows, one all-reduce, clipping, one step of the optimizer.

        Args:
          rows: a nest of tensors [b, ...]: this replica's share of the batch, in the order of the global
            envs, or in another order that does not depend on the topology.
          shared: a nest of tensors that every part gets whole.
          scale: float32 [], multiplies the learning rates.
        """
        step = self.description
        (gradients, sums), (errors, moved) = self._summed(rows, shared)
        shares = [moved[vector][0] / self._runtime.replicas for vector in step.moved]
        largest = [one_hot_by_replica(tf.reduce_max(errors))] if step.errors == "largest" else []
        # The one all-reduce of the step.
        of_all = iter(sum_replicas([*gradients, *shares, sums, *largest]))
        gradients = [next(of_all) for _ in gradients]
        for vector in step.moved:
            self._learning.variables[vector].assign(next(of_all))
        metrics = dict(zip(step.metrics, tf.unstack(next(of_all)), strict=True))
        if step.errors == "largest":
            errors = tf.reduce_max(next(of_all))
        else:
            errors = tf.reshape(errors, [-1]) if step.errors == "rows" else tf.constant(0.0)
        norm = self.apply(gradients, scale)
        return StepResult(metrics | ({step.norm: norm} if step.norm else {}), errors)

    def apply(self, gradients: Sequence[tf.Tensor], scale: tf.Tensor) -> tf.Tensor:
        """Clips summed gradients, and takes the optimizer's step. Returns the norm before clipping, float32
        [].
        """
        variables = [
            {slot: self._learning.variables[name] for slot, name in self.description.names(vector).items()}
            for vector in self.description.learned
        ]
        values = [{slot: x.read_value() for slot, x in of_vector.items()} for of_vector in variables]
        norm, values = self._update(values, list(gradients), scale)
        for of_vector, new in zip(variables, values, strict=True):
            for slot, value in new.items():
                of_vector[slot].assign(value)
        return norm

    def _summed_gradients(self, rows: Any, shared: Any) -> Any:
        """The results of `part_gradients` for this replica: gradients and sums of metrics of all parts, and
        the errors and moved vectors of each part, [parts, ...].

        Parts are computed a few at a time, because their activations are in memory together.
        """
        step, weights = self.description, self._learning.weights()
        parts = tf.nest.map_structure(lambda x: tf.reshape(x, (-1, step.part_rows, *x.shape[1:])), rows)
        if tf.nest.flatten(parts)[0].shape[0] == 1:
            sums, kept = self.part_gradients(weights, tf.nest.map_structure(lambda x: x[0], parts), shared)
            return sums, tf.nest.map_structure(lambda x: x[None], kept)
        specs = {name: tf.TensorSpec(weights[name].shape) for name in (*step.learned, *step.moved)}
        errors = {"rows": tf.TensorSpec([step.part_rows]), "largest": tf.TensorSpec([]), "": ()}[step.errors]
        sums, kept = tf.map_fn(
            lambda part: self.part_gradients(weights, part, shared),
            parts,
            fn_output_signature=(
                ([specs[name] for name in step.learned], tf.TensorSpec([len(step.metrics)])),
                (errors, {name: specs[name] for name in step.moved}),
            ),
            parallel_iterations=self._runtime.parts_at_once,
        )
        return tf.nest.map_structure(pairwise_sum, sums), kept

    def _part_gradients(self, weights: Weights, rows: Any, shared: Any) -> Any:
        """See `part_gradients`."""
        step = self.description
        learned = [weights[name] for name in step.learned]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(learned)
            losses, metrics, errors, moved = step.loss(weights, rows, shared)
            step.check(losses, metrics, errors)
            # Divided by the size of the whole batch, because gradients are summed over replicas.
            loss = tf.reduce_sum(losses) / step.batch_size
        gradients = tape.gradient(loss, learned)
        sums = tf.reduce_sum(tf.stack([metrics[name] for name in step.metrics]), axis=1) / step.batch_size
        if step.errors == "largest":
            errors = tf.reduce_max(errors)
        return (gradients, sums), (() if errors is None else errors, dict(moved))

    def _updated(
        self, values: Sequence[Mapping[str, tf.Tensor]], gradients: list[tf.Tensor], scale: tf.Tensor
    ) -> tuple[tf.Tensor, list[dict[str, tf.Tensor]]]:
        """The norm of all gradients, and the new weights and slots of each learned vector."""
        step = self.description
        norm = tf.linalg.global_norm(gradients)
        if step.max_norm is not None and step.clips_each:
            gradients = [tf.clip_by_norm(gradient, step.max_norm) for gradient in gradients]
        elif step.max_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, step.max_norm, use_norm=norm)
        new = []
        for value, gradient, rate in zip(values, gradients, step.rates, strict=True):
            slots = {name: slot for name, slot in value.items() if name != "weights"}
            weights, slots = step.optimizer.step(value["weights"], slots, gradient, scale * rate)
            new.append({"weights": weights, **slots})
        return norm, new


def pairwise_sum(parts: tf.Tensor) -> tf.Tensor:
    """The sum over the first dimension in a fixed order: neighbours, then pairs of neighbours, and so on.

    Written with `reduce_sum` because TensorFlow's graph optimizer turns trees of additions into chains.
    """
    while parts.shape[0] > 1:
        count = parts.shape[0]
        pairs = tf.reshape(parts[: count // 2 * 2], (count // 2, 2, *parts.shape[1:]))
        sums = tf.reduce_sum(pairs, axis=1)
        parts = sums if count % 2 == 0 else tf.concat([sums, parts[-1:]], axis=0)
    return parts[0]


def sum_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums over all replicas of all workers, in one collective. Call it in a replica's context."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))


def one_hot_by_replica(value: tf.Tensor) -> tf.Tensor:
    """The scalar at this replica's place and zeros elsewhere, [replicas]. `sum_replicas` then gathers the
    scalars.
    """
    context = tf.distribute.get_replica_context()
    place = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
    return tf.where(place > 0, value, 0.0)


def _variable(value: np.ndarray) -> tf.Variable:
    """A vector of which each replica has its own copy. All replicas change it equally."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
