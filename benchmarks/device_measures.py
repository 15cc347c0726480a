"""The measurements of `benchmarks.gpu`: each function below runs in a process of its own and returns numbers.

TensorFlow is imported in that process alone: memory, options and threads of a device belong to a process.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import floors
from tfrl.workers.strategy import set_up_tensorflow

_MEGABYTE = 2**20
_PACKAGES = ("tensorflow", "keras", "numpy", "gymnasium")


def device() -> dict[str, Any]:
    """The device, its driver's and the packages' versions."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    build = tf.sysconfig.get_build_info()
    return {
        "gpus": len(gpus),
        "name": details.get("device_name", "CPU"),
        "compute_capability": ".".join(map(str, details.get("compute_capability", ()))),
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        **{f"built_for_{name}": build[name] for name in ("cuda_version", "cudnn_version") if name in build},
    }


def training(algorithm: str, settings: Mapping[str, Any], logdir: str) -> dict[str, Any]:
    """Trains by `tfrl.train` in a new folder of `logdir`. Returns what progress.csv says of the speed, the
    peak of memory, and where the weights are.

    The first update compiles, so the medians leave it out.
    """
    import tfrl

    folder = tempfile.mkdtemp(prefix=f"{algorithm}-", dir=logdir)
    began = time.perf_counter()
    run = tfrl.train(algorithm, logdir=folder, run_name="run", **settings)
    seconds = time.perf_counter() - began
    rows = list(csv.DictReader((run.folder / "progress.csv").open()))
    found: dict[str, Any] = {"seconds": seconds, "weights": str(run.folder / "export" / "weights.npz")}
    for name in ("env_steps_per_second", "rollout_seconds", "update_seconds", "env_wait_fraction"):
        values = [float(row[f"time/{name}"]) for row in rows[1:] if row.get(f"time/{name}")]
        if values:
            found[name] = statistics.median(values)
    if "train/first_ratio_error" in rows[0]:
        found["first_ratio_error"] = max(float(row["train/first_ratio_error"]) for row in rows)
    return found | _peak_memory()


def _peak_memory() -> dict[str, float]:
    import tensorflow as tf

    found = {"peak_host_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEGABYTE}
    if tf.config.list_logical_devices("GPU"):
        found["peak_gpu_megabytes"] = tf.config.experimental.get_memory_info("GPU:0")["peak"] / _MEGABYTE
    return found


def difference(one: str, other: str) -> float:
    """The relative difference of two runs' weights: |w - w'| / |w'|."""
    first, second = (
        np.concatenate([arrays[name].ravel() for name in sorted(arrays)])
        for arrays in (dict(np.load(path)) for path in (one, other))
    )
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


# The network alone


def network(precision: str, seconds: float, acting: int, minibatch: int) -> dict[str, float]:
    """Env steps a second of PPO that each way of computing the network alone would allow.

    `keras`: plain Keras layers, as a stranger would write them: the floor. `tfrl`: the trainer's own network,
    its gradients as a graph; `tfrl_xla`: the same compiled by XLA, on GPUs.

    Args:
      precision: float32 or bfloat16.
      seconds: for each of these ways.
      acting, minibatch: rows of a forward pass and of a gradient.
    """
    import tensorflow as tf

    set_up_tensorflow()
    rows = acting, minibatch
    found = {"keras": _env_steps(*map(tf.function, floors.keras_network(precision)), seconds, *rows)}
    _, own = floors.build(precision)
    weights = floors.weights_of(tf, own)
    forward, gradient = (lambda images: own.outputs(weights, images)), floors.gradient_of(tf, own, 1)
    ways = {"tfrl": False, "tfrl_xla": True} if tf.config.list_logical_devices("GPU") else {"tfrl": False}
    for name, compiles in ways.items():
        calls = (tf.function(forward, jit_compile=compiles), tf.function(gradient, jit_compile=compiles))
        try:
            found[name] = _env_steps(*calls, seconds, *rows)
        except Exception as error:  # XLA fails in many ways where a part of CUDA is missing
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    return found


def _env_steps(
    forward: Callable[[Any], Any], gradient: Callable[[Any], Any], seconds: float, acting: int, minibatch: int
) -> float:
    """Env steps a second of one forward pass and three gradients a frame."""
    import tensorflow as tf

    shown, learned = (tf.constant(floors.frames(n)) for n in (acting, minibatch))
    forward_seconds = floors.seconds_of(lambda: forward(shown)[1].numpy(), seconds / 4)
    gradient_seconds = floors.seconds_of(lambda: gradient(learned)[0].numpy(), seconds / 2)
    return 1.0 / (forward_seconds / acting + 3 * gradient_seconds / minibatch)


def gradients(rows: int) -> dict[str, float]:
    """The gradients of the trainer's network in bfloat16 beside those in float32, for random frames.

    `cosine` is of all weights together; `worst_bias` is the greatest relative error of a layer's biases.
    """
    import tensorflow as tf

    set_up_tensorflow()
    frames, found = tf.constant(floors.frames(rows)), {}
    for precision in ("float32", "bfloat16"):
        _, own = floors.build(precision)
        vectors = tf.function(floors.gradient_of(tf, own, 1))(frames)
        found[precision] = {
            f"{name}/{key}": array
            for name, vector in zip(own.learned, vectors, strict=True)
            for key, array in own.functions[name].split(vector.numpy()).items()
        }
    exact, rounded = (np.concatenate([a.ravel() for a in found[p].values()]) for p in ("float32", "bfloat16"))
    biases = [name for name in found["float32"] if name.endswith("bias")]
    errors = [_relative(found["bfloat16"][name], found["float32"][name]) for name in biases]
    cosine = float(exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded))
    return {"cosine": cosine, "worst_bias": max(errors)}


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-12))


def transfers(num_envs: int, num_steps: int) -> dict[str, float]:
    """Seconds of the copies of one update of PPO on procgen: the observations of a rollout, and the
    observations and results of all calls that act.
    """
    import tensorflow as tf

    rollout, acting = floors.frames(1024), floors.frames(num_envs)
    place = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    with tf.device(place):
        touch = tf.function(lambda x: tf.reduce_max(x[0]))
        up = floors.seconds_of(lambda: touch(tf.identity(tf.constant(rollout))).numpy(), 1.0)
        empty = floors.seconds_of(lambda: touch(tf.identity(tf.constant(acting[:1]))).numpy(), 1.0)
        both = floors.seconds_of(lambda: touch(tf.identity(tf.constant(acting))).numpy(), 1.0)
    return {
        "rollout_up_seconds": (up - empty) * num_envs * num_steps / len(rollout),
        "acting_copies_seconds": (both - empty) * num_steps,
        "empty_call_seconds": empty,
    }


# A profile


def profile(precision: str, logdir: str, num_envs: int, num_steps: int) -> dict[str, Any]:
    """The operations of PPO's third update, with their shares of the device's busy time, largest first.

    `seconds` is how long rollout and update took. A GPU that was busy for much less waited for launches.
    """
    import tensorflow as tf

    import tfrl

    folder = Path(tempfile.mkdtemp(prefix="profile-", dir=logdir))

    class Profile(tfrl.Callback):
        began = seconds = 0.0

        def on_update(self, run: Any, metrics: dict[str, float]) -> None:
            if run.updates == 2:
                tf.profiler.experimental.start(str(folder / "trace"))
                self.began = time.perf_counter()
            elif run.updates == 3:
                self.seconds = time.perf_counter() - self.began
                tf.profiler.experimental.stop()

    watch = Profile()
    tfrl.train(
        "ppo_procgen",
        env="coinrun",
        seed=1,
        precision=precision,
        num_envs=num_envs,
        num_steps=num_steps,
        total_steps=3 * num_envs * num_steps,
        eval_episodes=1,
        callbacks=[watch],
        logdir=str(folder),
        run_name="run",
    )
    (trace,) = (folder / "trace").rglob("*.xplane.pb")
    return busy_shares(trace.read_bytes()) | {"seconds": watch.seconds}


def busy_shares(trace: bytes) -> dict[str, Any]:
    """The kinds of operations of a profile (an XSpace) and their shares of busy time, largest first.

    On a GPU these are kernels, by the TensorFlow operation that launched them. On a CPU these are operations,
    without the time of the operations within them. Without NVIDIA's CUPTI a profile has only the CPU.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(trace)
    on_gpu = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    planes = on_gpu or [plane for plane in space.planes if plane.name.startswith("/host:CPU")]
    seconds: dict[str, float] = defaultdict(float)
    for plane in planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        stats = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            if on_gpu and line.name.startswith(("TensorFlow", "XLA", "Steps", "Source")):
                continue  # these repeat the events of the streams
            events = [(e.offset_ps, e.duration_ps, _kind(e, names, stats, bool(on_gpu))) for e in line.events]
            for name, own in _own_times(events):
                seconds[name] += own / 1e12
    if not on_gpu:  # other events are functions and threads
        seconds = {name: own for name, own in seconds.items() if name}
    total = sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    parts = [[name, own / total] for name, own in largest]
    return {"device": "GPU" if on_gpu else "CPU", "busy_seconds": total, "parts": parts}


def _kind(event: Any, names: Mapping[int, str], stats: Mapping[int, str], is_kernel: bool) -> str:
    """The TensorFlow operation of an event; of a kernel without one its own name, otherwise ""."""
    for stat in event.stats:
        if stats.get(stat.metadata_id) in ("tf_op", "name"):
            text = stat.str_value or stats.get(stat.ref_value, "")
            if ":" in text:
                return text.rpartition(":")[2]
    name = names.get(event.metadata_id, "?")
    if is_kernel:
        return name[:60]
    return name.rpartition(":")[2] if ":" in name and "::" not in name else ""


def _own_times(events: Iterable[tuple[int, int, str]]) -> list[tuple[str, int]]:
    """The time of each event without that of the events within it; events are (begin, duration, name)."""
    own: list[tuple[str, int]] = []
    open_: list[tuple[int, int]] = []  # end, index
    for begin, duration, name in sorted(events, key=lambda e: (e[0], -e[1])):
        while open_ and open_[-1][0] <= begin:
            open_.pop()
        if open_:
            outer, whole = own[open_[-1][1]]
            own[open_[-1][1]] = outer, whole - duration
        open_.append((begin + duration, len(own)))
        own.append((name, duration))
    return own


if __name__ == "__main__":  # python -m benchmarks.device_measures NAME ARGUMENTS-AS-JSON FILE
    _name, _arguments, _file = sys.argv[1:]
    Path(_file).write_text(json.dumps(globals()[_name](*json.loads(_arguments))))
