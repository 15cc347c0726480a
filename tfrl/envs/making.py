"""One Gymnasium env: made by id or by a callable, its spaces, and the preprocessing of Atari's games.

Each fault is one sentence.

`kwargs` are keyword arguments of an env as JSON text.
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
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation

from tfrl.cli.errors import place, summary
from tfrl.cli.flags import nearest
from tfrl.envs import callables
from tfrl.envs.images import Layout, layout_of
from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, NUMBERS, WORD_FLAGS, ArraySpec, Part
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete

_DM_CONTROL = "shimmy"  # registers the envs of DeepMind Control


def make_env(
    env_id: str,
    kwargs: str = "{}",
    *,
    frame_skip: int | None = None,
    unlimited: bool = False,
    render: bool = False,
) -> gymnasium.Env:
    """Makes one env, without wrappers that only check, and with the usual preprocessing.

    Atari games get `_preprocess_atari`. The env of a callable keeps its own other wrappers.

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
    if render:
        draw_off_screen()
    elif _is_of_dm_control(env_id):
        os.environ.setdefault("MUJOCO_GL", "disable")  # its drawing crashes in a process with TensorFlow
    if callables.is_name(env_id):
        make = callables.find(env_id)
        draws = render and "render_mode" in inspect.signature(make).parameters
    else:
        make, draws = _maker(env_id, options, frame_skip=frame_skip, unlimited=unlimited), render
    try:
        env = make(**options | ({"render_mode": "rgb_array"} if draws else {}))
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"it is of type {type(env).__name__} and not a gymnasium.Env{_other_kind(env)}")
    except Exception as error:  # a user's env may raise anything
        given = f" with {kwargs}" if kwargs != "{}" else ""
        raise ValueError(f"{env_id} cannot be made{given}: {summary(error)}") from error
    if render and env.render_mode != "rgb_array":
        close(env)
        advice = "" if draws else "; let it take render_mode, and give that to the env"
        raise ValueError(f"{env_id} cannot be drawn: its render_mode is not rgb_array{advice}")
    return _without_checks(env)


def _other_kind(env: Any) -> str:
    """Advice about what is no `gymnasium.Env`, as the end of a sentence."""
    modules = {kind.__module__.partition(".")[0] for kind in type(env).__mro__}
    if isinstance(env, gymnasium.vector.VectorEnv) or "stable_baselines3" in modules:
        return ": return one env, of which --num-envs makes a vector"
    if "gym" in modules:
        return ": for an env of Gym, return shimmy.GymV21CompatibilityV0(env=env), or V26"
    if "pettingzoo" in modules:
        return ": tfrl trains one agent, so a wrapper must play the others"
    if isinstance(env, type) and issubclass(env, gymnasium.Env):
        return ": return an object of this class"
    return ""


def _maker(
    env_id: str, given: dict[str, Any], *, frame_skip: int | None, unlimited: bool
) -> Callable[..., gymnasium.Env]:
    """The function that makes the env of an id from the given keyword arguments. Raises ValueError."""
    spec = copy.deepcopy(find_spec(env_id))
    spec.order_enforce = False
    if unlimited:
        spec.max_episode_steps = None
    if not _is_preprocessed(spec, given):
        return functools.partial(_registered, spec)
    if taken := _ATARI_OPTIONS.keys() & given.keys():
        raise ValueError(f"the preprocessing of {env_id} sets {min(taken)}, so --env-kwargs cannot set it")
    return lambda **options: _preprocess_atari(
        _registered(spec, **_ATARI_OPTIONS, **options), frame_skip or _FRAME_SKIP
    )


def _is_preprocessed(spec: registration.EnvSpec, given: Mapping[str, Any]) -> bool:
    """True for an Atari game that shows images, which `_preprocess_atari` changes."""
    obs_type = given.get("obs_type", spec.kwargs.get("obs_type"))
    return spec.entry_point == "ale_py.env:AtariEnv" and obs_type != "ram"


def default_frame_skip(env_id: str, kwargs: Mapping[str, Any]) -> int:
    """The frames of a step without --frame-skip; 1 for an env that does not exist."""
    try:
        return _FRAME_SKIP if _is_preprocessed(find_spec(env_id), kwargs) else 1
    except ValueError:  # the task's own check reports it
        return 1


def _registered(spec: registration.EnvSpec, **options: Any) -> gymnasium.Env:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about older versions and render modes
        if isinstance(spec.entry_point, str):
            registration.load_env_creator(spec.entry_point)  # imports its module
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


def draw_off_screen() -> None:
    """Sets an off-screen renderer if there is no display and the user chose none.

    MuJoCo reads MUJOCO_GL at its import, and fails if the library is missing.
    """
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # for pygame, which otherwise prints a warning
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    if os.environ.get("MUJOCO_GL", "disable") == "disable":
        found = next((name for name, library in libraries.items() if ctypes.util.find_library(library)), None)
        os.environ.update({"MUJOCO_GL": found} if found else {})


def _is_of_dm_control(env_id: str) -> bool:
    return env_id.rpartition(":")[2].startswith("dm_control/")


def find_spec(env_id: str) -> registration.EnvSpec:
    """The registered spec of an id or `module:id`. Raises ValueError if it does not exist."""
    given, _, name = env_id.rpartition(":")
    module = given
    if not module and name not in registration.registry:
        plugin = _DM_CONTROL if _is_of_dm_control(name) else "ale_py"  # which registers Atari's games
        module = plugin if importlib.util.find_spec(plugin) else ""
    if module:
        try:
            callables.import_tensorflow_for(module)
            with warnings.catch_warnings(), contextlib.ExitStack() as quiet:
                warnings.simplefilter("ignore")
                if module == _DM_CONTROL:  # it imports the old gym, which prints a banner
                    quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
                imported = importlib.import_module(module)
        except Exception as error:  # a user's module may raise anything
            where = place(error.__traceback__, callables.home_of(module))
            raise ValueError(
                f"{env_id} needs the module {module}, which cannot be imported: {summary(error)}{where}"
            ) from error
        if module == "ale_py":
            imported.ALEInterface.setLoggerMode(imported.LoggerMode.Error)  # no banner
    if name not in registration.registry:
        where = "" if ":" in env_id else f"; if your own module registers it, write MODULE:{name}"
        if name.startswith("ALE/") and not importlib.util.find_spec("ale_py"):
            where = "; Atari's games need: pip install ale-py 'opencv-python-headless<4.12'"
        if _is_of_dm_control(name) and module != _DM_CONTROL:
            where = "; the envs of dm_control need: pip install 'shimmy[dm-control]' 'mujoco<4'"
        raise ValueError(f"there is no env {env_id!r}{did_you_mean(name, module=given)}{where}")
    return registration.registry[name]


def did_you_mean(typed: str, others: Iterable[str] = (), *, module: str = "") -> str:
    """` (did you mean CartPole-v1?)` with the id or name that is closest to `typed`; "" if none is close.

    Ids are compared without their versions, because all ids that end in -v0 would be a little alike.

    Args:
      typed: an id, or another name.
      others: further names.
      module: of `module:typed`. Its own ids are preferred, and named with it.
    """
    found: dict[str, list[str]] = {}  # ids by their names without version, in small letters
    for spec in registration.registry.values():
        point = spec.entry_point
        root = (point if isinstance(point, str) else getattr(point, "__module__", "")).partition(":")[0]
        # Gymnasium's own functions only say why the env does not exist.
        if root == "gymnasium.envs":
            continue
        is_of_module = module and root.partition(".")[0] == module.partition(".")[0]
        name = f"{module}:{spec.id}" if is_of_module else spec.id
        found.setdefault(_stem(spec.id), []).append(name)
    for other in others:
        found.setdefault(other.lower(), []).append(other)
    if module:
        own = {stem: names for stem, names in found.items() if names[0].startswith(f"{module}:")}
        found = own if nearest(_stem(typed), own) else found
    if not (close := difflib.get_close_matches(_stem(typed), found, n=1)):
        return ""
    # The version that was typed, or else the newest one.
    (name,) = difflib.get_close_matches(typed, found[close[0]], n=1, cutoff=0.0)
    return f" (did you mean {name}?)"


def _stem(env_id: str) -> str:
    """An id without its version, in small letters."""
    return re.sub(r"-v\d+$", "", env_id.strip()).lower()


@contextlib.contextmanager
def opened(env_id: str, kwargs: str) -> Iterator[gymnasium.Env]:
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


def draws_with_opengl(env_id: str, env: gymnasium.Env) -> bool:
    """True if OpenGL draws the env, or may draw it."""
    if callables.is_name(env_id):
        return hasattr(env.unwrapped, "mujoco_renderer")
    return not type(env.unwrapped).__module__.startswith(_WITHOUT_OPENGL)


# Spaces as the specs of `tfrl.envs.spec`


def observation_spec(env_id: str, space: spaces.Space | None) -> ArraySpec:
    """The spec of an env's observations. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1 and space.shape[0] and np.issubdtype(space.dtype, np.number):
            return ArraySpec(space.shape, "float32")
        if (layout := _layout(env_id, space)) is not None:
            return ArraySpec(layout.image_shape, "uint8", None if layout.is_plain else layout)
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
    elif isinstance(space, spaces.Box) and (layout := _layout(env_id, space)) is not None:
        yield Part(keys, IMAGE, layout.image_shape, "uint8", None if layout.is_plain else layout)
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


def _layout(env_id: str, space: spaces.Box) -> Layout | None:
    """The layout of images; None for other arrays. Raises ValueError if the channels cannot be told."""
    found = layout_of(space.shape, space.dtype, space.low, space.high)
    if found is None and space.dtype == np.uint8 and len(space.shape) == 3:
        raise ValueError(
            f"{env_id} shows {_describe(space)}, and this shape does not tell whether the first or the last "
            "number counts the channels: give images [H, W, C] with fewer channels than rows and columns"
        )
    return found


def action_spec(env_id: str, space: spaces.Space | None) -> ActionSpec:
    """The spec of an env's actions. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary) and space.shape:
        size = int(np.prod(space.shape))
        counts, starts = (2,) * size, (0,) * size
        if isinstance(space, spaces.MultiDiscrete):
            counts, starts = (tuple(np.ravel(x).tolist()) for x in (space.nvec, space.start))
        return MultiDiscrete(counts, starts, space.shape, space.dtype.name)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return _box(env_id, space)
    advice = ""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        advice = "; a wrapper that flattens it to one of these helps"
    elif isinstance(space, spaces.Box) and space.shape and space.dtype.kind in "biu":
        advice = "; MultiDiscrete fits whole numbers"
    raise ValueError(
        f"{env_id} takes {_describe(space)}, which is not supported: actions must be Discrete, MultiDiscrete "
        f"or MultiBinary, or a Box of real numbers{advice}"
    )


def _box(env_id: str, space: spaces.Box) -> Box:
    """The spec of real numbers. Raises ValueError if they have no bounds."""
    if not space.is_bounded():
        raise ValueError(
            f"{env_id} takes actions without bounds; give its action_space finite bounds, without ClipAction"
        )
    low, high = space.low.ravel(), space.high.ravel()
    if (high / 2 - low / 2 > np.finfo(np.float32).max / 2).any():
        raise ValueError(
            f"{env_id} takes actions between {low.min():.2g} and {high.max():.2g}, which are hardly "
            "bounds; give its action_space smaller ones"
        )
    return Box(tuple(low.tolist()), tuple(high.tolist()), space.dtype.name, space.shape)


def _describe(space: spaces.Space | None) -> str:
    kind = type(space).__name__
    return f"a {kind} of {space.dtype} {list(space.shape)}" if isinstance(space, spaces.Box) else f"a {kind}"


# Atari's games: the usual preprocessing, and the state of the emulator before an episode

_FRAME_SKIP, _STACK = 4, 4
_ATARI_OPTIONS = {"frameskip": 1, "obs_type": "grayscale"}
"""Arguments of `gymnasium.make`, because the preprocessing and not the emulator skips frames and makes them
grey.
"""


class _AtariFrames(TransformObservation):
    """The outermost wrapper of `_preprocess_atari`."""


def _preprocess_atari(env: gymnasium.Env, frame_skip: int) -> gymnasium.Env:
    """Atari's usual preprocessing (Mnih et al. 2015, Machado et al. 2018).

    An episode begins with up to 30 no-ops. An observation has the last 4 of every `frame_skip`th frame, grey:
    uint8 [84, 84, 4]. Rewards stay raw, and a lost life does not end the episode. `env` is made with
    _ATARI_OPTIONS.
    """
    stacked = FrameStackObservation(AtariPreprocessing(env, frame_skip=frame_skip), _STACK)
    stacked.metadata = {**env.metadata, "render_fps": 60}  # the console's; ALE says 30
    space = gymnasium.spaces.Box(0, 255, (84, 84, _STACK), np.uint8)
    return _AtariFrames(stacked, lambda frames: np.moveaxis(frames, 0, -1), space)


def is_atari(env: gymnasium.Env) -> bool:
    """True if `_preprocess_atari` made this env."""
    return isinstance(env, _AtariFrames)


def emulator_state(env: Any) -> dict[str, np.ndarray]:
    """The state that the next reset without a seed depends on, about 5 kB compressed.

    It does not suffice within an episode: it lacks the last action, which the emulator may repeat.
    """
    emulator = env.unwrapped.ale.cloneState(include_rng=True).serialize()
    generator = env.unwrapped.np_random.bit_generator.state
    return {"emulator": np.frombuffer(emulator, np.uint8), "generator": np.array(json.dumps(generator))}


def put_emulator_state(env: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Restores a state of `emulator_state`, for a reset."""
    from ale_py import ALEState

    env.unwrapped.ale.restoreState(ALEState(arrays["emulator"].tobytes()))
    env.unwrapped.np_random.bit_generator.state = json.loads(str(arrays["generator"]))
