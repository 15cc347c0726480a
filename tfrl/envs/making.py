"""One Gymnasium env: made by id or by a callable, with one sentence for what is wrong with it.

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
from gymnasium.envs import registration

from tfrl.cli.flags import nearest
from tfrl.envs import atari, callables
from tfrl.envs.calls import summary

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
    if taken := atari.OPTIONS.keys() & given.keys():
        raise ValueError(f"the preprocessing of {env_id} sets {min(taken)}, so --env-kwargs cannot set it")
    return lambda **options: atari.preprocess(
        _registered(spec, **atari.OPTIONS, **options), frame_skip or atari.FRAME_SKIP
    )


def _is_preprocessed(spec: registration.EnvSpec, given: Mapping[str, Any]) -> bool:
    """True for an Atari game that shows images, which `atari.preprocess` changes."""
    obs_type = given.get("obs_type", spec.kwargs.get("obs_type"))
    return spec.entry_point == "ale_py.env:AtariEnv" and obs_type != "ram"


def default_frame_skip(env_id: str, kwargs: Mapping[str, Any]) -> int:
    """The frames of a step without --frame-skip; 1 for an env that does not exist."""
    try:
        return atari.FRAME_SKIP if _is_preprocessed(find_spec(env_id), kwargs) else 1
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
            with warnings.catch_warnings(), contextlib.ExitStack() as quiet:
                warnings.simplefilter("ignore")
                if module == _DM_CONTROL:  # it imports the old gym, which prints a banner
                    quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
                imported = importlib.import_module(module)
        except Exception as error:  # a user's module may raise anything
            raise ValueError(
                f"{env_id} needs the module {module}, which cannot be imported: {summary(error)}"
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
