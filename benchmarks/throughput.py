"""python -m benchmarks.throughput: env steps a second against the compute floor, in one run.

The floor is what the network alone costs, forward passes and gradients and nothing else: no envs, no
sampling, no optimizer, no logging. It is measured twice: with the trainer's own code (`own_floor`), and as
stock layers of Keras with none of our code (`keras_floor`). The faster of the two counts (`floor`), because a
floor of the same code would hide what this code costs. An env step of PPO takes one forward pass and `epochs`
gradients, so

    floor = 1 / (forward + epochs * gradient)     seconds a frame, the best batch sizes of those tried,

and one of another --algorithm as many of both as `passes` says, with each operation on all cores or, if that
is faster, in parts side by side as the trainer computes. The arithmetic limit is what the same cores would do
if all of it ran as fast as a large matrix product: the additions and multiplications of the network, three
times those of a forward pass for a gradient (the first layer needs a little less), at the rate of that
product.

Our own figure is what progress.csv of a real `python -m tfrl.ppo` says, without its first update (PPG: its
first phase), which traces the graph. The floors are measured before and after it, so that all see the same
machine; with --within, our own floor in parts alone is measured between the updates of a run in its own
process. With --peer torch the same network's floor in PyTorch is measured too, where it is installed: no
PyTorch script can be faster than that. --cleanrl measures such a script as well, between two of our runs:
CleanRL's ppo_procgen.py or ppg_procgen.py (https://github.com/vwxyzjn/cleanrl, the same algorithm and, for
PPG with --single, network), with as many envs and env steps.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks import command, speed
from benchmarks.floors import Passes
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.cli.flags import COUNT, Range
from tfrl.envs.registry import games

_WAITS = ("env_wait_fraction", "learner_wait_fraction", "actor_wait_fraction")


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    precisions: str = "auto"
    """float32, bfloat16 or both with a comma; auto: both where --precision auto of the trainer takes
    bfloat16, else float32 alone."""
    algorithm: Literal["ppo", "drac", "ppg", "impala"] = "ppo"
    """Algorithm of the trainer."""
    env: str = "coinrun"
    """The game."""
    num_envs: int = 64
    """Envs."""
    num_steps: int = 256
    """Env steps of a rollout, in each env."""
    updates: Annotated[int, COUNT] = 3
    """Updates of our run that count; one more comes first. PPG: phases."""
    policy_updates: int = 2
    """PPG's updates of a phase, which do not change what an env step takes."""
    single: bool = False
    """PPG with the single network."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """Kind of a recurrent layer behind the torso, in the run and in the floor."""
    actors: int = 0
    """IMPALA's --actors; 0: a thread."""
    floor_seconds: Annotated[float, Range(0, 3600, above=True)] = 20.0
    """Seconds of each measurement of a floor."""
    peer: Literal["none", "torch"] = "none"
    """Framework whose floor is measured beside ours."""
    within: bool = False
    """Measure the floor within the run, between its updates, instead of before and after it: for machines
    whose speed changes from minute to minute."""
    cleanrl: str = ""
    """Command that starts CleanRL's script, `python cleanrl/ppo_procgen.py` say, to measure it as well."""


def main(options: Options) -> None:
    """Measures and prints."""
    _check(options)
    rows, each = [], passes(_config(options))
    for precision in precisions(options.precisions):
        row = {"precision": precision}
        row |= (_floor_within if options.within else _floor_around)(options, precision, each)
        row["arithmetic_limit"] = _in_process("arithmetic_limit", precision, options.floor_seconds / 4, each)
        row["ratio_to_limit"] = row["env_steps_per_second"] / row["arithmetic_limit"]
        if options.peer == "torch" and precision == "float32":
            row["torch_floor"] = _in_process("torch_floor", precision, options.floor_seconds, each)
        if options.cleanrl and precision == "float32":
            row["cleanrl"] = _cleanrl_run(options)
            row["ours_after_cleanrl"] = _our_run(options, precision)["env_steps_per_second"]
            ours_in_turn = statistics.mean([row["env_steps_per_second"], row["ours_after_cleanrl"]])
            row["ratio_to_cleanrl"] = ours_in_turn / row["cleanrl"]
        rows.append(row)
    print(
        json.dumps({"options": dataclasses.asdict(options), "cores": os.cpu_count(), "rows": rows}, indent=2)
    )
    table = Table("env steps/s", *(row["precision"] for row in rows))
    for name in dict.fromkeys(key for row in rows for key in row if key != "precision"):
        table.add_row(name, *(f"{row[name]:.3g}" if name in row else "-" for row in rows))
    Console().print(table)


def _floor_around(options: Options, precision: str, each: Passes) -> dict[str, Any]:
    """Our run, and the floor before and after it."""
    before = _floors_of_tensorflow(precision, options.floor_seconds, each)
    ours = _our_run(options, precision)
    after = _floors_of_tensorflow(precision, options.floor_seconds, each)
    floors = {name: statistics.mean([before[name], after[name]]) for name in before}
    found = {"floor": max(floors.values()), **floors}
    found |= {f"{name}_before": rate for name, rate in before.items()}
    found |= {f"{name}_after": rate for name, rate in after.items()}
    return found | ours | {"ratio_to_floor": ours["env_steps_per_second"] / found["floor"]}


def _floor_within(options: Options, precision: str, each: Passes) -> dict[str, Any]:
    """Our run, and the floor between its updates."""
    asked = (options.algorithm, _flags(options), precision, tuple(each), _updates_at_once(options))
    return json.loads(
        command.answer(f"from benchmarks.floor_within import measure; print(measure(*{asked}))")
    )


def passes(config: Any) -> Passes:
    """The passes of an algorithm's settings, where separate networks are two torsos.

    PPO acts by one forward pass and learns by a gradient an epoch. DrAC's gradients are of two views of a
    frame. PPG's auxiliary phase takes the policy's logits anew and then its own epochs; its phases do not
    change how often a frame is passed through. IMPALA learns from a frame once.
    """
    torsos = 1 if config.share_torso else 2
    memory = (config.memory, 1 if config.memory == "none" else config.num_steps)
    if config.algorithm == "drac":
        return Passes(torsos, 2 * torsos * config.epochs, *memory)
    if config.algorithm == "ppg":
        return Passes(torsos + 1, torsos * (config.epochs + config.aux_epochs), *memory)
    if config.algorithm == "impala":
        return Passes(torsos, torsos, *memory)
    return Passes(torsos, torsos * config.epochs, *memory)


def precisions(wanted: str) -> list[str]:
    """The precisions that --precisions stands for. Raises UserError for another one."""
    if wanted != "auto":
        found = [name.strip() for name in wanted.split(",")]
        if not {*found} <= {"float32", "bfloat16"}:
            raise UserError(
                f"--precisions must be auto, or of float32 and bfloat16, with a comma; got {wanted}."
            )
        return found
    code = "from tfrl.workers.strategy import resolve_precision as f; print(f('auto'))"
    if command.answer(code) == "bfloat16":
        return ["float32", "bfloat16"]
    told = (
        "bfloat16 is left out, which --precision auto does not take here; --precisions bfloat16 measures it."
    )
    print(told, file=sys.stderr, flush=True)
    return ["float32"]


def _check(options: Options) -> None:
    """Raises UserError for what would fail after minutes."""
    if options.precisions != "auto":
        precisions(options.precisions)
    if _config(options).env not in games():
        raise UserError(
            f"--env must be one of procgen's games, whose frames the floor is of; got {options.env}."
        )
    if options.memory != "none" and (options.peer != "none" or options.cleanrl or options.algorithm == "ppg"):
        raise UserError("--memory has no peer, and no floor for ppg; leave it out.")
    if options.peer == "torch" and importlib.util.find_spec("torch") is None:
        raise UserError("--peer torch needs PyTorch, which is not installed here.")
    if options.within and options.algorithm == "impala":
        raise UserError("--within is for algorithms that act and learn in turn, which impala does not.")
    command.check_program(options.cleanrl, "--cleanrl")


def _config(options: Options) -> Any:
    return reader(options.algorithm).parse(_flags(options))


def _flags(options: Options) -> list[str]:
    """The trainer's, of the run to measure."""
    steps = options.num_envs * options.num_steps * _updates_at_once(options) * (options.updates + 1)
    flags = ["--env", options.env, "--total-steps", str(steps), "--eval-episodes", "1"]
    flags += ["--memory", options.memory]
    if options.algorithm == "ppg":
        flags += ["--policy-updates", str(options.policy_updates)]
        flags += ["--share-torso"] if options.single else []
    if options.actors:
        flags += ["--actors", str(options.actors)]
    return [*flags, "--num-envs", str(options.num_envs), "--num-steps", str(options.num_steps)]


def _updates_at_once(options: Options) -> int:
    """The updates after which the same work begins anew."""
    return options.policy_updates if options.algorithm == "ppg" else 1


def _our_run(options: Options, precision: str) -> dict[str, Any]:
    """A real run of the trainer, read from its progress.csv."""
    with tempfile.TemporaryDirectory() as logdir:
        flags = [*_flags(options), "--precision", precision, "--logdir", logdir, "--run-name", "throughput"]
        started = time.time()
        trainer = [sys.executable, "-m", f"tfrl.{options.algorithm}", *flags]
        peak_memory_mb = command.finish(trainer, stdout=subprocess.DEVNULL).ru_maxrss / 1024
        with (Path(logdir) / "throughput" / "progress.csv").open() as file:
            updates = list(csv.DictReader(file))
        created = (Path(logdir) / "throughput" / "config.yaml").stat().st_mtime
    batch, each = options.num_envs * options.num_steps, _updates_at_once(options)
    seconds = [batch / float(row["time/env_steps_per_second"]) for row in updates]
    counted = updates[each:]
    phases = [sum(seconds[i : i + each]) for i in range(each, len(updates), each)]
    first_seconds = seconds[0]
    waits = [wait for wait in _WAITS if f"time/{wait}" in counted[0]]
    return {
        "env_steps_per_second": batch * each / statistics.median(phases),
        **{wait: statistics.median(float(u[f"time/{wait}"]) for u in counted) for wait in waits},
        "seconds_to_start": created - started,
        "seconds_to_first_update": created - started + first_seconds,
        "peak_memory_mb": peak_memory_mb,
    }


def _cleanrl_run(options: Options) -> float:
    """Env steps a second of CleanRL's script; PPG's between the ends of policy phases."""
    each, updates = _updates_at_once(options), options.updates + 1
    steps = options.num_envs * options.num_steps * each
    script = command.check_program(options.cleanrl, "--cleanrl")
    script += ["--env-id", options.env, "--num-envs", str(options.num_envs)]
    script += ["--num-steps", str(options.num_steps), "--total-timesteps", str(steps * updates)]
    if options.algorithm == "ppg":
        script += ["--n-iteration", str(each)]
    return speed.of_script(script, steps, updates, lines_each=each).median


def _floors_of_tensorflow(precision: str, seconds: float, each: Passes) -> dict[str, float]:
    """Env steps a second of the network alone: of our code in the faster of two ways, and of plain Keras.

    There is no plain network with memory.
    """
    ways = ("whole_floor", "parts_floor", "keras_floor")
    rates = {
        way: _in_process(way, precision, seconds / len(ways), each)
        for way in ways
        if way != "keras_floor" or each.memory == "none"
    }
    plain = {name: rate for name, rate in rates.items() if name == "keras_floor"}
    return {"own_floor": max(rates["whole_floor"], rates["parts_floor"]), **plain}


def _in_process(measure: str, precision: str, seconds: float, each: Passes) -> float:
    """What a function below measures in a fresh process, as threads must not disturb the next measurement."""
    return float(
        command.answer(
            f"from benchmarks.floors import Passes, {measure} as f; "
            f"print(f({precision!r}, {seconds}, {each}))"
        )
    )


if __name__ == "__main__":
    command.run(Options, main)
