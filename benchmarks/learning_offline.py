"""python -m benchmarks.learning_offline: what the offline algorithms come to on a set of mixed quality.

The set has as many episodes of an early as of a late policy of SAC on Pendulum-v1. Each algorithm learns from
it with each seed, and plays 100 episodes at the end, from the same 100 starts for all of them. With --d3rlpy,
the command of a Python that has d3rlpy and Gymnasium, its algorithms do the same with the same sizes and
numbers of gradient steps, a run of theirs after each of ours. Runs that are complete are only read. The table
also has the gradient steps a second: medians over the seeds. For ours, those of a run are the median of its
rows, so compilation is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import command, training
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT
from tfrl.experience import recorded
from tfrl.run import files

ENV = "Pendulum-v1"
_PLAYERS = {"early": 1_500, "late": 6_000}  # env steps of SAC
# With the default rates, CQL is worse than the set after 10,000 gradient steps (docs/notebook/offline.md).
_CQL = ("--lr", "1e-3", "--critic-lr", "1e-3", "--alpha-lr", "1e-3", "--conservative-weight", "1")
_ALGORITHMS = {"bc": ("--hidden", "256,256", "--activation", "relu"), "iql": (), "td3_bc": (), "cql": _CQL}
_EPISODES = 100
_SPEED = "time/updates_per_second"
_PEER = Path(__file__).with_name("d3rlpy_script.py")


@dataclass(frozen=True)
class Options:
    """The training."""

    algorithms: str = ",".join(_ALGORITHMS)
    """Algorithms, with commas between."""
    seeds: str = "1..5"
    """Seeds with commas between; 1..3 is the same as 1,2,3."""
    gradient_steps: Annotated[int, COUNT] = 10_000
    """Gradient steps of a run."""
    episodes: Annotated[int, COUNT] = 50
    """Episodes of each of the two policies in the set."""
    logdir: str = "logs/offline"
    """The folder of the set and the runs."""
    d3rlpy: str = ""
    """The command of a Python that has d3rlpy; empty: leave it out."""


def main(options: Options) -> None:
    """Makes the set, trains, and prints the table."""
    logdir, seeds, names = Path(options.logdir), command.seeds(options.seeds), options.algorithms.split(",")
    if not {*names} <= {*_ALGORITHMS}:
        raise UserError(f"--algorithms must be of {', '.join(_ALGORITHMS)}; got {options.algorithms}.")
    dataset = ",".join(str(_collected(name, logdir, options)) for name in _PLAYERS)
    episodes = [raw for shard in recorded.open_set(dataset).shards for raw in shard.raw()]
    rows = {"the set": [float(episode.rewards.sum(dtype=np.float64)) for episode in episodes]}
    speeds: dict[str, list[float]] = {}
    file = _arrays(episodes, logdir)
    for name in names:
        flags = ["--env", ENV, "--dataset", dataset, "--total-steps", str(options.gradient_steps)]
        flags += [*_ALGORITHMS[name], "--eval-episodes", "100", "--run-name"]
        for seed in seeds:
            (run,) = training.train([*flags, f"{name}-seed{seed}"], [seed], str(logdir), algorithm=name)
            results = {f"tfrl {name}": (_played(run.path), np.nanmedian(run.progress[_SPEED]))}
            if options.d3rlpy:
                results[f"d3rlpy {name}"] = _of_peer(name, file, seed, logdir, options)
            for row, (value, speed) in results.items():
                rows.setdefault(row, []).append(value)
                speeds.setdefault(row, []).append(speed)
    table = Table(title=f"{ENV}, {options.gradient_steps:,} gradient steps", box=box.SIMPLE_HEAD)
    for title in ("", "mean return", "standard error", "least", "runs or episodes", "gradient steps/s"):
        table.add_column(title, justify="right" if title else "left")
    for row, values in rows.items():
        error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
        speed = f"{np.median(speeds[row]):.0f}" if row in speeds else ""
        table.add_row(
            *(row, f"{np.mean(values):.1f}", f"{error:.1f}", f"{min(values):.1f}", str(len(values)), speed)
        )
    Console().print(table)


def _collected(name: str, logdir: Path, options: Options) -> Path:
    """The folder of the episodes of one policy, recorded if they are not there."""
    data, steps = logdir / f"set-{name}", str(_PLAYERS[name])
    sizes = ["--env", ENV, "--total-steps", steps, "--run-name", f"sac-{name}"]
    training.train(sizes, [1], str(logdir), algorithm="sac")
    words = ["--episodes", str(options.episodes), "--sample", "--out", str(data)]
    command.finish([sys.executable, "-m", "tfrl.collect", str(logdir / f"sac-{name}"), *words])
    return data


def _arrays(episodes: Sequence[recorded.RawEpisode], logdir: Path) -> Path:
    """A file of the set's episodes as arrays of all steps, for readers without tensorflow-datasets."""
    path = logdir / "set.npz"
    last = [np.arange(len(episode.rewards)) == len(episode.rewards) - 1 for episode in episodes]
    with files.replacing(path) as staged, staged.open("wb") as kept:
        np.savez(
            kept,
            observations=np.concatenate([episode.observations[:-1] for episode in episodes]),
            actions=np.concatenate([episode.actions for episode in episodes]),
            rewards=np.concatenate([episode.rewards for episode in episodes]),
            terminals=np.concatenate([x & e.terminated for x, e in zip(last, episodes, strict=True)]),
            timeouts=np.concatenate([x & (not e.terminated) for x, e in zip(last, episodes, strict=True)]),
        )
    return path


def _played(run: Path) -> float:
    """The mean return of the run's policy in the episodes that d3rlpy_script.py plays, too."""
    import gymnasium

    import tfrl

    policy, envs = tfrl.load(run), [gymnasium.make(ENV) for _ in range(_EPISODES)]
    observations = np.stack([env.reset(seed=10_000 + i)[0] for i, env in enumerate(envs)])
    total, ended = np.zeros(_EPISODES), False
    while not ended:  # all episodes have the same length
        steps = [env.step(action) for env, action in zip(envs, policy(observations), strict=True)]
        observations = np.stack([step[0] for step in steps])
        total += [step[1] for step in steps]
        ended = steps[0][2] or steps[0][3]
    return float(total.mean())


def _of_peer(name: str, file: Path, seed: int, logdir: Path, options: Options) -> tuple[float, float]:
    """The mean return of d3rlpy's algorithm and its gradient steps a second; kept beside the runs."""
    path = logdir / f"d3rlpy-{name}-seed{seed}.json"
    if not path.exists():
        words = [*command.check_program(options.d3rlpy, "--d3rlpy"), str(_PEER), name, str(file)]
        words += [str(seed), str(options.gradient_steps)]
        with files.replacing(path) as staged, staged.open("w") as kept:
            command.finish(words, stdout=kept)
    found = json.loads(path.read_text().splitlines()[-1])
    return float(np.mean(found["returns"])), found["steps_per_second"]


if __name__ == "__main__":
    command.run(Options, main)
