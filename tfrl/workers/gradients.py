"""Sums of gradients, for every trainer: parts of a batch, in pairs, and one all-reduce.

The additions are the same ones however many replicas share the parts: without that, rounding grows to a
different run within a few dozen steps of Adam (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


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


def sum_list(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of tensors of one shape, in the order of `pairwise_sum`."""
    return pairwise_sum(tf.stack(tensors))


def sum_parts(
    function: Callable[[Any], tuple[Any, Any]],
    rows: Any,
    *,
    part_rows: int,
    signature: tuple[Any, Any],
    at_once: int,
) -> tuple[Any, Any]:
    """Results of a replica's rows, computed in parts and summed in pairs.

    Args:
      function: gives, of some rows, what is to be summed (gradients, say), and what is to be kept apart (a
        maximum, say); both nests of tensors.
      rows: a nest of tensors [b, ...]; in the order of the global envs, or whatever else no topology changes.
      part_rows: rows of a part; divides b.
      signature: `tf.TensorSpec`s of the function's results.
      at_once: parts that are computed side by side, whose activations are in memory together.

    Returns:
      The sums, and of the rest one value a part, [parts, ...].
    """
    parts = tf.nest.map_structure(lambda x: tf.reshape(x, (-1, part_rows, *x.shape[1:])), rows)
    if tf.nest.flatten(parts)[0].shape[0] == 1:
        sums, kept = function(tf.nest.map_structure(lambda x: x[0], parts))
        return sums, tf.nest.map_structure(lambda x: x[None], kept)
    sums, kept = tf.map_fn(function, parts, fn_output_signature=signature, parallel_iterations=at_once)
    return tf.nest.map_structure(pairwise_sum, sums), kept


def sum_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums over all replicas of all workers, in one collective. Call it in a replica's context."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(tensors))


def in_own_place(value: tf.Tensor) -> tf.Tensor:
    """A scalar among zeros, [replicas], which `sum_replicas` gathers: a sum cannot carry a maximum."""
    context = tf.distribute.get_replica_context()
    place = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
    return tf.where(place > 0, value, 0.0)
