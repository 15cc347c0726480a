"""A tfds data set that needs no download: frames of procgen's games, which it plays itself.

    procgen_frames/games        which of the 16 games is this? 16 000 + 4 000 images
    procgen_frames/games-mini   a tenth of it, for trials
    procgen_frames/returns      how much will a random player collect from here on? 16 000 + 4 000 images

A random player acts, with actions from a seeded generator, so the images are the same wherever they are made.
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
_HORIZON = 150  # env steps after which a reward counts for less than 0.0005 of its value
_DISCOUNT = 0.95
_DEGREES = ("low", "middle", "high")


@dataclass(eq=False)
class FramesConfig(tfds.core.BuilderConfig):
    """A configuration of the data set: the games that are played, and the label.

    Args:
        games: the games, each with the same share of the images.
        label: "game", or "return": the discounted (0.95) sum of the rewards to come in the episode, as one of
            three classes that are equally frequent in training.
        train, test: images; they divide by the number of games.
        seed: decides levels and actions.
    """

    games: tuple[str, ...] = games()
    label: str = "game"
    train: int = 16_000
    test: int = 4_000
    seed: int = 1


class ProcgenFrames(tfds.core.GeneratorBasedBuilder):
    """The builder. Features: `image` uint8 [64, 64, 3], `label`, `level` (procgen's level seed)."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = (
        FramesConfig(name="games", description="Which of the 16 games?"),
        FramesConfig(name="games-mini", description="A tenth of `games`.", train=1_600, test=400),
        FramesConfig(
            name="returns",
            description="How much will a random player of chaser collect?",
            games=("chaser",),
            label="return",
        ),
    )

    def _info(self) -> tfds.core.DatasetInfo:
        names = self.builder_config.games if self.builder_config.label == "game" else _DEGREES
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(64, 64, 3), encoding_format="png"),
                "label": tfds.features.ClassLabel(names=list(names)),
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
        config = self.builder_config
        if config.label == "game":
            return {split: self._games_of(split) for split in ("train", "test")}
        settings = {"seed": config.seed, "horizon": _HORIZON}
        train = play(config.games[0], config.train, start_level=0, **settings)
        test = play(config.games[0], config.test, start_level=LEVELS, **settings)
        edges = np.quantile(train[2], [1 / 3, 2 / 3])
        return {
            split: _examples(split, images, np.digitize(returns, edges), levels)
            for split, (images, levels, returns) in (("train", train), ("test", test))
        }

    def _generate_examples(self) -> None:
        """Unused: `_split_generators` gives the examples themselves."""

    def _games_of(self, split: str) -> Iterator[tuple[str, dict[str, object]]]:
        """The examples of one game after another: a game's frames are in memory alone."""
        config = self.builder_config
        count = getattr(config, split) // len(config.games)
        start_level = LEVELS if split == "test" else 0
        for label, game in enumerate(config.games):
            images, levels, _ = play(game, count, seed=config.seed, start_level=start_level)
            yield from _examples(f"{split}-{game}", images, np.full(count, label), levels)


def _examples(
    prefix: str, images: np.ndarray, labels: np.ndarray, levels: np.ndarray
) -> Iterator[tuple[str, dict[str, object]]]:
    for index, (image, label, level) in enumerate(zip(images, labels, levels, strict=True)):
        yield f"{prefix}-{index:06d}", {"image": image, "label": int(label), "level": int(level)}


def play(
    game: str, count: int, *, seed: int, start_level: int, horizon: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` frames of a random player in levels from `start_level` on, and `horizon` steps of what follows.

    Every env gives one frame in ten steps. A return to come is cut off at the end of its episode, and after
    the last step played.

    Returns images uint8 [count, 64, 64, 3], their levels int64 [count] and returns to come float64 [count].
    """
    num_envs = min(_ENVS, count)
    rounds = -(-count // num_envs)
    spec = EnvSpec(
        env=game, num_envs=num_envs, seed=seed, num_levels=LEVELS, start_level=start_level, num_threads=4
    )
    # The same seed for each game would give all of them the same actions.
    generator = np.random.default_rng([seed, start_level, *game.encode()])
    env: Any = registry.make(spec)
    images: list[np.ndarray] = []
    levels, rewards, first = [], [], []
    for step in range(rounds * _STRIDE + horizon):
        shown = env.observe()
        rewards.append(shown.reward.astype(np.float64))
        first.append(shown.first.copy())
        if step % _STRIDE == _STRIDE - 1 and len(images) < rounds:
            images.append(shown.observation.copy())
            levels.append([info["level_seed"] for info in env.info()])
        env.act(generator.integers(env.action_spec.n, size=num_envs, dtype=np.int32))
    env.close()
    returns = _returns_to_come(np.stack(rewards), np.stack(first))[_STRIDE - 1 :: _STRIDE][:rounds]
    levels = np.concatenate(levels).astype(np.int64)
    return np.concatenate(images)[:count], levels[:count], returns.reshape(-1)[:count]


def _returns_to_come(rewards: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Discounted sums [T, B] of the rewards after each observation, to the end of its episode.

    `rewards[t]` is of the action before observation t; `first[t]` says that t begins an episode.
    """
    returns = np.zeros_like(rewards)
    for t in range(len(rewards) - 2, -1, -1):
        returns[t] = rewards[t + 1] + np.where(first[t + 1], 0.0, _DISCOUNT * returns[t + 1])
    return returns
