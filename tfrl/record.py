"""python -m tfrl.record RUN: a video of the policy, in a grid of episodes, as people see the env."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import COUNT, NATURAL, Range, check_ranges
from tfrl.config.of_run import folder
from tfrl.envs import registry
from tfrl.evaluation import policy_files
from tfrl.evaluation.levels import check_level_set
from tfrl.evaluation.uniform import UniformPolicy, check_no_run, task_without_run
from tfrl.reporting import recording
from tfrl.reporting.recording import Recording
from tfrl.reporting.window import Window
from tfrl.run import files

_USAGE = "python -m tfrl.record RUN, or python -m tfrl.record --random ENV"
_TILES = Range(1, 100)  # a larger grid is more than players show


@dataclass(frozen=True)
class Options(Recording):
    """The video."""

    format: Literal["mp4", "gif"] = "mp4"
    """A gif is shown in half the size."""
    window: bool = False
    """Show the policy in a window instead of writing a file; closing it, Escape or q ends."""
    greedy: bool | None = None
    """Take the most likely action (--no-greedy: draw one); None: as the run's own evaluation does."""
    seed: int | None = None
    """Decides levels and actions; None: the run's."""
    checkpoint: str = "last"
    """last, best (by the return in evaluations) or the number of an update."""
    random: str | None = None
    """An env to show with a random policy, without a run."""
    out: str | None = None
    """The file, whose ending decides the format; None: in the run's videos folder, or RANDOM.mp4 here."""


def main(arguments: Sequence[str]) -> int:
    """Records a video, or shows a window; the exit code."""
    words, options = command_line.parse(Options, arguments, _USAGE, "Show a policy at play.")
    check_ranges(options, {"episodes": _TILES, "max_steps": COUNT, "seed": NATURAL})
    if options.out and Path(options.out).suffix not in (".mp4", ".gif"):
        raise UserError(f"--out must be a file that ends in .mp4 or .gif; got {options.out!r}.")
    if options.window and options.out:
        raise UserError("--window writes no file; leave --out out, or --window.")
    if options.random:
        check_no_run(words)
        return _record_random(options)
    return _record_run(folder(command_line.one(words, "run", _USAGE)), options)


def _record_random(options: Options) -> int:
    task = task_without_run(options.random, options.seed)
    check_level_set(task.env, options.levels)
    player = UniformPolicy(registry.specs(task)[1])
    with _window(task, options) as window:
        if window is not None:
            recording.show(player, task, window, options, player.probabilities)
            return 0
    path = Path(options.out or f"{registry.file_name(task.env)}.{options.format}")
    _save(player, task, path, options)
    print(path)
    return 0


def _record_run(run: Path, options: Options) -> int:
    source = policy_files.find(run, options.checkpoint)
    seed = source.config.seed if options.seed is None else options.seed
    greedy = source.config.eval_greedy if options.greedy is None else options.greedy
    config = dataclasses.replace(source.config, seed=seed)
    check_level_set(config.env, options.levels)
    with _window(config, options) as window:
        with quiet_start():
            from tfrl.evaluation import policy
            from tfrl.run import metrics

            player = policy.load(source, greedy=greedy)
        if window is not None:
            recording.show(player, config, window, options, player.probabilities)
            return 0
    name = f"{registry.file_name(config.env)}-{options.levels}-{source.env_steps}.{options.format}"
    path = Path(options.out) if options.out else run / "videos" / name
    frames = _save(player, config, path, options)
    try:
        metrics.add_video(run, f"video/{options.levels}", frames, source.env_steps)
    except OSError as error:
        raise UserError(f"cannot write TensorBoard's events in {run}: {files.reason(error)}.") from None
    print(path)
    return 0


def _save(player: Any, task: Any, path: Path, options: Options) -> np.ndarray:
    """As `recording.save`; raises UserError if the file cannot be written."""
    try:
        return recording.save(player, task, path, options, player.probabilities)
    except OSError as error:
        raise UserError(f"cannot write {path}: {files.reason(error)}.") from None


def _window(task: Any, options: Options) -> contextlib.AbstractContextManager[Any]:
    """Returns the window that was asked for, opened before anything that takes long; else None."""
    if not options.window:
        return contextlib.nullcontext()
    return Window(task.env, fps=registry.frames_per_second(task))


if __name__ == "__main__":
    endings.run(main)
