"""python -m benchmarks.recovery: what a killed, stopped or hung worker costs, and a full disk.

Runs of two workers under `cluster.launch` are disturbed a few times each. The trials aim in turn at moments
(anywhere, rollout, update, checkpoint write, evaluation), and in turn at the chief and at the other worker:
each waits for a random update, for the victim to begin the phase, and for a random part of the phase's time.

- seconds: from the fault to the end of the first update that no earlier attempt had finished;
- lost: the env steps of finished updates that were taken again;
- equal: the run ended with the weights of an undisturbed run, bit for bit.

SIGTERM ends the run, which is started again at once. A full disk is noticed by the next checkpoint; then
space is made. Trials are added to the results file, and the tables are of all in it, so that many can be made
in short pieces.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.disturbed_run import WORKERS, DisturbedRun
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.settings import COUNT, check_ranges
from tfrl.run.folder import read_json

FAULTS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hang": signal.SIGSTOP, "disk": None}
PHASES = {
    "anywhere": "",
    "rollout": "collecting",
    "update": "updating",
    "checkpoint write": "saving",
    "evaluation": "evaluating",
}
_TRIALS_A_RUN = 5
_BATCH = 8 * 32  # env steps of an update
_FLAGS = ["--env", "catch", "--torso", "cookbook", "--precision", "float32", "--num-envs", "8"]
_FLAGS += ["--num-steps", "32", "--num-minibatches", "4", "--epochs", "2", "--eval-episodes", "64"]
_DISK = "16m"  # a few checkpoints of 1.1 MB, and the rest of a run

Trial = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The trials."""

    faults: str = "kill,term,hang,disk"
    """Faults: kill (SIGKILL), term (SIGTERM), hang (SIGSTOP), disk (a full disk; needs root), with commas."""
    trials: int = 10
    """Trials of each fault; 10 have each moment with each worker once."""
    results: str = "recovery.json"
    """Trials are added to this file."""
    updates: int = 90
    """Length of a run."""
    checkpoint_every: int = 5
    """Updates between checkpoints."""
    eval_every: int = 8
    """Updates between evaluations."""
    seed: int = 1
    """Decides the moments."""

    @property
    def flags(self) -> list[str]:
        """The trainer's."""
        every = ["--checkpoint-every", str(self.checkpoint_every), "--eval-every", str(self.eval_every)]
        return [*_FLAGS, *every, "--total-steps", str(self.updates * _BATCH)]


def main(options: Options) -> None:
    """Makes the trials and prints the tables. UserError: an unknown fault, or a file of other settings."""
    faults = options.faults.split(",")
    unknown = [fault for fault in faults if fault not in FAULTS]
    if unknown:
        raise UserError(f"--faults {','.join(unknown)} is not among {', '.join(FAULTS)}.")
    check_ranges(options, dict.fromkeys(("trials", "updates", "checkpoint_every", "eval_every"), COUNT))
    results = Path(options.results)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no run stays behind
    done = _read(results, options)
    _write(results, done)
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults:
            earlier = [trial["fault"] for trial in done["trials"]].count(fault)
            for first in range(earlier, earlier + options.trials, _TRIALS_A_RUN):
                numbers = range(first, min(first + _TRIALS_A_RUN, earlier + options.trials))
                done["trials"] += _disturb(Path(folder) / f"{fault}-{first}", fault, numbers, done, options)
                _write(results, done)
    print(report(done["trials"], options.checkpoint_every * _BATCH))


def _read(path: Path, options: Options) -> dict[str, Any]:
    """The results so far; at first those of the undisturbed run: its weights, and how long phases take."""
    settings = options.flags
    if path.exists():
        done = read_json(path) or {}
        if done.get("settings") != settings:
            raise UserError(f"{path} holds no results of these settings; give another --results.")
        return done
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--results {path} cannot be written: {path.parent} is no folder to write in.")
    with tempfile.TemporaryDirectory() as folder:
        run = DisturbedRun(Path(folder), options.flags)
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


def _write(path: Path, done: dict[str, Any]) -> None:
    staged = path.with_name(path.name + ".tmp")
    staged.write_text(json.dumps(done, indent=1))
    staged.replace(path)


def _disturb(
    folder: Path, fault: str, numbers: Sequence[int], done: dict[str, Any], options: Options
) -> list[Trial]:
    """One run with these trials."""
    trials: list[Trial] = []
    with _small_disk(folder / "disk") if fault == "disk" else contextlib.nullcontext() as disk:
        run = DisturbedRun(folder, options.flags, disk)
        try:
            for number in numbers:
                dice = random.Random(f"{options.seed} {fault} {number}")
                trial = {"fault": fault, **_plan(number)}
                # So many updates, at least, that a checkpoint is likely in between.
                _wait_for_update(run, _finished(run) + dice.randint(2, 2 + options.checkpoint_every))
                victim = _aim(run, trial, done["seconds"], dice)
                trial |= _strike_disk(run) if fault == "disk" else _strike(run, FAULTS[fault], victim)
                print(json.dumps(trial), file=sys.stderr)
                trials.append(trial)
            equal = run.finish(gaps=fault == "disk") == done["weights"]
        finally:
            run.stop()
    return [trial | {"equal": equal} for trial in trials]


def _plan(number: int) -> Trial:
    return {"moment": list(PHASES)[number % len(PHASES)], "victim": number % WORKERS}


def _finished(run: DisturbedRun) -> int:
    note = run.note(0)
    return 0 if note is None else note.update


def _wait_for_update(run: DisturbedRun, update: int) -> None:
    if not run.wait_until(lambda: _finished(run) >= update):
        raise TrainingError(f"the run in {run.folder} is over before the trial; give more --updates")


def _aim(run: DisturbedRun, trial: Trial, seconds: dict[str, float], dice: random.Random) -> int:
    """Waits for the moment; the victim's process."""
    worker, phase = trial["victim"], PHASES[trial["moment"]]
    if not phase:
        time.sleep(dice.uniform(0.0, sum(seconds.get(p, 0.0) for p in ("collecting", "updating"))))
        return run.note(worker).process
    before = run.note(worker)  # a phase that has begun before may be nearly over
    began = lambda note: note != before and note.phase.startswith(phase)  # noqa: E731
    if not run.wait_until(lambda: began(run.note(worker))):
        raise TrainingError(f"the run in {run.folder} is over before the trial; give more --updates")
    note = run.note(worker)
    span = max(value for name, value in seconds.items() if name.startswith(phase))
    time.sleep(max(0.0, note.at + dice.uniform(0.0, 0.8 * span) - time.monotonic()))
    return note.process


def _strike(run: DisturbedRun, signum: signal.Signals, victim: int) -> Trial:
    """Sends the signal, and waits until an update is finished that was not before."""
    struck = time.monotonic()
    os.kill(victim, signum)
    hit = next(n for n in (run.note(w) for w in range(WORKERS)) if n.process == victim)
    if signum == signal.SIGTERM:
        code = run.wait()
        if code != 128 + signum:
            raise TrainingError(f"exit code {code} after {signum.name}:\n{run.output[-2000:]}")
        run.start()
    chief = run.note(0).process
    if not run.wait_until(lambda: run.note(0).process != chief):
        raise TrainingError(f"the run in {run.folder} was not restarted:\n{run.output[-2000:]}")
    notes = run.notes(0)
    first = next(i for i, note in enumerate(notes) if note.process == notes[-1].process)
    finished, resumed = notes[first - 1].update, notes[first]
    run.wait_until(lambda: run.note(0).update > finished)
    over = next(note.at for note in run.notes(0)[first:] if note.update > finished)
    return {
        "hit": hit.phase,
        "update": hit.update,
        "seconds": over - struck,
        "until_trained_on": resumed.at - struck,
        "lost": (finished - resumed.update) * _BATCH,
    }


def _strike_disk(run: DisturbedRun) -> Trial:
    """Fills the disk until a checkpoint fails, and makes space again."""
    hit, said, saved = run.note(0), run.output.count("is full ("), run.saved()
    struck = time.monotonic()
    ballast = _fill(run.logdir)
    run.wait_until(lambda: run.output.count("is full (") > said)
    over = next(note.at for note in run.notes(0) if note.update > hit.update)
    kept = bool(saved) and saved[-1] in run.saved()
    litter = run.staged()
    ballast.unlink()
    run.wait_until(lambda: run.saved()[-1:] > saved[-1:])
    return {
        "hit": hit.phase,
        "update": hit.update,
        "seconds": over - struck,
        "lost": 0 if run.notes(0)[-1].process == hit.process else None,
        "last_good_kept": kept and not litter,
    }


def _fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False).returncode != 0:
        raise UserError("only root can mount a small disk; leave disk out of --faults.")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def report(trials: Sequence[Trial], interval: int) -> str:
    """The tables, in Markdown.

    Args:
      trials: of any faults.
      interval: env steps between two checkpoints.
    """
    lines = [
        f"| fault | trials | seconds to the next new update: median, most | "
        f"env steps lost, of {interval}: median, most | equal |",
        "|---|---|---|---|---|",
    ]
    for fault in dict.fromkeys(trial["fault"] for trial in trials):
        lines.append(f"| {fault} {_row([t for t in trials if t['fault'] == fault])}")
    lines += ["", "| hit while | chief | trials | seconds | lost | equal |", "|---|---|---|---|---|---|"]
    cases = dict.fromkeys((t["fault"], t["hit"].split(" ")[0], t["victim"] == 0) for t in trials)
    for fault, hit, chief in sorted(cases):
        of = [
            t for t in trials if (t["fault"], t["hit"].split(" ")[0], t["victim"] == 0) == (fault, hit, chief)
        ]
        lines.append(f"| {fault}, {hit} | {'yes' if chief else 'no'} {_row(of)}")
    return "\n".join(lines)


def _row(trials: Sequence[Trial]) -> str:
    seconds, lost = ([t[key] for t in trials] for key in ("seconds", "lost"))
    return (
        f"| {len(trials)} | {statistics.median(seconds):.1f}, {max(seconds):.1f} "
        f"| {statistics.median(lost):.0f}, {max(lost)} | {sum(t['equal'] for t in trials)} |"
    )


if __name__ == "__main__":
    command.run(Options, main)
