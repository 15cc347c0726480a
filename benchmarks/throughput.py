"""python -m benchmarks.throughput: env steps a second against the compute floor, in one run.

The floor is what the network alone costs, with the same code's forward pass and gradients and nothing
else: no envs, no sampling, no optimizer, no logging. An env step of PPO takes one forward pass and `epochs`
gradients, so

    floor = 1 / (forward + epochs * gradient)     seconds a frame, the best batch sizes of those tried,

and one of another --algorithm as many of both as `passes` says, with each operation on all cores or, if that
is faster, in parts side by side as the trainer computes. The arithmetic limit is what the same cores would do
if all of it ran as fast as a large matrix product: the additions and multiplications of the network, three
times those of a forward pass for a gradient (the first layer needs a little less), at the rate of that
product.

Our own figure is what progress.csv of a real `python -m tfrl.ppo` says, without its first update (PPG: its
first phase), which traces the graph. The floor is measured before and after it, so that both see the same
machine. With --peer torch the same network's floor in PyTorch is measured too, where it is installed: no
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import command, speed
from benchmarks.arithmetic import product_rate
from tfrl.cli.errors import UserError
from tfrl.cli.settings import COUNT, Range, check_ranges
from tfrl.config import reader
from tfrl.envs.registry import games, specs

if TYPE_CHECKING:
    from tfrl.networks.actor_critic import ActorCritic

_FORWARD_BATCHES = (32, 64)
_GRADIENT_BATCHES = (256, 512)
_WAITS = ("env_wait_fraction", "learner_wait_fraction", "actor_wait_fraction")


class Passes(NamedTuple):
    """Passes of a frame through a torso, from its env step to the last gradient of it."""

    forwards: int
    gradients: int


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
    updates: int = 3
    """Updates of our run that count; one more comes first. PPG: phases."""
    policy_updates: int = 2
    """PPG's updates of a phase, which do not change what an env step takes."""
    single: bool = False
    """PPG with the single network."""
    actors: int = 0
    """IMPALA's --actors; 0: a thread."""
    floor_seconds: float = 20.0
    """Seconds of each measurement of a floor."""
    peer: Literal["none", "torch"] = "none"
    """Framework whose floor is measured beside ours."""
    cleanrl: str = ""
    """Command that starts CleanRL's script, `python cleanrl/ppo_procgen.py` say, to measure it as well."""


def main(options: Options) -> None:
    """Measures and prints."""
    _check(options)
    rows, each = [], passes(_config(options))
    for precision in precisions(options.precisions):
        before = _floor_of_tensorflow(precision, options.floor_seconds, each)
        ours = _our_run(options, precision)
        after = _floor_of_tensorflow(precision, options.floor_seconds, each)
        floor = statistics.mean([before, after])
        row = {"precision": precision, "floor": floor, "floor_before": before, "floor_after": after, **ours}
        row["ratio_to_floor"] = ours["env_steps_per_second"] / floor
        row["arithmetic_limit"] = _in_process("arithmetic_limit", precision, options.floor_seconds / 4, each)
        row["ratio_to_limit"] = ours["env_steps_per_second"] / row["arithmetic_limit"]
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


def passes(config: Any) -> Passes:
    """The passes of an algorithm's settings, where separate networks are two torsos.

    PPO acts by one forward pass and learns by a gradient an epoch. DrAC's gradients are of two views of a
    frame. PPG's auxiliary phase takes the policy's logits anew and then its own epochs; its phases do not
    change how often a frame is passed through. IMPALA learns from a frame once.
    """
    torsos = 1 if config.share_torso else 2
    if config.algorithm == "drac":
        return Passes(torsos, 2 * torsos * config.epochs)
    if config.algorithm == "ppg":
        return Passes(torsos + 1, torsos * (config.epochs + config.aux_epochs))
    if config.algorithm == "impala":
        return Passes(torsos, torsos)
    return Passes(torsos, torsos * config.epochs)


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
    check_ranges(options, {"updates": COUNT, "floor_seconds": Range(0, 3600, above=True)})
    if options.precisions != "auto":
        precisions(options.precisions)
    if _config(options).env not in games():
        raise UserError(
            f"--env must be one of procgen's games, whose frames the floor is of; got {options.env}."
        )
    if options.peer == "torch" and importlib.util.find_spec("torch") is None:
        raise UserError("--peer torch needs PyTorch, which is not installed here.")
    command.check_program(options.cleanrl, "--cleanrl")


def _config(options: Options) -> Any:
    return reader(options.algorithm).parse(_flags(options))


def _flags(options: Options) -> list[str]:
    """The trainer's, of the run to measure."""
    steps = options.num_envs * options.num_steps * _updates_at_once(options) * (options.updates + 1)
    flags = ["--env", options.env, "--total-steps", str(steps), "--eval-episodes", "1"]
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


def _floor_of_tensorflow(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second of the network alone, computed in the faster of two ways."""
    ways = ("whole_floor", "parts_floor")
    return max(_in_process(way, precision, seconds / len(ways), each) for way in ways)


def _in_process(measure: str, precision: str, seconds: float, each: Passes) -> float:
    """What a function below measures in a fresh process, as threads must not disturb the next measurement."""
    return float(
        command.answer(
            f"from benchmarks.throughput import Passes, {measure} as f; "
            f"print(f({precision!r}, {seconds}, {each}))"
        )
    )


def _best(
    forward: Callable[[int], Any],
    gradient: Callable[[int], Any],
    seconds: float,
    each: Passes,
    gradient_batches: Sequence[int] = _GRADIENT_BATCHES,
) -> float:
    """Env steps a second from functions that take a batch size and do one call on it."""
    share = seconds / (len(_FORWARD_BATCHES) + len(gradient_batches))
    best = [
        min(_seconds(partial(function, batch), share) / batch for batch in batches)
        for function, batches in ((forward, _FORWARD_BATCHES), (gradient, gradient_batches))
    ]
    return 1.0 / (each.forwards * best[0] + each.gradients * best[1])


def _seconds(function: Callable[[], Any], seconds: float) -> float:
    """What a call takes, the median of as many as fit into `seconds`."""
    function()  # tracing, memory
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def whole_floor(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second of the network alone, in TensorFlow, each operation on all cores."""
    tf, network = _network(precision)
    return _floor(network, _gradient(tf, network), seconds, each)


def parts_floor(precision: str, seconds: float, each: Passes) -> float:
    """The same in parts side by side, as the trainer computes on CPUs."""
    from tfrl.workers import parts, strategy

    parts.one_thread_each()  # before anything else uses TensorFlow
    at_once, part = parts.cores(), strategy.PART_ROWS
    tf, network = _network(precision)
    of_part = _gradient(tf, network)

    def gradient(images: Any) -> Any:
        parts = tf.reshape(images, (-1, part, *images.shape[1:]))
        shapes = [tf.TensorSpec(v.shape) for v in network.trained_variables]
        return tf.map_fn(of_part, parts, fn_output_signature=shapes, parallel_iterations=at_once)

    forward = network.forward_pass(on_gpu=False, at_once=at_once)
    return _floor(forward, gradient, seconds, each, [n * part * at_once for n in (2, 4)])


def arithmetic_limit(precision: str, seconds: float, each: Passes) -> float:
    """Env steps a second if all arithmetic were as fast as a large matrix product, on all cores."""
    from resnet.counts import mflop

    _, network = _network(precision)
    rate = product_rate(precision, seconds)
    # The heads are products of 256 x 16, a thousandth of the torso.
    return rate / (1e6 * mflop(network.actor.torso) * (each.forwards + 3 * each.gradients))


def _network(precision: str) -> tuple[Any, ActorCritic]:
    """TensorFlow and IMPALA's network, as the trainer sets them up."""
    import tfrl  # noqa: F401 - sets what TensorFlow reads at import

    import tensorflow as tf  # isort: skip

    from tfrl.networks import actor_critic
    from tfrl.workers import strategy

    strategy.set_up_tensorflow()
    observation_spec, action_spec = specs("coinrun")
    network = actor_critic.build(
        torso="impala",
        torso_options={},
        observation_spec=observation_spec,
        action_spec=action_spec,
        share_torso=True,
        precision=precision,
        seed=1,
    )
    return tf, network


def _gradient(tf: Any, network: ActorCritic) -> Callable[[Any], Any]:
    """Gradients of something like a loss, by observations."""
    variables = [v.value for v in network.trained_variables]

    def gradient(observations: Any) -> Any:
        with tf.GradientTape() as tape:
            logits, values = network(observations, training=True)
            loss = tf.reduce_sum(tf.square(logits)) + tf.reduce_sum(tf.square(values))
        return tape.gradient(loss, variables)

    return gradient


def _floor(
    forward: Callable[[Any], Any],
    gradient: Callable[[Any], Any],
    seconds: float,
    each: Passes,
    gradient_batches: Sequence[int] = _GRADIENT_BATCHES,
) -> float:
    """Env steps a second from TensorFlow functions of observations."""
    import numpy as np
    import tensorflow as tf

    images = {
        n: tf.constant(np.random.default_rng(n).integers(0, 256, (n, 64, 64, 3), np.uint8))
        for n in {*_FORWARD_BATCHES, *gradient_batches}
    }
    forward, gradient = tf.function(forward), tf.function(gradient)
    calls = (lambda n: forward(images[n])[1].numpy(), lambda n: gradient(images[n])[0].numpy())
    return _best(*calls, seconds, each, gradient_batches)


def torch_floor(precision: str, seconds: float, each: Passes) -> float:
    """The same in PyTorch, float32, channels last (its faster layout on CPUs)."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(channels, channels, 3, padding=1)
            self.second = nn.Conv2d(channels, channels, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(torch.relu(self.first(torch.relu(x))))

    layers: list[nn.Module] = []
    channels = 3
    for depth in (16, 32, 32):
        layers += [nn.Conv2d(channels, depth, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [Block(depth), Block(depth)]
        channels = depth
    layers += [nn.Flatten(), nn.ReLU(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 16)]
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def images(n: int) -> torch.Tensor:
        raw = torch.randint(0, 256, (n, 3, 64, 64), dtype=torch.uint8)
        return raw.contiguous(memory_format=torch.channels_last)

    cache = {n: images(n) for n in {*_FORWARD_BATCHES, *_GRADIENT_BATCHES}}

    def forward(n: int) -> None:
        with torch.inference_mode():
            network(cache[n].float() / 255.0)

    def gradient(n: int) -> None:
        network.zero_grad()
        network(cache[n].float() / 255.0).square().sum().backward()

    return _best(forward, gradient, seconds, each)


if __name__ == "__main__":
    command.run(Options, main)
