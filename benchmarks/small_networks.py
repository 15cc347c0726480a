"""python -m benchmarks.small_networks: where the time of PPO with a small network goes.

An agent is made as a run makes it, in this process, without the run around it. For each preset the table has
microseconds of processor time for one env step of

- the compiled gradient steps alone: the floor, as no trainer of these settings can be faster;
- the whole update around them: advantages, renewed values, shuffling, metrics;
- acting in NumPy, in TensorFlow as larger networks do, and the envs under random actions;
- the collector: acting, envs and storing;
- all of it, as `OnPolicyLearner.update` does it, and its ratio to the floor.

All are held to one core, medians of several rounds.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT

_FLOOR = "gradient steps alone"
_FEW = 200  # calls of what takes microseconds


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    presets: str = "torchrl,cleanrl,gymnasium"
    """Presets of PPO with commas between; gymnasium is CartPole-v1 with the defaults."""
    rounds: Annotated[int, COUNT] = 5
    """Updates that count; two more come first."""


def main(options: Options) -> None:
    """Measures and prints."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # before TensorFlow counts the cores
    from tfrl.algorithms.ppo import Config
    from tfrl.cli.settings import preset_files

    presets = options.presets.split(",")
    for name in presets:
        if name not in preset_files(Config):
            raise UserError(
                f"--presets: there is no preset {name!r}; known: {', '.join(preset_files(Config))}."
            )
    results = [_measure(name, options.rounds) for name in presets]
    table = Table("us of processor time an env step", *presets, title="one core, medians")
    for row in results[0]:
        table.add_row(row, *(f"{result[row]:.1f}" for result in results))
    table.add_row("the floor's share of all", *(f"{r[_FLOOR] / r['all']:.0%}" for r in results))
    table.add_row("env steps a second", *(f"{1e6 / r['all']:,.0f}" for r in results))
    Console().print(table)


def _measure(preset: str, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        learner = _make_learner(preset, Path(folder))
        for _ in range(2):  # compiled, and timed by the agent itself
            learner.update()
        steps = learner.agent._config.steps_per_update
        floor, times = _floor(learner), {"collecting": [], "updating": [], _FLOOR: []}
        for _ in range(rounds):  # in turns, as the machine may change
            rollout, seconds = _timed(learner.collect)
            times["collecting"].append(seconds)
            times["updating"].append(_timed(lambda rollout=rollout: learner.learn(rollout))[1])
            times[_FLOOR].append(_timed(floor)[1])
        result = {name: 1e6 * statistics.median(x) / steps for name, x in times.items()}
        result |= {name: 1e6 * seconds for name, seconds in _calls(learner).items()}
        learner.close()
    return result | {"all": result["collecting"] + result["updating"]}


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


def _floor(learner: Any) -> Callable[[], None]:
    """The gradient steps of one update, of data that is already where TensorFlow has it."""
    agent, kept = learner.agent, {}
    steps, epoch = agent._compiled_steps, agent._config.steps_per_epoch

    def keep(names: Any, batch: Any, index: Any, end: Any, sums: Any) -> Any:
        kept["names"], kept["batch"], kept["sums"] = names, batch, sums
        return steps(names, batch, index, end, sums)

    agent._compiled_steps = keep
    learner.learn(learner.collect())
    agent._compiled_steps = steps
    index = [epoch * k for k in range(agent._config.epochs + 1)]

    def run() -> None:
        import tensorflow as tf

        for start, end in zip(index[:-1], index[1:], strict=True):
            arguments = (kept["names"], kept["batch"], tf.constant(start), tf.constant(end), kept["sums"])
            steps(*arguments)[3].numpy()

    return run


def _calls(learner: Any) -> dict[str, float]:
    """Seconds of an env step's parts, by calls in a loop."""
    agent, collector = learner.agent, learner.envs
    env, spec = collector._groups[0].env, collector.action_spec
    observations = env.observe().observation[None]
    generator = np.random.default_rng(0)
    noise = np.stack([agent.network.draw_noise(generator, env.num_envs)])
    actions = spec.uniform(generator, env.num_envs)

    def in_tensorflow() -> None:
        per_replica = agent._runtime.per_replica
        [x.numpy() for x in agent.acting._sample(per_replica(observations), per_replica(noise))]

    calls = {
        "acting in NumPy": lambda: agent.acting.sample(observations, noise),
        "acting in TensorFlow": in_tensorflow,
        "the env": lambda: env.act(actions),
    }
    seconds = {}
    for name, call in calls.items():
        call()
        rounds = [_timed(lambda call=call: [call() for _ in range(_FEW)])[1] for _ in range(5)]
        seconds[name] = statistics.median(rounds) / _FEW / env.num_envs
    return seconds


def _make_learner(preset: str, folder: Path) -> Any:
    from tfrl.algorithms.ppo import PPOAgent
    from tfrl.cli.endings import StopRequest
    from tfrl.run.console import Console as Progress
    from tfrl.run.session import Session
    from tfrl.training.on_policy import OnPolicyLearner
    from tfrl.workers import strategy
    from tfrl.workers.watchdog import Watchdog

    where = ["--logdir", str(folder), "--run-name", "run", "--precision", "float32"]
    config = reader("ppo").parse(["--preset", preset, *where])
    runtime = strategy.make(config, None)
    watchdog = Watchdog(folder / "heartbeats", ("here",), 0, stall_timeout=0.0)
    stop = StopRequest(folder / "stop")
    session = Session(config, runtime, Progress(enabled=False), stop, watchdog)
    return OnPolicyLearner(config, session, PPOAgent)


if __name__ == "__main__":
    command.run(Options, main)
