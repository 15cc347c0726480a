"""python -m benchmarks.turns: PPO on procgen and a plain Keras floor, by turns of a few seconds.

The speed of a shared machine changes within minutes, so a run of each after the other compares different
machines. Here both are processes of which one is stopped (SIGSTOP) while the other has all cores. The floor
is `benchmarks.floors.keras_network`: for 512 frames, eight forward passes of 64 frames and as many gradients
of 512 as PPO has epochs, each with a step of Keras's Adam. It steps no envs and samples nothing. The trainer
counts from the end of its first update, which compiles.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import TrainingError
from tfrl.cli.flags import COUNT, POSITIVE
from tfrl.run.metrics import PROGRESS_FILE

_FRAMES = 512  # of a repetition of the floor
_FORWARD_ROWS = 64
_LOOK_SECONDS = 0.05
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds of processor time
_ENDLESS = 1_000_000_000  # env steps; the run is killed


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is for CPUs that have AMX."""
    env: str = "coinrun"
    """The game."""
    num_envs: Annotated[int, COUNT] = 64
    """Envs of the trainer."""
    num_steps: Annotated[int, COUNT] = 64
    """Env steps of a rollout, in each env; shorter ones give more updates to count."""
    num_minibatches: Annotated[int, COUNT] = 2
    """Minibatches of an epoch; 2,048 samples each are those of procgen's preset."""
    minutes: Annotated[float, POSITIVE] = 5.0
    """Length of the measurement, of both together."""
    turn_seconds: Annotated[float, POSITIVE] = 5.0
    """Length of a turn."""


class Side:
    """One of the two processes, and what it has done in its turns.

    Args:
      process: it.
      frames: returns how many frames, or env steps, it has finished.
    """

    def __init__(self, process: subprocess.Popen, frames: Callable[[], int]) -> None:
        self._process, self._frames = process, frames
        self._usage = psutil.Process(process.pid)
        self._active = 0.0  # seconds of its turns
        self._marks: list[tuple[int, float, float]] = []  # frames, active seconds, processor seconds

    def turn(self, seconds: float) -> None:
        """Lets it run so long, and notes when frames are finished."""
        self._process.send_signal(signal.SIGCONT)
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            if self._process.poll() is not None:
                raise TrainingError(f"a measured process ended with code {self._process.returncode}.")
            frames = self._frames()
            if frames > (self._marks[-1][0] if self._marks else 0):
                cpu = self._usage.cpu_times()
                self._marks.append((frames, self._active + passed, cpu.user + cpu.system))
            time.sleep(_LOOK_SECONDS)
        self._process.send_signal(signal.SIGSTOP)
        self._active += time.perf_counter() - began

    @property
    def is_ready(self) -> bool:
        """True if it has compiled: its first frames are finished."""
        return bool(self._marks)

    def rates(self) -> tuple[float, float]:
        """Frames in a second of its turns, and in a second of processor time."""
        if len(self._marks) < 2:
            raise TrainingError("the turns were too short to count; give more --minutes.")
        first, last = self._marks[0], self._marks[-1]
        frames = last[0] - first[0]
        return frames / (last[1] - first[1]), frames / max(last[2] - first[2], _TICK)


def main(options: Options) -> None:
    """Measures and prints."""
    flags = ["--env", options.env, "--precision", options.precision, "--num-envs", str(options.num_envs)]
    flags += ["--num-steps", str(options.num_steps), "--num-minibatches", str(options.num_minibatches)]
    flags += ["--total-steps", str(_ENDLESS), "--eval-every", "0"]
    epochs = reader("ppo_procgen").parse(flags).epochs
    with tempfile.TemporaryDirectory() as folder:
        progress, done = Path(folder) / "run" / PROGRESS_FILE, Path(folder) / "floor"
        trainer = ["-m", "tfrl.ppo_procgen", *flags, "--logdir", folder, "--run-name", "run"]
        call = f"repeat_floor({options.precision!r}, {epochs}, {str(done)!r})"
        code = f"from benchmarks.turns import repeat_floor; {call}"
        processes = [_start(words) for words in (trainer, ["-c", code])]
        try:
            sides = [
                Side(processes[0], lambda: _env_steps(progress)),
                Side(processes[1], lambda: _size(done)),
            ]
            for side in sides:
                while not side.is_ready:
                    side.turn(options.turn_seconds)
            end = time.monotonic() + 60 * options.minutes
            while time.monotonic() < end:
                for side in sides:
                    side.turn(options.turn_seconds)
            (ours, floor), names = (
                (side.rates() for side in sides),
                ("a second", "a second of processor time"),
            )
        finally:
            for process in processes:
                process.kill()
                process.wait()
    rows = {
        name: {"trainer": x, "floor": y, "ratio": x / y}
        for name, x, y in zip(names, ours, floor, strict=True)
    }
    print(json.dumps({"options": dataclasses.asdict(options), "cores": os.cpu_count(), **rows}))
    table = Table("env steps", "trainer", "floor", "ratio")
    for name, row in rows.items():
        table.add_row(name, f"{row['trainer']:.0f}", f"{row['floor']:.0f}", f"{row['ratio']:.2f}")
    Console().print(table)


def _start(words: list[str]) -> subprocess.Popen:
    """A process of this Python, stopped before it has done much."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGSTOP)
    return process


def _env_steps(progress: Path) -> int:
    """The env steps of the last row of progress.csv."""
    if not progress.exists():
        return 0
    with progress.open(newline="") as file:
        return max((int(row["env_steps"]) for row in csv.DictReader(file)), default=0)


def _size(done: Path) -> int:
    """The frames of the floor's finished repetitions: each adds a byte to its file."""
    return _FRAMES * done.stat().st_size if done.exists() else 0


def repeat_floor(precision: str, epochs: int, done: str) -> None:
    """Repeats the floor without end; adds a byte to the file after each repetition."""
    from benchmarks.floors import frames, keras_network

    forward, gradient = keras_network(precision)
    import keras  # after what `keras_network` sets
    import tensorflow as tf

    few, many = (tf.constant(frames(rows)) for rows in (_FORWARD_ROWS, _FRAMES))
    learned, optimizer = [tf.Variable(array) for array in gradient(many)], keras.optimizers.Adam()
    optimizer.build(learned)
    forward, learn = tf.function(forward), tf.function(lambda x: optimizer.apply(gradient(x), learned))
    with Path(done).open("ab", buffering=0) as file:
        while True:
            for _ in range(_FRAMES // _FORWARD_ROWS):
                forward(few)[1].numpy()
            for _ in range(epochs):
                learn(many)
            learned[0].numpy()
            file.write(b".")


if __name__ == "__main__":
    command.run(Options, main)
