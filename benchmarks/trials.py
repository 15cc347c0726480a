"""Trials of disturbed runs: the file that collects them, the loop that makes them, cells of their tables."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.disturbed_run import DisturbedRun
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT
from tfrl.run import files
from tfrl.run.folder import read_json

BATCH = 8 * 32
"""Env steps of an update of the runs."""
TRIALS_A_RUN = 5
"""Trials that share a run."""

Trial = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs and the moments."""

    results: str = "recovery.json"
    """Trials are added to this file."""
    updates: Annotated[int, COUNT] = 90
    """Length of a run."""
    checkpoint_every: Annotated[int, COUNT] = 5
    """Updates between checkpoints."""
    seed: int = 1
    """Decides the moments."""


def check(faults: Sequence[str], known: Collection[str]) -> None:
    """Raises UserError for an unknown fault."""
    unknown = [fault for fault in faults if fault not in known]
    if unknown:
        raise UserError(f"--faults {','.join(unknown)} is not among {', '.join(known)}.")


def make(
    path: Path,
    settings: Sequence[str],
    trials: Mapping[str, int],
    start: Callable[[Path], DisturbedRun],
    disturb: Callable[[Path, str, Sequence[int], dict[str, Any]], list[Trial]],
    a_run: Mapping[str, int],
) -> list[Trial]:
    """Makes trials, and gives all that are in the file then.

    Args:
      path: of the results.
      settings: which all trials in it have in common.
      trials: how many to add, by fault.
      start: starts the undisturbed run in a folder.
      disturb: makes the trials of a fault with these numbers in one run, of a folder and the results so far.
      a_run: how many of them, by fault, where it is not `TRIALS_A_RUN`.

    Raises:
      UserError: the file has other settings, or cannot be written.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no run stays behind
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        done = read(path, settings, lambda: start(Path(place) / "undisturbed"))
        write(path, done)
        for fault, count in trials.items():
            earlier = [trial["fault"] for trial in done["trials"]].count(fault)
            most = a_run.get(fault, TRIALS_A_RUN)
            for first in range(earlier, earlier + count, most):
                numbers = range(first, min(first + most, earlier + count))
                done["trials"] += disturb(Path(place) / f"{fault}-{first}", fault, numbers, done)
                write(path, done)
    return done["trials"]


def read(path: Path, settings: Sequence[str], start: Callable[[], DisturbedRun]) -> dict[str, Any]:
    """The results so far; at first those of the undisturbed run: its weights, and how long phases take."""
    if path.exists():
        done = read_json(path) or {}
        if done.get("settings") != settings:
            raise UserError(f"{path} holds no results of these settings; give another --results.")
        return done
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--results {path} cannot be written: {path.parent} is no folder to write in.")
    run = start()
    try:
        weights = run.finish()
    finally:
        run.stop()
    notes = run.notes(0)
    spans: dict[str, list[float]] = {}
    for note, following in zip(notes, notes[1:], strict=False):
        spans.setdefault(note.phase, []).append(following.at - note.at)
    seconds = {phase: statistics.median(found) for phase, found in spans.items()}
    print("phases of the undisturbed run:", {k: round(v, 3) for k, v in seconds.items()}, file=sys.stderr)
    return {"settings": settings, "weights": weights, "seconds": seconds, "trials": []}


def write(path: Path, done: Mapping[str, Any]) -> None:
    """Writes the results, whole or not at all."""
    files.write(path, json.dumps(done, indent=1))


def of_a_run(
    run: DisturbedRun,
    fault: str,
    numbers: Sequence[int],
    options: Options,
    weights: str,
    strike: Callable[[int, random.Random], Trial],
    *,
    gaps: bool = False,
) -> list[Trial]:
    """Makes the trials of one run, each after a random number of updates, and lets it end.

    Args:
      run: the run.
      fault: the fault.
      numbers: of the trials.
      options: the benchmark's.
      weights: the checksum of the undisturbed run's.
      strike: makes one trial, of its number and what decides its moment.
      gaps: whether rows may be missing in progress.csv.
    """
    trials: list[Trial] = []
    try:
        for number in numbers:
            dice = random.Random(f"{options.seed} {fault} {number}")
            # So many updates, at least, that a checkpoint is likely in between.
            update = run.finished + dice.randint(2, 2 + options.checkpoint_every)
            run.wait_until_aimed(lambda update=update: run.finished >= update)
            trial = {"fault": fault, **strike(number, dice)}
            print(json.dumps(trial), file=sys.stderr)
            trials.append(trial)
        equal = run.finish(gaps=gaps) == weights
    finally:
        run.stop()
    return [trial | {"equal": equal} for trial in trials]


def wait_within_update(seconds: Mapping[str, float], dice: random.Random) -> None:
    """Waits for a random part of an update, whose phases take these seconds."""
    time.sleep(dice.uniform(0.0, sum(seconds.get(phase, 0.0) for phase in ("collecting", "updating"))))


def head(interval: int) -> str:
    """The titles of `cells`; `interval` are the env steps between two checkpoints."""
    return (
        f"trials | seconds to the next new update: median, most | env steps lost, of {interval}: median, most"
    )


def cells(trials: Sequence[Trial]) -> str:
    """The number of trials, and the median and the most of what they took and lost, as cells of a row."""
    seconds, lost = ([t[key] for t in trials] for key in ("seconds", "lost"))
    return (
        f"{len(trials)} | {statistics.median(seconds):.1f}, {max(seconds):.1f} "
        f"| {statistics.median(lost):.0f}, {max(lost)}"
    )
