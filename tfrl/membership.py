"""A process's place among the workers of a run: it comes in, and learns that others are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrl import agreement, distribute
from tfrl.distribute import Runtime
from tfrl.quiet import quiet_start
from tfrl.rendezvous import rendezvous
from tfrl.tf_config import TFConfig
from tfrl.watchdog import Watchdog


@contextlib.contextmanager
def join(
    config: Any, cluster: TFConfig | None, tell: Callable[[str], None]
) -> Iterator[tuple[Runtime, Watchdog]]:
    """Meets the other workers, if there are any, and makes the strategy; TensorFlow's errors become ours.

    Args:
      config: a trainer's settings, which the workers compare.
      cluster: what TF_CONFIG says; None for a single process.
      tell: told whom this worker waits for.

    Yields:
      The strategy and this worker's place in it, and a watchdog that is yet to be started.

    Raises:
      UserError: a worker did not come, or has other settings; the settings do not fit this machine.
      PeerError: another worker died or was cut off.
      TrainingError: TensorFlow failed here.
    """
    if cluster is not None:
        with quiet_start():
            mine = agreement.fingerprint(config)
        rendezvous(cluster, mine, config.cluster_timeout, tell)
    with quiet_start():
        runtime = distribute.make(config, cluster)
    addresses = cluster.workers if cluster else ("here",)
    heartbeats = config.run_dir / "heartbeats"
    watchdog = Watchdog(heartbeats, addresses, runtime.worker, stall_timeout=config.stall_timeout)
    try:
        yield runtime, watchdog
    except tf.errors.OpError as error:
        raise distribute.failure(error, runtime.num_workers, watchdog.missing) from error
