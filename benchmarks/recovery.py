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
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks import command, trials
from benchmarks.disturbed_run import DisturbedRun
from benchmarks.trials import BATCH, Trial
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT

FAULTS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hang": signal.SIGSTOP, "disk": None}
PHASES = {
    "anywhere": "",
    "rollout": "collecting",
    "update": "updating",
    "checkpoint write": "saving",
    "evaluation": "evaluating",
}
_WORKERS = 2
_RESTARTS = 9  # more than there are trials in a run
_LAUNCHER = [sys.executable, "-m", "cluster.launch", "--workers", str(_WORKERS)]
_LAUNCHER += ["--max-restarts", str(_RESTARTS), "--"]
_FLAGS = ["--env", "catch", "--torso", "cookbook", "--precision", "float32", "--num-envs", "8"]
_FLAGS += ["--num-steps", "32", "--num-minibatches", "4", "--epochs", "2", "--eval-episodes", "64"]
_DISK = "16m"  # a few checkpoints of 1.1 MB, and the rest of a run


@dataclasses.dataclass(frozen=True)
class Options(trials.Options):
    """The trials."""

    faults: str = "kill,term,hang,disk"
    """Faults: kill (SIGKILL), term (SIGTERM), hang (SIGSTOP), disk (a full disk; needs root), with commas."""
    trials: Annotated[int, COUNT] = 10
    """Trials of each fault; 10 have each moment with each worker once."""
    eval_every: Annotated[int, COUNT] = 8
    """Updates between evaluations."""

    @property
    def flags(self) -> list[str]:
        """The trainer's."""
        every = ["--checkpoint-every", str(self.checkpoint_every), "--eval-every", str(self.eval_every)]
        return [*_FLAGS, *every, "--total-steps", str(self.updates * BATCH)]


def main(options: Options) -> None:
    """Makes the trials and prints the tables. UserError: an unknown fault, or a file of other settings."""
    faults = options.faults.split(",")
    trials.check(faults, FAULTS)

    def start(folder: Path, logdir: Path | None = None) -> DisturbedRun:
        return DisturbedRun(folder, "tfrl.ppo_procgen", options.flags, launcher=_LAUNCHER, logdir=logdir)

    def disturb(folder: Path, fault: str, numbers: Sequence[int], done: Mapping[str, Any]) -> list[Trial]:
        full = fault == "disk"
        with _small_disk(folder / "disk") if full else contextlib.nullcontext() as disk:
            run = start(folder, disk)

            def strike(number: int, dice: random.Random) -> Trial:
                trial = _plan(number)
                victim = _aim(run, trial, done["seconds"], dice)
                return trial | (_strike_disk(run) if full else _strike(run, FAULTS[fault], victim))

            return trials.of_a_run(run, fault, numbers, options, done["weights"], strike, gaps=full)

    wanted = dict.fromkeys(faults, options.trials)
    found = trials.make(Path(options.results), options.flags, wanted, start, disturb, {})
    print(report(found, options.checkpoint_every * BATCH))


def _plan(number: int) -> Trial:
    return {"moment": list(PHASES)[number % len(PHASES)], "victim": number % _WORKERS}


def _aim(run: DisturbedRun, trial: Trial, seconds: dict[str, float], dice: random.Random) -> int:
    """Waits for the moment; the victim's process."""
    worker, phase = trial["victim"], PHASES[trial["moment"]]
    if not phase:
        trials.wait_within_update(seconds, dice)
        return run.note(worker).process
    before = run.note(worker)  # a phase that has begun before may be nearly over
    began = lambda note: note != before and note.phase.startswith(phase)  # noqa: E731
    run.wait_until_aimed(lambda: began(run.note(worker)))
    note = run.note(worker)
    span = max(value for name, value in seconds.items() if name.startswith(phase))
    time.sleep(max(0.0, note.at + dice.uniform(0.0, 0.8 * span) - time.monotonic()))
    return note.process


def _strike(run: DisturbedRun, signum: signal.Signals, victim: int) -> Trial:
    """Sends the signal, and waits until an update is finished that was not before."""
    chief, struck = run.note(0).process, time.monotonic()
    os.kill(victim, signum)
    hit = next(n for n in (run.note(w) for w in range(_WORKERS)) if n.process == victim)
    if signum == signal.SIGTERM:
        run.start_again(128 + signum)
    recovery = run.restarted(struck, chief)
    return {
        "hit": hit.phase,
        "update": hit.update,
        "seconds": recovery.seconds,
        "until_trained_on": recovery.resumed,
        "lost": recovery.updates * BATCH,
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


def report(found: Sequence[Trial], interval: int) -> str:
    """The tables, in Markdown.

    Args:
      found: trials of any faults.
      interval: env steps between two checkpoints.
    """
    lines = [f"| fault | {trials.head(interval)} | equal |", "|---|---|---|---|---|"]
    for fault in dict.fromkeys(trial["fault"] for trial in found):
        lines.append(f"| {fault} {_row([t for t in found if t['fault'] == fault])}")
    lines += ["", "| hit while | chief | trials | seconds | lost | equal |", "|---|---|---|---|---|---|"]
    cases = dict.fromkeys(_case(trial) for trial in found)
    for fault, hit, chief in sorted(cases):
        of = [trial for trial in found if _case(trial) == (fault, hit, chief)]
        lines.append(f"| {fault}, {hit} | {'yes' if chief else 'no'} {_row(of)}")
    return "\n".join(lines)


def _case(trial: Trial) -> tuple[str, str, bool]:
    return trial["fault"], trial["hit"].split(" ")[0], trial["victim"] == 0


def _row(found: Sequence[Trial]) -> str:
    return f"| {trials.cells(found)} | {sum(t['equal'] for t in found)} |"


if __name__ == "__main__":
    command.run(Options, main)
