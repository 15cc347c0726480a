"""python -m benchmarks.weights: whether small runs of all algorithms end with the weights of another commit.

A change of the code that should change no result is checked by it: every run has a checksum of its weights
(`weights_sha256` of results.json), and `--beside COMMIT` compares each with that of the same run by another
commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
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


def checksums(tree: Path, names: list[str], logs: Path, data: Path) -> dict[str, str]:
    """The checksum of each run by the code in `tree`, or the error that ended it."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    found = {}
    for name in names:
        flags = [*RUNS[name].split(), "--eval-episodes", "1", "--logdir", str(logs), "--run-name", name]
        if RUNS[name] == _SET:
            flags += ["--dataset", str(data)]
        ended = subprocess.run(
            [sys.executable, "-m", f"tfrl.{name.partition('-')[0]}", *flags],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )
        results = logs / name / "results.json"
        if ended.returncode == 0:
            found[name] = json.loads(results.read_text(encoding="utf-8"))["weights_sha256"]
        else:
            found[name] = (ended.stderr.strip() or "no message").splitlines()[-1]
    return found


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
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = collect(folder) if any(RUNS[name] == _SET for name in names) else folder
        ours = checksums(ROOT, names, folder / "ours", data)
        theirs = ours
        if options.beside:
            tree = folder / "tree"
            subprocess.run(["git", "worktree", "add", "--detach", tree, options.beside], cwd=ROOT, check=True)
            try:
                theirs = checksums(tree, names, folder / "theirs", data)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    for name in names:
        same = "equal" if ours[name] == theirs[name] else f"differs: {theirs[name]}"
        print(f"{name:16} {ours[name]}  {same if options.beside else ''}")
    failed = [name for name in names if len(ours[name]) != 64]
    different = [name for name in names if ours[name] != theirs[name]]
    if failed or different:
        raise TrainingError(
            f"failed: {', '.join(failed) or 'none'}; different: {', '.join(different) or 'none'}"
        )


if __name__ == "__main__":
    run(Options, main)
