"""python -m benchmarks.scaling_model: env steps a second by the numbers of actors and learners, by a model.

Nothing is measured here. An update of N envs and T steps, with A actors, L learners and a lag of 1 or more,
takes as long as the slower of two sides that work side by side:

- an actor steps its N / A envs T times and computes their actions, puts its rollout into the object store,
  and gets the weights, which a learner sends to the nodes of its actors one after the other;
- a learner calls its A / L actors, takes their rollouts, computes, and sums its gradients in a ring.

What each of these costs has been measured on two cores (`Costs`, with the sources). What it comes to on many
machines has not: every core is taken to be as fast, and nobody to be late.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.scaling import ring_seconds
from tfrl.cli.flags import COUNT, NOT_NEGATIVE

ACTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEARNERS = (1, 2, 4, 8, 16)
MEASURED = {1: 761, 2: 1580, 4: 3043}
"""Env steps/s by the number of actors, of 16 envs that sleep 1 ms a step; docs/notebook/actors.md."""
_ROLLOUT = 201e6  # bytes of the rollout whose hand-over was measured: 64 x 256 procgen frames, rounded


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that things take, and where each figure is from."""

    flops: float = 143 * 610e6 / 2
    """FLOP a second of a core, with our convolutions. docs/notebook/ppo-speed.md: PPO's trainer, 143 env
    steps/s on two cores; each takes 610 MFLOP (61 forward, three times 183)."""
    procgen_step: float = 2 / 45_000
    """Core seconds of an env step of procgen: 45,000 a second on two cores, before the trainer existed."""
    python_step: float = 0.30e-3
    """Seconds of an env step in Python beside the env's own, actions included: what `fit_step` makes of
    MEASURED; most of it is a sleep that ended late under load."""
    put: float = 0.040 / _ROLLOUT
    """Seconds a byte, into the object store; docs/notebook/actors.md."""
    take: float = 0.055 / _ROLLOUT
    """Seconds a byte, from there into the learner's buffers; docs/notebook/actors.md."""
    network: float = 0.55 / _ROLLOUT
    """Seconds a byte, from node to node: 0.4 to 0.7 s for such a rollout between two Ray nodes on one
    machine, whose cores both shared. A cable of 3 Gb/s would take as long."""
    call: float = 1.1e-3
    """Seconds of a call on Ray: 0.8 to 1.4 ms were measured."""
    message: float = 0.98e-3 + 30e-6
    """Seconds of a message of the ring: 0.98 ms of docs/notebook/scaling.md, and 30 microseconds, assumed, of
    a network."""
    ring_byte: float = 2.3e-9
    """Seconds a byte in the ring; docs/notebook/scaling.md."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A run: its env, its network, its rollouts, and its machines."""

    name: str
    num_envs: int
    num_steps: int
    num_minibatches: int
    observation_bytes: int
    """Bytes of an env step in a rollout."""
    env_seconds: float
    """Core seconds of an env step."""
    in_python: bool
    """Envs are stepped in a loop of Python, and not in C++ all together."""
    forward: float
    """FLOP of an action."""
    update: float
    """FLOP of a sample that is learned from once."""
    weight_bytes: int
    learner_cores: int = 16
    actors_per_node: int = 16


# The learner's one pass gives the values and log-probabilities that V-trace needs, too.
COINRUN = Task(
    "coinrun, the IMPALA network",
    *(256, 128, 8, 64 * 64 * 3 + 24),
    env_seconds=Costs.procgen_step,
    in_python=False,
    forward=61e6,
    update=183e6,
    weight_bytes=2_500_000,
)
SLOW = Task(
    "an env of 20 ms a step, two layers of 256",
    *(256, 128, 8, 4 * 17 + 24),
    env_seconds=20e-3,
    in_python=True,
    forward=0.14e6,
    update=0.42e6,
    weight_bytes=290_000,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The machines."""

    learner_cores: Annotated[int, COUNT] = 16
    """Cores of each learner."""
    gigabits: Annotated[float, NOT_NEGATIVE] = 0.0
    """Rate of the network between nodes; 0: what Ray came to between two nodes on one machine, 3 Gb/s."""
    plot: str | None = None
    """A PNG file to draw."""


def main(options: Options) -> None:
    """Computes, prints and draws."""
    command.check_plot(options.plot)
    costs = Costs()
    if options.gigabits:
        costs = dataclasses.replace(costs, network=8 / (options.gigabits * 1e9))
    tasks = [dataclasses.replace(task, learner_cores=options.learner_cores) for task in (COINRUN, SLOW)]
    console = Console()
    fitted = fit_step(MEASURED, env_seconds=1e-3)
    console.print(f"an env step of the measured slow envs took {1e3 * fitted:.2f} ms more than its sleep")
    for task in tasks:
        console.print(_table(task, costs))
    if options.plot:
        _draw(tasks, costs, options.plot)


def actor_seconds(task: Task, costs: Costs, actors: int, learners: int) -> dict[str, float]:
    """Seconds of a rollout in an actor, by part."""
    steps = task.num_envs / actors * task.num_steps
    each = task.env_seconds + task.forward / costs.flops + (costs.python_step if task.in_python else 0.0)
    nodes = math.ceil(actors / learners / task.actors_per_node)
    return {
        "env steps": steps * each,
        "rollouts": costs.call + steps * task.observation_bytes * costs.put,
        "weights": nodes * task.weight_bytes * costs.network,
    }


def learner_seconds(task: Task, costs: Costs, actors: int, learners: int) -> dict[str, float]:
    """Seconds of an update in a learner, by part."""
    steps = task.num_envs / learners * task.num_steps
    ring = ring_seconds(learners, task.weight_bytes, costs.message, costs.ring_byte)
    return {
        "update": steps * task.update / (costs.flops * task.learner_cores),
        "rollouts": actors / learners * costs.call
        + steps * task.observation_bytes * (costs.network + costs.take),
        "all-reduce": task.num_minibatches * ring,
    }


def rate(task: Task, costs: Costs, actors: int, learners: int) -> tuple[float, str]:
    """Env steps a second, and the largest part of what the slower side does."""
    sides = (actor_seconds(task, costs, actors, learners), learner_seconds(task, costs, actors, learners))
    slower = max(sides, key=lambda parts: sum(parts.values()))
    return task.num_envs * task.num_steps / sum(slower.values()), max(slower, key=slower.get)


def fit_step(rates: Mapping[int, float], *, env_seconds: float) -> float:
    """Seconds x of an env step beside `env_seconds`, of {actors: env steps/s}, by relative least squares.

    An actor steps one env after the other, so that all together make actors / (env_seconds + x) a second.
    """
    each = np.array([actors / found for actors, found in rates.items()])  # seconds of an env step
    return float(np.sum(1 / each) / np.sum(1 / each**2) - env_seconds)


def _table(task: Task, costs: Costs) -> Table:
    table = Table("actors", title=f"{task.name}: env steps/s, and what limits them")
    for learners in LEARNERS:
        table.add_column(_learners(learners), justify="right")
    for actors in ACTORS:
        cells = [rate(task, costs, actors, learners) for learners in LEARNERS if learners <= actors]
        table.add_row(str(actors), *(f"{found:,.0f} {part}" for found, part in cells))
    return table


def _learners(count: int) -> str:
    return f"{count} learners" if count > 1 else "1 learner"


def _draw(tasks: Sequence[Task], costs: Costs, path: str) -> None:
    """Draws env steps/s over actors: what was measured as points, what the model predicts as dashes."""
    import matplotlib

    from tfrl.reporting import plots

    with matplotlib.rc_context(plots.STYLE):
        figure = plots.Figure(figsize=(11, 4.2))
        first, *axes = figure.subplots(1, 1 + len(tasks))
        each = 1e-3 + fit_step(MEASURED, env_seconds=1e-3)
        model = [actors / each for actors in MEASURED]
        first.plot(list(MEASURED), model, label="model", color=plots.GREY, linestyle="--")
        first.plot(list(MEASURED), list(MEASURED.values()), label="measured", **plots.marker_style(0))
        first.set(title="16 envs of 1 ms a step")
        for ax, task in zip(axes, tasks, strict=True):
            for i, learners in enumerate(LEARNERS):
                actors = [count for count in ACTORS if count >= learners]
                rates = [rate(task, costs, count, learners)[0] for count in actors]
                label = f"model: {_learners(learners)}"
                color = plots.line_style(i)["color"]
                ax.plot(actors, rates, label=label, color=color, linestyle=(2 * i, (6, 4)))
            ax.set(title=f"model, not measured:\n{task.name}")
        for ax, ticks in zip((first, *axes), (tuple(MEASURED), *(ACTORS for _ in axes)), strict=True):
            ax.set(xscale="log", yscale="log", xlabel="actors")
            ax.set_xticks(ticks, [str(count) for count in ticks])
            ax.minorticks_off()
        first.set_yticks(list(MEASURED.values()), [f"{found:,}" for found in MEASURED.values()])
        first.set_ylabel("env steps/s")
        first.legend()
        axes[0].legend()
    figure.savefig(path)  # in the style, powers of ten would be plain text


if __name__ == "__main__":
    command.run(Options, main)
