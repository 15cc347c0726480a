"""Evaluations: what envs they play, the loop that plays, their metrics, and their part of results.json.

A fixed number of episodes is played in every env, so that short episodes do not count more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.cli.streams import tell
from tfrl.config.task import Task, check
from tfrl.envs import registry
from tfrl.envs.published import normalized_return
from tfrl.envs.registry import LEVEL_SETS, TRAIN
from tfrl.envs.spec import EnvSpec, Step, VecEnv
from tfrl.experience.memory import Memory
from tfrl.run import rng

_MOST_ENVS = 64
LONGEST_EPISODE = 100_000
"""Env steps after which an evaluation takes an episode as ended: some envs have no limit of their own."""
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


class Player(Protocol):
    """A policy that plays: a trainer's, or one that a run left."""

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] of observations [B, *shape], by noise float32 [B, K]; any B from 2 on.

        A recurrent policy takes its memory [B, M], and gives a pair: the actions, and states [B, S].
        """

    def memory(self, envs: int) -> Memory | None:
        """The memory of so many envs, if the policy is recurrent."""

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one env, float32 [steps, K]."""


class Watcher:
    """Looks on while episodes are played; this one does nothing."""

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Sees o_t [B, *shape] and a_t [B, *shape] of all envs, idle ones too, before each step."""

    def after(self, step: Step) -> None:
        """Sees the outcome of each step."""


def split_episodes(episodes: int) -> tuple[int, int]:
    """The number of envs and of episodes in each, for at least `episodes` in all."""
    num_envs = min(episodes, _MOST_ENVS)
    return num_envs, -(-episodes // num_envs)


def play(
    player: Player,
    spec: EnvSpec,
    indices: Sequence[int],
    *,
    episodes_each: int,
    on_episode: Callable[[int], None] = lambda count: None,
    watcher: Watcher | None = None,
    max_steps: float = math.inf,
    broken_off: Callable[[], bool] = lambda: False,
) -> Episodes:
    """Plays `episodes_each` episodes in each of the envs `indices` of `spec`.

    Args:
      player: is asked for the actions of envs that still have episodes to play; the last one alone is asked
        for twice.
      spec: the global vector of evaluation envs.
      indices: this worker's share of them.
      episodes_each: K.
      on_episode: gets the number of finished episodes.
      watcher: sees every step.
      max_steps: of each env, after which what is not finished stays 0 in the result.
      broken_off: asked before each step; True ends the playing in the same way.

    Raises:
      UserError: the env cannot be made here.
    """
    watcher = watcher or Watcher()
    env = _make(spec, indices)
    generators = [rng.generator(spec.seed, rng.Use.EVALUATION, i) for i in indices]
    tally = _Tally(len(indices), episodes_each)
    actions = np.zeros((len(indices), *env.action_spec.shape), env.action_spec.dtype)
    memory = player.memory(len(indices))
    step = 0
    while (active := tally.active()).size and step < max_steps and not broken_off():
        if step % _NOISE_BLOCK == 0:
            noise = np.stack([player.draw_noise(g, _NOISE_BLOCK) for g in generators], axis=1)
        observations = env.observe().observation
        # A GPU computes a batch of one in another way, and how many are left depends on the topology.
        rows = active if active.size > 1 else active.repeat(2)
        shown = observations[rows], noise[step % _NOISE_BLOCK][rows]
        if memory is None:
            actions[rows] = player.act(*shown)
        else:
            actions[rows], states = player.act(*shown, memory.values[rows])
            memory.acted(states, actions[rows], rows)
        idle = np.flatnonzero(tally.done >= episodes_each)
        if idle.size and env.observation_spec.num_actions:  # they repeat an action that may be forbidden now
            allowed = env.observation_spec.allowed(observations[idle])
            zeros = np.zeros((idle.size, max(1, math.prod(env.action_spec.shape))), np.float32)
            actions[idle] = env.action_spec.from_uniform(zeros, allowed)
        watcher.before(env, observations, actions)
        env.act(actions)
        result = tally.cut_off(env.observe())
        if memory is not None:
            memory.rewarded(result.reward)
            memory.begin(result.first)
        watcher.after(result)
        if tally.add(env, result):
            on_episode(int(tally.done.sum()))
        step += 1
    env.close()
    if tally.cut:
        tell(f"warning: {tally.cut} episodes of {spec.env} were cut off after {LONGEST_EPISODE:,} steps.")
    return tally.played


def _make(spec: EnvSpec, indices: Sequence[int]) -> VecEnv:
    try:
        return registry.make(spec, indices)
    except ValueError as error:
        raise UserError(f"{str(error).rstrip('.')}.") from None


class _Tally:
    """Counts the episodes of B envs until each has had K, and what they came to."""

    def __init__(self, num_envs: int, episodes_each: int) -> None:
        shape = num_envs, episodes_each
        self.played = Episodes(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool))
        self.done = np.zeros(num_envs, np.int64)  # finished episodes of each env
        self.cut = 0  # of these, how many had not ended
        self._is_cut = np.zeros(num_envs, bool)  # at the step at hand
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs)  # of the running ones

    def active(self) -> np.ndarray:
        """The envs that still have episodes to play."""
        return np.flatnonzero(self.done < self.played.returns.shape[1])

    def cut_off(self, step: Step) -> Step:
        """The step with episodes that are too long by now ended there; their next ones go on from it."""
        self._is_cut = ~step.first & (self._length + 1 >= LONGEST_EPISODE)
        if not self._is_cut.any():
            return step
        self.cut += int(self._is_cut[self.active()].sum())
        finals = np.array(step.observation)
        if step.final_observation is not None:
            finals[step.truncated] = step.final_observation
        truncated = step.truncated | self._is_cut
        return step._replace(
            first=step.first | self._is_cut, truncated=truncated, final_observation=finals[truncated]
        )

    def add(self, env: VecEnv, step: Step) -> bool:
        """Takes a step of all envs; true if it ended an episode that counts."""
        active, first = self.active(), step.first
        self._return, self._length = self._return + step.reward, self._length + 1
        ended = active[first[active]]
        if ended.size:
            at = ended, self.done[ended]
            self.played.returns[at], self.played.lengths[at] = self._return[ended], self._length[ended]
            self.played.solved[at] = (env.solved() & ~self._is_cut)[ended]
            self.done[ended] += 1
        self._return[first], self._length[first] = 0.0, 0.0
        return bool(ended.size)


_METRICS = ("return", "return_std", "episode_length", "episode_length_std", "normalized_return")
GAP = "eval/generalization_gap"


def level_spec(task: Any, level_set: str, num_envs: int, use: rng.Use = rng.Use.EVALUATION) -> EnvSpec:
    """The envs that a policy is looked at in; other ones than training's, for each use and level set.

    Args:
      task: the run's settings, whose seed decides which episodes and, in `play`, which actions.
      level_set: "train" for the run's training levels, "test" for the full distribution of levels.
      num_envs: how many; env i is the same in any number of them.
      use: what is played for. Evaluations in training, afterwards and beside it play the same.
    """
    return EnvSpec.of(
        task,
        num_envs=num_envs,
        seed=rng.env_seed(task.seed, use, LEVEL_SETS.index(level_set)),
        num_processes=getattr(task, "env_processes", 0),
        num_levels=task.num_levels if level_set == TRAIN else 0,
        start_level=task.start_level if level_set == TRAIN else 0,
    )


def check_plays(config: Task, task: Task) -> None:
    """Raise UserError if there is no such env, or a policy trained by `config` cannot play it."""
    check(task)
    if registry.specs(task) != registry.specs(config):
        raise UserError(
            f"{task.env} and {config.env} have different observations or actions, so this policy cannot "
            "play both."
        )


def check_level_set(env: str, level_set: str) -> None:
    """Raise UserError if the env has no such level set."""
    if level_set not in registry.family(env).level_sets:
        raise UserError(f"{env} has no levels: leave --levels out.")


def evaluation_columns(level_sets: tuple[str, ...]) -> tuple[str, ...]:
    """The metrics of an evaluation in the order of progress.csv."""
    gap = (GAP,) if TRAIN in level_sets else ()
    return (*(f"eval_{s}/{name}" for s in level_sets for name in _METRICS), *gap)


def evaluation_metrics(task: Any, level_set: str, played: Episodes) -> dict[str, float]:
    """The metrics of one level set's episodes."""
    mean = float(played.returns.mean())
    score = normalized_return(task.env, task.distribution_mode, mean)
    values = (
        mean,
        float(played.returns.std()),
        float(played.lengths.mean()),
        float(played.lengths.std()),
        math.nan if score is None else score,
    )
    return {f"eval_{level_set}/{name}": value for name, value in zip(_METRICS, values, strict=True)}


def with_gap(task: Any, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with the score on training levels minus that on unseen ones.

    NaN where training plays all levels there are. Normalised scores count where both are known, else returns.
    """
    if TRAIN not in task.level_sets:
        return dict(metrics)
    scores = [metrics.get(f"eval_{s}/normalized_return", math.nan) for s in LEVEL_SETS]
    if np.isnan(scores).any():  # a game without a published range
        scores = [metrics[f"eval_{s}/return"] for s in LEVEL_SETS]
    return {**metrics, GAP: scores[0] - scores[1] if task.has_unseen_levels else math.nan}


def evaluation_results(task: Any, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The `eval` part of results.json, from the metrics of the last evaluation."""
    num_envs, each = split_episodes(task.eval_episodes)
    part: dict[str, Any] = {
        level_set: {name: metrics[f"eval_{level_set}/{name}"] for name in _METRICS}
        | {"episodes": num_envs * each}
        for level_set in task.level_sets
    }
    return part | ({"generalization_gap": metrics[GAP]} if GAP in metrics else {})
