"""python -m tfrl.record RUN: a video of the policy, in a grid of episodes, as people see the game."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import COUNT, NATURAL, Range, check_ranges
from tfrl.config.ppo import READER
from tfrl.evaluation import policy_files
from tfrl.reporting.recording import Recording, save
from tfrl.run import files

if TYPE_CHECKING:
    from tfrl.evaluation import policy

_USAGE = "python -m tfrl.record RUN, or python -m tfrl.record --random ENV"
_TILES = Range(1, 100)  # a larger grid is more than players show


@dataclass(frozen=True)
class Options(Recording):
    """What is recorded."""

    format: Literal["mp4", "gif"] = "mp4"
    """A gif is shown in half the size."""
    greedy: bool = False
    """Take the most likely action instead of drawing one."""
    seed: int | None = None
    """Decides levels and actions; None: the run's."""
    checkpoint: str = "last"
    """last, best (by the return on unseen levels) or the number of an update."""
    random: str | None = None
    """An env to show with an untrained policy, without a run."""
    out: str | None = None
    """The file, whose ending decides the format; None: in the run's videos folder, or RANDOM.mp4 here."""


def main(arguments: Sequence[str]) -> int:
    """Records a video; the exit code."""
    words, options = command_line.parse(Options, arguments, _USAGE, "Write a video of a policy at play.")
    check_ranges(options, {"episodes": _TILES, "max_steps": COUNT, "seed": NATURAL})
    if options.out and Path(options.out).suffix not in (".mp4", ".gif"):
        raise UserError(f"--out must be a file that ends in .mp4 or .gif; got {options.out!r}.")
    if options.random:
        if words:
            raise UserError(f"--random takes no run; got {words[0]}.")
        path = Path(options.out or f"{options.random}.{options.format}")
        config, player = _untrained(options)
        _save(player, config, path, options)
        print(path)
        return 0
    return _record_run(Path(command_line.one(words, "run", _USAGE)), options)


def _save(player: policy.Policy, config: Any, path: Path, options: Options) -> np.ndarray:
    """As `save`; raises UserError if the file cannot be written."""
    try:
        return save(player, config, path, options, player.probabilities if options.overlay else None)
    except OSError as error:
        raise UserError(f"cannot write {path}: {files.reason(error)}.") from None


def _record_run(run: Path, options: Options) -> int:
    source = policy_files.find(run, options.checkpoint)
    seed = source.config.seed if options.seed is None else options.seed
    config = dataclasses.replace(source.config, seed=seed)
    with quiet_start():
        from tfrl.evaluation import policy
        from tfrl.run import metrics

        player = policy.load(source, greedy=options.greedy)
    name = f"{config.env}-{options.levels}-{source.env_steps}.{options.format}"
    path = Path(options.out) if options.out else run / "videos" / name
    frames = _save(player, config, path, options)
    try:
        metrics.add_video(run, f"video/{options.levels}", frames, source.env_steps)
    except OSError as error:
        raise UserError(f"cannot write TensorBoard's events in {run}: {files.reason(error)}.") from None
    print(path)
    return 0


def _untrained(options: Options) -> tuple[Any, policy.Policy]:
    flags = ["--env", options.random, "--seed", str(1 if options.seed is None else options.seed)]
    config = READER.parse(flags)
    if config.has_unseen_levels:
        config = dataclasses.replace(config, num_levels=0)
    with quiet_start():
        from tfrl.evaluation import policy

        return config, policy.untrained(config, greedy=options.greedy)


if __name__ == "__main__":
    endings.run(main)
