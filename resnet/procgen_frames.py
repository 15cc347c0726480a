"""A tfds data set that needs no download: frames of procgen's games, which it plays itself.

    procgen_frames/games        which of the 16 games is this? 16 000 + 4 000 images
    procgen_frames/games-mini   a tenth of it, for trials

A random player acts, with actions from a seeded generator, so the images are the same on every machine.
Training and test images come from disjoint levels, and each example carries its level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from tfrl.envs import registry
from tfrl.envs.registry import games
from tfrl.envs.spec import EnvSpec

LEVELS = 100_000
"""Levels 0 to LEVELS - 1 are for training, the next LEVELS for testing."""

_ENVS = 64
_STRIDE = 10  # env steps between two images of an env: neighbours would look alike


@dataclass(eq=False)
class FramesConfig(tfds.core.BuilderConfig):
    """A configuration of the data set.

    Args:
        games: the games, each with the same share of the images. They are the labels.
        train, test: images; they divide by the number of games.
        seed: decides levels and actions.
    """

    games: tuple[str, ...] = games()
    train: int = 16_000
    test: int = 4_000
    seed: int = 1


class ProcgenFrames(tfds.core.GeneratorBasedBuilder):
    """The builder. Features: `image` uint8 [64, 64, 3], `label`, `level` (procgen's level seed)."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = (
        FramesConfig(name="games", description="Which of the 16 games?"),
        FramesConfig(name="games-mini", description="A tenth of `games`.", train=1_600, test=400),
    )

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(64, 64, 3), encoding_format="png"),
                "label": tfds.features.ClassLabel(names=list(self.builder_config.games)),
                "level": np.int64,
            }
        )
        return self.dataset_info_from_configs(
            features=features,
            supervised_keys=("image", "label"),
            homepage="https://openai.com/index/procgen-benchmark/",
            description="Frames of procgen's games, played at random.",
            citation="Cobbe et al. 2020, arXiv:1912.01588",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(split) for split in ("train", "test")}

    def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, object]]]:
        """The examples of one game after another, so that only one game's frames are in memory."""
        config = self.builder_config
        count = getattr(config, split) // len(config.games)
        start_level = LEVELS if split == "test" else 0
        for label, game in enumerate(config.games):
            images, levels = play(game, count, seed=config.seed, start_level=start_level)
            for index, (image, level) in enumerate(zip(images, levels, strict=True)):
                yield f"{split}-{game}-{index:06d}", {"image": image, "label": label, "level": int(level)}


def play(game: str, count: int, *, seed: int, start_level: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames of a random player in levels from `start_level` on. Every env gives one frame in ten steps.

    Returns images uint8 [count, 64, 64, 3] and their levels int64 [count].
    """
    num_envs = min(_ENVS, count)
    rounds = -(-count // num_envs)
    spec = EnvSpec(
        env=game, num_envs=num_envs, seed=seed, num_levels=LEVELS, start_level=start_level, num_threads=4
    )
    # The same seed for each game would give all of them the same actions.
    generator = np.random.default_rng([seed, start_level, *game.encode()])
    env: Any = registry.make(spec)
    images, levels = [], []
    for step in range(rounds * _STRIDE):
        shown = env.observe()
        if step % _STRIDE == _STRIDE - 1:
            images.append(shown.observation.copy())
            levels.append([info["level_seed"] for info in env.info()])
        env.act(generator.integers(env.action_spec.n, size=num_envs, dtype=np.int32))
    env.close()
    return np.concatenate(images)[:count], np.concatenate(levels).astype(np.int64)[:count]
