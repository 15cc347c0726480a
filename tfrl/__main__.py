"""python -m tfrl [NAME ...]: list the commands, or run python -m tfrl.NAME. `tfrl` is the same."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfrl import __version__
from tfrl.algorithms.registry import ALGORITHMS
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.cli.flags import nearest
from tfrl.envs import callables

COMMANDS = (
    "tfrl.ppo_procgen",
    *(f"tfrl.{algorithm}" for algorithm in ALGORITHMS),
    *("tfrl.tune", "tfrl.status", "tfrl.report", "tfrl.evaluate", "tfrl.record", "tfrl.collect", "tfrl.env"),
    *("tfrl.completion", "tfrl.resnet", "resnet", "resnet.train", "resnet.evaluate"),
    *("cluster.launch", "cluster.tf_config"),
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command that the first argument names, or lists all commands; returns the exit code."""
    if list(arguments) == ["--version"]:
        print(f"tfrl {__version__}")
        return 0
    if arguments and arguments[0] not in ("-h", "--help", "--help-all"):
        return _command(arguments[0])(arguments[1:])
    print(f"tfrl {__version__}. Each command has --help:\n")
    for module in COMMANDS:
        print(f"  {_first_line(module)}")
    return 0


def script() -> None:
    """Runs the console script `tfrl`. Like `python -m`, it finds modules in the working folder."""
    sys.path.insert(0, "")
    endings.run(main)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """The `main` of the command `tfrl.NAME`, or of a user's algorithm `module:Class`. Raises UserError."""
    if callables.is_name(name):
        from tfrl.training.command import of_algorithm

        return of_algorithm(name)
    known = [module.removeprefix("tfrl.") for module in COMMANDS if module.startswith("tfrl.")]
    if name.replace("-", "_") not in known:
        raise UserError(f"there is no command {name}{nearest(name, known, 0.7)}; known: {', '.join(known)}.")
    return importlib.import_module(f"tfrl.{name.replace('-', '_')}").main


def _first_line(module: str) -> str:
    """The first line of a module's docstring. The file is not imported, because some import TensorFlow."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    origin = Path(spec.origin)
    if spec.submodule_search_locations:
        origin = origin.with_name("__main__.py")
    return (ast.get_docstring(ast.parse(origin.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    endings.run(main)
