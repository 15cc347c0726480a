"""python -m benchmarks.weights: whether small runs of all algorithms end with the weights of another commit.

A change of the code that should change no result is checked by it: every run has a checksum of its weights
(`weights_sha256` of results.json), and `--beside COMMIT` compares each with that of the same run by another
commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import run
from tfrl.cli.errors import TrainingError, UserError

ROOT = Path(__file__).parents[1]
_IMAGES = "--env catch --torso cookbook --num-envs 8 --num-steps 32 --total-steps 512 --precision float32"
_REPLAY = "--total-steps 200 --iteration-steps 100 --learning-starts 50 --batch-size 32"
_SET = "--total-steps 40 --batch-size 32 --env none"
RUNS = {
    "ppo": _IMAGES,
    "ppo-mlp": "--env CartPole-v1 --num-envs 4 --num-steps 32 --total-steps 512 --normalize-observations",
    "ppo-lstm": f"{_IMAGES} --memory lstm --memory-size 16 --num-minibatches 2",
    "ppo-lag": f"{_IMAGES} --lag 1",
    "ppo-levels": "--env coinrun --torso cookbook --num-envs 8 --num-steps 16 --total-steps 256 "
    "--level-replay --num-levels 20",
    "drac": _IMAGES,
    "daac": f"{_IMAGES} --order-coef 0.001",
    "ppg": f"{_IMAGES} --policy-updates 2 --aux-epochs 1 --aux-minibatches 4",
    "impala": _IMAGES,
    "impact": _IMAGES,
    "reinforce": "--env CartPole-v1 --num-envs 4 --total-steps 400",
    "dqn": f"--env CartPole-v1 {_REPLAY}",
    "dqn-prioritized": f"--env catch --torso cookbook --num-envs 4 {_REPLAY} --prioritized",
    "ddpg": f"--env Pendulum-v1 {_REPLAY}",
    "td3": f"--env Pendulum-v1 {_REPLAY}",
    "sac": f"--env Pendulum-v1 {_REPLAY}",
    "bc": _SET,
    "iql": _SET,
    "td3_bc": _SET,
    "cql": _SET,
}
"""The flags of each run by its name, which begins with the algorithm. Those of `_SET` learn from a set that
the run `sac` collects."""


@dataclass(frozen=True)
class Options:
    """The runs, and the commit to compare with."""

    beside: str = ""
    """Another commit, such as HEAD~3. Empty: only print the checksums."""
    only: str = ""
    """Names of the runs, with commas between. Empty: all."""


def checksum(tree: Path, name: str, logs: Path, data: Path) -> str:
    """The checksum of a run by the code in `tree`, or the error that ended it."""
    flags = [*RUNS[name].split(), "--eval-episodes", "1", "--logdir", str(logs), "--run-name", name]
    if RUNS[name] == _SET:
        flags += ["--dataset", str(data)]
    ended = subprocess.run(
        [sys.executable, "-m", f"tfrl.{name.partition('-')[0]}", *flags],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        return (ended.stderr.strip() or "no message").splitlines()[-1]
    return json.loads((logs / name / "results.json").read_text(encoding="utf-8"))["weights_sha256"]


@contextlib.contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """A work tree of another commit, in a new folder."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--detach", tree, commit], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def collect(folder: Path) -> Path:
    """Collects a small set of Pendulum-v1 by this commit; returns its folder."""
    data = folder / "set"
    for words in (
        ["tfrl.sac", *RUNS["sac"].split(), "--logdir", str(folder), "--run-name", "collecting"],
        ["tfrl.collect", str(folder / "collecting"), "--episodes", "2", "--out", str(data)],
    ):
        ended = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise TrainingError(f"{words[0]}: {ended.stderr.strip()}")
    return data


def main(options: Options) -> None:
    """Prints one line a run; raises TrainingError if one of them differs or fails."""
    names = options.only.split(",") if options.only else list(RUNS)
    if unknown := [name for name in names if name not in RUNS]:
        raise UserError(f"there is no run {unknown[0]}; known: {', '.join(RUNS)}.")
    failed = []
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        data = collect(folder) if any(RUNS[name] == _SET for name in names) else folder
        other = held.enter_context(checkout(options.beside, folder)) if options.beside else None
        for name in names:
            found = checksum(ROOT, name, folder / "ours", data)
            verdict, is_right = "", len(found) == 64
            if other is not None:
                theirs = checksum(other, name, folder / "theirs", data)
                is_right &= found == theirs
                verdict = "equal" if found == theirs else f"differs: {theirs}"
            print(f"{name:16} {found}  {verdict}", flush=True)
            if not is_right:
                failed.append(name)
    if failed:
        raise TrainingError(f"failed or different: {', '.join(failed)}")


if __name__ == "__main__":
    run(Options, main)
