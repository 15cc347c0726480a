"""python -m benchmarks.recovery_of_actors: what a killed or hung actor, learner, driver or node of Ray costs.

Runs of IMPALA in lockstep, whose two actors on Ray step the envs, are disturbed a few times each: after a
random number of updates, at a random moment of one.

- kill, hang: SIGKILL or SIGSTOP of an actor, which is replaced; --actor-timeout finds one that hangs;
- learner: SIGKILL of one of two learners, which all begin again from the last checkpoint;
- driver, term: SIGKILL or SIGTERM of the run, which is started again at once by the same command;
- node: SIGKILL of all processes of a node of Ray that has an actor. The others are the head, with the run and
  the other actor, and a spare one, as all three are of one CPU. Ray's own health checks find the loss.

- seconds: from the fault to the end of the first update that no earlier attempt had finished. After the loss
  of an actor the learner still finishes the update whose rollout it has: the first one that had to wait for
  the replacement counts;
- lost: the env steps of finished updates that were taken again;
- the runs that ended with the weights of an undisturbed run, bit for bit.

Trials are added to the results file, and the table is of all in it, so that many can be made in short pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks import command, trials
from benchmarks.disturbed_run import DisturbedRun
from benchmarks.process_tree import ACTOR, family, kill_family, named, wait_until_gone
from benchmarks.ray_nodes import Node, Nodes
from benchmarks.trials import BATCH, Trial
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import TrainingError
from tfrl.cli.flags import COUNT, Range
from tfrl.config import distributed

READER = reader("impala")

FAULTS = {"kill": 20, "hang": 5, "learner": 5, "driver": 5, "term": 5, "node": 5}
"""Faults, and how many trials of each there are by default."""
_SIGNALS = {"hang": signal.SIGSTOP, "term": signal.SIGTERM}  # SIGKILL otherwise
# A node's Ray is as the fault leaves it; and a run may end while what the one before it left goes.
_A_RUN = {"node": 1, "driver": 1, "term": 1}
_LEARNERS = 2
_NODES = 3
_FLAGS = ["--env", "catch", "--torso", "cookbook", "--precision", "float32", "--num-envs", "8"]
_FLAGS += ["--num-steps", "32", "--num-minibatches", "2", "--eval-episodes", "64", "--actors", "2"]
_REPLACED = "another process replaces it"  # says the run
_ENDS_WITHIN = 180.0  # seconds: Ray's agents look now and then whether the driver lives


@dataclasses.dataclass(frozen=True)
class Options(trials.Options):
    """The trials."""

    faults: str = ",".join(FAULTS)
    """Faults: kill, hang (an actor), learner, driver, term (the run), node (of Ray), with commas."""
    trials: Annotated[int | None, COUNT] = None
    """Trials of each fault; None: 20 of kill and 5 of each other."""
    results: str = "recovery_of_actors.json"
    """Trials are added to this file."""
    actor_timeout: Annotated[float, Range(0, 1e7, above=True)] = 10.0
    """Seconds without a rollout after which an actor that hangs is replaced."""

    @property
    def flags(self) -> list[str]:
        """The trainer's, of all runs."""
        every = ["--checkpoint-every", str(self.checkpoint_every)]
        return [*_FLAGS, *every, "--total-steps", str(self.updates * BATCH)]

    def flags_of(self, fault: str) -> list[str]:
        """The trainer's, of runs with this fault; its result does not depend on them."""
        if fault == "hang":
            return ["--actor-timeout", str(self.actor_timeout)]
        return ["--learners", str(_LEARNERS)] if fault == "learner" else []


def main(options: Options) -> None:
    """Makes the trials and prints the table. UserError: an unknown fault, or a file of other settings."""
    faults = options.faults.split(",")
    trials.check(faults, FAULTS)
    distributed.check_ray(READER.parse(options.flags))

    def disturb(folder: Path, fault: str, numbers: Sequence[int], done: Mapping[str, Any]) -> list[Trial]:
        with _surroundings(folder, fault) as (nodes, flags, environ):
            run = _start(folder, [*options.flags, *options.flags_of(fault), *flags], environ)

            def strike(number: int, dice: random.Random) -> Trial:
                trials.wait_within_update(done["seconds"], dice)
                return _strike(run, fault, dice, nodes)

            found = trials.of_a_run(run, fault, numbers, options, done["weights"], strike)
        return [trial | {"run": numbers[0]} for trial in found]

    wanted = {fault: options.trials or FAULTS[fault] for fault in faults}
    settings, path = options.flags, Path(options.results)
    found = trials.make(path, settings, wanted, lambda folder: _start(folder, settings), disturb, _A_RUN)
    print(report(found, options.checkpoint_every * BATCH))


def _start(folder: Path, flags: Sequence[str], environ: Mapping[str, str] | None = None) -> DisturbedRun:
    """A run whose Ray, if it has one of its own, leaves nothing outside of the folder around this one."""
    temporary = {"TMPDIR": str(folder.parent)}  # sockets have names of 107 characters at most
    return DisturbedRun(folder, "tfrl.impala", flags, environ={**temporary, **(environ or {})})


@contextlib.contextmanager
def _surroundings(folder: Path, fault: str) -> Iterator[tuple[list[Node], list[str], dict[str, str]]]:
    """Nodes of Ray for this fault, if it needs any, and the flags and variables of a run that joins them."""
    if fault != "node":
        yield [], [], {}
        return
    folder.mkdir()
    with contextlib.closing(Nodes(folder)) as ray:
        nodes = [ray.start() for _ in range(_NODES)]
        yield nodes, ["--ray-address", ray.address], ray.environ


def _strike(run: DisturbedRun, fault: str, dice: random.Random, nodes: Sequence[Node]) -> Trial:
    """Makes the fault, and waits until the run has recovered."""
    victim, everyone = _victim(run, fault, dice, nodes), family(run.pid)
    signum = _SIGNALS.get(fault, signal.SIGKILL)
    hit, said, struck = run.note(0), run.output.count(_REPLACED), time.monotonic()
    kill_family(victim) if fault == "node" else os.kill(victim, signum)
    if victim == everyone[0]:
        run.start_again(128 + signum if signum == signal.SIGTERM else -signum)
    if fault in ("kill", "hang", "node"):
        if not run.wait_until(lambda: run.output.count(_REPLACED) > said):
            raise TrainingError(f"the run in {run.folder} did not replace an actor:\n{run.output[-2000:]}")
        recovery = run.recovered(struck, run.finished)
    else:
        recovery = run.restarted(struck, hit.process)
    if victim == everyone[0]:
        wait_until_gone(everyone, _ENDS_WITHIN)
    return {
        "hit": hit.phase,
        "update": hit.update,
        "seconds": recovery.seconds,
        "lost": recovery.updates * BATCH,
    }


def _victim(run: DisturbedRun, fault: str, dice: random.Random, nodes: Sequence[Node]) -> int:
    """The number of a process, of a node's first one for the fault `node`."""
    if fault in ("kill", "hang"):
        return dice.choice(named(run.pid, ACTOR))
    if fault == "learner":
        return run.note(dice.randrange(_LEARNERS)).process
    if fault == "node":
        return dice.choice([node for node in nodes[1:] if node.actors()]).process.pid
    return run.pid


def report(found: Sequence[Trial], interval: int) -> str:
    """The table, in Markdown.

    Args:
      found: trials of any faults.
      interval: env steps between two checkpoints.
    """
    lines = [f"| fault | {trials.head(interval)} | runs with the undisturbed weights |"]
    lines.append("|---|---|---|---|---|")
    for fault in dict.fromkeys(trial["fault"] for trial in found):
        of = [trial for trial in found if trial["fault"] == fault]
        runs = {trial["run"]: trial["equal"] for trial in of}
        lines.append(f"| {fault} | {trials.cells(of)} | {sum(runs.values())} of {len(runs)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command.run(Options, main)
