"""python -m benchmarks.continuous_control: PPO on InvertedDoublePendulum-v5 beside other projects' scripts.

Two contests, one process after the other, round by round, so that all see the same machine:

- TorchRL's PPO tutorial (https://github.com/pytorch/rl, tutorials/sphinx-tutorials/coding_ppo.py) and ours
  with --preset torchrl: 1,000 env steps an update, minibatches of 64, 10 epochs, policy and value of 3 x 256;
- CleanRL's ppo_continuous_action.py (https://github.com/vwxyzjn/cleanrl), stable-baselines3's PPO with its
  defaults, and ours with --preset cleanrl: 2,048 env steps, 32 minibatches, 10 epochs, 2 x 64 each.

Nothing of theirs is here: --torchrl, --cleanrl and --sb3 name the scripts, which --peer-python starts with
`--env-id ID --seed N --total-timesteps N`, and which print a line that begins with `SPS:` at the end of each
update, as CleanRL's does. The other two need that added, their arguments, and the env's id. With --learn
TorchRL's script must also print `final_return=X` at its end, the mean return of `--final-episodes N` episodes
of the most likely actions; it and ours are then trained to 50,000 env steps, and their returns compared.

Env steps a second count from the end of the first update, which compiles. Where the machine is not quiet, the
column for a second of processor time tells more; `taskset -c 1` before the command holds all to one core. The
floor is the update alone, compiled (`benchmarks/update_floor.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from benchmarks import command, peers, speed, training, update_floor
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT, Range

_ENV = "InvertedDoublePendulum-v5"
_CONTESTS = {"torchrl": (1000, ("torchrl",)), "cleanrl": (2048, ("cleanrl", "sb3"))}
"""Env steps of an update and the peers, by our preset."""
_LEARN_STEPS = 50_000
_RETURN = "final_return="


@dataclasses.dataclass(frozen=True)
class Options:
    """The comparison."""

    torchrl: str = ""
    """The script of TorchRL's tutorial."""
    cleanrl: str = ""
    """CleanRL's script."""
    sb3: str = ""
    """A script that trains stable-baselines3's PPO."""
    peer_python: str = "python3"
    """The Python that has what these scripts import."""
    updates: Annotated[int, Range(2, 10_000)] = 10
    """Updates that count; one more comes first."""
    runs: Annotated[int, COUNT] = 3
    """Rounds, of which the median counts."""
    floor_seconds: Annotated[float, Range(0, 3600, above=True)] = 10.0
    """Seconds of each measurement of a floor."""
    precision: str = "auto"
    """Our --precision."""
    learn: bool = False
    """Compare returns with TorchRL's script in place of speeds."""
    seeds: str = "1..10"
    """Seeds of --learn with commas between, 1..3 for 1,2,3."""
    episodes: Annotated[int, COUNT] = 10
    """Episodes of the evaluation at the end, with --learn."""
    logdir: str = "logs/continuous-control"
    """Folder of our runs and of TorchRL's lines, with --learn, so that the same command continues."""


def main(options: Options) -> None:
    """Measures and prints."""
    _check(options)
    if options.learn:
        _compare_returns(options)
    else:
        _compare_speeds(options)


def _check(options: Options) -> None:
    """Raises UserError for what would fail after minutes."""
    for flag, path in (
        ("--torchrl", options.torchrl),
        ("--cleanrl", options.cleanrl),
        ("--sb3", options.sb3),
    ):
        peers.check_file(path, flag)
    command.check_program(options.peer_python, "--peer-python")
    command.seeds(options.seeds)
    for preset in _CONTESTS:
        reader("ppo").parse(["--preset", preset, "--precision", options.precision])
    if options.learn and not options.torchrl:
        raise UserError("--learn compares with TorchRL's script: name it by --torchrl.")


# Speed


def _compare_speeds(options: Options) -> None:
    found: dict[tuple[str, str], list[speed.Speed]] = {}
    for _ in range(options.runs):
        for preset, (steps, others) in _CONTESTS.items():
            found.setdefault((preset, peers.OURS), []).append(_our_run(options, preset, steps))
            for peer in filter(lambda name: getattr(options, name), others):
                script = _script(options, peer, seed=1, steps=steps * (options.updates + 1))
                measured = speed.of_script(script, steps, options.updates + 1)
                found.setdefault((preset, peer), []).append(measured)
    floors = {preset: update_floor.floor(preset, options.floor_seconds) for preset in _CONTESTS}
    figures = {"options": dataclasses.asdict(options), "cores": os.cpu_count(), "floors": floors}
    print(json.dumps({**figures, "runs": peers.as_json(found)}))
    title = f"{_ENV}, env steps a second, medians of {options.runs} runs; in brackets ours in multiples of it"
    Console().print(peers.table(title, "preset", found, floors))


def _our_run(options: Options, preset: str, steps: int) -> speed.Speed:
    updates = options.updates + 1
    flags = ["--preset", preset, "--total-steps", str(steps * updates), "--precision", options.precision]
    return speed.of_trainer("tfrl.ppo", [*flags, "--eval-episodes", "1"], steps, updates)


def _script(options: Options, peer: str, seed: int, steps: int) -> list[str]:
    """The command that starts a peer's script."""
    return peers.script(options.peer_python, getattr(options, peer), _ENV, seed=seed, steps=steps)


# Returns


def _compare_returns(options: Options) -> None:
    """Trains ours and TorchRL's with the same seeds and prints what both come to."""
    seeds = command.seeds(options.seeds)
    flags = ["--preset", "torchrl", "--total-steps", str(_LEARN_STEPS), "--precision", options.precision]
    flags += ["--eval-episodes", str(options.episodes)]
    ours = [run.final_return("test") for run in training.train(flags, seeds, options.logdir)]
    theirs = [_return_of_peer(options, seed) for seed in seeds]
    title = f"{_ENV}, {_LEARN_STEPS:,} env steps, mean return of {options.episodes} episodes"
    table = Table("seed", "tfrl, --preset torchrl", "TorchRL's tutorial", title=title)
    for seed, *returns in zip(seeds, ours, theirs, strict=True):
        table.add_row(str(seed), *(f"{value:.1f}" for value in returns))
    table.add_section()
    table.add_row("median", *(f"{statistics.median(returns):.1f}" for returns in (ours, theirs)))
    Console().print(table)


def _return_of_peer(options: Options, seed: int) -> float:
    """What TorchRL's script comes to; its lines are kept, and not made again."""
    path = Path(options.logdir) / f"torchrl-seed{seed}.txt"
    script = [*_script(options, "torchrl", seed, _LEARN_STEPS), "--final-episodes", str(options.episodes)]
    found = [line for line in peers.lines(path, script) if line.startswith(_RETURN)]
    if not found:
        raise TrainingError(f"there is no line in {path} that begins with {_RETURN}.")
    return float(found[-1].removeprefix(_RETURN).split()[0])


if __name__ == "__main__":
    command.run(Options, main)
