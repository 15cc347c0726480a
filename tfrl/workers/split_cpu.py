"""Several replicas on each worker's CPU, for MultiWorkerMirroredStrategy."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended


class SplitCPUStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """A MultiWorkerMirroredStrategy with a replica on each logical CPU of a worker.

    TensorFlow's own takes all GPUs of a worker, or one CPU, and there is no public way to tell it otherwise.
    The list of a worker's devices comes from one protected method, and the rest works with any list, so that
    method is replaced (seen in TensorFlow 2.21; a test with two workers of two replicas guards it).

    Args:
      communication_options: as TensorFlow's.
    """

    def __init__(self, communication_options: tf.distribute.experimental.CommunicationOptions) -> None:
        extended = _Extended(self, cluster_resolver=None, communication_options=communication_options)
        tf.distribute.Strategy.__init__(self, extended)


class _Extended(CollectiveAllReduceExtended):
    def _initialize_local_devices(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        """The logical CPUs that `tf.config.set_logical_device_configuration` made, and their kind."""
        parts = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0])
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(len(parts))), "CPU"
