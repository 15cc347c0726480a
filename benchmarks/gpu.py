"""python -m benchmarks.gpu: the first check of a machine with a GPU, in about ten minutes.

It trains real runs in processes of their own, and measures the network alone beside them, in this order:

- the versions of the driver's and TensorFlow's parts;
- env steps/s of PPO in bfloat16, with the seconds of rollout and update, peak memory, and the largest
  |ratio - 1| of a first minibatch (`first_ratio_error`);
- the floor: the same network in plain Keras, one forward pass and three gradients a frame;
- the largest parts of PPO's update, from TensorFlow's profiler;
- with several GPUs: 1 and 2 replicas beside each other, the scaling, and NCCL beside the ring;
- the speed of IMPALA and SAC;
- the weights after three float32 updates on the device, beside those of a second run, with and without
  TF_DETERMINISTIC_OPS, and beside those of the CPU;
- PPO in float32, bfloat16 gradients beside float32, PPO where XLA compiles all that it can, copies.

Each result is printed and written as soon as it is there, so a run that is cut off keeps what it had. A check
that fails prints one line, and the others go on. `--device cpu` measures the CPU in the same way.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.device_measures import difference
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import COUNT, NOT_NEGATIVE, POSITIVE

_SECONDS_A_CHECK = 240
_ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1"}
_ALL_COMPILED = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}  # TensorFlow's own switch, for GPUs
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
    seconds: Annotated[float, POSITIVE] = 4.0
    """Seconds for each measurement of the network alone."""
    minutes: Annotated[float, NOT_NEGATIVE] = 0.0
    """End after this time and leave out the checks that do not fit. 0: take all."""
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
        try:
            _take_all(checks, options, device["gpus"])
        finally:  # also after Ctrl-C
            Console(width=110).print(_table(found))
            if options.out:
                print(f"All numbers are in {options.out}.")


class _Checks:
    """Runs measurements of `benchmarks.device_measures`, each in a process of its own."""

    def __init__(self, options: Options, found: dict[str, Any], logdir: str) -> None:
        self.found, self.logdir = found, logdir
        self._options, self._on = options, {} if options.device == "gpu" else _ON_CPU
        self._end = time.monotonic() + 60 * options.minutes if options.minutes else math.inf

    def take(
        self, name: str, function: str, *arguments: Any, environ: Mapping[str, str] | None = None
    ) -> Any:
        """The result of a measurement, noted under `name`; None if it failed, with a line that says why."""
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
        run = ["-m", "cluster.launch", "--workers", str(workers), "--", "python", "-m", "tfrl.ppo_procgen"]
        words = [*run, "--logdir", self.logdir, "--run-name", name, *flags]
        results = Path(self.logdir) / name / "results.json"
        return self._note(name, words, None, lambda: json.loads(results.read_text()))

    def _note(
        self, name: str, words: list[str], environ: Mapping[str, str] | None, read: Callable[[], Any]
    ) -> Any:
        environ = {**os.environ, **self._on, **(environ or {})}
        why, began = "", time.monotonic()
        limit = min(_SECONDS_A_CHECK, self._end - began)
        try:
            if limit <= 0:
                raise subprocess.TimeoutExpired(words, 0)
            print(f"{name} ...", file=sys.stderr, flush=True)
            done = subprocess.run(
                [sys.executable, *words],
                capture_output=True,
                text=True,
                env=environ,
                timeout=limit,
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}, no message"
                why = f"exit code {done.returncode}: {last}"
            else:
                self.found[name] = read()
        except subprocess.TimeoutExpired:
            why = f"no result within {limit:.0f} s" if limit > 0 else "no time was left"
        if why:
            self.found[name] = {"failed": why}
            print(f"{name} failed: {why}", file=sys.stderr, flush=True)
        else:
            took = time.monotonic() - began
            print(f"{name} ({took:.0f} s): {_in_words(name, self.found[name])}", flush=True)
        self._write()
        return None if why else self.found[name]

    def compare(self, name: str, one: Any, other: Any) -> None:
        """Notes the difference of two runs' weights, if both runs have ended well."""
        if one is None or other is None:
            return
        found = difference(one["weights"], other["weights"])
        self.found.setdefault("differences", {})[name] = found
        print(f"relative difference of the weights, {name}: {found:.3g}", flush=True)
        self._write()

    def _write(self) -> None:
        if self._options.out:
            Path(self._options.out).write_text(json.dumps(self.found, indent=2))


def _take_all(checks: _Checks, options: Options, gpus: int) -> None:
    """Takes all checks, those first of which most is to be learned."""
    sizes = {"num_envs": options.num_envs, "num_steps": options.num_steps}
    steps = options.num_envs * options.num_steps
    minibatch = steps // 8  # procgen's default has eight
    procgen = {
        "env": "coinrun",
        "seed": 1,
        "eval_episodes": 1,
        "total_steps": steps * options.updates,
        **sizes,
    }
    # Speed.
    checks.train("PPO bfloat16", "ppo_procgen", precision="bfloat16", **procgen)
    checks.take("network bfloat16", "network", "bfloat16", options.seconds, options.num_envs, minibatch)
    checks.take("profile", "profile", "bfloat16", checks.logdir, options.num_envs, options.num_steps)
    if gpus > 1:
        _take_several(checks, options, gpus, procgen)
    checks.train("IMPALA bfloat16", "impala", precision="bfloat16", **procgen)
    checks.train("SAC", "sac", env="Pendulum-v1", seed=1, total_steps=1000 * options.updates, eval_episodes=1)
    # Equality, on small runs.
    deterministic = {"TF_DETERMINISTIC_OPS": "1"}
    exact = [
        checks.train(f"deterministic {n}", "ppo_procgen", environ=deterministic, **_SMALL) for n in (1, 2)
    ]
    checks.compare("two deterministic runs", *exact)
    here = checks.train("small", "ppo_procgen", **_SMALL)
    cpu = checks.train("small on the CPU", "ppo_procgen", environ=_ON_CPU, **_SMALL)
    checks.compare("the device and the CPU", here, cpu)
    again = checks.train("small again", "ppo_procgen", **_SMALL)
    checks.compare("two runs", again, here)
    # The rest.
    checks.train("PPO float32", "ppo_procgen", precision="float32", **procgen)
    checks.take("gradients", "gradients", minibatch)
    checks.train("PPO bfloat16, all compiled", "ppo_procgen", _ALL_COMPILED, precision="bfloat16", **procgen)
    checks.take("network float32", "network", "float32", options.seconds, options.num_envs, minibatch)
    checks.take("copies", "transfers", options.num_envs, options.num_steps)


def _take_several(checks: _Checks, options: Options, gpus: int, procgen: Mapping[str, Any]) -> None:
    """What only several GPUs can show."""
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
    one = checks.train("1 replica", "ppo_procgen", replicas=1, **_SMALL)
    two = checks.train("2 replicas", "ppo_procgen", replicas=2, **_SMALL)
    checks.compare("1 and 2 replicas", two, one)
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
        busy, seconds = result["busy_seconds"], result["seconds"]
        return f"{parts}; {result['device']} busy for {busy:.2f} s in {seconds:.2f} s"
    shown = {key: value for key, value in result.items() if key != "weights"}
    return ", ".join(
        f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in shown.items()
    )


if __name__ == "__main__":
    command.run(Options, main)
