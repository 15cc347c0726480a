"""The strategy, from settings and TF_CONFIG; a few collectives; and `join`, which meets the other workers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.endings import OURS, held_back
from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.settings import Precision, Settings
from tfrl.cli.streams import native_log, quiet_start, shows_information, tell
from tfrl.ops.graph import compiled, tf
from tfrl.workers import machine
from tfrl.workers.data_parallel import pairwise_sum
from tfrl.workers.rendezvous import rendezvous
from tfrl.workers.tf_config import RESTARTED, TFConfig, close_to_network
from tfrl.workers.watchdog import CONNECTING, LIFELESS, NoWatchdog, Watchdog, deadline


@dataclass(eq=False)
class Runtime:
    """A strategy and this process's place in it.

    Attributes:
      worker: this process's index among `num_workers`.
      precision: "float32" or "bfloat16", resolved.
      parts_at_once: the number of parts that a replica computes at the same time (`tfrl.workers.machine`).
      replicas: the replicas of all workers; `local_replicas` counts those of this process.
      is_chief: True if this worker writes the files of the run.
    """

    strategy: tf.distribute.Strategy
    worker: int
    num_workers: int
    precision: Precision
    parts_at_once: int = 1

    def __post_init__(self) -> None:
        self.replicas: int = self.strategy.num_replicas_in_sync
        self.local_replicas = self.replicas // self.num_workers
        self.uses_gpu = bool(tf.config.list_logical_devices("GPU"))
        self.is_chief = self.worker == 0

    @property
    def device(self) -> str:
        """The devices in messages, such as "2 x GPU"."""
        kind = "GPU" if self.uses_gpu else "CPU"
        return f"{self.local_replicas} x {kind}" if self.local_replicas > 1 else kind

    def local_envs(self, num_envs: int) -> range:
        """The global indices of the envs that this worker steps."""
        share = num_envs // self.num_workers
        return range(self.worker * share, (self.worker + 1) * share)

    def micro_batch(self, config: Settings, rows: int | None = None) -> int:
        """Rows of a replica's minibatch whose gradients are taken at once; they divide the minibatch.

        `rows` are those of the minibatch, all workers together; None: `config.rows_per_step`.
        """
        rows = config.rows_per_step if rows is None else rows
        if self.uses_gpu and not config.micro_batch:
            return rows // self.replicas
        return _cpu_micro_batch(config, rows, self.replicas)

    @property
    def is_one_cpu(self) -> bool:
        """True if the strategy is for one replica, on a CPU."""
        return isinstance(self.strategy, tf.distribute.OneDeviceStrategy) and not self.uses_gpu

    # Values per replica

    def per_replica(self, values: np.ndarray | Sequence[np.ndarray]) -> Any:
        """Gives replica r of this worker `values[r]`."""
        tensors = [tf.convert_to_tensor(v) for v in values]
        if len(tensors) == 1:  # the strategy would take 60 us for it
            return tensors[0]
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tensors[context.replica_id_in_sync_group % self.local_replicas]
        )

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this worker's replicas, of a result of `strategy.run`."""
        return self.strategy.experimental_local_results(value)

    def first(self, value: Any) -> tf.Tensor:
        """The value of one replica, of a result that is the same on all replicas."""
        return self.local_results(value)[0]

    # Collectives: every worker must call them in the same order

    def sum_over_workers(self, array: np.ndarray) -> np.ndarray:
        """The element-wise sum of the arrays of all workers."""
        if self.num_workers == 1:
            return array
        # One shape and type, so that one trace serves; float64 holds float32 and any count exactly.
        flat = array.astype(np.float64).reshape(-1)
        parts = [flat] + [np.zeros_like(flat)] * (self.local_replicas - 1)
        total = self.first(self._sum(self.per_replica(parts))).numpy()
        return total.reshape(array.shape).astype(array.dtype)

    @compiled(reduce_retracing=True)
    def _sum(self, values: Any) -> Any:
        def reduce(x: tf.Tensor) -> tf.Tensor:
            # An argument has no device yet, and MultiWorkerMirroredStrategy asks for the replica's.
            x = tf.identity(x)
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)

        return self.strategy.run(reduce, args=(values,))

    def gather_envs(self, array: np.ndarray) -> np.ndarray:
        """Joins the arrays [..., B] of all workers into [..., N], in the order of the global envs.

        A sum of zeros and one number is exact, so an all-reduce serves as a gather.
        """
        if self.num_workers == 1:
            return array
        share = array.shape[-1]
        whole = np.zeros((*array.shape[:-1], share * self.num_workers), array.dtype)
        whole[..., self.worker * share : (self.worker + 1) * share] = array
        return self.sum_over_workers(whole)

    def all_agree(self, mine: bool) -> bool:
        """True if all workers say True. Also a barrier."""
        return int(self.sum_over_workers(np.array([not mine], np.int32))[0]) == 0

    def any_worker(self, mine: bool) -> bool:
        """True if any worker says True. Also a barrier."""
        return int(self.sum_over_workers(np.array([mine], np.int32))[0]) > 0


# The strategy


def set_up_tensorflow() -> None:
    """Sets TensorFlow's options in a process that computes, before anything uses it. May be called twice."""
    # In notebooks it would report each file that it exports.
    if tf.get_logger().level < logging.WARNING and not shows_information():
        tf.get_logger().setLevel(logging.WARNING)
    # Grappler's remapper fails on residual networks with an error message, and makes others slower. The zoo's
    # layers ask for fused operations themselves (resnet/operations.py).
    tf.config.optimizer.set_experimental_options({"remapping": False})
    # By default GPUs from Ampere on round the inputs of float32 convolutions to ten bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for gpu in machine.gpus():  # an evaluation may share one
        with contextlib.suppress(RuntimeError):  # the user's program has used TensorFlow already
            tf.config.experimental.set_memory_growth(gpu, True)


def make(config: Settings, cluster: TFConfig | None) -> Runtime:
    """Makes the strategy for the settings and TF_CONFIG.

    Call it before anything else uses TensorFlow: logical devices and the server of the collectives must come
    first. If a CPU's cores share the parts of a minibatch, TensorFlow's operations then have one thread each.

    Args:
      config: checked settings.
      cluster: the result of `tf_config.for_strategy`.

    Raises UserError for more replicas than devices, or a way to communicate that needs GPUs.
    """
    set_up_tensorflow()
    if config.threads:
        machine.limit_threads(config.threads)
    strategy_name = config.strategy
    gpus = machine.gpus()
    if strategy_name == "auto":
        many = config.replicas > 1 or (config.replicas == 0 and len(gpus) > 1)
        strategy_name = "multi-worker" if cluster else "mirrored" if many else "one-device"

    replicas = config.replicas or (len(gpus) if strategy_name == "mirrored" else 1) or 1
    if gpus and strategy_name == "mirrored" and replicas > len(gpus):
        raise UserError(f"--replicas {replicas} needs {replicas} GPUs; this machine has {len(gpus)}")
    worker, num_workers = 0, 1
    if cluster is not None and strategy_name == "multi-worker":
        worker, num_workers = cluster.worker or 0, cluster.num_workers
    at_once = 1 if gpus else _parts_at_once(config, num_workers, replicas)
    if strategy_name == "multi-worker":
        strategy = _multi_worker(config, len(gpus))
    elif strategy_name == "mirrored":
        # NCCL is the fast way between GPUs; between parts of a CPU the exact order of additions is free.
        exact = (
            None
            if gpus
            else tf.distribute.ReductionToOneDevice(
                accumulation_fn=lambda tensors: pairwise_sum(tf.stack(tensors))
            )
        )
        strategy = tf.distribute.MirroredStrategy(_devices(bool(gpus), replicas), cross_device_ops=exact)
    else:
        strategy = tf.distribute.OneDeviceStrategy("/gpu:0" if gpus else "/cpu:0")
    precision = resolve_precision(config.precision, small=config.small_network)
    machine.note_float16(precision)
    machine.note_emulated(precision)
    return Runtime(strategy, worker, num_workers, precision, at_once)


# Rows of a part of a minibatch on CPUs: larger parts take more memory and are no faster. Many small parts
# keep many cores busy if they are computed side by side. A minibatch has 32 parts at most, then larger ones.
PART_ROWS, _SERIAL_PART_ROWS = 128, 512


def _parts_at_once(config: Settings, num_workers: int, local_replicas: int) -> int:
    """The number of parts of a minibatch that each replica computes at once, on its share of the cores.

    Operations get one thread each if the parts of the whole minibatch can keep the cores busy. All workers
    decide the same, and the same as a single process, because other numbers of threads round differently.
    """
    if config.whole_batches:
        return 1
    minibatch = config.rows_per_step
    replicas = num_workers * local_replicas
    parts, threads = minibatch // _cpu_micro_batch(config, minibatch, replicas), machine.threads()
    # With --threads, the result must not depend on their number.
    machine.one_thread_each(parts >= threads or config.threads > 0)
    return -(-(config.threads or threads) // local_replicas)


def _cpu_micro_batch(config: Settings, minibatch: int, replicas: int) -> int:
    """Rows of a part; they divide a replica's share of the minibatch."""
    share = max(1, minibatch // replicas)
    if config.micro_batch:
        return math.gcd(config.micro_batch, share)
    # 1, 2 and 4 replicas share a power of two of equal parts evenly, and add them in the same pairs, bit for
    # bit. There are 32 at most, because the gradients of all parts are in memory until they are added.
    most = _SERIAL_PART_ROWS if config.whole_batches else PART_ROWS
    parts = next((2**k for k in range(6) if config.min_parts <= 2**k >= minibatch / most), 32)
    if minibatch % parts == 0 and share % (minibatch // parts) == 0:
        return minibatch // parts
    return max(d for d in range(1, min(share, most) + 1) if share % d == 0)


def _multi_worker(config: Settings, gpus: int) -> tf.distribute.Strategy:
    if gpus and config.replicas not in (0, gpus):
        raise UserError(
            f"--replicas {config.replicas}: with TF_CONFIG each worker has one replica for each of its "
            f"{gpus} GPU(s); leave --replicas out"
        )
    if config.communication == "nccl" and not gpus:
        raise UserError("--communication nccl is for GPUs, and this machine has none; use auto or ring")
    kind = tf.distribute.experimental.CommunicationImplementation[config.communication.upper()]
    options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
    _allow_pauses()
    if not gpus and config.replicas > 1:
        _devices(False, config.replicas)
        return _split_cpu(options)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


# Seconds without a heartbeat after which TensorFlow takes a worker for lost; for the chief, half as many.
_LOST_AFTER = 30


def _allow_pauses() -> None:
    """Lets a worker pause for some seconds: an overloaded machine, or one that moves to another host.

    By default TensorFlow ends all workers if the chief is silent for 5 s, or another worker for 10 s. A
    strategy asks for these heartbeats by a private method, which gets another argument here (seen in
    TensorFlow 2.21; a test with stopped workers guards it).
    """
    from tensorflow.python.eager.context import context

    context().configure_coordination_service = functools.partial(
        context().configure_coordination_service, heartbeat_timeout_in_ms=_LOST_AFTER * 1000
    )


def _split_cpu(options: tf.distribute.experimental.CommunicationOptions) -> tf.distribute.Strategy:
    """A MultiWorkerMirroredStrategy with a replica on each logical CPU of a worker.

    TensorFlow's own takes all GPUs of a worker, or one CPU. It gets a worker's devices from one protected
    method and works with any list, so this replaces that method (seen in TensorFlow 2.21; a test with two
    workers of two replicas guards it).
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    class Extended(CollectiveAllReduceExtended):
        def _initialize_local_devices(
            self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
        ) -> tuple[tuple[str, ...], str]:
            """The logical CPUs that `_devices` made, and their kind."""
            cpus = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0])
            return tuple(f"{worker_device}/device:CPU:{i}" for i in range(len(cpus))), "CPU"

    class SplitCPUStrategy(tf.distribute.MultiWorkerMirroredStrategy):
        def __init__(self) -> None:
            extended = Extended(self, cluster_resolver=None, communication_options=options)
            tf.distribute.Strategy.__init__(self, extended)

    return SplitCPUStrategy()


def _devices(on_gpu: bool, replicas: int) -> list[str]:
    if not on_gpu:
        cpu = tf.config.list_physical_devices("CPU")[0]
        # A process can be split only once; a second strategy uses the devices of the first.
        if len(tf.config.get_logical_device_configuration(cpu) or ()) < replicas:
            parts = [tf.config.LogicalDeviceConfiguration()] * replicas
            try:
                tf.config.set_logical_device_configuration(cpu, parts)
            except RuntimeError:
                raise UserError(
                    f"--replicas {replicas} needs a process in which TensorFlow has not run yet: "
                    "TensorFlow splits a CPU only once."
                ) from None
    return [f"/{'gpu' if on_gpu else 'cpu'}:{i}" for i in range(replicas)]


def resolve_precision(name: Precision, system: Path = Path("/"), *, small: bool = False) -> Precision:
    """Replaces "auto" by bfloat16 if the first GPU, or else the CPU, is faster in it.

    `system` is the parent folder of /proc; `small` networks are not faster in it.
    """
    if name != "auto":
        return name
    if small:
        return "float32"
    gpus = machine.gpus()
    if gpus:
        capability = tf.config.experimental.get_device_details(gpus[0]).get("compute_capability", (0, 0))
        return "bfloat16" if capability >= (8, 0) else "float32"
    features = machine.cpuinfo("flags", system).split()
    # AVX512-BF16 alone is faster on AMD's CPUs, slower on Intel's; with neither, bfloat16 is emulated, ten
    # times slower (docs/notebook/bfloat16.md).
    of_amd = "avx512_bf16" in features and machine.cpuinfo("vendor_id", system) == "AuthenticAMD"
    return "bfloat16" if of_amd or "amx_bf16" in features else "float32"


# Joining the workers of a run

# Workers may have different values of these settings.
_MAY_DIFFER = (
    *("logdir", "resume", "yes", "log_level", "device", "threads", "env_threads", "env_processes"),
    *("cluster_timeout", "stall_timeout"),
)
_PACKAGES = ("tfrl", "resnet")  # whose code must be the same on all workers
# A collective raises these if a peer has died, left or been cut off. Other errors are this process's own.
_LOST_PEER = ("Aborted", "Cancelled", "DeadlineExceeded", "Internal", "Unavailable", "Unknown")
# The lines before the reason in an error of TensorFlow's.
_STACK = re.compile(r"\s*($|Graph execution error:|Detected at node|File \")|\s")


@contextlib.contextmanager
def join(config: Settings, cluster: TFConfig | None) -> Iterator[tuple[Runtime, NoWatchdog]]:
    """Does the rendezvous with the other workers, makes the strategy, and translates TensorFlow's errors.

    Before the rendezvous, a signal ends a worker at once, because it has nothing to save. Afterwards, signals
    wait until the session can end all workers together.

    Args:
      config: a trainer's settings, which the workers compare.
      cluster: what TF_CONFIG says; None for a single process.

    Yields:
      The strategy and this worker's place in it, and the watchdog that gets its steps.

    Raises:
      UserError: a worker has other settings; the settings do not fit this machine.
      PeerError: another worker did not come, died or was cut off.
      TrainingError: TensorFlow failed here.
    """
    with quiet_start():
        machine.choose_device(config.device)
    if cluster is not None:
        with quiet_start():
            mine = fingerprint(config, evaluated=cluster.evaluator is not None)
        # Each worker says for whom it waits, because the chief, which has the display, may come last.
        rendezvous(cluster, mine, config.cluster_timeout, tell, restarted=RESTARTED in os.environ)
    addresses, worker = (cluster.workers, cluster.worker or 0) if cluster else (("here",), 0)
    watchdog = NoWatchdog()
    if len(addresses) > 1:
        folder, timeout = config.run_dir / "heartbeats", config.stall_timeout
        watchdog = Watchdog(folder, addresses, worker, stall_timeout=timeout)
    log = config.run_dir / "tensorflow" / f"worker-{worker}.log"
    # With several workers, the last messages before a crash go into the log.
    together, quiet = len(addresses) > 1, contextlib.nullcontext if len(addresses) > 1 else quiet_start
    with held_back(), native_log(log, of_command=OURS.of_command) if together else contextlib.nullcontext():
        watchdog.beat(CONNECTING)
        watchdog.start()
        try:
            patience = max(LIFELESS, config.cluster_timeout, config.stall_timeout)
            with deadline(patience) if together else contextlib.nullcontext(), quiet():
                runtime = make(config, cluster)
            if cluster is not None and together:
                _close_ports(cluster)
            watchdog.beat("preparing")
            tf.config.run_functions_eagerly(config.eager)
            yield runtime, watchdog
        except tf.errors.OpError as error:
            missing = watchdog.missing if isinstance(watchdog, Watchdog) else None
            raise failure(error, missing) from error
        finally:
            tf.config.run_functions_eagerly(False)
            watchdog.close()


def _close_ports(cluster: TFConfig) -> None:
    """Closes the ports of workers on one machine to other machines; if it cannot, the chief warns."""
    if cluster.is_local and not close_to_network(cluster) and cluster.is_chief:
        ports = ", ".join(address.rpartition(":")[2] for address in cluster.workers)
        tell(
            f"warning: TensorFlow's ports {ports} are open to the network without a password; close "
            "them as docs/distributed.md says under Security."
        )


def fingerprint(config: Settings, *, evaluated: bool = False) -> dict[str, str]:
    """The values that must be equal on all workers, by names for users: settings, code, versions, devices.

    `evaluated` is True if TF_CONFIG has an evaluator, which then evaluates instead of the workers.
    """
    root = Path(__file__).resolve().parents[2]
    code = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            code.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return {name: str(value) for name, value in vars(config).items() if name not in _MAY_DIFFER} | {
        "precision": resolve_precision(config.precision, small=config.small_network),
        "an evaluator in TF_CONFIG": str(evaluated),
        "the code (its checksum)": code.hexdigest()[:12],
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": metadata.version("keras"),
        "the number of GPUs": str(len(machine.gpus())),
    }


def failure(error: tf.errors.OpError, missing: Callable[[], str] | None) -> TrainingError:
    """Translates an error of TensorFlow for the user: a PeerError if another worker is the cause.

    `missing` then names the missing workers, as the beginning of a sentence; None: there are no others.
    """
    lines = [line.strip() for line in error.message.splitlines() if not _STACK.match(line)]
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if missing is not None and type(error).__name__.removesuffix("Error") in _LOST_PEER:
        return PeerError(f"{missing()}; TensorFlow says {reason}")
    return TrainingError(f"TensorFlow failed, {reason}")
