"""tfrl: deep reinforcement learning in TensorFlow 2, from a laptop to a cluster."""

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.2.0"


if TYPE_CHECKING:
    from tfrl import callbacks as callbacks
    from tfrl.cli.errors import SettingsError as SettingsError
    from tfrl.cli.errors import TrainingError as TrainingError
    from tfrl.library import Policy as Policy
    from tfrl.library import Run as Run
    from tfrl.library import Trainer as Trainer
    from tfrl.library import evaluate as evaluate
    from tfrl.library import load as load
    from tfrl.library import train as train
    from tfrl.library import trainer as trainer
    from tfrl.run.callbacks import Callback as Callback

_PUBLIC = {
    **dict.fromkeys(("train", "trainer", "Trainer", "load", "Policy", "Run"), "tfrl.library"),
    **dict.fromkeys(("SettingsError", "TrainingError"), "tfrl.cli.errors"),
    "Callback": "tfrl.run.callbacks",
}
_MODULES = ("callbacks", "evaluate")  # the module `evaluate` can be called


def __getattr__(name: str) -> object:
    """Imports a public name at its first use."""
    if name in _MODULES:
        return importlib.import_module(f"tfrl.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC, *_MODULES]


# TensorFlow reads these when it is first imported. oneDNN is off by default on x86 CPUs without AVX-512 VNNI,
# although it more than doubles an update's speed there.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# 2 keeps errors and drops TensorFlow's start-up information and warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# NumPy starts no threads. They would receive the signals that the main thread blocks (tfrl/cli/signals.py),
# and NumPy's matrix products are too small to gain from threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
