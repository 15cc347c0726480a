"""python -m benchmarks.house: the size and the shape of the product code.

It counts lines and files, untyped settings, and the places where gradients are taken. With --reach, it counts
the product's own functions that a small run of PPO and of SAC calls, which are what a reader must know or
ignore. With --way, it lists the calls on the way from the command to the gradient.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("tfrl", "resnet", "cluster")
RUNS = {
    "ppo": "--env CartPole-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --epochs 1 --total-steps 32",
    "sac": "--env Pendulum-v1 --learning-starts 20 --batch-size 16 --iteration-steps 50 --total-steps 50",
}
_REACHED = {
    "ppo": "--env catch --torso cookbook --num-envs 8 --num-steps 32 --total-steps 512",
    "sac": "--env Pendulum-v1 --total-steps 512",
}
"""The runs of `reach`."""


def files() -> list[Path]:
    """The Python files of the product that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if name.endswith(".py")]


def counts() -> dict[str, int]:
    """Counts by what they are of."""
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    joined = "\n".join(texts.values())
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "files": len(texts),
        "`config: Any`": len(re.findall(r"config: Any\b", joined)),
        "`GradientTape`": len(re.findall(r"GradientTape\(", joined)),
        "longest file, lines": max(text.count("\n") for text in texts.values()),
    }


class Reach(NamedTuple):
    """The functions of the product that a run calls.

    Attributes:
      functions: their number. Lambdas, comprehensions and the bodies of modules and classes do not count.
      lines: the lines of the functions, by file. A function within another one counts in both.
    """

    functions: int
    lines: dict[str, int]


def reach(algorithm: str) -> Reach:
    """The reach of a small run of PPO or SAC, which a process of its own trains.

    Raises RuntimeError if the run fails.
    """
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "benchmarks.house", "--reach-of", algorithm, logs]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the run of {algorithm} failed:\n{ended.stderr}")
    return Reach(*json.loads(ended.stdout.splitlines()[-1]))


def _reach_here(algorithm: str, logs: str) -> Reach:
    """The reach of a run in this process."""
    import runpy

    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.argv = [f"tfrl.{algorithm}", *_REACHED[algorithm].split(), "--logdir", logs]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return _reach_of(called, files())


def _reach_of(called: set[CodeType], product: list[Path]) -> Reach:
    """The functions among `called` that files of the product define."""
    names = {str(path): str(path.relative_to(ROOT)) for path in product}
    lines: Counter[str] = Counter()
    functions = 0
    for code in called:
        # The body of a module or a class has no CO_OPTIMIZED, and <lambda> is no name.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name.isidentifier()
        if is_function and code.co_filename in names:
            functions += 1
            lines[names[code.co_filename]] += len(inspect.getsourcelines(code)[0])
    return Reach(functions, dict(lines.most_common()))


def way_to_the_gradient(algorithm: str) -> list[traceback.FrameSummary]:
    """The calls of the project between a command and its first gradient."""
    import importlib

    import tensorflow as tf

    stacks = []
    original = tf.GradientTape.gradient

    def gradient(self: tf.GradientTape, *args: object, **options: object) -> object:
        calls = traceback.extract_stack()
        stacks.append([call for call in calls if Path(call.filename).is_relative_to(ROOT / "tfrl")])
        return original(self, *args, **options)

    tf.GradientTape.gradient = gradient
    with tempfile.TemporaryDirectory() as logs:
        flags = [*RUNS[algorithm].split(), "--eval-episodes", "1", "--logdir", logs]
        importlib.import_module(f"tfrl.{algorithm}").main(flags)
    tf.GradientTape.gradient = original
    return stacks[0]


def main(arguments: list[str]) -> int:
    """Prints the counts; with `--reach` the reach, and with `--way` the ways to the gradient."""
    if arguments[:1] == ["--reach-of"]:  # a process of `reach`
        print(json.dumps(_reach_here(*arguments[1:])))
        return 0
    for name, count in counts().items():
        print(f"{name:24} {count:>8,}")
    for algorithm in _REACHED if "--reach" in arguments else ():
        found = reach(algorithm)
        total = sum(found.lines.values())
        print(f"{algorithm}: {found.functions} functions of {total:,} lines in {len(found.lines)} files")
        for name, count in found.lines.items():
            print(f"  {count:>6,} {name}")
    for algorithm in RUNS if "--way" in arguments else ():
        calls = way_to_the_gradient(algorithm)
        names = {call.filename for call in calls}
        lines = sum(Path(name).read_text(encoding="utf-8").count("\n") for name in names)
        print(f"{algorithm}: {len(calls)} calls in {len(names)} files with {lines:,} lines")
        for call in calls:
            print(f"  {Path(call.filename).relative_to(ROOT)}:{call.lineno} {call.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
