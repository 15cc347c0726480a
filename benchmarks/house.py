"""python -m benchmarks.house: the size and the shape of the product code.

It counts lines and files, untyped settings, and the places where gradients are taken. For PPO and SAC it
trains a few steps and lists the calls of the project on the way from the command to the gradient.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tfrl", "resnet", "cluster")
RUNS = {
    "ppo": "--env CartPole-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --epochs 1 --total-steps 32",
    "sac": "--env Pendulum-v1 --learning-starts 20 --batch-size 16 --iteration-steps 50 --total-steps 50",
}


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
    """Prints the counts; with `--way`, also the ways to the gradient."""
    for name, count in counts().items():
        print(f"{name:24} {count:>8,}")
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
