"""Evaluations: their envs, the loop that plays episodes, their metrics, and their part of results.json.

Every env plays the same number of episodes, so that short episodes do not count more often.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.cli.streams import tell
from tfrl.config.run import Task, check_task
from tfrl.envs import registry
from tfrl.envs.facts import NO_ENV
from tfrl.envs.registry import LEVEL_SETS, TRAIN
from tfrl.envs.spec import EnvSpec, Step, VecEnv
from tfrl.experience.memory import Memory
from tfrl.run import rng

# The envs

_MAX_ENVS = 64


def split_episodes(episodes: int) -> tuple[int, int]:
    """The number of envs, and of episodes in each, for at least `episodes` episodes."""
    num_envs = min(episodes, _MAX_ENVS)
    return num_envs, -(-episodes // num_envs)


def level_spec(task: Any, level_set: str, num_envs: int, use: rng.Use = rng.Use.EVALUATION) -> EnvSpec:
    """The envs of an evaluation or a video; training never uses the same envs.

    Args:
      task: the run's settings. Their seed decides the episodes, and the actions in `play`.
      level_set: "train" for the run's training levels, "test" for the full distribution of levels.
      num_envs: the number of envs; env i does not depend on it.
      use: the purpose, which has its own envs. All evaluations of a run have the same purpose.
    """
    return EnvSpec.of(
        task,
        num_envs=num_envs,
        seed=rng.env_seed(task.seed, use, LEVEL_SETS.index(level_set)),
        num_processes=getattr(task, "env_processes", 0),
        num_levels=task.num_levels if level_set == TRAIN else 0,
        start_level=task.start_level if level_set == TRAIN else 0,
    )


def other_env(config: Task, env: str) -> dict[str, Any]:
    """The changes of the settings of a run that plays `env`: arguments belong to the run's own env."""
    env = registry.own_name(env)
    return {"env": env} if env == config.env else {"env": env, "env_kwargs": {}}


def check_plays(config: Task, task: Task) -> None:
    """Raises UserError if there is no such env, or a policy trained with `config` cannot play it."""
    if task.env == NO_ENV:
        raise UserError(
            "this policy was trained without an env: name one, by --envs of tfrl.evaluate or env= in Python."
        )
    check_task(task)
    if registry.specs(task) != registry.specs(config):
        raise UserError(
            f"{task.env} and {config.env} have different observations or actions, so this policy cannot "
            "play both."
        )


def check_level_set(env: str, level_set: str) -> None:
    """Raises UserError if the env has no such level set."""
    if level_set not in registry.family(env).level_sets:
        raise UserError(f"{env} has no levels: leave --levels out.")


# Playing

LONGEST_EPISODE = 100_000
"""Env steps after which an evaluation cuts an episode off, because some envs have no limit of their own."""
_NOISE_BLOCK = 256  # steps whose random numbers are drawn together


@dataclass(frozen=True)
class Episodes:
    """Finished episodes [N, K]: K in each of N envs.

    Attributes:
      returns: float64, of raw rewards.
      lengths: float64, in env steps.
      solved: bool, True if the level was solved.
    """

    returns: np.ndarray
    lengths: np.ndarray
    solved: np.ndarray


class ActingPolicy(Protocol):
    """A policy that plays episodes: a trainer's, or a saved one."""

    def act(self, observations: np.ndarray, noise: np.ndarray, *memory: np.ndarray) -> Any:
        """Actions [B, *shape] for observations [B, *shape] and noise float32 [B, K]; B is at least 2.

        A recurrent policy also takes its memory [B, M], and returns a pair: actions, and states [B, S].
        """

    def memory(self, envs: int) -> Memory | None:
        """Makes the memory of this number of envs; None if the policy is not recurrent."""

    def draw_noise(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        """The noise of one env, float32 [steps, K]."""


class Watcher:
    """Sees the steps of episodes while they are played; this base class does nothing."""

    def before(self, env: VecEnv, observations: np.ndarray, actions: np.ndarray) -> None:
        """Called before each step, with o_t and a_t [B, *shape] of all envs, also of idle ones."""

    def after(self, step: Step) -> None:
        """Called with the result of each step."""


def play(
    policy: ActingPolicy,
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
      policy: gives the actions of the envs that still have episodes to play.
      spec: the global vector of evaluation envs.
      indices: the envs of this worker.
      episodes_each: K.
      on_episode: called with the number of finished episodes.
      watcher: sees every step.
      max_steps: the largest number of steps of each env; unfinished episodes stay 0 in the result.
      broken_off: called before each step; if it returns True, the rest stays 0 as well.

    Raises:
      UserError: the env cannot be made here.
    """
    try:
        env = registry.make(spec, indices)
    except ValueError as error:
        raise UserError(f"{str(error).rstrip('.')}.") from None
    generators = [rng.generator(spec.seed, rng.Use.EVALUATION, i) for i in indices]
    tally = _Tally(len(indices), episodes_each)
    actions = np.zeros((len(indices), *env.action_spec.shape), env.action_spec.dtype)
    memory = policy.memory(len(indices))
    step = 0
    with contextlib.closing(env):
        while (active := tally.active()).size and step < max_steps and not broken_off():
            if step % _NOISE_BLOCK == 0:
                noise = np.stack([policy.draw_noise(g, _NOISE_BLOCK) for g in generators], axis=1)
            observations = env.observe().observation
            # A batch has at least two rows, because GPUs round a batch of one differently.
            rows = active if active.size > 1 else active.repeat(2)
            shown = observations[rows], noise[step % _NOISE_BLOCK][rows]
            if memory is None:
                actions[rows] = policy.act(*shown)
            else:
                actions[rows], states = policy.act(*shown, memory.values[rows])
                memory.acted(states, actions[rows], rows)
            idle = np.flatnonzero(tally.done >= episodes_each)
            if idle.size and env.observation_spec.num_actions:  # their last action may be forbidden now
                allowed = env.observation_spec.allowed(observations[idle])
                zeros = np.zeros((idle.size, max(1, math.prod(env.action_spec.shape))), np.float32)
                actions[idle] = env.action_spec.from_uniform(zeros, allowed)
            if watcher is not None:
                watcher.before(env, observations, actions)
            env.act(actions)
            result = tally.cut_off(env.observe())
            if memory is not None:
                memory.rewarded(result.reward)
                memory.begin(result.first)
            if watcher is not None:
                watcher.after(result)
            if tally.add(env, result):
                on_episode(int(tally.done.sum()))
            step += 1
    if tally.cut:
        tell(f"warning: {tally.cut} episodes of {spec.env} were cut off after {LONGEST_EPISODE:,} steps.")
    return tally.played


def play_level_set(
    policy: ActingPolicy,
    task: Any,
    level_set: str,
    episodes: int,
    *,
    on_episode: Callable[[int], None] = lambda count: None,
) -> Episodes:
    """Plays at least `episodes` episodes of a level set, the same number in each env. Raises like `play`."""
    num_envs, each = split_episodes(episodes)
    spec = level_spec(task, level_set, num_envs)
    return play(policy, spec, range(num_envs), episodes_each=each, on_episode=on_episode)


class _Tally:
    """The returns and lengths of K episodes in each of B envs."""

    def __init__(self, num_envs: int, episodes_each: int) -> None:
        shape = num_envs, episodes_each
        self.played = Episodes(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool))
        self.done = np.zeros(num_envs, np.int64)  # finished episodes of each env
        self.cut = 0  # finished episodes that were cut off
        self._is_cut = np.zeros(num_envs, bool)  # True where the present step cuts an episode off
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs)  # of the running episodes

    def active(self) -> np.ndarray:
        """The envs that still have episodes to play."""
        return np.flatnonzero(self.done < self.played.returns.shape[1])

    def cut_off(self, step: Step) -> Step:
        """Ends episodes that are too long; the next episode of such an env continues from there."""
        self._is_cut = ~step.first & (self._length + 1 >= LONGEST_EPISODE)
        self.cut += int(self._is_cut[self.active()].sum())
        return step._replace(first=step.first | self._is_cut)

    def add(self, env: VecEnv, step: Step) -> bool:
        """Adds a step of all envs; True if it ended an episode that counts."""
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


# Metrics and results

_METRICS = (
    *("return", "return_std", "episode_length", "episode_length_std", "normalized_return"),
    "mean_reward",
)
GAP = "eval/generalization_gap"


def evaluation_columns(level_sets: tuple[str, ...]) -> tuple[str, ...]:
    """The metrics of an evaluation in the order of progress.csv."""
    gap = (GAP,) if TRAIN in level_sets else ()
    return (*(f"eval_{s}/{name}" for s in level_sets for name in _METRICS), *gap)


def evaluation_metrics(task: Any, level_set: str, played: Episodes) -> dict[str, float]:
    """The metrics of one level set's episodes. `mean_reward` is the mean reward of an env step."""
    mean = float(played.returns.mean())
    score = task.normalized(mean)
    values = (
        mean,
        float(played.returns.std()),
        float(played.lengths.mean()),
        float(played.lengths.std()),
        math.nan if score is None else score,
        float(played.returns.sum() / max(1.0, played.lengths.sum())),
    )
    return {f"eval_{level_set}/{name}": value for name, value in zip(_METRICS, values, strict=True)}


def with_gap(task: Any, metrics: Mapping[str, float]) -> dict[str, float]:
    """Adds the generalisation gap: the score on training levels minus the score on unseen levels.

    Scores are normalised returns, or returns if one of them is unknown. The gap is NaN if no level is unseen.
    """
    if TRAIN not in task.level_sets:
        return dict(metrics)
    scores = [metrics.get(f"eval_{s}/normalized_return", math.nan) for s in LEVEL_SETS]
    if np.isnan(scores).any():
        scores = [metrics[f"eval_{s}/return"] for s in LEVEL_SETS]
    return {**metrics, GAP: scores[0] - scores[1] if task.has_unseen_levels else math.nan}


def evaluation_results(task: Any, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The section `eval` of results.json, from the metrics of the last evaluation."""
    num_envs, each = split_episodes(task.eval_episodes)
    part: dict[str, Any] = {
        level_set: {name: metrics[f"eval_{level_set}/{name}"] for name in _METRICS}
        | {"episodes": num_envs * each}
        for level_set in task.level_sets
    }
    for level_set, found in part.items():  # beside the paper's ranges, those of rliable
        score = task.normalized(metrics[f"eval_{level_set}/return"], "rliable")
        found |= {} if score is None else {"normalized_return_rliable": score}
    return part | ({"generalization_gap": metrics[GAP]} if GAP in metrics else {})
