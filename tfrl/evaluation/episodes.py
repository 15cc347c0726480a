"""The loop that every evaluation plays, and the levels that it plays on.

A fixed number of episodes is played in every env, so that short episodes do not count more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfrl import envs
from tfrl.config.ppo import Config
from tfrl.run import rng

LEVEL_SETS = ("train", "test")
_MOST_ENVS = 64
_NOISE_BLOCK = 256  # steps whose random numbers are drawn at once


@dataclass(frozen=True)
class Episodes:
    """Finished episodes [N, K]: K in each of N envs.

    Attributes:
      returns: raw, float64; lengths: in env steps, float64; solved: bool, whether the level was solved.
    """

    returns: np.ndarray
    lengths: np.ndarray
    solved: np.ndarray


class Watcher:
    """Looks on while episodes are played; this one does nothing."""

    def before(self, env: envs.VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Before each step: o_t, uint8 [B, H, W, C], and a_t, int32 [B], of all envs, also of idle ones."""

    def after(self, rewards: np.ndarray, first: np.ndarray) -> None:
        """After each step: r_t, float32 [B], and whether it ended the episode, bool [B]."""


def level_spec(config: Config, level_set: str, num_envs: int) -> envs.EnvSpec:
    """The envs of an evaluation: the run's training levels ("train") or the full distribution ("test")."""
    return envs.EnvSpec(
        name=config.env,
        num_envs=num_envs,
        # Other episodes than training's, also after the largest seed that procgen's 32 bits hold.
        seed=(config.seed + 1 + LEVEL_SETS.index(level_set)) % 2**31,
        distribution_mode=config.distribution_mode,
        num_levels=config.num_levels if level_set == "train" else 0,
        start_level=config.start_level if level_set == "train" else 0,
    )


def generalization_gap(config: Config, metrics: Mapping[str, float]) -> float:
    """The score on training levels minus that on unseen ones; NaN where training plays all there are.

    Args:
      config: the run's settings.
      metrics: `eval_train/return` and the like: normalised scores count where both are known, else returns.
    """
    if not config.has_unseen_levels:
        return math.nan
    scores = [metrics.get(f"eval_{s}/normalized_return", math.nan) for s in LEVEL_SETS]
    if np.isnan(scores).any():  # a game without a published range
        scores = [metrics[f"eval_{s}/return"] for s in LEVEL_SETS]
    return scores[0] - scores[1]


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
    watcher: Watcher | None = None,
    max_steps: float = math.inf,
    broken_off: Callable[[], bool] = lambda: False,
) -> Episodes:
    """Plays `episodes_each` episodes in each of the envs `indices` of `spec`.

    Args:
      act: actions int32 [B] from observations uint8 [B, H, W, C] and uniform numbers float32 [B]. Only envs
        that still have episodes to play are asked for; the last one alone is asked for twice.
      spec: the global vector of evaluation envs.
      indices: this worker's share of them.
      episodes_each: K.
      on_frame: gets the first env's observation [H, W, C] at each step of its first episode.
      on_episode: gets the number of finished episodes.
      watcher: sees every step.
      max_steps: of each env, after which what is not finished stays 0 in the result.
      broken_off: asked before each step; True ends the playing in the same way.
    """
    watcher = watcher or Watcher()
    env = envs.make(spec, indices)
    noise = [rng.generator(spec.seed, rng.Use.EVALUATION, i) for i in indices]
    tally = _Tally(len(indices), episodes_each)
    actions = np.zeros(len(indices), np.int32)
    step = 0
    while (active := tally.active()).size and step < max_steps and not broken_off():
        if step % _NOISE_BLOCK == 0:
            uniforms = np.stack([g.random(_NOISE_BLOCK, np.float32) for g in noise], axis=1)
        _, observations, _ = env.observe()
        if tally.done[0] == 0:
            on_frame(observations[0])
        # A GPU computes a batch of one in another way, and how many are left depends on the topology.
        rows = active if active.size > 1 else active.repeat(2)
        actions[rows] = act(observations[rows], uniforms[step % _NOISE_BLOCK][rows])
        watcher.before(env, observations, actions)
        env.act(actions)
        rewards, _, first = env.observe()
        watcher.after(rewards, first)
        if tally.add(env, rewards, first):
            on_episode(int(tally.done.sum()))
        step += 1
    env.close()
    return tally.played


class _Tally:
    """Counts the episodes of B envs until each has had K, and what they came to."""

    def __init__(self, num_envs: int, episodes_each: int) -> None:
        shape = num_envs, episodes_each
        self.played = Episodes(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool))
        self.done = np.zeros(num_envs, np.int64)  # finished episodes of each env
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs)  # of the running ones

    def active(self) -> np.ndarray:
        """The envs that still have episodes to play."""
        return np.flatnonzero(self.done < self.played.returns.shape[1])

    def add(self, env: envs.VecEnv, rewards: np.ndarray, first: np.ndarray) -> bool:
        """Takes a step of all envs; whether it ended an episode that counts."""
        active = self.active()
        self._return, self._length = self._return + rewards, self._length + 1
        ended = active[first[active]]
        if ended.size:
            at = ended, self.done[ended]
            self.played.returns[at], self.played.lengths[at] = self._return[ended], self._length[ended]
            self.played.solved[at] = env.solved()[ended]
            self.done[ended] += 1
        self._return[first], self._length[first] = 0.0, 0.0
        return bool(ended.size)
