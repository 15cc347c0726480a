"""tfrl: deep reinforcement learning in TensorFlow 2, from a laptop to a cluster."""

import importlib
import importlib.util
import itertools
import os
import signal
import sys
from typing import TYPE_CHECKING

__version__ = "0.2.0"


if TYPE_CHECKING:
    from tfrl import callbacks as callbacks
    from tfrl.cli.errors import SettingsError as SettingsError
    from tfrl.cli.errors import TrainingError as TrainingError
    from tfrl.library import Policy as Policy
    from tfrl.library import Run as Run
    from tfrl.library import evaluate as evaluate
    from tfrl.library import load as load
    from tfrl.library import train as train
    from tfrl.run.callbacks import Callback as Callback

_PUBLIC = {
    **dict.fromkeys(("train", "load", "Policy", "Run"), "tfrl.library"),
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


# Until a command sets its own signal handlers (tfrl/cli/endings.py), Ctrl-C ends it without a traceback, as
# SIGTERM does, even if Ctrl-C was ignored, as for `command &` in a script. Programs that only import this
# package must not change. So this finds out whether Python runs `-m` with one of our modules, which Python
# either still looks for, or has found already.
_OF_PYTHON = (signal.default_int_handler, signal.SIG_IGN)
_OURS = ("tfrl", "resnet", "cluster", "benchmarks")
_module = next((name for flag, name in itertools.pairwise(sys.orig_argv) if flag == "-m"), "")
_run = getattr(sys.modules.get("__main__"), "__spec__", None)
_runs_ours = _run is not None and _run.name.partition(".")[0] in _OURS[1:]
_finds_ours = sys.argv[:1] == ["-m"] and _module.partition(".")[0] in _OURS
if (_finds_ours or _runs_ours) and signal.getsignal(signal.SIGINT) in _OF_PYTHON:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# TensorFlow reads these when it is first imported. oneDNN is off by default on x86 CPUs without AVX-512 VNNI,
# although it more than doubles an update's speed there.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# 2 keeps errors and drops TensorFlow's start-up information and warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# NumPy starts no threads. They would receive the signals that the main thread blocks (tfrl/cli/signals.py),
# and NumPy's matrix products are too small to gain from threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_is_command = _finds_ours and _module.startswith("tfrl.") and _module.count(".") == 1
if _is_command and not importlib.util.find_spec(_module):
    # For `python -m tfrl.a2c`, Python's own error would not name the existing commands.
    from tfrl import __main__
    from tfrl.cli import endings

    endings.run(lambda _: __main__.main([_module.removeprefix("tfrl.")]))
