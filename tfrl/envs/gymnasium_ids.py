"""Gymnasium's envs one by one: makes the env of an id, and turns its spaces into specs.

Errors in an id, a space or a call become one sentence. `kwargs` are keyword arguments of the env as JSON
text, so that functions can be cached by them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator, parse_env_id, registry
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

from tfrl.cli import signals
from tfrl.cli.errors import EnvError
from tfrl.envs import callables, own_state
from tfrl.envs.observations import (
    ACTION_MASK,
    CHOICES,
    FLAGS,
    IMAGE,
    NUMBERS,
    WORD_FLAGS,
    ArraySpec,
    Packer,
    Part,
    flat_mask,
)
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete

# For each namespace of ids: the module that registers them, and the package to install.
_PLUGINS = {
    "ALE": (("ale_py",), "ale-py opencv-python-headless"),
    "dm_control": (("dm_control", "shimmy"), "'shimmy[dm-control]'"),
}
# The package to install for envs whose module begins with this name.
_EXTRAS = {
    "gymnasium.envs.box2d": "'gymnasium[box2d]'",
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.classic_control": "pygame",
    "gymnasium.envs.toy_text": "'gymnasium[toy-text]'",
    "gymnasium.envs.phys2d": "'gymnasium[jax]'",
    "gymnasium.envs.tabular": "'gymnasium[jax]'",
    "ale_py": "ale-py opencv-python-headless",
}


class FrameSkip(gymnasium.Wrapper):
    """Repeats each action `skip` times, or until the episode ends; sums the rewards and returns the last
    frame.
    """

    def __init__(self, env: gymnasium.Env, skip: int) -> None:
        super().__init__(env)
        self._skip = skip

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes one action; returns the same as `gymnasium.Env.step`."""
        total = 0.0
        for _ in range(self._skip):
            shown, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return shown, total, terminated, truncated, info


ATARI_FRAME_SKIP, _STACK = 4, 4
_NO_SKIP = {"frameskip": 1, "obs_type": "grayscale"}
"""Arguments of `gymnasium.make`, because the preprocessing and not the emulator skips frames and makes them
grey.
"""


class _AtariFrames(TransformObservation):
    """The outermost wrapper of `preprocess_atari`."""


def preprocess_atari(env: gymnasium.Env, frame_skip: int) -> gymnasium.Env:
    """Atari's usual preprocessing (Mnih et al. 2015, Machado et al. 2018).

    An episode begins with up to 30 no-ops. An observation has the last 4 of every `frame_skip`th frame, grey:
    uint8 [84, 84, 4]. Rewards stay raw, and a lost life does not end the episode. `env` is made with
    _NO_SKIP.
    """
    stacked = FrameStackObservation(AtariPreprocessing(env, frame_skip=frame_skip), _STACK)
    space = gymnasium.spaces.Box(0, 255, (84, 84, _STACK), np.uint8)
    return _AtariFrames(stacked, lambda frames: np.moveaxis(frames, 0, -1), space)


def is_atari(env: gymnasium.Env) -> bool:
    """True if `preprocess_atari` made this env."""
    return isinstance(env, _AtariFrames)


def make_env(
    env_id: str,
    kwargs: str = "{}",
    *,
    frame_skip: int | None = None,
    unlimited: bool = False,
    render: bool = False,
) -> gymnasium.Env:
    """Makes one env, without wrappers that only check, and with the usual preprocessing.

    Atari games get `preprocess_atari`; dict observations of dm_control are flattened. The env of a callable
    stays as it is, with its own wrappers.

    Args:
      env_id: Gymnasium's id, or module:id, or the name of a callable (`tfrl.envs.callables`).
      kwargs: keyword arguments of the env, as JSON text.
      frame_skip: how often each action is repeated. None: 4 for Atari's games, 1 for others.
      unlimited: removes the registered time limit of the env.
      render: makes `env.render()` return frames, uint8 [H, W, 3].

    Raises:
      ValueError: the id does not exist, a package is missing, the arguments are wrong, or the env cannot be
        drawn.
    """
    if callables.is_name(env_id):
        env = _call(env_id, json.loads(kwargs), render=render)
        return env if frame_skip in (None, 1) else FrameSkip(env, frame_skip)
    spec = copy.deepcopy(_find(env_id))
    spec.order_enforce = False
    if unlimited:
        spec.max_episode_steps = None
    options = json.loads(kwargs) | ({"render_mode": "rgb_array"} if render else {})
    obs_type = options.get("obs_type", spec.kwargs.get("obs_type"))
    atari_images = spec.entry_point == "ale_py.env:AtariEnv" and obs_type != "ram"
    if atari_images:
        if taken := _NO_SKIP.keys() & options.keys():
            raise ValueError(
                f"the preprocessing of {env_id} sets {min(taken)}, so --env-kwargs cannot set it "
                "(--frame-skip sets how often each action is repeated)"
            )
        options |= _NO_SKIP
    if render:
        _draw_off_screen()
    try:
        maker = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        _silence_mujoco()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about older versions and render modes
            shown = not render or _has_pictures(maker)  # other envs may refuse the option
            if not shown:
                del options["render_mode"]
            env = gymnasium.make(spec, disable_env_checker=True, **options)
            env = preprocess_atari(env, frame_skip or ATARI_FRAME_SKIP) if atari_images else env
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ValueError(f"{env_id} needs a package that is missing{_remedy(spec, error)}") from error
    except Exception as error:  # a user's env may raise anything
        given = f" with --env-kwargs {kwargs}" if kwargs != "{}" else ""
        raise ValueError(f"{env_id} cannot be made{given}: {_cause(error)}") from error
    if not atari_images and frame_skip not in (None, 1):
        env = FrameSkip(env, frame_skip)
    if render and not (shown and _has_pictures(env)):
        raise ValueError(f"{env_id} cannot be drawn: it has no render mode rgb_array")
    if env_id.startswith("dm_control/") and isinstance(env.observation_space, gymnasium.spaces.Dict):
        env = gymnasium.wrappers.FlattenObservation(env)
    return env


def _call(name: str, kwargs: dict[str, Any], *, render: bool) -> gymnasium.Env:
    """Makes the env of a callable. Raises ValueError like `make_env`."""
    make = callables.find(name)
    if render:
        _draw_off_screen()
        if "render_mode" in _parameters(make):
            kwargs = kwargs | {"render_mode": "rgb_array"}
    try:
        _silence_mujoco()
        env = make(**kwargs)
    except Exception as error:  # a user's function may raise anything
        given = f" with {json.dumps(kwargs)}" if kwargs else ""
        raise ValueError(f"{name} cannot be made{given}: {_cause(error)}") from error
    if not isinstance(env, gymnasium.Env):
        raise ValueError(
            f"{name} returns {_kind(env)}, but must return a gymnasium.Env (Gymnasium "
            f"{gymnasium.__version__})"
        )
    if render and env.render_mode != "rgb_array":
        raise ValueError(
            f"{name} cannot be drawn: the function must accept render_mode and make an env whose "
            "render_mode is rgb_array"
        )
    return _without_checks(env)


def _parameters(make: Callable[..., Any]) -> Collection[str]:
    """The names of a callable's parameters; empty if Python does not know them."""
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):
        return ()


def _without_checks(env: gymnasium.Env) -> gymnasium.Env:
    """The env without the wrappers of `gymnasium.make` that only check, which cost time at each step."""
    if not isinstance(env, gymnasium.Wrapper):
        return env
    inner = _without_checks(env.env)
    if isinstance(env, gymnasium.wrappers.PassiveEnvChecker | gymnasium.wrappers.OrderEnforcing):
        return inner
    env.env = inner
    return env


def _has_pictures(maker: Any) -> bool:
    metadata = getattr(maker, "metadata", None)  # a function that makes envs has no spec
    return not isinstance(metadata, dict) or "rgb_array" in metadata.get("render_modes", ())


def _silence_mujoco() -> None:
    """Keeps MuJoCo from writing warnings about its own models to MUJOCO_LOG.TXT in the working folder."""
    if "mujoco" in sys.modules:
        sys.modules["mujoco"].set_mju_user_warning(lambda message: None)


def _draw_off_screen() -> None:
    """Sets an off-screen renderer if there is no display and the user chose none.

    MuJoCo and dm_control read MUJOCO_GL at their import, and fail if its library is missing.
    """
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # for pygame, which otherwise prints a warning
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    if "MUJOCO_GL" not in os.environ:
        found = next((name for name, library in libraries.items() if ctypes.util.find_library(library)), None)
        os.environ.update({"MUJOCO_GL": found} if found else {})


def _cause(error: BaseException) -> str:
    """An exception in one line, with advice if MuJoCo's graphics raised it."""
    cause = _summary(error)
    if any("mujoco" in frame.filename.lower() for frame in traceback.extract_tb(error.__traceback__)):
        cause += (
            f" (MUJOCO_GL is {os.environ.get('MUJOCO_GL', 'unset')}; without a display MuJoCo draws with "
            "MUJOCO_GL=egl and the libraries libegl1 and libgl1-mesa-dri, or MUJOCO_GL=osmesa and libosmesa6)"
        )
    return cause


def _summary(error: BaseException) -> str:
    """The type of an exception and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _remedy(spec: gymnasium.envs.registration.EnvSpec, error: Exception) -> str:
    """`: pip install ...` if the missing package is known, otherwise the text of the error."""
    module = spec.entry_point if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    needed = next((package for start, package in _EXTRAS.items() if module.startswith(start)), None)
    return f": pip install {needed}" if needed else f" ({_summary(error)})"


def _find(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """The registered spec of an id or `module:id`. Raises ValueError if it does not exist."""
    module, _, name = env_id.rpartition(":")
    try:
        namespace, base, version = parse_env_id(name)
    except gymnasium.error.Error:
        raise ValueError(f"{env_id!r} is not the id of an env; ids look like CartPole-v1") from None
    if module:
        _import(module, env_id)
    elif namespace in _PLUGINS:
        modules, packages = _PLUGINS[namespace]
        _draw_off_screen()
        for plugin in modules:
            _import(plugin, env_id, packages)
    elif name not in registry and importlib.util.find_spec("ale_py"):
        _import("ale_py", env_id)  # PongNoFrameskip-v4 and the like have no namespace
    if name in registry:
        return registry[name]
    where = "" if module else f"; an env that a module of yours registers is named MODULE:{name}"
    raise ValueError(f"there is no env {env_id!r}{did_you_mean(name, module=module)}{where}")


def _import(module: str, env_id: str, packages: str = "") -> None:
    """Imports the module that registers an id; `packages` are the packages to install for it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dm_control warns that there is no display
            imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and packages:
            raise ValueError(f"{env_id} needs a package that is missing: pip install {packages}") from error
        raise ValueError(
            f"{env_id} needs the module {module}, which cannot be imported: {_cause(error)}"
        ) from error
    if module == "ale_py":
        imported.ALEInterface.setLoggerMode(imported.LoggerMode.Error)  # no banner


def did_you_mean(typed: str, others: Iterable[str] = (), module: str = "") -> str:
    """` (did you mean CartPole-v1?)` with the id or name that is closest to `typed`; "" if none is close.

    `module` is written before the suggested id.
    """
    # Gymnasium's own functions only say why the env does not exist.
    ids = (s.id for s in registry.values() if getattr(s.entry_point, "__module__", "") != "gymnasium.envs")
    by_lower = {name.lower(): name for name in (*ids, *others)}
    close = difflib.get_close_matches(typed.lower(), by_lower, n=1)
    return f" (did you mean {module and f'{module}:'}{by_lower[close[0]]}?)" if close else ""


class Facts(NamedTuple):
    """Facts about an env.

    Attributes:
      observation, action: the specs.
      action_mask: True if its reset returns info["action_mask"].
      fps: frames per second for videos; 30 if the env names no rate.
      with_opengl: True if MuJoCo draws it.
    """

    observation: ArraySpec
    action: ActionSpec
    action_mask: bool
    fps: float
    with_opengl: bool

    def specs(self, *, masked: bool) -> tuple[ArraySpec, ActionSpec]:
        """The specs of observations and actions; observations contain the action mask if it is used."""
        observation = self.observation.with_mask(self.action.mask_size) if masked else self.observation
        return observation, self.action


def masks_actions(setting: str, facts: Facts) -> bool:
    """True if the setting `action_masks` (auto, never or must) uses the masks of this env."""
    return setting != "never" and facts.action_mask


@functools.cache
def facts_of(env_id: str, kwargs: str = "{}") -> Facts:
    """The facts about an env, from its first reset and step.

    Raises:
      ValueError: see `make_env`; or the observations or actions are not supported.
      EnvError: its first reset or step fails, or returns values of the wrong kind.
    """
    with _open(env_id, kwargs) as env:
        spaces = (getattr(env, f"{kind}_space", None) for kind in ("observation", "action"))
        observation, actions = observation_spec(env_id, next(spaces)), actions_of(env_id, next(spaces))
        masks = check_calls(env_id, env, observation, actions)
        fps = float(env.metadata.get("render_fps") or 30)
        return Facts(observation, actions.spec, masks, fps, hasattr(env.unwrapped, "mujoco_renderer"))


@contextlib.contextmanager
def _open(env_id: str, kwargs: str) -> Iterator[gymnasium.Env]:
    """Makes an env, and closes it at the end of the context. Raises like `make_env`."""
    env = make_env(env_id, kwargs)
    try:
        yield env
    finally:
        close(env)


def close(env: gymnasium.Env) -> None:
    """Closes an env, and ignores its errors."""
    with contextlib.suppress(Exception):
        env.close()


@functools.cache
def can_repeat(env_id: str, kwargs: str = "{}") -> bool:
    """True if two runs of 20 steps from one seed are the same, and the id is not marked nondeterministic.

    Only the state of such an env can be restored by a replay. Raises like `facts_of`.
    """
    facts = facts_of(env_id, kwargs)
    with _open(env_id, kwargs) as env:
        env.action_space.seed(0)
        given = None if facts.action_mask else [env.action_space.sample() for _ in range(20)]
        outlines = [_outline(env_id, env, given) for _ in range(2)]
    marked = not callables.is_name(env_id) and _find(env_id).nondeterministic
    return not marked and outlines[0] == outlines[1]


@functools.cache
def saves_itself(env_id: str, kwargs: str = "{}") -> bool:
    """True if an env has `get_state()` and `set_state(state)`, and they are exact.

    Envs with action masks are replayed instead, because this check takes any actions. Raises like `facts_of`.
    """
    if facts_of(env_id, kwargs).action_mask:
        return False
    with _open(env_id, kwargs) as env:
        if not own_state.is_saved(env):
            return False
        with _open(env_id, kwargs) as other:
            return own_state.is_exact(env, other)


def _outline(env_id: str, env: gymnasium.Env, given: list | None) -> list[tuple]:
    """All results of the first steps of an episode from seed 1, with these actions or 20 allowed actions."""
    actions = actions_of(env_id, env.action_space)
    with Calling(env_id, env, RESET):
        shown, info = env.reset(seed=1)
        seen = [(_bytes_of(shown), 0.0, False, False)]
    with Calling(env_id, env, STEP):
        for t in range(20):
            action = _allowed_action(env_id, info, actions, t) if given is None else given[t]
            shown, reward, terminated, truncated, info = env.step(action)
            seen.append((_bytes_of(shown), float(reward), bool(terminated), bool(truncated)))
            if terminated or truncated:
                break
    return seen


def _bytes_of(shown: Any) -> list[bytes]:
    """The bytes of all arrays of an observation, in the order of its Dict or Tuple."""
    if isinstance(shown, Mapping):
        shown = tuple(shown.values())
    if isinstance(shown, tuple):
        return [array for part in shown for array in _bytes_of(part)]
    return [np.asarray(shown).tobytes()]


def _allowed_action(env_id: str, info: Mapping[str, Any], actions: Actions, number: int) -> Any:
    """An action that the mask in an info allows, drawn by a number of a series."""
    mask = mask_of(env_id, info, actions.spec).astype(bool)
    drawn = np.random.default_rng(number).random((1, max(1, math.prod(actions.spec.shape))), np.float32)
    return actions.inputs(actions.spec.from_uniform(drawn, mask[None]))[0]


def forget() -> None:
    """Drops all cached facts, because a name now belongs to another callable."""
    facts_of.cache_clear()
    can_repeat.cache_clear()
    saves_itself.cache_clear()


def reward_threshold(env_id: str) -> float | None:
    """The mean return at which Gymnasium counts an env as solved; None for callables and envs without a
    threshold.

    Raises ValueError if the id does not exist.
    """
    if callables.is_name(env_id):  # wrappers of a callable may have changed the rewards
        return None
    threshold = _find(env_id).reward_threshold
    return None if threshold is None else float(threshold)


# Modules whose envs do not draw with OpenGL, but with pygame or an emulator.
_WITHOUT_OPENGL = (
    *("gymnasium.envs.classic_control", "gymnasium.envs.box2d", "gymnasium.envs.toy_text"),
    "ale_py",
)


def draws_with_opengl(env_id: str) -> bool:
    """True if drawing an env needs OpenGL or may need it. Raises ValueError if the id does not exist."""
    return not str(_find(env_id).entry_point).startswith(_WITHOUT_OPENGL)


def rendering_error(env_id: str, error: Exception) -> str:
    """One sentence for a failure to render, which names the missing package or OpenGL library."""
    if isinstance(error, gymnasium.error.DependencyNotInstalled):
        remedy = f" ({_summary(error)})" if callables.is_name(env_id) else _remedy(_find(env_id), error)
        return f"{env_id} cannot be rendered without a package that is missing{remedy}"
    return f"{env_id} cannot be rendered: {_cause(error)}"


class Actions(NamedTuple):
    """An action space for agents, and the conversion to the env's actions.

    Attributes:
      spec: the spec of its actions.
      inputs: converts agents' actions [N, *spec.shape] to the arguments of the N envs' `step`.
    """

    spec: ActionSpec
    inputs: Callable[[np.ndarray], Sequence[Any] | np.ndarray]


def observation_spec(env_id: str, space: spaces.Space | None) -> ArraySpec:
    """The spec of an env's observations. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1 and np.issubdtype(space.dtype, np.number):
            return ArraySpec(space.shape, "float32")
        if len(space.shape) == 3 and space.dtype == np.uint8:
            return _image_spec(env_id, space)
    parts = list(_parts(env_id, space, ()))
    if not sum(part.size for part in parts):
        raise ValueError(f"{env_id} has empty observations: {_describe(space)} without any numbers")
    return ArraySpec.of_parts(parts)


def _parts(env_id: str, space: spaces.Space | None, keys: tuple[str, ...]) -> Iterator[Part]:
    """The arrays of a space, at these keys of a Dict or Tuple. Raises ValueError for other spaces."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _parts(env_id, inner, (*keys, str(key)))
    elif isinstance(space, spaces.Tuple):
        for place, inner in enumerate(space.spaces):
            yield from _parts(env_id, inner, (*keys, str(place)))
    elif isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3:
        image = _image_spec(env_id, space)
        yield Part(keys, IMAGE, image.shape, "uint8", image.channels_first)
    elif isinstance(space, spaces.Box) and space.dtype.kind in "biuf":
        yield Part(keys, NUMBERS, space.shape, space.dtype.name)
    elif isinstance(space, spaces.Discrete):
        yield Part(keys, CHOICES, (), space.dtype.name, counts=(int(space.n),), starts=(int(space.start),))
    elif isinstance(space, spaces.MultiDiscrete):
        counts, starts = (tuple(np.ravel(x).tolist()) for x in (space.nvec, space.start))
        yield Part(keys, CHOICES, space.shape, space.dtype.name, counts=counts, starts=starts)
    elif isinstance(space, spaces.MultiBinary):
        yield Part(keys, FLAGS, space.shape, space.dtype.name)
    elif isinstance(space, spaces.Space) and getattr(space.dtype, "kind", "") == "U":
        yield Part(keys, FLAGS, (WORD_FLAGS,), "str")
    else:
        where = f" at {'/'.join(keys)}" if keys else ""
        raise ValueError(
            f"{env_id} shows {_describe(space)}{where}, which is not supported: observations must be Box, "
            "Discrete, MultiBinary, MultiDiscrete or Text, or a Dict or Tuple of them"
        )


_FEW = 16  # channels, because the width of an image is larger


def _image_spec(env_id: str, space: spaces.Box) -> ArraySpec:
    """The spec of images. Raises ValueError if the shape does not show which axis has the channels."""
    first, middle, last = shape = space.shape
    channels_last = last < min(first, middle) or first == middle != last
    channels_first = first <= _FEW < last and first < middle or middle == last != first
    if channels_last:  # comes first: a small board may have fewer channels than cells in a row
        return ArraySpec(shape, "uint8")
    if channels_first:
        return ArraySpec((middle, last, first), "uint8", channels_first=True)
    raise ValueError(
        f"{env_id} shows {_describe(space)}, and this shape does not tell whether the first or the last "
        "number counts the channels: give images [H, W, C] with fewer channels than rows and columns"
    )


def actions_of(env_id: str, space: spaces.Space | None) -> Actions:
    """The actions of an env. Raises ValueError if the space is not supported."""
    for kind, make in _ACTIONS.items():
        if isinstance(space, kind) and (actions := make(env_id, space)):
            return actions
    raise ValueError(
        f"{env_id} takes {_describe(space)}, which is not supported: "
        "actions must be Discrete or MultiDiscrete, or a Box that is a vector of real numbers"
    )


def _discrete(env_id: str, space: spaces.Discrete) -> Actions:
    start = int(space.start)
    # ints: faster than NumPy's
    return Actions(
        Discrete(int(space.n), start), lambda actions: (actions + start if start else actions).tolist()
    )


def _multi_discrete(env_id: str, space: spaces.MultiDiscrete) -> Actions | None:
    if len(space.shape) != 1:
        return None
    starts = np.asarray(space.start, space.dtype)
    spec = MultiDiscrete(tuple(space.nvec.tolist()), tuple(starts.tolist()))
    return Actions(spec, lambda actions: actions.astype(starts.dtype) + starts)


def _box(env_id: str, space: spaces.Box) -> Actions | None:
    if len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        return None
    if not space.is_bounded():
        raise ValueError(f"{env_id} takes actions without bounds; give its action_space finite bounds")
    low, high = (np.asarray(x, space.dtype) for x in (space.low, space.high))
    middle, half = low / 2 + high / 2, high / 2 - low / 2  # in this order no bound overflows by itself
    if (half > np.finfo(np.float32).max / 2).any():
        raise ValueError(
            f"{env_id} takes actions between {low.min():.2g} and {high.max():.2g}, which are hardly "
            "bounds; give its action_space smaller ones"
        )

    def inputs(actions: np.ndarray) -> np.ndarray:
        scaled = actions * half
        scaled += middle
        np.maximum(scaled, low, out=scaled)
        return np.minimum(scaled, high, out=scaled)

    return Actions(Box(tuple(space.low.tolist()), tuple(space.high.tolist())), inputs)


_ACTIONS: dict[type[spaces.Space], Callable[[str, Any], Actions | None]] = {
    spaces.Discrete: _discrete,
    spaces.MultiDiscrete: _multi_discrete,
    spaces.Box: _box,
}


def _describe(space: spaces.Space | None) -> str:
    kind = type(space).__name__
    return f"a {kind} of {space.dtype} {list(space.shape)}" if isinstance(space, spaces.Box) else f"a {kind}"


RESET = "reset(seed=..., options=...)"
STEP = "step(action)"
_GIVES = {RESET: "(observation, info)", STEP: "(observation, reward, terminated, truncated, info)"}


def check_calls(env_id: str, env: gymnasium.Env, spec: ArraySpec, actions: Actions) -> bool:
    """Calls `reset` and `step` once each; True if the reset's info has an "action_mask" for these actions.

    Raises EnvError if they fail, or return values of the wrong kind.
    """
    has_mask = False
    # The env's own step: Gymnasium's time limit would raise another error for wrong values.
    inner = env.env if isinstance(env, gymnasium.wrappers.TimeLimit) else env
    env.action_space.seed(0)
    action, packer = env.action_space.sample(), Packer(spec) if spec.parts else None
    for call in (RESET, STEP):
        with Calling(env_id, env, call):
            given = env.reset(seed=1) if call == RESET else inner.step(action)
        names = _GIVES[call].strip("()").split(", ")
        if not isinstance(given, tuple) or len(given) != len(names):
            what = f"{len(given)} values" if isinstance(given, tuple) else _kind(given)
            raise _breach(env_id, call, f"gives {what}", f"must give {_GIVES[call]}")
        parts = dict(zip(names, given, strict=True))
        if not isinstance(info := parts.pop("info"), Mapping):
            raise _breach(env_id, call, f"gives {_kind(info)} as info", "must give a dict")
        shown = parts.pop("observation")
        observation = packed(env_id, packer, shown) if packer else fitting(env_id, shown, spec)
        if call == RESET and actions.spec.mask_size and ACTION_MASK in info:
            has_mask, action = True, _allowed_action(env_id, info, actions, 0)
        for name, value in parts.items():
            if not _is_number(value):
                raise _breach(env_id, call, f"gives {_kind(value)} as {name}", "must give a number")
        with np.errstate(over="ignore"):  # `check_finite` reports it
            numbers = np.asarray(np.float32(parts.get("reward", 0))), observation.astype(spec.dtype)
        check_finite(env_id, *numbers)
    return has_mask


def packed(env_id: str, packer: Packer, shown: Any, mask: np.ndarray | None = None) -> np.ndarray:
    """A row of an observation and its mask. Raises EnvError if it does not fit the env's space."""
    try:
        return packer(shown, mask)
    except ValueError as error:
        raise EnvError(f"{env_id} shows an observation of {error}") from None


def mask_of(env_id: str, info: Mapping[str, Any], spec: ActionSpec, *, ends: bool = False) -> np.ndarray:
    """The action mask in an info, uint8 [mask_size]; for MultiDiscrete it is flat or a tuple of arrays.

    Where an episode `ends`, the mask may be missing or may forbid everything. Then all actions are allowed,
    because the mask only serves to value the last observation of a truncated episode.

    Raises EnvError if the mask is missing, has another size or forbids all actions.
    """
    given = info.get(ACTION_MASK)
    if given is None and not ends:
        raise EnvError(
            f'{env_id} gives no info["{ACTION_MASK}"], but gave one at its first reset: give one at each '
            "reset and step, or use --action-masks never"
        )
    if given is None:
        return np.ones(spec.mask_size, np.uint8)
    mask = flat_mask(given).ravel()
    if mask.size != spec.mask_size:
        raise EnvError(
            f'{env_id} gives an info["{ACTION_MASK}"] of {mask.size} flags, but its actions need '
            f"{spec.mask_size}"
        )
    begins = np.cumsum((0, *spec.mask_counts[:-1]))
    if not np.maximum.reduceat(mask, begins).all():
        if ends:
            return np.ones(spec.mask_size, np.uint8)
        raise EnvError(f'{env_id} forbids every action in its info["{ACTION_MASK}"]')
    return mask


def _breach(env_id: str, call: str, does: str, must: str) -> EnvError:
    return EnvError(f"{env_id} does not follow Gymnasium's interface: its {call} {does}, but {must}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _is_number(value: Any) -> bool:
    """True for one real number or truth value, of Python's types or NumPy's."""
    array = np.asarray(value)
    return array.size == 1 and array.dtype.kind in "biuf"


def fitting(env_id: str, shown: Any, spec: ArraySpec) -> np.ndarray:
    """An observation as an array [*spec.shape] of uint8, or of any numbers for float32.

    Raises EnvError if it has another shape, or is not uint8 although the space is, because a cast would wrap
    around.
    """
    array = np.asarray(shown)
    of_its_kind = array.dtype == np.uint8 if spec.dtype == "uint8" else array.dtype.kind in "biuf"
    if array.shape == spec.env_shape and of_its_kind:
        return np.moveaxis(array, 0, -1) if spec.channels_first else array
    numbers = "uint8" if spec.dtype == "uint8" else "numbers"
    what = "None" if shown is None else f"{array.dtype} {list(array.shape)}"
    raise EnvError(
        f"{env_id} shows an observation of {what} where its observation_space says {numbers} "
        f"{list(spec.env_shape)}"
    )


def check_finite(env_id: str, reward: np.ndarray, observation: np.ndarray) -> None:
    """Raise EnvError if a reward, or a number of an observation, float32 [...], is NaN or infinite."""
    for name, numbers in (("a reward", reward), ("an observation", observation)):
        bad = numbers[~np.isfinite(numbers)] if numbers.dtype.kind == "f" else np.empty(0)
        if len(bad):
            what = "not a number (NaN)" if np.isnan(bad[0]) else "infinite, or too large for float32"
            raise EnvError(f"{env_id} gave {name} that is {what}")


def all_finite(numbers: np.ndarray) -> bool:
    """True if float32 [...] are all finite and none is so large that its square is not; 0.5 us for a few."""
    flat = numbers.ravel()
    return isfinite(flat.dot(flat))


class Calling:
    """Calls of an env: `with calling: ...` turns their exceptions into an EnvError of one sentence.

    The sentence names the line of the env's code that failed. One object serves many calls; each costs 0.2
    us.

    Args:
      env_id: its name.
      env: the env, or one of several of its kind.
      call: RESET or STEP.
    """

    def __init__(self, env_id: str, env: gymnasium.Env, call: str) -> None:
        self._env_id, self._env, self._call = env_id, env, call

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises EnvError in place of an exception that is neither EnvError nor MemoryError."""
        # An env that calls sys.exit, like a game whose window is closed, would end the run as if it were
        # complete.
        quits = isinstance(error, SystemExit) and not signals.OURS.first
        if not isinstance(error, SystemExit if quits else Exception) or isinstance(
            error, EnvError | MemoryError
        ):
            return
        home, frames = _home(self._env), traceback.extract_tb(trace)[1:]  # the first one is the caller's
        own = [frame for frame in frames if home and Path(frame.filename).is_relative_to(home)]
        places = [f" ({frame.filename}:{frame.lineno})" for frame in own or frames]
        where = f"{self._call}{places[-1] if places else ''}"
        raise EnvError(f"{self._env_id} raised {_summary(error)}, in {where}") from error


def _home(env: gymnasium.Env) -> Path | None:
    """The folder of the env's own package, or of the file that has it."""
    package = sys.modules.get(type(env.unwrapped).__module__.partition(".")[0])
    file = getattr(package, "__file__", None)
    return Path(file).parent if file else None
