"""tfrl: deep reinforcement learning in TensorFlow 2, from a laptop to a cluster."""

import importlib
import importlib.util
import itertools
import os
import signal
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.2.0"


if TYPE_CHECKING:
    from tfrl import callbacks as callbacks
    from tfrl.cli.errors import SettingsError as SettingsError
    from tfrl.cli.errors import TrainingError as TrainingError
    from tfrl.library import Policy as Policy
    from tfrl.library import Run as Run
    from tfrl.library import Trainer as Trainer
    from tfrl.library import collect as collect
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
_MODULES = ("callbacks", "collect", "evaluate")  # the last two modules can be called


def __getattr__(name: str) -> object:
    """Imports a public name at its first use."""
    if name in _MODULES:
        return importlib.import_module(f"tfrl.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC, *_MODULES]


class Function(types.ModuleType):
    """A module of a command that is also a function of the Python library, such as `tfrl.evaluate`."""

    def __call__(self, *arguments: object, **options: object) -> object:
        """Calls the function of `tfrl.library` that has the name of the module."""
        name = self.__name__.removeprefix("tfrl.")
        return getattr(importlib.import_module("tfrl.library"), name)(*arguments, **options)


# The first moments of a command: Ctrl-C ends it with one sentence, until the command sets its own signal
# handlers (tfrl/cli/endings.py). Programs that only import this package keep their handlers. So this finds
# out whether Python runs the script `tfrl` or, by `-m`, one of our modules, for which it still looks or which
# it has found.


def _end_at_once(*_: object) -> None:
    os.write(2, b"Stopped before anything began: there is nothing to save.\n")
    os._exit(130)


_module = next((name for option, name in itertools.pairwise(sys.orig_argv) if option == "-m"), "")
_is_sought = sys.argv[:1] == ["-m"] and _module.partition(".")[0] == "tfrl"
_main = getattr(sys.modules.get("__main__"), "__spec__", None)
_is_found = _main is not None and _main.name.partition(".")[0] in ("resnet", "cluster", "benchmarks")
_is_script = _main is None and os.path.basename(sys.argv[0] if sys.argv else "") == "tfrl"  # noqa: PTH119
if (_is_sought or _is_found or _is_script) and signal.getsignal(signal.SIGINT) in (
    signal.default_int_handler,
    signal.SIG_IGN,  # of a background process of a script
):
    signal.signal(signal.SIGINT, _end_at_once)

# TensorFlow reads these when it is first imported. oneDNN is off by default on x86 CPUs without AVX-512 VNNI,
# although it more than doubles an update's speed there.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# 2 keeps errors and drops TensorFlow's start-up information and warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# NumPy starts no threads. They would receive the signals that the main thread blocks (tfrl/cli/endings.py),
# and NumPy's matrix products are too small to gain from threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if _is_sought and _module.count(".") == 1 and importlib.util.find_spec(_module) is None:
    # For `python -m tfrl.a2c`, Python's own error would not name the commands.
    from tfrl import __main__
    from tfrl.cli import endings

    endings.run(lambda _: __main__.main([_module.removeprefix("tfrl.")]))
