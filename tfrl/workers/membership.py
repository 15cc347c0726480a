"""Joins a process to the workers of its run, watches it, and tells it when other workers are gone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

from tfrl.cli.settings import Settings
from tfrl.cli.signals import held_back
from tfrl.cli.streams import native_log, quiet_start, tell
from tfrl.workers import strategy
from tfrl.workers.rendezvous import rendezvous
from tfrl.workers.strategy import Runtime
from tfrl.workers.tf_config import RESTARTED, TFConfig, close_to_network
from tfrl.workers.watchdog import CONNECTING, LIFELESS, Watchdog, deadline

# Workers may have different values of these settings.
_MAY_DIFFER = ("logdir", "resume", "env_threads", "env_processes", "cluster_timeout", "stall_timeout")
_PACKAGES = ("tfrl", "resnet")


@contextlib.contextmanager
def join(config: Settings, cluster: TFConfig | None) -> Iterator[tuple[Runtime, Watchdog]]:
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
    if cluster is not None:
        with quiet_start():
            mine = fingerprint(config, evaluated=cluster.evaluator is not None)
        # Each worker says for whom it waits, because the chief, which has the display, may come last.
        rendezvous(cluster, mine, config.cluster_timeout, tell, restarted=RESTARTED in os.environ)
    addresses, worker = (cluster.workers, cluster.worker or 0) if cluster else (("here",), 0)
    watchdog = Watchdog(config.run_dir / "heartbeats", addresses, worker, stall_timeout=config.stall_timeout)
    log = config.run_dir / "tensorflow" / f"worker-{worker}.log"
    # With several workers, the last messages before a crash go into the log.
    together, quiet = len(addresses) > 1, contextlib.nullcontext if len(addresses) > 1 else quiet_start
    with held_back(), native_log(log) if together else contextlib.nullcontext():
        watchdog.beat(CONNECTING)
        watchdog.start()
        try:
            patience = max(LIFELESS, config.cluster_timeout, config.stall_timeout)
            with deadline(patience) if together else contextlib.nullcontext(), quiet():
                runtime = strategy.make(config, cluster)
            if (
                cluster
                and together
                and cluster.is_local
                and not close_to_network(cluster)
                and cluster.is_chief
            ):
                ports = ", ".join(address.rpartition(":")[2] for address in cluster.workers)
                tell(
                    f"warning: TensorFlow's ports {ports} are open to the network without a password; close "
                    "them as docs/distributed.md says under Security."
                )
            watchdog.beat("preparing")
            yield runtime, watchdog
        except tf.errors.OpError as error:
            raise strategy.failure(error, len(addresses), watchdog.missing) from error
        finally:
            watchdog.close()


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
        "precision": strategy.resolve_precision(config.precision, small=config.small_network),
        "an evaluator in TF_CONFIG": str(evaluated),
        "the code (its checksum)": code.hexdigest()[:12],
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "the number of GPUs": str(len(tf.config.list_physical_devices("GPU"))),
    }
