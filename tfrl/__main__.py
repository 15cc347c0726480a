"""python -m tfrl: this list of the commands; with --version, the version."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tfrl import __version__
from tfrl.cli import endings
from tfrl.cli.errors import UserError
from tfrl.config import ALGORITHMS

_COMMANDS = (
    "tfrl.ppo_procgen",
    *(f"tfrl.{algorithm}" for algorithm in ALGORITHMS),
    *("tfrl.suite", "tfrl.tune", "tfrl.status", "tfrl.report", "tfrl.evaluate", "tfrl.record"),
    *("tfrl.collect", "tfrl.completion", "resnet", "resnet.train", "resnet.evaluate"),
    *("cluster.launch", "cluster.tf_config"),
)


def main(arguments: Sequence[str]) -> int:
    """Prints what each command does, in the first line of its own docstring; the exit code."""
    if list(arguments) == ["--version"]:
        print(f"tfrl {__version__}")
        return 0
    if arguments and arguments[0] not in ("-h", "--help"):
        raise UserError(f"{arguments[0]!r} is no command of its own; python -m tfrl lists them.")
    print(f"tfrl {__version__}. Each command has --help:\n")
    for module in _COMMANDS:
        print(f"  {_first_line(module)}")
    return 0


def _first_line(module: str) -> str:
    """Read and not imported: some import TensorFlow."""
    spec = importlib.util.find_spec(module)
    origin = Path(spec.origin)
    if spec.submodule_search_locations:
        origin = origin.with_name("__main__.py")
    return ast.get_docstring(ast.parse(origin.read_text(encoding="utf-8"))).splitlines()[0]


if __name__ == "__main__":
    endings.run(main)
