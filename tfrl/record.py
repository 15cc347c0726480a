"""python -m tfrl.record RUN: a video of the policy, in a grid of episodes, as people see the game."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.quiet import quiet_start
from tfrl.cli.settings import COUNT, NATURAL, Range, check_ranges
from tfrl.config.ppo import Config, check_game
from tfrl.evaluation import policy_files
from tfrl.evaluation.episodes import level_spec, play

_USAGE = "python -m tfrl.record RUN, or python -m tfrl.record --random GAME"
_FPS = 15  # procgen's own speed for people
_TILES = Range(1, 100)  # a larger grid is more than players show


@dataclass(frozen=True)
class Options:
    """What is recorded."""

    episodes: int = 4
    """Episodes, side by side in a grid, each on its own level."""
    levels: Literal["train", "test"] = "test"
    """The run's training levels, or unseen ones."""
    format: Literal["mp4", "gif"] = "mp4"
    """A gif is shown in half the size."""
    overlay: bool = True
    """Show step, return and the probabilities of actions below the game."""
    greedy: bool = False
    """Take the most likely action instead of drawing one."""
    max_steps: int = 1000
    """Env steps after which the video ends."""
    seed: int | None = None
    """Decides levels and actions; None: the run's."""
    checkpoint: str = "last"
    """last, best (by the return on unseen levels) or the number of an update."""
    random: str | None = None
    """A game to show with an untrained policy, without a run."""
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
        config, act, probabilities = _untrained(options)
        save(act, config, path, options, probabilities)
        print(path)
        return 0
    return _record_run(Path(command_line.one(words, "run", _USAGE)), options)


def save(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray],
    config: Config,
    path: Path,
    options: Options,
    probabilities: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Plays one episode in each of `options.episodes` envs and writes the video.

    Args:
      act: actions of observations and uniforms, as for `play`.
      config: the game and its training levels.
      path: the file; its folder is made.
      options: what of it is shown.
      probabilities: of each action, float32 [B, A], of observations, for the overlay.

    Returns:
      A small version of the beginning, uint8 [T, H, W, 3], for TensorBoard.

    Raises UserError if the file cannot be written.
    """
    from tfrl.reporting import video

    spec = level_spec(config, options.levels, options.episodes)
    staged = path.with_name(f".{path.name}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.touch()  # says what is wrong better than the encoder would
        with video.Writer(staged, fps=_FPS) as writer:
            grid = video.Grid(
                options.episodes,
                writer,
                overlay=options.overlay,
                probabilities=probabilities,
                scale=2 if path.suffix == ".gif" or options.episodes > 4 else 1,
            )
            play(
                act,
                dataclasses.replace(spec, render=True),
                range(options.episodes),
                episodes_each=1,
                watcher=grid,
                max_steps=options.max_steps,
            )
        staged.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or str(error).splitlines()[0]}.") from None
    finally:
        with contextlib.suppress(OSError):  # after a Ctrl-C, too; and it may be what fills the disk
            staged.unlink()
    return grid.preview


def _record_run(run: Path, options: Options) -> int:
    source = policy_files.find(run, options.checkpoint)
    seed = source.config.seed if options.seed is None else options.seed
    config = dataclasses.replace(source.config, seed=seed)
    with quiet_start():
        from tfrl.evaluation import policy
        from tfrl.run import metrics

        player = policy.load(source)
    name = f"{config.env}-{options.levels}-{source.env_steps}.{options.format}"
    path = Path(options.out) if options.out else run / "videos" / name
    act = player.greedy if options.greedy else player.sample
    frames = save(act, config, path, options, player.probabilities if options.overlay else None)
    try:
        metrics.add_video(run, f"video/{options.levels}", frames, source.env_steps, fps=_FPS)
    except OSError as error:
        raise UserError(f"cannot write TensorBoard's events in {run}: {error.strerror}.") from None
    print(path)
    return 0


def _untrained(options: Options) -> tuple[Config, Callable, Callable | None]:
    config = Config(env=options.random or "", num_levels=0, seed=1 if options.seed is None else options.seed)
    check_game(config)
    with quiet_start():
        from tfrl.evaluation import policy

        player = policy.untrained(config)
    act = player.greedy if options.greedy else player.sample
    return config, act, player.probabilities if options.overlay else None


if __name__ == "__main__":
    endings.run(main)
