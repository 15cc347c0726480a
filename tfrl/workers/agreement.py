"""The fingerprint of a worker: all that must be equal on all workers of a run, for the rendezvous."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import keras
import tensorflow as tf

from tfrl.cli.settings import Hardware
from tfrl.workers import strategy

# Machines may differ in these: where the shared disk is, how many cores there are, how patient one is.
_OWN = ("logdir", "resume", "env_threads", "cluster_timeout", "stall_timeout")
_PACKAGES = ("tfrl", "resnet")


def fingerprint(config: Hardware, *, evaluated: bool = False) -> dict[str, str]:
    """All settings, code, versions and devices of this worker, by names that a user knows.

    `evaluated` says whether its TF_CONFIG names an evaluator: the workers then leave evaluations to it.
    """
    settings = {name: str(value) for name, value in vars(config).items() if name not in _OWN}
    return settings | {
        "precision": strategy.resolve_precision(config.precision, small=config.small_network),
        "an evaluator in TF_CONFIG": str(evaluated),
        "the code (its checksum)": _code_checksum(),
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "the number of GPUs": str(len(tf.config.list_physical_devices("GPU"))),
    }


def _code_checksum() -> str:
    root = Path(__file__).resolve().parents[2]
    checksum = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            checksum.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return checksum.hexdigest()[:12]
