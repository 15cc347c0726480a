"""A check of an env by random actions: its steps, an exact resume, and what it does wrong in silence."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfrl.envs import registry
from tfrl.envs.spec import EnvSettings, EnvSpec, Step, VecEnv

_ENVS = 2
_AFTER = 50
"""The most steps after a restored state that are compared."""
_WHOLE_NUMBERS = 2**24
"""float32 has all whole numbers up to this one."""


@dataclass(frozen=True)
class Played:
    """The results of random steps in several envs.

    Attributes:
      steps: the steps of all envs.
      lengths, returns: of the episodes that ended.
      truncated: the number of these episodes that were truncated.
      rewards: the smallest and the largest reward.
      largest: the largest absolute real number of an observation; 0 without real numbers.
      seconds: the time of a step of one env.
      resumes_exactly: True if restored envs took equal steps.
    """

    steps: int
    lengths: list[int]
    returns: list[float]
    truncated: int
    rewards: tuple[float, float]
    largest: float
    seconds: float
    resumes_exactly: bool


def play(task: EnvSettings, steps: int, seed: int) -> Played:
    """Takes about `steps` random steps in two envs, then more steps that restored envs must repeat.

    Raises ValueError or EnvError if the env cannot be made, fails, or returns values of the wrong kind.
    """
    each = max(1, steps // _ENVS)
    generator = np.random.default_rng(seed)
    lengths, returns, truncated, largest = [], [], 0, 0.0
    rewards = np.empty((each, _ENVS))
    ages, sums = np.zeros(_ENVS, int), np.zeros(_ENVS)
    with contextlib.closing(registry.make(EnvSpec.of(task, num_envs=_ENVS, seed=seed))) as env:
        began = time.perf_counter()
        for number in range(each):
            step = _act(env, _random_actions(env, generator))
            rewards[number] = step.reward
            ages, sums = ages + 1, sums + step.reward
            if env.observation_spec.num_numbers:
                largest = max(largest, float(np.abs(env.observation_spec.numbers(step.observation)).max()))
            lengths += ages[step.first].tolist()
            returns += sums[step.first].tolist()
            truncated += int(step.truncated.sum())
            ages[step.first], sums[step.first] = 0, 0.0
        seconds = (time.perf_counter() - began) / (each * _ENVS)
        states, actions, expected = env.get_state(), [], []
        for _ in range(min(each, _AFTER)):
            actions.append(_random_actions(env, generator))
            expected.append(_act(env, actions[-1]))
    bounds = float(rewards.min()), float(rewards.max())
    exact = _resumes_exactly(task, seed + 1, states, actions, expected)
    return Played(each * _ENVS, lengths, returns, truncated, bounds, largest, seconds, exact)


def _act(env: VecEnv, actions: np.ndarray) -> Step:
    env.act(actions)
    return env.observe()


def _random_actions(env: VecEnv, generator: np.random.Generator) -> np.ndarray:
    """Uniform actions [B, *shape] among the allowed ones."""
    allowed = env.observation_spec.allowed(env.observe().observation)
    numbers = generator.random((env.num_envs, max(1, math.prod(env.action_spec.shape))), np.float32)
    return env.action_spec.from_uniform(numbers, allowed)


def _resumes_exactly(
    task: EnvSettings, seed: int, states: list[bytes], actions: list[np.ndarray], expected: list[Step]
) -> bool:
    """True if other envs with these states take these steps."""
    with contextlib.closing(registry.make(EnvSpec.of(task, num_envs=_ENVS, seed=seed))) as env:
        env.set_state(states)
        if not env.exact_state:
            return False
        for action, step in zip(actions, expected, strict=True):
            if not all(map(np.array_equal, _act(env, action)[:4], step[:4])):
                return False
    return True


def silent_faults(task: EnvSettings, steps: int, seed: int) -> list[str]:
    """Sentences about faults of a Gymnasium env that end no run. Raises like `play`.

    It looks at the values that the env itself returns in `steps` random steps.
    """
    return list(dict.fromkeys(_silent_faults(task, steps, seed)))


def _silent_faults(task: EnvSettings, steps: int, seed: int) -> Iterator[str]:
    from tfrl.envs import calls, facts, making

    known = facts.facts_of(task)
    spec, action_spec = known.observation, known.action
    store, generator = spec.store(), np.random.default_rng(seed)
    env = making.make_env(task.env, json.dumps(dict(task.env_kwargs)), frame_skip=task.frame_skip)
    resetting, stepping = (calls.Calling(task.env, env, call) for call in (calls.RESET, calls.STEP))
    with contextlib.closing(env):
        begun = []
        for _ in range(2):
            with resetting:
                shown, info = env.reset(seed=seed)
            begun.append(calls.stored(task.env, store, shown).copy())
        if not np.array_equal(begun[0], begun[1]):
            yield (
                "reset(seed=...) shows other observations for the same seed: pass the seed to "
                "super().reset(seed=seed), and draw from self.np_random"
            )
        before = calls.generator_states()
        for _ in range(steps):
            mask = None
            if known.mask_source:
                mask = calls.mask_of(task.env, env, known.mask_source, shown, info, action_spec)[None] != 0
            numbers = generator.random((1, max(1, math.prod(action_spec.shape))), np.float32)
            with stepping:
                shown, _, terminated, truncated, info = env.step(
                    action_spec.env_inputs(action_spec.from_uniform(numbers, mask))[0]
                )
            yield from _doubts(env.observation_space, shown, "")
            if terminated and info.get("TimeLimit.truncated"):
                yield (
                    'episodes that a time limit ends, by info["TimeLimit.truncated"], count as terminated: '
                    "return truncated=True and terminated=False for them"
                )
            if terminated or truncated:
                with resetting:
                    shown, info = env.reset()
        if not known.draws_globally:
            for name in calls.drawn_from(before):
                yield f"the env draws from {name} at some steps, which all envs of a process share"


def _doubts(space: Any, shown: Any, name: str) -> Iterator[str]:
    """Sentences about an observation that its space does not have, or that float32 does not have."""
    from gymnasium import spaces

    where = f"observation {name}" if name else "an observation"
    inner: dict[Any, Any] = {}
    if isinstance(space, spaces.Dict) and isinstance(shown, Mapping):
        for key in shown.keys() - space.spaces.keys():
            yield f"{where} has the key {key!r}, which its observation_space does not have: it is not used"
        inner = dict(space.spaces)
    elif isinstance(space, spaces.Tuple):
        inner = dict(enumerate(space.spaces))
    for key, part in inner.items():
        yield from _doubts(part, shown[key], f"{name}/{key}" if name else str(key))
    if not isinstance(space, spaces.Box) or not space.shape or len(space.shape) == 3:
        return
    numbers = np.asarray(shown)
    if (numbers < space.low).any() or (numbers > space.high).any():
        yield f"{where} is outside the bounds of its observation_space"
    if ((np.abs(numbers) > _WHOLE_NUMBERS) & (numbers != numbers.astype(np.float32))).any():
        yield f"{where} has numbers beyond 16,777,216, which lose digits as float32: subtract or scale them"
