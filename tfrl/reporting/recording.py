"""Shows a policy at play, in a video or a window: a grid of episodes, as people see the env."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl.envs.registry import frames_per_second
from tfrl.evaluation.episodes import Player, play
from tfrl.evaluation.levels import check_level_set, level_spec
from tfrl.reporting.video import Frames, Grid, Writer
from tfrl.reporting.window import Window
from tfrl.run import files, rng

Probabilities = Callable[[np.ndarray], np.ndarray] | None
"""Gives those of each action, float32 [B, A], of observations; None where a policy has none."""


@dataclass(frozen=True)
class Recording:
    """The video."""

    episodes: int = 4
    """Episodes, side by side in a grid, each on its own level."""
    levels: Literal["train", "test"] = "test"
    """The run's training levels, or unseen ones; envs without levels have test alone."""
    overlay: bool = True
    """Show step, return and actions below the env: their probabilities, or each of their numbers."""
    max_steps: int = 1000
    """Env steps after which the video ends."""


def save(
    player: Player, task: Any, path: Path, options: Recording, probabilities: Probabilities = None
) -> np.ndarray:
    """Plays one episode in each of `options.episodes` envs and writes the video.

    Args:
      player: the policy.
      task: the run's settings: the env and its training levels.
      path: the file; its folder is made.
      options: what of it is shown.
      probabilities: for the overlay; without them it shows the actions as they are.

    Returns:
      A small version of the beginning, uint8 [T, H, W, 3], for TensorBoard.

    Raises:
      OSError: the file cannot be written.
      UserError: the env cannot be rendered.
    """
    tile = 512 if path.suffix == ".mp4" and options.episodes == 1 else 256
    files.make_folder(path.parent)
    with files.replacing(path) as staged:
        staged.touch()  # says what is wrong better than the encoder would
        with Writer(staged, fps=frames_per_second(task)) as writer:
            grid = _play(player, task, writer, options, probabilities, tile=tile)
    return grid.preview


def show(
    player: Player, task: Any, window: Window, options: Recording, probabilities: Probabilities = None
) -> None:
    """Plays one episode in each of `options.episodes` envs in a window, until all are over or it is closed.

    Raises UserError if the env cannot be rendered.
    """
    tile = 512 if options.episodes == 1 else 256  # four at full size are higher than most screens
    play_on = {"tile": tile, "broken_off": lambda: window.closed}
    _play(player, task, window, options, probabilities, **play_on)


def _play(
    player: Player,
    task: Any,
    frames: Frames,
    options: Recording,
    probabilities: Probabilities,
    *,
    tile: int,
    broken_off: Callable[[], bool] = lambda: False,
) -> Grid:
    check_level_set(task.env, options.levels)
    grid = Grid(options.episodes, frames, overlay=options.overlay, probabilities=probabilities, tile=tile)
    spec = level_spec(task, options.levels, options.episodes, rng.Use.RECORDING)
    play(
        player,
        dataclasses.replace(spec, render=True),
        range(options.episodes),
        episodes_each=1,
        watcher=grid,
        max_steps=options.max_steps,
        broken_off=broken_off,
    )
    return grid
