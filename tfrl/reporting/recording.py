"""Videos of a policy at play: a grid of episodes, as people see the env."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfrl.evaluation.episodes import Player, play
from tfrl.evaluation.levels import level_spec
from tfrl.reporting import video
from tfrl.run import files, rng

FPS = 15  # procgen's own speed for people


@dataclass(frozen=True)
class Recording:
    """What is recorded."""

    episodes: int = 4
    """Episodes, side by side in a grid, each on its own level."""
    levels: Literal["train", "test"] = "test"
    """The run's training levels, or unseen ones."""
    overlay: bool = True
    """Show step, return and the probabilities of actions below the game."""
    max_steps: int = 1000
    """Env steps after which the video ends."""


def save(
    player: Player,
    task: Any,
    path: Path,
    options: Recording,
    probabilities: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Plays one episode in each of `options.episodes` envs and writes the video.

    Args:
      player: the policy.
      task: the run's settings: the env and its training levels.
      path: the file; its folder is made.
      options: what of it is shown.
      probabilities: of each action, float32 [B, A], of observations, for the overlay; None where actions are
        continuous, which the overlay shows as they are.

    Returns:
      A small version of the beginning, uint8 [T, H, W, 3], for TensorBoard.

    Raises OSError if the file cannot be written.
    """
    spec = level_spec(task, options.levels, options.episodes, rng.Use.RECORDING)
    files.make_folder(path.parent)
    with files.replacing(path) as staged:
        staged.touch()  # says what is wrong better than the encoder would
        with video.Writer(staged, fps=FPS) as writer:
            grid = video.Grid(
                options.episodes,
                writer,
                overlay=options.overlay,
                probabilities=probabilities,
                scale=2 if path.suffix == ".gif" or options.episodes > 4 else 1,
            )
            play(
                player,
                dataclasses.replace(spec, render=True),
                range(options.episodes),
                episodes_each=1,
                watcher=grid,
                max_steps=options.max_steps,
            )
    return grid.preview
