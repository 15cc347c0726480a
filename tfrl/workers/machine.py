"""The memory and cores that this process may use, what its CPU can do, and parts of work that cores share.

A container or SLURM may limit both by control groups (man 7 cgroups). In each function `system` is the parent
folder of /proc and /sys.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfrl.cli.errors import UserError
from tfrl.cli.streams import tell
from tfrl.ops.graph import tf

if TYPE_CHECKING:
    import numpy as np

_ROOT = Path("/")


def memory(system: Path = _ROOT) -> int:
    """Bytes of memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, version in _groups("memory", system):
        limits += _numbers(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    return min(limits)


def cores(system: Path = _ROOT) -> int:
    """Cores, rounded up."""
    limits = [float(len(os.sched_getaffinity(0)))]
    for group, version in _groups("cpu", system):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        numbers = [number for name in names for number in _numbers(group / name)]
        if len(numbers) == 2 and min(numbers) > 0:  # microseconds of computing in each period; -1 or max: any
            limits.append(numbers[0] / numbers[1])
    return math.ceil(min(limits))


def cpuinfo(name: str, system: Path = _ROOT) -> str:
    """A field of the first core in /proc/cpuinfo, such as `flags` or `vendor_id`; or an empty text."""
    fields = (line.partition(":") for line in (system / "proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _groups(controller: str, system: Path) -> Iterator[tuple[Path, int]]:
    """The control groups of this process and their parents, and the version of their files.

    A line of /proc/self/cgroup is NUMBER:CONTROLLERS:PATH, without controllers in version 2. In a container
    the path may be one of the host; then the container's limits are at the root.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = system / "sys/fs/cgroup" / (controller if controllers else "")
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(root):
                yield place, 1 if controllers else 2


def _numbers(file: Path) -> list[int]:
    """The numbers in a group's file; none where there is no file, or "max"."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


# Parts of a network's work
#
# By default TensorFlow spreads every operation over all cores, which wait for the slowest at its end, and a
# network has hundreds of operations. Parts that are computed at once, each on one thread, do not wait
# (docs/notebook/ppo-speed.md). And an operation on one thread adds its numbers in the same order on any
# machine, with any number of cores.

# Rows of a part of a forward pass, at most and at least. With AMX, 16 images take 1.3 times as long as 8, and
# beyond 32 little is gained. TensorFlow rounds the convolution of a single image differently from that of the
# same image in a batch.
_MAX_ROWS, _MIN_ROWS = 32, 2
_MAX_FILLED = 256  # on a GPU


def threads() -> int:
    """The threads that TensorFlow may use: TF_NUM_INTRAOP_THREADS, which launchers set, or one a core."""
    wanted = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else cores()


def limit_threads(count: int) -> None:
    """Gives TensorFlow so many threads in this process, or warns if it has already computed something."""
    threading = tf.config.threading
    with contextlib.suppress(RuntimeError):
        threading.set_inter_op_parallelism_threads(count)
        threading.set_intra_op_parallelism_threads(count)
    if threading.get_inter_op_parallelism_threads() != count:
        _warn(
            f"warning: TensorFlow has already run in this process, so --threads {count} decides only how "
            "many parts it computes at once."
        )


def gpus() -> list[Any]:
    """The GPUs that TensorFlow may use."""
    return tf.config.get_visible_devices("GPU")


def choose_device(device: str) -> None:
    """Makes TensorFlow use only the GPUs of --device: none for cpu, all for auto and gpu, one for gpu:NUMBER.

    Raises UserError if there is no such GPU, or TensorFlow already uses other ones.
    """
    kind, _, number = device.partition(":")
    found = tf.config.list_physical_devices("GPU")
    if kind == "gpu" and int(number or 0) >= len(found):
        has = (
            f"only {len(found)}, from gpu:0 on" if found else "none; docs/quickstart.md says what to install"
        )
        raise UserError(f"--device {device} needs a GPU that is not here: TensorFlow finds {has}.")
    wanted = [] if kind == "cpu" else [found[int(number)]] if number else found
    if device == "auto" or wanted == gpus():
        return
    try:
        tf.config.set_visible_devices(wanted, "GPU")
    except RuntimeError:
        raise UserError(
            f"--device {device} needs a process in which TensorFlow has not run yet: TensorFlow chooses its "
            "devices only once."
        ) from None


def one_thread_each(wanted: bool = True) -> None:
    """Gives TensorFlow's operations one thread each, in all of this process and from now on.

    This is impossible once TensorFlow has computed something: then a warning says so. With more threads, a
    run is slower, and not equal to runs on other numbers of cores.
    """
    threading = tf.config.threading
    if wanted:
        with contextlib.suppress(RuntimeError):
            threading.set_intra_op_parallelism_threads(1)
    if wanted != (threading.get_intra_op_parallelism_threads() == 1) and threads() > 1:
        have = "threads of their own" if wanted else "one thread each"
        _warn(
            f"warning: TensorFlow has already run in this process, so its operations keep {have}; results "
            "may differ by rounding from those of a new process."
        )


_warn = functools.cache(tell)  # once in a process


def note_float16(precision: str) -> None:
    """Makes TensorFlow write its error about a CPU without float16 now, within `quiet_start`, which hides it.

    TensorFlow writes this once in a process, as an error: without this call in the middle of a training, when
    the first ReLU of a bfloat16 network computes in float16 (resnet/operations.py).
    """
    if precision == "bfloat16" and not gpus():
        tf.nn.relu(tf.zeros([1], tf.float16))


def note_emulated(precision: str, system: Path = _ROOT) -> None:
    """Warns of bfloat16 on an x86 CPU without it (docs/notebook/bfloat16.md)."""
    features = set(cpuinfo("flags", system).split())
    native = features & {"avx512_bf16", "amx_bf16"} or not features
    if precision == "bfloat16" and not native and not gpus():
        _warn(
            "warning: this CPU has no bfloat16: TensorFlow emulates it, many times slower than float32 and "
            "with less exact gradients; begin a run here with --precision auto or float32."
        )


def filled(rows: np.ndarray) -> np.ndarray:
    """Rows [B, ...] and copies of the last row, so that their number is 2, 4, 8 ... or at least 256.

    For GPUs: before cuDNN computes with a new number of rows, it tries out its algorithms for each layer.
    """
    import numpy as np  # the launcher imports this module, and needs no NumPy

    count = len(rows)
    missing = 2 ** max(1, (count - 1).bit_length()) - count if count < _MAX_FILLED else 0
    return np.concatenate([rows, rows[-1:].repeat(missing, axis=0)]) if missing else rows


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
        size = tf.clip_by_value((count + at_once - 1) // at_once, _MIN_ROWS, _MAX_ROWS)
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
