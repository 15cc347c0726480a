"""python -m benchmarks.recovery: kills a worker at random moments, and counts what it costs.

Each trial is a run of two workers under `cluster.launch`, of which one is sent a signal at a random moment
after the first update. Recovery is the time from then to the next row of progress.csv that no earlier attempt
had written; the loss is what progress.csv had beyond the checkpoint that the run went on from. In the end the
weights are compared, bit for bit, with those of a run that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import tyro

from tfrl.summary import logged_steps

_POLL = 0.02  # seconds
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_BATCH = 8 * 32
_FLAGS = ["--env", "catch", "--torso", "cookbook", "--precision", "float32", "--num-envs", "8"]
_FLAGS += ["--num-steps", "32", "--num-minibatches", "4", "--epochs", "2", "--eval-episodes", "2"]
_FLAGS += ["--stall-timeout", "10"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to try."""

    trials: int = 10
    """Kills, one in a run each."""
    fault: Literal["SIGKILL", "SIGSTOP"] = "SIGKILL"
    """What the worker is sent: it dies or hangs."""
    updates: int = 40
    """Length of each run."""
    checkpoint_every: int = 5
    """Updates between checkpoints."""
    eval_every: int = 8
    """Updates between evaluations."""
    seed: int = 1
    """Decides the moments and the victims."""


def main(options: Options) -> None:
    """Runs the trials and prints a JSON object."""
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        expected = _finish(_start(Path(folder), "undisturbed", options), Path(folder) / "undisturbed")
        # Imports and tracing take most of a short run; the updates' own time decides the moments.
        spread = json.loads((Path(folder) / "undisturbed" / "results.json").read_text())["seconds"]
        print(f"undisturbed: {time.monotonic() - began:.0f} s", file=sys.stderr)
        trials = []
        for trial in range(options.trials):
            found = _trial(Path(folder), f"trial-{trial}", moments, spread, options)
            found["equal"] = found.pop("weights") == expected
            print(json.dumps(found), file=sys.stderr)
            trials.append(found)
    hit = [t for t in trials if t["hit"]]
    print(
        json.dumps(
            {
                "fault": options.fault,
                "trials": len(hit),
                "recovery_seconds_median": statistics.median(t["seconds"] for t in hit) if hit else None,
                "recovery_seconds_most": max((t["seconds"] for t in hit), default=None),
                "lost_env_steps_median": statistics.median(t["lost"] for t in hit) if hit else None,
                "lost_env_steps_most": max((t["lost"] for t in hit), default=None),
                "checkpoint_interval_env_steps": options.checkpoint_every * _BATCH,
                "bit_equal": sum(t["equal"] for t in hit),
            },
            indent=2,
        )
    )


def _trial(
    folder: Path, name: str, moments: random.Random, spread: float, options: Options
) -> dict[str, Any]:
    run = folder / name
    launcher = _start(folder, name, options)
    _wait(launcher, lambda: logged_steps(run / "progress.csv") >= _BATCH)
    time.sleep(moments.uniform(0.0, 0.8 * spread))
    victims = _workers(launcher.pid)
    victim = moments.randrange(2)
    struck = time.monotonic()
    before = logged_steps(run / "progress.csv")
    hit = len(victims) == 2 and launcher.poll() is None and not (run / "results.json").exists()
    if hit:
        os.kill(victims[victim], getattr(signal, options.fault))
    goal = min(before + _BATCH, options.updates * _BATCH)
    # A row of the same number may come from the attempt that dies: only a resumed one counts.
    config = (run / "config.yaml").stat().st_mtime_ns
    _wait(launcher, lambda: (run / "config.yaml").stat().st_mtime_ns != config)
    _wait(launcher, lambda: logged_steps(run / "progress.csv") >= goal or (run / "results.json").exists())
    seconds = time.monotonic() - struck
    weights = _finish(launcher, run)
    resumed = json.loads((run / "results.json").read_text())["resumed_at"]
    lost = before - resumed[0] if resumed else 0
    return {
        "hit": hit,
        "victim": victim,
        "at": before,
        "seconds": seconds,
        "lost": max(lost, 0),
        "weights": weights,
    }


def _start(folder: Path, name: str, options: Options) -> subprocess.Popen[bytes]:
    flags = [*_FLAGS, "--total-steps", str(options.updates * _BATCH), "--logdir", str(folder)]
    flags += ["--checkpoint-every", str(options.checkpoint_every), "--eval-every", str(options.eval_every)]
    launcher = [sys.executable, "-m", "cluster.launch", "--workers", "2", "--"]
    return subprocess.Popen(
        [*launcher, sys.executable, "-m", "tfrl.ppo_procgen", *flags, "--run-name", name],
        env={**os.environ, **_THREADS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _finish(launcher: subprocess.Popen[bytes], run: Path) -> str:
    code = launcher.wait()
    if code != 0:
        raise SystemExit(f"the run in {run} ended with exit code {code}")
    return json.loads((run / "results.json").read_text())["weights_sha256"]


def _wait(launcher: subprocess.Popen[bytes], condition: Any) -> None:
    while launcher.poll() is None:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(_POLL)


def _workers(launcher: int) -> list[int]:
    """The trainers' process ids: grandchildren of the launcher, behind its agents."""
    return [worker for agent in _children(launcher) for worker in _children(agent)]


def _children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # a name may hold spaces
            if int(fields[1]) == process:
                found.append(int(stat.parent.name))
    return sorted(found)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
