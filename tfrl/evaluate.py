"""Evaluation: a fixed number of episodes in every env, so that short episodes do not count more often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tfrl import envs, random
from tfrl.config import Config

LEVEL_SETS = ("train", "test")
_MOST_ENVS = 64
_NOISE_BLOCK = 256  # steps whose random numbers are drawn at once


@dataclass(frozen=True)
class Episodes:
    """Raw returns and lengths in env steps of finished episodes, float64 [N, K]: K in each of N envs."""

    returns: np.ndarray
    lengths: np.ndarray


def level_spec(config: Config, level_set: str, num_envs: int) -> envs.EnvSpec:
    """The envs of an evaluation: the run's training levels ("train") or the full distribution ("test")."""
    return envs.EnvSpec(
        name=config.env,
        num_envs=num_envs,
        seed=config.seed + 1 + LEVEL_SETS.index(level_set),  # other episodes than training's
        distribution_mode=config.distribution_mode,
        num_levels=config.num_levels if level_set == "train" else 0,
        start_level=config.start_level if level_set == "train" else 0,
    )


def split_episodes(episodes: int) -> tuple[int, int]:
    """How many envs, and how many episodes in each: at least `episodes` in all, rounded up."""
    num_envs = min(episodes, _MOST_ENVS)
    return num_envs, -(-episodes // num_envs)


def play(
    act: Callable[[np.ndarray, np.ndarray], np.ndarray],
    spec: envs.EnvSpec,
    indices: Sequence[int],
    *,
    episodes_each: int,
    on_frame: Callable[[np.ndarray], None] = lambda frame: None,
    on_episode: Callable[[int], None] = lambda count: None,
) -> Episodes:
    """Plays `episodes_each` episodes in each of the envs `indices` of `spec`.

    Args:
      act: actions int32 [B] from observations uint8 [B, H, W, C] and uniform numbers float32 [B]. Only envs
        that still have episodes to play are asked for.
      spec: the global vector of evaluation envs.
      indices: this worker's share of them.
      episodes_each: K.
      on_frame: gets the first env's observation [H, W, C] at each step of its first episode.
      on_episode: gets the number of finished episodes.
    """
    env = envs.make(spec, indices)
    count = len(indices)
    noise = [random.generator(spec.seed, random.Use.EVALUATION, i) for i in indices]
    returns, lengths = np.zeros((count, episodes_each)), np.zeros((count, episodes_each))
    done = np.zeros(count, np.int64)  # finished episodes of each env
    total, length = np.zeros(count), np.zeros(count)
    actions = np.zeros(count, np.int32)
    step = 0
    while (active := np.flatnonzero(done < episodes_each)).size:
        if step % _NOISE_BLOCK == 0:
            uniforms = np.stack([g.random(_NOISE_BLOCK, np.float32) for g in noise], axis=1)
        _, observations, _ = env.observe()
        if done[0] == 0:
            on_frame(observations[0])
        actions[active] = act(observations[active], uniforms[step % _NOISE_BLOCK][active])
        env.act(actions)
        rewards, _, first = env.observe()
        total, length, step = total + rewards, length + 1, step + 1
        for i in np.flatnonzero(first[active]):
            j = active[i]
            returns[j, done[j]], lengths[j, done[j]] = total[j], length[j]
            done[j] += 1
        total[first], length[first] = 0.0, 0.0
        if first.any():
            on_episode(int(done.sum()))
    env.close()
    return Episodes(returns, lengths)
