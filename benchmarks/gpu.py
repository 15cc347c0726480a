"""python -m benchmarks.gpu: the first check of a machine with a GPU, in about eight minutes.

It trains real runs in processes of their own, and measures the network alone beside them:

- the versions of the driver's and TensorFlow's parts;
- the weights after three float32 updates on the device, beside those of the CPU, and beside those of a second
  run, with and without TF_DETERMINISTIC_OPS;
- the largest |ratio - 1| of a first minibatch (`first_ratio_error`), and bfloat16 gradients beside float32;
- env steps/s of PPO, IMPALA and SAC, with the seconds of rollout and update, copies, and peak memory;
- the floor: the same network in plain Keras, one forward pass and three gradients a frame;
- the largest parts of PPO's update, from TensorFlow's profiler;
- with several GPUs: 1 and 2 replicas beside each other, the scaling, and NCCL beside the ring.

A check that fails prints one line, and the others go on. `--device cpu` measures the CPU in the same way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.device_measures import difference
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT, POSITIVE

_SECONDS_A_CHECK = 240
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1"}
# Three updates of procgen's default network, small enough for any CPU.
_SMALL = {"env": "coinrun", "seed": 1, "precision": "float32", "num_envs": 8, "num_steps": 32}
_SMALL |= {"num_minibatches": 4, "total_steps": 768, "eval_episodes": 1}


@dataclass(frozen=True)
class Options:
    """The flags."""

    device: Literal["gpu", "cpu"] = "gpu"
    """Measure this device."""
    updates: Annotated[int, COUNT] = 6
    """Updates of each timed run; the first one compiles and is not counted."""
    num_envs: Annotated[int, COUNT] = 64
    """Envs of the timed runs on procgen."""
    num_steps: Annotated[int, COUNT] = 256
    """Steps of a rollout in the timed runs on procgen."""
    seconds: Annotated[float, POSITIVE] = 8.0
    """Seconds for each measurement of the network alone."""
    out: str = ""
    """Write all numbers to this JSON file, after every check."""


def main(options: Options) -> None:
    """Runs all checks, and prints a table."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as logdir:
        checks = _Checks(options, found, logdir)
        device = checks.take("device", "device", environ={} if options.device == "gpu" else _ON_CPU)
        if device is None:
            raise TrainingError("TensorFlow does not start on this machine; the lines above say why.")
        if options.device == "gpu" and not device["gpus"]:
            raise UserError(
                "TensorFlow sees no GPU here: install requirements-cuda.txt and look at `nvidia-smi`, or "
                "give --device cpu."
            )
        _take_all(checks, options, device["gpus"])
    Console(width=110).print(_table(found))
    if options.out:
        print(f"All numbers are in {options.out}.")


class _Checks:
    """Runs measurements of `benchmarks.device_measures`, each in a process of its own."""

    def __init__(self, options: Options, found: dict[str, Any], logdir: str) -> None:
        self.found, self.logdir = found, logdir
        self._options, self._on = options, {} if options.device == "gpu" else _ON_CPU

    def take(
        self, name: str, function: str, *arguments: Any, environ: Mapping[str, str] | None = None
    ) -> Any:
        """The result of a measurement, noted under `name`; None if it failed, with a line that says why."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        answer = Path(self.logdir) / f"{name}.json"
        words = ["-m", "benchmarks.device_measures", function, json.dumps(arguments), str(answer)]
        return self._note(name, words, environ, lambda: json.loads(answer.read_text()))

    def train(
        self, name: str, algorithm: str, environ: Mapping[str, str] | None = None, **settings: Any
    ) -> Any:
        """The same for a run of `tfrl.train`."""
        return self.take(name, "training", algorithm, settings, self.logdir, environ=environ)

    def launch(self, name: str, workers: int, *flags: str) -> Any:
        """Env steps a second of PPO by `cluster.launch`, noted under `name`."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        run = ["-m", "cluster.launch", "--workers", str(workers), "--", "python", "-m", "tfrl.ppo_procgen"]
        words = [*run, "--logdir", self.logdir, "--run-name", name, *flags]
        results = Path(self.logdir) / name / "results.json"
        return self._note(name, words, None, lambda: json.loads(results.read_text()))

    def _note(
        self, name: str, words: list[str], environ: Mapping[str, str] | None, read: Callable[[], Any]
    ) -> Any:
        environ = {**os.environ, **(self._on if environ is None else environ)}
        why = ""
        try:
            done = subprocess.run(
                [sys.executable, *words],
                capture_output=True,
                text=True,
                env=environ,
                timeout=_SECONDS_A_CHECK,
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}, no message"
                why = f"exit code {done.returncode}: {last}"
            else:
                self.found[name] = read()
        except subprocess.TimeoutExpired:
            why = f"no result within {_SECONDS_A_CHECK} s"
        if why:
            self.found[name] = {"failed": why}
            print(f"{name} failed: {why}", file=sys.stderr, flush=True)
        if self._options.out:
            Path(self._options.out).write_text(json.dumps(self.found, indent=2))
        return None if why else self.found[name]


def _take_all(checks: _Checks, options: Options, gpus: int) -> None:
    precisions = ("float32", "bfloat16")
    minibatch = options.num_envs * options.num_steps // 8  # procgen's default has eight
    for precision in precisions:
        sizes = options.num_envs, minibatch
        checks.take(f"network {precision}", "network", precision, options.seconds, *sizes)
    checks.take("copies", "transfers")
    checks.take("gradients", "gradients", minibatch)
    # Equality, on small runs.
    here = checks.train("small", "ppo_procgen", **_SMALL)
    cpu = checks.train("small on the CPU", "ppo_procgen", environ=_ON_CPU, **_SMALL)
    again = checks.train("small again", "ppo_procgen", **_SMALL)
    deterministic = {"TF_DETERMINISTIC_OPS": "1", **({} if options.device == "gpu" else _ON_CPU)}
    exact = [
        checks.train(f"deterministic {n}", "ppo_procgen", environ=deterministic, **_SMALL) for n in (1, 2)
    ]
    pairs = {"CPU": (here, cpu), "a second run": (again, here), "a second deterministic run": tuple(exact)}
    checks.found["differences"] = {
        name: difference(one["weights"], other["weights"])
        for name, (one, other) in pairs.items()
        if one is not None and other is not None
    }
    # Speed.
    steps = options.num_envs * options.num_steps
    procgen = {"env": "coinrun", "seed": 1, "eval_episodes": 1, "total_steps": steps * options.updates}
    procgen |= {"num_envs": options.num_envs, "num_steps": options.num_steps}
    for precision in precisions:
        checks.train(f"PPO {precision}", "ppo_procgen", precision=precision, **procgen)
    checks.train("IMPALA bfloat16", "impala", precision="bfloat16", **procgen)
    checks.train("SAC", "sac", env="Pendulum-v1", seed=1, total_steps=1000 * options.updates, eval_episodes=1)
    checks.take("profile", "profile", "bfloat16", checks.logdir, options.num_envs, options.num_steps)
    if gpus > 1:
        _take_several(checks, options, gpus, procgen)


def _take_several(checks: _Checks, options: Options, gpus: int, procgen: Mapping[str, Any]) -> None:
    """What only several GPUs can show."""
    one = checks.train("1 replica", "ppo_procgen", replicas=1, **_SMALL)
    two = checks.train("2 replicas", "ppo_procgen", replicas=2, **_SMALL)
    if one is not None and two is not None:
        checks.found["differences"]["1 and 2 replicas"] = difference(two["weights"], one["weights"])
    whole = {**procgen, "num_envs": gpus * options.num_envs, "total_steps": gpus * procgen["total_steps"]}
    for replicas in (1, gpus):
        share = replicas / gpus
        sized = {**whole, **{name: int(whole[name] * share) for name in ("num_envs", "total_steps")}}
        checks.train(
            f"PPO bfloat16 on {replicas} GPUs",
            "ppo_procgen",
            precision="bfloat16",
            replicas=replicas,
            **sized,
        )
    flags = [word for name, value in whole.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    for way in ("nccl", "ring"):
        checks.launch(f"two-workers-{way}", 2, "--precision", "bfloat16", "--communication", way, *flags)


def _table(found: Mapping[str, Any]) -> Table:
    """All checks as one table of two columns."""
    table = Table("check", "result", title=found["device"]["name"])
    for name, result in found.items():
        table.add_row(name, _in_words(name, result))
    return table


def _in_words(name: str, result: Mapping[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    if name == "profile":
        parts = ", ".join(f"{part} {share:.0%}" for part, share in result["parts"][:5])
        return f"{parts}; busy {result['busy_seconds']:.2f} s"
    shown = {key: value for key, value in result.items() if key != "weights"}
    return ", ".join(
        f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in shown.items()
    )


if __name__ == "__main__":
    command.run(Options, main)
