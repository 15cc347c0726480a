"""python -m benchmarks.actors: what actors on Ray cost and gain.

- cost: env steps a second of IMPALA on --env with one actor, and its ratio to a thread;
- slow envs: the same of envs that sleep a millisecond a step, with 1, 2, 4 and 8 actors, and their ratio to
  as many times one actor;
- hand-over: seconds from an actor's rollout of 64 x 256 procgen frames, 201 MB, to the learner's buffers.

Runs are real ones, `python -m tfrl.impala`, in a folder of their own. Rates are medians over updates,
without the first ones, in which TensorFlow traces.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT
from tfrl.config import distributed

READER = reader("impala")

_TRACED = 3  # updates that do not count
_SLOW = "--env benchmarks.slow_env:tfrl/Slow-v0 --num-envs 16 --num-steps 64 --num-minibatches 1"


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    env: str = "coinrun"
    """Env of the cost."""
    updates: Annotated[int, COUNT] = 6
    """Updates of each run that count; three more come first."""
    actors: str = "1,2,4,8"
    """Numbers of actors that step slow envs, with commas between: divisors of 16."""
    parts: str = "cost,slow,handover"
    """Parts to measure, with commas between."""


def main(options: Options) -> None:
    """Measures and prints."""
    READER.parse(["--env", options.env])
    counts = [int(word) if word.isdecimal() else 0 for word in options.actors.split(",")]
    if not all(count and 16 % count == 0 for count in counts):
        raise UserError(f"--actors must be divisors of 16 with commas between; got {options.actors}.")
    parts = options.parts.split(",")
    if not {*parts} <= {"cost", "slow", "handover"}:
        raise UserError(f"--parts must be of cost, slow and handover; got {options.parts}.")
    distributed.check_ray(READER.parse(["--actors", "1"]))
    table = Table("", "env steps/s", "learner waits", "actors wait", "ratio", title="IMPALA, one run each")
    with tempfile.TemporaryDirectory() as logs:
        if "cost" in parts:
            flags = ["--env", options.env]
            _rows(table, logs, options.updates, flags, f"{options.env}, ", [0, 1], to_each=False)
        if "slow" in parts:
            _rows(table, logs, options.updates, _SLOW.split(), "envs that sleep 1 ms, ", counts, to_each=True)
    Console().print(table) if table.row_count else None
    if "handover" in parts:
        put, taken = _hand_over()
        print(f"a rollout of 201 MB: {put:.3f} s in the actor, {taken:.3f} s in the learner (best of 5)")


def _rows(
    table: Table,
    logs: str,
    updates: int,
    flags: Sequence[str],
    title: str,
    counts: Sequence[int],
    *,
    to_each: bool,
) -> None:
    """Adds a row for each number of actors, compared with the first, or with as many times its rate."""
    first = None
    for count in counts:
        rate, learner, actor = _run(logs, updates, [*flags, "--actors", str(count)])
        first = first or rate / (counts[0] if to_each else 1)
        ratio = rate / first / (count if to_each else 1)
        by = f"{count} actors" if count else "a thread"
        table.add_row(title + by, f"{rate:,.0f}", f"{learner:.2f}", f"{actor:.2f}", f"{ratio:.2f}")


def _run(logs: str, updates: int, flags: Sequence[str]) -> tuple[float, float, float]:
    """Env steps a second, and the shares of time that the learner and the actors waited."""
    name = f"run{len(list(Path(logs).iterdir()))}"
    config = READER.parse(flags)
    total = (updates + _TRACED) * config.steps_per_update
    words = [sys.executable, "-m", "tfrl.impala", *flags, "--total-steps", str(total), "--eval-episodes", "1"]
    words += ["--logdir", logs, "--run-name", name, "--checkpoint-every", "1000"]
    command.finish(words, stdout=subprocess.DEVNULL)
    with (Path(logs) / name / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))[_TRACED:]
    names = ("time/env_steps_per_second", "time/learner_wait_fraction", "time/actor_wait_fraction")
    rate, learner, actor = (statistics.median(float(row[name]) for row in rows) for name in names)
    return rate, learner, actor


def _hand_over() -> tuple[float, float]:
    """Seconds to put a rollout into the object store, and to have it in buffers that are used again."""
    from tfrl.remote.cluster import Cluster, ray

    shape = (257, 64, 64, 64, 3)
    cluster = Cluster(None, {"--actors": 1}, 3 * int(np.prod(shape)))
    maker = ray.remote(_Maker).remote(shape)
    target, puts, takes = np.zeros(shape, np.uint8), [], []
    for _ in range(5):
        ready = ray.get(maker.put.remote())
        puts.append(ready[1])
        began = time.perf_counter()
        np.copyto(target, ray.get(ready[0][0]))
        takes.append(time.perf_counter() - began)
        del ready
    cluster.close()
    return min(puts), min(takes)


class _Maker:
    """An actor with a rollout."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._frames = np.ones(shape, np.uint8)

    def put(self) -> tuple[list, float]:
        """A reference to the frames, in a list so that it stays one, and the seconds that it took."""
        from tfrl.remote.cluster import ray

        began = time.perf_counter()
        reference = ray.put(self._frames)
        return [reference], time.perf_counter() - began


if __name__ == "__main__":
    command.run(Options, main)
