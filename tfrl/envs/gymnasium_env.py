"""One Gymnasium env: it is made from an id or a callable, and its spaces become specs.

Errors become one sentence. `kwargs` are keyword arguments of the env as JSON text.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator, registry

from tfrl.cli.flags import nearest
from tfrl.envs import atari, callables, own_state
from tfrl.envs.calls import check_calls, summary
from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, NUMBERS, WORD_FLAGS, ArraySpec, Part
from tfrl.envs.registry import Facts
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete

_FEW_CHANNELS = 16  # because the width of an image is larger


def make_env(
    env_id: str,
    kwargs: str = "{}",
    *,
    frame_skip: int | None = None,
    unlimited: bool = False,
    render: bool = False,
) -> gymnasium.Env:
    """Makes one env, without wrappers that only check, and with the usual preprocessing.

    Atari games get `atari.preprocess`. The env of a callable keeps its own other wrappers.

    Args:
      env_id: Gymnasium's id, or module:id, or the name of a callable (`tfrl.envs.callables`).
      kwargs: keyword arguments of the env, as JSON text.
      frame_skip: frames of a step; only for the images of Atari's games. None: 4.
      unlimited: removes the registered time limit of the env.
      render: makes `env.render()` return frames, uint8 [H, W, 3].

    Raises:
      ValueError: the id does not exist, a package is missing, the arguments are wrong, or the env cannot be
        drawn.
    """
    options = json.loads(kwargs)
    if callables.is_name(env_id):
        make = callables.find(env_id)
        draws = render and "render_mode" in inspect.signature(make).parameters
    else:
        make, draws = _maker(env_id, options, frame_skip=frame_skip, unlimited=unlimited), render
    if render:
        _draw_off_screen()
    try:
        env = make(**options, **({"render_mode": "rgb_array"} if draws else {}))
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"it is of type {type(env).__name__} and not a gymnasium.Env")
    except Exception as error:  # a user's env may raise anything
        given = f" with {kwargs}" if kwargs != "{}" else ""
        raise ValueError(f"{env_id} cannot be made{given}: {summary(error)}") from error
    if render and env.render_mode != "rgb_array":
        close(env)
        raise ValueError(f"{env_id} cannot be drawn: its render_mode is not rgb_array")
    return _without_checks(env)


def _maker(
    env_id: str, given: dict[str, Any], *, frame_skip: int | None, unlimited: bool
) -> Callable[..., gymnasium.Env]:
    """The function that makes the env of an id from the given keyword arguments. Raises ValueError."""
    spec = copy.deepcopy(find_spec(env_id))
    spec.order_enforce = False
    if unlimited:
        spec.max_episode_steps = None
    obs_type = given.get("obs_type", spec.kwargs.get("obs_type"))
    if spec.entry_point != "ale_py.env:AtariEnv" or obs_type == "ram":
        return functools.partial(_registered, spec)
    if taken := atari.OPTIONS.keys() & given.keys():
        raise ValueError(f"the preprocessing of {env_id} sets {min(taken)}, so --env-kwargs cannot set it")
    return lambda **options: atari.preprocess(
        _registered(spec, **atari.OPTIONS, **options), frame_skip or atari.FRAME_SKIP
    )


def _registered(spec: gymnasium.envs.registration.EnvSpec, **options: Any) -> gymnasium.Env:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about older versions and render modes
        if isinstance(spec.entry_point, str):
            load_env_creator(spec.entry_point)  # imports its module
        if "mujoco" in sys.modules:  # it would write warnings about its own models to the working folder
            sys.modules["mujoco"].set_mju_user_warning(lambda message: None)
        return gymnasium.make(spec, disable_env_checker=True, **options)


def _without_checks(env: gymnasium.Env) -> gymnasium.Env:
    """The env without the wrappers of `gymnasium.make` that only check, which cost time at each step."""
    if not isinstance(env, gymnasium.Wrapper):
        return env
    inner = _without_checks(env.env)
    if isinstance(env, gymnasium.wrappers.PassiveEnvChecker | gymnasium.wrappers.OrderEnforcing):
        return inner
    env.env = inner
    return env


def _draw_off_screen() -> None:
    """Sets an off-screen renderer if there is no display and the user chose none.

    MuJoCo reads MUJOCO_GL at its import, and fails if the library is missing.
    """
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # for pygame, which otherwise prints a warning
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    if "MUJOCO_GL" not in os.environ:
        found = next((name for name, library in libraries.items() if ctypes.util.find_library(library)), None)
        os.environ.update({"MUJOCO_GL": found} if found else {})


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """The registered spec of an id or `module:id`. Raises ValueError if it does not exist."""
    module, _, name = env_id.rpartition(":")
    if not module and name not in registry and importlib.util.find_spec("ale_py"):
        module = "ale_py"  # it registers Atari's games
    if module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                imported = importlib.import_module(module)
        except Exception as error:  # a user's module may raise anything
            raise ValueError(
                f"{env_id} needs the module {module}, which cannot be imported: {summary(error)}"
            ) from error
        if module == "ale_py":
            imported.ALEInterface.setLoggerMode(imported.LoggerMode.Error)  # no banner
    if name not in registry:
        where = "" if ":" in env_id else f"; if your own module registers it, write MODULE:{name}"
        if name.startswith("ALE/") and not importlib.util.find_spec("ale_py"):
            where = "; Atari's games need: pip install ale-py opencv-python-headless"
        raise ValueError(f"there is no env {env_id!r}{did_you_mean(name)}{where}")
    return registry[name]


def did_you_mean(typed: str, others: Iterable[str] = ()) -> str:
    """` (did you mean CartPole-v1?)` with the id or name that is closest to `typed`; "" if none is close."""
    # Gymnasium's own functions only say why the env does not exist.
    ids = (s.id for s in registry.values() if getattr(s.entry_point, "__module__", "") != "gymnasium.envs")
    return nearest(typed, (*ids, *others))


def find_facts(env_id: str, kwargs: str = "{}") -> Facts:
    """The facts about an env, from its first reset and step.

    Raises:
      ValueError: see `make_env`; or the observations or actions are not supported.
      EnvError: its first reset or step fails, or returns values of the wrong kind.
    """
    with _open(env_id, kwargs) as env:
        observation = observation_spec(env_id, getattr(env, "observation_space", None))
        action = action_spec(env_id, getattr(env, "action_space", None))
        action_mask = check_calls(env_id, env, observation, action)
        saves_state = False
        if own_state.is_saved(env) and not action_mask:  # because this check takes any actions
            with _open(env_id, kwargs) as other:
                saves_state = own_state.is_exact(env, other)
        return Facts(
            observation,
            action,
            action_mask,
            fps=float(env.metadata.get("render_fps") or 30),
            with_opengl=_draws_with_opengl(env_id, env),
            saves_state=saves_state,
        )


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


# Modules whose envs do not draw with OpenGL, but with pygame or an emulator.
_WITHOUT_OPENGL = (
    *("gymnasium.envs.classic_control", "gymnasium.envs.box2d", "gymnasium.envs.toy_text"),
    "ale_py",
)


def _draws_with_opengl(env_id: str, env: gymnasium.Env) -> bool:
    if callables.is_name(env_id):
        return hasattr(env.unwrapped, "mujoco_renderer")
    return not type(env.unwrapped).__module__.startswith(_WITHOUT_OPENGL)


# Spaces as specs


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


def _image_spec(env_id: str, space: spaces.Box) -> ArraySpec:
    """The spec of images. Raises ValueError if the shape does not show which axis has the channels."""
    first, middle, last = shape = space.shape
    channels_last = last < min(first, middle) or first == middle != last
    channels_first = first <= _FEW_CHANNELS < last and first < middle or middle == last != first
    if channels_last:  # comes first: a small board may have fewer channels than cells in a row
        return ArraySpec(shape, "uint8")
    if channels_first:
        return ArraySpec((middle, last, first), "uint8", channels_first=True)
    raise ValueError(
        f"{env_id} shows {_describe(space)}, and this shape does not tell whether the first or the last "
        "number counts the channels: give images [H, W, C] with fewer channels than rows and columns"
    )


def action_spec(env_id: str, space: spaces.Space | None) -> ActionSpec:
    """The spec of an env's actions. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return MultiDiscrete(tuple(space.nvec.tolist()), tuple(np.asarray(space.start).tolist()))
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        return _box(env_id, space)
    raise ValueError(
        f"{env_id} takes {_describe(space)}, which is not supported: "
        "actions must be Discrete or MultiDiscrete, or a Box that is a vector of real numbers"
    )


def _box(env_id: str, space: spaces.Box) -> Box:
    """The spec of a vector of real numbers. Raises ValueError if it has no bounds."""
    if not space.is_bounded():
        raise ValueError(f"{env_id} takes actions without bounds; give its action_space finite bounds")
    low, high = space.low, space.high
    if (high / 2 - low / 2 > np.finfo(np.float32).max / 2).any():
        raise ValueError(
            f"{env_id} takes actions between {low.min():.2g} and {high.max():.2g}, which are hardly "
            "bounds; give its action_space smaller ones"
        )
    return Box(tuple(low.tolist()), tuple(high.tolist()), space.dtype.name)


def _describe(space: spaces.Space | None) -> str:
    kind = type(space).__name__
    return f"a {kind} of {space.dtype} {list(space.shape)}" if isinstance(space, spaces.Box) else f"a {kind}"
