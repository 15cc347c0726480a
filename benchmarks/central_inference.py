"""python -m benchmarks.central_inference: env steps a second of observers whose actions one agent chooses.

The first figure is of steps alone, all envs at once; the second, of a real run of REINFORCE, has its updates,
and the waiting of envs whose episodes are the shorter ones.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.algorithms.registry import reader
from tfrl.algorithms.reinforce import Config
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, coerce
from tfrl.cli.streams import quiet_start

READER = reader("reinforce")

_WARM_UP = 20  # steps that are not counted
_RUN_UPDATES = 12  # at the least, of the run, whose first two are not counted


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    env: str = "CartPole-v1"
    """The env."""
    observers: str = "0,1,2,4"
    """Numbers of observers, with commas between."""
    envs: Annotated[int, COUNT] = 512
    """Envs, all observers together."""
    steps: Annotated[int, COUNT] = 300
    """Steps of all envs."""


def main(options: Options) -> None:
    """Measures and prints."""
    numbers = [coerce(word, int, "--observers") for word in options.observers.split(",")]
    if any(number < 0 for number in numbers):
        raise UserError(f"--observers must be at least 0; got {options.observers}.")
    table = Table(
        "observers", "steps alone", "with updates", title=f"{options.envs} x {options.env}, env steps/s"
    )
    for number in numbers:
        config = READER.parse(_flags(options, number))
        table.add_row(
            str(number), f"{_steps_alone(config, options.steps):,.0f}", f"{_of_a_run(options, number):,.0f}"
        )
    Console().print(table)


def _flags(options: Options, number: int) -> list[str]:
    return ["--env", options.env, "--num-envs", str(options.envs), "--observers", str(number)]


def _steps_alone(config: Config, steps: int) -> float:
    """Env steps a second, none of which waits or is learned from."""
    with quiet_start():
        from tfrl.algorithms.reinforce import ReinforceAgent
        from tfrl.experience.observer import Observer
        from tfrl.remote.actors import RayObservers
        from tfrl.training.learner import env_spec
        from tfrl.workers import strategy

    agent, spec = ReinforceAgent(config, strategy.make(config, None)), env_spec(config)
    if config.observers:
        session: Any = SimpleNamespace(  # the part that observers use
            raise_if_stopped_here=lambda: None,
            console=SimpleNamespace(warn=print),
            watchdog=SimpleNamespace(beat=lambda: None),
        )
        observers = RayObservers(config, spec, session)
    else:
        observers = Observer(spec, range(config.num_envs))
    everyone, generator = np.ones(config.num_envs, bool), np.random.default_rng(0)
    noise = agent.draw_training_noise(generator, config.num_envs)
    try:
        for step in range(_WARM_UP + steps):
            if step == _WARM_UP:
                began = time.perf_counter()
            observers.step(agent.sample(observers.observation, noise)[0], everyone)
        return steps * config.num_envs / (time.perf_counter() - began)
    finally:
        observers.close()


def _of_a_run(options: Options, number: int) -> float:
    """Env steps a second of the updates of a run, after the first two."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tfrl.reinforce", *_flags(options, number), "--logdir", folder]
        words += ["--run-name", "run", "--solved-at", "1e9", "--eval-episodes", "1"]
        words += ["--total-steps", str(_RUN_UPDATES * 30 * options.envs)]
        command.finish(words, stdout=-3)
        with (Path(folder) / "run" / "progress.csv").open() as file:
            rows = list(csv.DictReader(file))[1:]
    seconds = sum(float(r["time/rollout_seconds"]) + float(r["time/update_seconds"]) for r in rows[1:])
    return (int(rows[-1]["env_steps"]) - int(rows[0]["env_steps"])) / seconds


if __name__ == "__main__":
    command.run(Options, main)
