"""Calls of a Gymnasium env: checks of their results, errors in one sentence, states that an env saves, and
advice to the user.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from tfrl.cli import endings
from tfrl.cli.errors import EnvError, place, summary
from tfrl.envs.observations import (
    ACTION_MASK,
    BY_METHOD,
    IN_INFO,
    IN_OBSERVATION,
    NUMBERS,
    ArraySpec,
    flat_mask,
)
from tfrl.envs.spec import ActionSpec, Box

RESET = "reset(seed=..., options=...)"
STEP = "step(action)"


def level_reset(seed: int | None, level: int) -> str:
    """The call of `reset` that begins a level, in messages."""
    return f'reset(seed={seed}, options={{"level": {level}}})'


class Seen(NamedTuple):
    """The results of the first calls of an env.

    Attributes:
      mask_source: where its action mask is, such as IN_INFO, or "" without a mask.
      generators: the generators of the whole process that it draws from.
      info: the info of its first reset.
    """

    mask_source: str
    generators: tuple[str, ...]
    info: Mapping[str, Any]


def check_calls(env_id: str, env: gymnasium.Env, spec: ArraySpec, action_spec: ActionSpec) -> Seen:
    """Calls `reset` and `step` once each, and once more if the first calls draw from a global generator.

    Raises EnvError if they fail, or return values of the wrong kind.
    """
    env.action_space.seed(0)
    action = env.action_space.sample()
    before = generator_states()
    with Calling(env_id, env, RESET):
        begun, begun_info = env.reset(seed=1)
        dict(begun_info)  # raises an error if it is none
        source = mask_source(env_id, env, begun, begun_info, spec, action_spec)
        if source:
            action = _allowed_action(
                mask_of(env_id, env, source, begun, begun_info, action_spec), action_spec
            )
    with Calling(env_id, env, STEP), np.errstate(over="ignore"):  # `check_finite` reports it
        after, given, terminated, truncated, info = env.step(action)
        reward = np.asarray(float(given), np.float32)
        checked_ends(env_id, terminated, truncated)
        dict(info)
    for shown in (begun, after):
        observation = stored(env_id, spec.store(), shown)
        with np.errstate(over="ignore"):
            check_finite(env_id, reward, observation.astype(spec.dtype))
    generators = drawn_from(before)
    if generators:  # the first calls may also have imported a library that draws
        before = generator_states()
        with contextlib.suppress(Exception):  # a mask may forbid the action now
            env.reset(seed=1)
            env.step(action)
        generators = drawn_from(before)
    return Seen(source, generators, dict(begun_info))


def generator_states() -> dict[str, Any]:
    """The states of the generators of the whole process, by name."""
    _, keys, *rest = np.random.get_state()
    return {"np.random": (np.asarray(keys).tobytes(), *rest), "random": random.getstate()}


def drawn_from(before: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the generators whose states have changed."""
    return tuple(name for name, state in generator_states().items() if state != before[name])


def checked_ends(env_id: str, *flags: Any) -> list[bool]:
    """`terminated` and `truncated` as bools. Raises EnvError if one of them is not a bool, 0 or 1."""
    found = []
    for name, value in zip(("terminated", "truncated"), flags, strict=True):
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
            text = repr(value).partition("\n")[0]
            raise EnvError(f"{env_id} gave {name} = {text}, in {STEP}: it must be True or False")
        found.append(bool(array.item()))
    return found


def time_limit(env: gymnasium.Env) -> int | None:
    """The smallest number of steps of the env's TimeLimit wrappers; None without one."""
    limits = [each._max_episode_steps for each in wrappers(env) if isinstance(each, TimeLimit)]
    return min(limits, default=None)


def wrappers(env: gymnasium.Env) -> Iterator[gymnasium.Wrapper]:
    """The wrappers of an env, the outermost first."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def check_levels(env_id: str, env: gymnasium.Env, levels: Sequence[int]) -> None:
    """Raises EnvError if the env's reset seems to ignore options["level"].

    It does not ignore it if its info["level"] is the level. Otherwise, with one seed, a level must show the
    same observation twice, and the first eight levels different ones.
    """
    shown, named = [], True
    for level in (levels[0], *levels[:8]):
        with Calling(env_id, env, level_reset(1, level)):
            observation, info = env.reset(seed=1, options={"level": level})
            shown.append(pickle.dumps(observation))
            named = named and np.array_equal(np.asarray(info.get("level")).ravel(), [level])
    if named or len(levels) == 1:
        return
    needs = '--level-replay needs a reset that begins level options["level"]'
    if shown[0] != shown[1]:
        raise EnvError(
            f"{env_id} begins one level with one seed in two ways: {needs}; if chance still decides its "
            'first observation, return info["level"] as well'
        )
    if len({*shown}) == 1:
        raise EnvError(
            f"{env_id} begins equal episodes for different levels: {needs}; if such levels look equal at "
            'first, return info["level"] as well'
        )


def stored(env_id: str, store: Callable[..., np.ndarray], *shown: Any) -> np.ndarray:
    """The result of `ArraySpec.store`. Raises EnvError if the observation does not fit the env's space."""
    try:
        return store(*shown)
    except ValueError as error:
        raise EnvError(f"{env_id} shows an observation of {error}") from None


# Action masks

_MASKS = {
    IN_INFO: 'info["action_mask"]',
    IN_OBSERVATION: 'observation["action_mask"]',
    BY_METHOD: "action_masks()",
}
"""The masks of each source in messages."""


def mask_source(
    env_id: str, env: gymnasium.Env, shown: Any, info: Mapping[str, Any], spec: ArraySpec, actions: ActionSpec
) -> str:
    """The place of the action mask of an env that has just been reset, such as IN_INFO; "" without one.

    Raises EnvError if it gives None in place of a mask.
    """
    if not actions.mask_size:
        return ""
    if ACTION_MASK in info:
        if info[ACTION_MASK] is None:
            raise EnvError(
                f'{env_id} gives info["{ACTION_MASK}"] = None, in {RESET}: give an array of '
                f"{actions.mask_size} flags, or leave it out"
            )
        return IN_INFO
    if any(part.keys == (ACTION_MASK,) and part.size == actions.mask_size for part in spec.parts):
        return IN_OBSERVATION if len(spec.parts) > 1 else ""
    return BY_METHOD if _masks_method(env) is not None else ""


def _masks_method(env: gymnasium.Env) -> Callable[[], Any] | None:
    """The method `action_masks` of an env or of one of its wrappers."""
    try:
        found = env.get_wrapper_attr("action_masks")
    except AttributeError:
        return None
    return found if callable(found) else None


def mask_of(
    env_id: str,
    env: gymnasium.Env,
    source: str,
    shown: Any,
    info: Mapping[str, Any],
    spec: ActionSpec,
    *,
    ends: bool = False,
) -> np.ndarray:
    """The action mask of an env, uint8 [mask_size]; for MultiDiscrete it is flat or a tuple of arrays.

    Where an episode `ends`, the mask may be missing or may forbid everything. Then all actions are allowed,
    because the mask only serves to value the last observation of a truncated episode.

    Args:
      env_id: its name.
      env: the env, whose last call returned `shown` and `info`.
      source: such as IN_INFO.
      shown, info: an observation and its info.
      spec: that of the actions.
      ends: the observation is the last one of an episode.

    Raises EnvError if the mask is missing, has another size or forbids all actions.
    """
    given: Any = info.get(ACTION_MASK)
    if source == IN_OBSERVATION:
        given = shown.get(ACTION_MASK) if isinstance(shown, Mapping) else None
    elif source == BY_METHOD:
        method = _masks_method(env)
        given = None if method is None else method()
    return checked_mask(env_id, given, _MASKS[source], spec, ends=ends)


def checked_mask(env_id: str, given: Any, name: str, spec: ActionSpec, *, ends: bool = False) -> np.ndarray:
    """A mask as flags uint8 [mask_size]. Raises EnvError like `mask_of`, which explains `ends`."""
    if given is None and not ends:
        raise EnvError(
            f"{env_id} gives no {name}, but gave one at its first reset: give one at each reset and step, or "
            "use --action-masks never"
        )
    if given is None:
        return np.ones(spec.mask_size, np.uint8)
    try:
        mask = flat_mask(given).ravel()
    except ValueError as error:
        raise EnvError(f"{env_id} gives {name} with {error}") from None
    if mask.size != spec.mask_size:
        raise EnvError(f"{env_id} gives {name} of {mask.size} flags, but its actions need {spec.mask_size}")
    forbidden = spec.forbidden_by(mask)
    if not forbidden:
        return mask
    if ends:
        return np.ones(spec.mask_size, np.uint8)
    raise EnvError(f"{env_id} forbids {forbidden} in its {name}")


def _allowed_action(mask: np.ndarray, spec: ActionSpec) -> Any:
    """The first action that a mask uint8 [mask_size] allows."""
    zeros = np.zeros((1, max(1, math.prod(spec.shape))), np.float32)
    return spec.env_inputs(spec.from_uniform(zeros, mask[None].astype(bool)))[0]


# Numbers


def check_finite(env_id: str, reward: np.ndarray, observation: np.ndarray) -> None:
    """Raises EnvError if a reward, or a number of an observation, float32 [...], is NaN or infinite."""
    for name, numbers in (("a reward", reward), ("an observation", observation)):
        flat = numbers.ravel()
        if flat.dtype.kind != "f" or isfinite(flat.dot(flat)):  # 0.5 us for a few numbers
            continue
        bad = flat[~np.isfinite(flat)]
        if len(bad):  # otherwise, only the square of a number is too large
            what = "not a number (NaN)" if np.isnan(bad[0]) else "infinite, or too large for float32"
            raise EnvError(f"{env_id} gave {name} that is {what}")


class Calling:
    """Calls of an env: `with calling: ...` turns their exceptions into an EnvError of one sentence.

    The sentence names the line of the env's code that failed. One object serves many calls; each costs 0.2
    us.

    Args:
      env_id: its name.
      env: the env, or one of several of its kind.
      call: such as RESET or STEP.
    """

    def __init__(self, env_id: str, env: gymnasium.Env, call: str) -> None:
        self._env_id, self._env, self._call = env_id, env, call

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises EnvError in place of an exception that is neither EnvError nor MemoryError."""
        # An env that calls sys.exit, like a game whose window is closed, would end the run as if it were
        # complete.
        quits = isinstance(error, SystemExit) and not endings.OURS.first
        if not isinstance(error, SystemExit if quits else Exception) or isinstance(
            error, EnvError | MemoryError
        ):
            return
        where = f"{self._call}{place(trace, _home(self._env))}"
        raise EnvError(f"{self._env_id} raised {summary(error)}, in {where}") from error


def _home(env: gymnasium.Env) -> Path | None:
    """The folder of the env's own package, or of the file that has it."""
    package = sys.modules.get(type(env.unwrapped).__module__.partition(".")[0])
    file = getattr(package, "__file__", None)
    return Path(file).parent if file else None


# States that a user's env saves with `get_state()` and `set_state(state)`, instead of a replay

_PREFIX = "own/"


def saves_state(env: gymnasium.Env) -> bool:
    """True if the env has both methods, below time limits only, because other wrappers may have a state."""
    inner, _ = _below_limits(env)
    return all(callable(getattr(type(inner), name, None)) for name in ("get_state", "set_state"))


def _below_limits(env: gymnasium.Env) -> tuple[Any, list[TimeLimit]]:
    """The env below its time limits, and these, the outermost first."""
    limits = []
    while isinstance(env, TimeLimit):
        limits.append(env)
        env = env.env
    return env, limits


def get_own_state(env: gymnasium.Env) -> dict[str, np.ndarray]:
    """The env's own state as arrays. Raises TypeError if it is not a dict of JSON values and arrays."""
    inner, limits = _below_limits(env)
    state = inner.get_state()
    if not isinstance(state, Mapping):
        raise TypeError("get_state() must give a dict")
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in state.items() if name not in arrays}
    about = np.array(json.dumps({"limits": [limit._elapsed_steps for limit in limits], "rest": rest}))
    return {_PREFIX: about} | {f"{_PREFIX}{name}": value.copy() for name, value in arrays.items()}


def put_own_state(env: gymnasium.Env, arrays: Mapping[str, np.ndarray]) -> None:
    """Restores a state of `get_own_state` in an env that has been reset."""
    inner, limits = _below_limits(env)
    about = json.loads(str(arrays[_PREFIX]))
    for limit, steps in zip(limits, about["limits"], strict=True):
        limit._elapsed_steps = steps
    own = {name.removeprefix(_PREFIX): a for name, a in arrays.items() if name.startswith(_PREFIX)}
    inner.set_state(about["rest"] | {name: array.copy() for name, array in own.items() if name})


def saves_exactly(env: gymnasium.Env, other: gymnasium.Env, spec: ArraySpec) -> bool:
    """True if a second env, restored from the state of the first, takes ten equal steps.

    `spec` is that of their observations.
    """
    store = spec.store()

    def show(env: gymnasium.Env, action: Any) -> tuple[Any, ...]:
        shown, reward, terminated, truncated, _ = env.step(action)
        return store(shown).tobytes(), float(reward), bool(terminated), bool(truncated)

    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(15)]
    with contextlib.suppress(Exception):  # its methods may raise anything; then the episode is replayed
        env.reset(seed=1)
        for action in actions[:5]:
            if any(env.step(action)[2:4]):
                return False
        other.reset(seed=2)
        put_own_state(other, get_own_state(env))
        return all(show(env, action) == show(other, action) for action in actions[5:])
    return False


# Advice before the env trains. Notes say what tfrl makes of its values. Warnings name what may harm the
# training.

_MANY_NUMBERS = 4096
"""The most inputs of an mlp that are no reason to ask for another form."""
_WIDE_BOUNDS = 100.0
_BOARD = 8
"""The fewest rows and columns of numbers that could be an image."""
_STATISTICS = {
    "NormalizeObservation": ("observations", "--normalize-observations"),
    "NormalizeReward": ("rewards, and reports returns in these units", "--normalize-rewards"),
}
"""Gymnasium's wrappers with running statistics: what they normalise, and the setting for it."""
_OTHER_MASKS = (
    *("action_masks", "avail_actions", "available_actions", "legal_actions", "legal_moves", "mask"),
    *("valid_actions", "valid_action_mask", "invalid_actions"),
)
"""Names that envs give to masks, which tfrl does not know."""


def notes_about(spec: ArraySpec, action: ActionSpec, seen: Seen) -> Iterator[str]:
    """Sentences about what tfrl makes of the observations and actions of an env.

    Images of other layouts are not named here, because `ArraySpec` describes them.
    """
    if seen.mask_source == IN_OBSERVATION:
        yield 'observation["action_mask"] is used as the action mask, not as an input of the network'
    elif seen.mask_source == BY_METHOD:
        yield "action_masks() of the env gives the action masks"
    elif not action.mask_size and ACTION_MASK in seen.info:
        yield f'info["action_mask"] is not used, because the actions are {action.kind}'
    shown = next((part.size for part in spec.parts if part.keys == (ACTION_MASK,)), 0)
    if shown and seen.mask_source != IN_OBSERVATION:
        why = f"the actions need {action.mask_size} flags, and it has {shown}"
        if not action.mask_size:
            why = f"the actions are {action.kind}"
        elif seen.mask_source == IN_INFO:
            why = 'info["action_mask"] is the mask'
        yield f'observation["action_mask"] is an input of the network and not a mask, because {why}'
    for part in spec.of_kind(NUMBERS):
        sides = sorted(part.shape)[-2:]
        if len(sides) == 2 and sides[0] >= _BOARD and part.size <= _MANY_NUMBERS:
            yield (
                f"{part.name}, {part.dtype} {list(part.shape)}, is {part.size:,} numbers to the network; an "
                "image would be uint8 [H, W, C] from 0 to 255"
            )


def warnings_about(env: gymnasium.Env, spec: ArraySpec, action: ActionSpec, seen: Seen) -> Iterator[str]:
    """Sentences about what may harm the training."""
    for part in spec.of_kind(NUMBERS):
        if part.size > _MANY_NUMBERS and len(part.shape) > 1:
            yield (
                f"{part.name}, {part.dtype} {list(part.shape)}, is flattened to {part.size:,} numbers for an "
                "mlp; give images as uint8 [H, W, C] from 0 to 255, by TransformObservation for example, "
                "or --torso your own network"
            )
    if (flags := sum(spec.choices)) > _MANY_NUMBERS:
        yield (
            f"Discrete and MultiDiscrete observations become {flags:,} zeros and ones for an mlp; a Box of "
            "numbers would be smaller"
        )
    for name in (type(each).__name__ for each in wrappers(env)):
        if name in _STATISTICS:
            what, setting = _STATISTICS[name]
            yield (
                f"the wrapper {name} in the env normalises {what}; its statistics begin anew in each "
                f"evaluation: leave it out, and use {setting}"
            )
    for generator in seen.generators:
        yield (
            f"the env draws from {generator}, which all envs of a process share: evaluations change the "
            "training, and a resumed run begins new episodes; draw from self.np_random instead"
        )
    if isinstance(action, Box) and max(map(abs, (*action.low, *action.high))) > _WIDE_BOUNDS:
        yield (
            f"actions go from {min(action.low):g} to {max(action.high):g}; if the env clips them to less, "
            "most actions are the same: give its action_space the bounds that it uses"
        )
    others = [name for name in _OTHER_MASKS if name in seen.info]
    if others and not seen.mask_source and action.mask_size:
        yield f'info["{others[0]}"] is not used; a mask of actions must be info["action_mask"]'
