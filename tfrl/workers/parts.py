"""Parts of a network's work: the CPU cores of a process compute several parts at once, each on one thread.

By default TensorFlow spreads every operation over all cores, which wait for the slowest at its end, and a
network has hundreds of operations. Parts side by side do not wait (docs/notebook/ppo-speed.md). And an
operation on one thread adds its numbers in the same order on any machine, with any number of cores.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from tfrl.cli.streams import once, tell
from tfrl.ops.graph import tf
from tfrl.workers import machine

# Rows of a part of a forward pass, at most and at least: TensorFlow rounds the convolution of a single image
# differently from that of the same image in a batch.
_MOST_ROWS, _LEAST_ROWS = 8, 2
COMPILED_ROWS = 32
"""Rows of every part of a small network's forward pass: XLA compiles it for one number of rows."""
VALUE_ROWS = 256
"""The same of values in runs of one topology (`RLSettings.has_one_topology`): it halves their time."""


def cores() -> int:
    """The cores that this process may use: TF_NUM_INTRAOP_THREADS, which launchers set, or all of them."""
    wanted = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else machine.cores()


def one_thread_each(wanted: bool = True) -> None:
    """Gives TensorFlow's operations one thread each, in all of this process and from now on.

    This is impossible once TensorFlow has computed something: then a warning says so. With more threads, a
    run is slower, and not equal to runs on other numbers of cores.
    """
    threading = tf.config.threading
    if wanted:
        with contextlib.suppress(RuntimeError):
            threading.set_intra_op_parallelism_threads(1)
    if wanted != (threading.get_intra_op_parallelism_threads() == 1) and cores() > 1:
        have = "threads of their own" if wanted else "one thread each"
        _warn(
            f"warning: TensorFlow has already run in this process, so its operations keep {have}; results "
            "may differ by rounding from those of a new process."
        )


_warn = once(tell)


def map_rows(
    function: Callable[[Any], Any],
    rows: Any,
    signature: Sequence[tf.TensorSpec],
    at_once: int,
    size: int | None = None,
) -> list[tf.Tensor]:
    """Applies `function` to parts of a few rows each, `at_once` of them at the same time.

    The last part is filled up, and no part has a single row, so that the results of a row do not depend on
    the number of rows.

    Args:
      function: takes rows [b, ...], gives tensors [b, ...], one for each of `signature`.
      rows: a tensor [B, ...], or a nest of them.
      signature: `tf.TensorSpec`s of the results of one row.
      at_once: the number of parts at the same time.
      size: the rows of every part; None: chosen by their number.

    Returns:
      Tensors [B, ...].
    """
    rows = tf.nest.map_structure(tf.convert_to_tensor, rows)
    count = tf.shape(tf.nest.flatten(rows)[0])[0]
    if size is None:
        size = tf.clip_by_value((count + at_once - 1) // at_once, _LEAST_ROWS, _MOST_ROWS)
    missing = -count % size

    def split(x: tf.Tensor) -> tf.Tensor:
        filled = tf.pad(x, [[0, missing]] + [[0, 0]] * (x.shape.rank - 1))
        return tf.reshape(filled, (-1, size, *x.shape[1:]))

    results = tf.map_fn(
        lambda part: list(function(part)),
        tf.nest.map_structure(split, rows),
        fn_output_signature=[tf.TensorSpec((None, *s.shape), s.dtype) for s in signature],
        parallel_iterations=at_once,
    )
    return [tf.reshape(x, (-1, *s.shape))[:count] for x, s in zip(results, signature, strict=True)]
