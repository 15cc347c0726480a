"""tfrl: deep reinforcement learning in TensorFlow 2, from a laptop to a cluster."""

import importlib.util
import itertools
import os
import signal
import sys

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """The public classes, imported when they are first asked for."""
    if name == "Callback":
        from tfrl.run.callbacks import Callback

        return Callback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Until a command has handlers of its own (tfrl/cli/endings.py), Ctrl-C ends it as SIGTERM does, without a
# traceback; also where it is ignored, as of a `command &` in a script: later our handlers would heed it, too.
# Not where others import us: "-m" stands there while Python looks for a module of ours; one that was found
# before we are imported, of resnet, say, is what Python runs then.
_OF_PYTHON = (signal.default_int_handler, signal.SIG_IGN)
_run = getattr(sys.modules.get("__main__"), "__spec__", None)
_runs_ours = _run is not None and _run.name.partition(".")[0] in ("resnet", "cluster", "benchmarks")
if (sys.argv[:1] == ["-m"] or _runs_ours) and signal.getsignal(signal.SIGINT) in _OF_PYTHON:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# TensorFlow reads these when it is first imported, so they are set before any module of ours imports it.
# oneDNN is off by default on x86 CPUs without AVX-512 VNNI, where it more than doubles an update's speed.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# 2 keeps errors and drops TensorFlow's start-up information and warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# NumPy has no threads of its own: they would take the signals that the main thread holds back
# (tfrl/cli/signals.py), and our matrix products outside TensorFlow are too small to gain by them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if sys.argv[:1] == ["-m"]:
    # Python's own error for `python -m tfrl.a2c` would name no command that exists.
    _module = next((name for flag, name in itertools.pairwise(sys.orig_argv) if flag == "-m"), "")
    if _module.startswith("tfrl.") and _module.count(".") == 1 and not importlib.util.find_spec(_module):
        from tfrl import __main__
        from tfrl.cli import endings

        endings.run(lambda _: __main__.main([_module.removeprefix("tfrl.")]))
