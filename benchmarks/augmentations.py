"""python -m benchmarks.augmentations: milliseconds that each augmentation takes for a batch of frames.

Frames of four games of procgen, on one core, after a first call that compiles. `--sheet FILE` draws them,
too: that is how docs/images/augmentations.png was made.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Annotated

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from benchmarks import command
from tfrl.cli.flags import COUNT
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec

GAMES = ("coinrun", "fruitbot", "starpilot", "jumper")
WARM_UP = 40  # random steps, after which games look like themselves
SCALE, MARGIN, HEADING = 2, 2, 16  # pixels of the sheet for one of a frame's, between frames, for names


@dataclasses.dataclass(frozen=True)
class Options:
    """The measurement."""

    batch_size: Annotated[int, COUNT] = 2048
    """Frames of a batch."""
    rounds: Annotated[int, COUNT] = 20
    """Calls of each."""
    sheet: str | None = None
    """A PNG file to draw, every augmentation of one frame of each of four games."""


def main(options: Options) -> None:
    """Measures, prints and draws."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # before TensorFlow counts the cores
    import tensorflow as tf

    from tfrl.ops.augment import AUGMENTATIONS
    from tfrl.ops.graph import graph

    frames = np.stack([_frame(game, seed) for seed, game in enumerate(GAMES)])
    batch = tf.constant(np.resize(frames, (options.batch_size, *frames.shape[1:])))
    seeds = np.random.default_rng(0).integers(-(2**31), 2**31, (options.batch_size, 2)).astype(np.int32)
    table = Table("augmentation", "ms", "CPU ms", title=f"{options.batch_size} frames, one core, medians")
    sheet = {"frame": frames}
    for name, function in AUGMENTATIONS.items():
        augment = graph(function, jit_compile=True)
        sheet[name] = augment(batch, seeds)[: len(GAMES)].numpy()
        times = []
        for _ in range(options.rounds):
            start = np.array([time.perf_counter(), time.process_time()])
            augment(batch, seeds)
            times.append(1e3 * (np.array([time.perf_counter(), time.process_time()]) - start))
        table.add_row(name, *(f"{ms:.1f}" for ms in np.median(times, axis=0)))
    Console().print(table)
    if options.sheet is not None:
        _draw(sheet).save(options.sheet, optimize=True)


def _frame(game: str, seed: int) -> np.ndarray:
    """A frame of a game that is played at random, uint8 [H, W, 3]."""
    env = registry.make(EnvSpec(game, num_envs=1, seed=seed))
    rng = np.random.default_rng(seed)
    for _ in range(WARM_UP):
        env.act(rng.integers(env.action_spec.n, size=1, dtype=np.int32))
        frame = env.observe().observation[0].copy()
    env.close()
    return frame


def _draw(sheet: dict[str, np.ndarray]) -> Image.Image:
    """A column for each name, a row for each of its images uint8 [B, H, W, 3]."""
    rows, height, width, _ = next(iter(sheet.values())).shape
    height, width = SCALE * height + MARGIN, SCALE * width + MARGIN
    image = Image.new("RGB", (len(sheet) * width - MARGIN, HEADING + rows * height - MARGIN), "white")
    draw = ImageDraw.Draw(image)
    for column, (name, pictures) in enumerate(sheet.items()):
        draw.text((column * width + 2, 2), name, fill="black")
        for row, picture in enumerate(pictures):
            large = Image.fromarray(picture.repeat(SCALE, axis=0).repeat(SCALE, axis=1))
            image.paste(large, (column * width, HEADING + row * height))
    return image


if __name__ == "__main__":
    command.run(Options, main)
