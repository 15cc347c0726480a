"""Gymnasium's envs one by one: makes the env of an id or a callable, and finds facts about it.

Errors become one sentence. `kwargs` are keyword arguments of the env as JSON text.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator, parse_env_id, registry

from tfrl.envs import atari, callables, own_state
from tfrl.envs.calls import check_calls, kind_of, summary
from tfrl.envs.facts import Facts
from tfrl.envs.spaces import action_spec, observation_spec


def make_env(
    env_id: str,
    kwargs: str = "{}",
    *,
    frame_skip: int | None = None,
    unlimited: bool = False,
    render: bool = False,
) -> gymnasium.Env:
    """Makes one env, without wrappers that only check, and with the usual preprocessing.

    Atari games get `atari.preprocess`. The env of a callable stays as it is, with its own wrappers.

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
    if callables.is_name(env_id):
        return _call(env_id, json.loads(kwargs), render=render)
    spec = copy.deepcopy(find_spec(env_id))
    spec.order_enforce = False
    if unlimited:
        spec.max_episode_steps = None
    options = json.loads(kwargs) | ({"render_mode": "rgb_array"} if render else {})
    obs_type = options.get("obs_type", spec.kwargs.get("obs_type"))
    atari_images = spec.entry_point == "ale_py.env:AtariEnv" and obs_type != "ram"
    if atari_images:
        if taken := atari.OPTIONS.keys() & options.keys():
            raise ValueError(
                f"the preprocessing of {env_id} sets {min(taken)}, so --env-kwargs cannot set it "
                "(--frame-skip sets how often each action is repeated)"
            )
        options |= atari.OPTIONS
    if render:
        _draw_off_screen()
    try:
        maker = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        _silence_mujoco()
        drawn = not render or _has_pictures(maker)
        if not drawn:  # its class may refuse the argument
            del options["render_mode"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about older versions and render modes
            env = gymnasium.make(spec, disable_env_checker=True, **options)
            env = atari.preprocess(env, frame_skip or atari.FRAME_SKIP) if atari_images else env
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ValueError(f"{env_id} needs a package that is missing: {summary(error)}") from error
    except Exception as error:  # a user's env may raise anything
        given = f" with --env-kwargs {kwargs}" if kwargs != "{}" else ""
        raise ValueError(f"{env_id} cannot be made{given}: {cause_of(error)}") from error
    if not drawn:
        close(env)
        raise ValueError(f"{env_id} cannot be drawn: it has no render mode rgb_array")
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
        raise ValueError(f"{name} cannot be made{given}: {cause_of(error)}") from error
    if not isinstance(env, gymnasium.Env):
        raise ValueError(
            f"{name} returns {kind_of(env)}, but must return a gymnasium.Env (Gymnasium "
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
    """False if the class of an env has no render mode rgb_array; True for a function that makes envs."""
    metadata = getattr(maker, "metadata", None)
    return not isinstance(metadata, dict) or "rgb_array" in metadata.get("render_modes", ())


def _silence_mujoco() -> None:
    """Keeps MuJoCo from writing warnings about its own models to MUJOCO_LOG.TXT in the working folder."""
    if "mujoco" in sys.modules:
        sys.modules["mujoco"].set_mju_user_warning(lambda message: None)


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


def cause_of(error: BaseException) -> str:
    """An exception in one line, with advice if MuJoCo's graphics raised it."""
    cause = summary(error)
    if any("mujoco" in frame.filename.lower() for frame in traceback.extract_tb(error.__traceback__)):
        cause += (
            f" (MUJOCO_GL is {os.environ.get('MUJOCO_GL', 'unset')}; without a display MuJoCo draws with "
            "MUJOCO_GL=egl and the libraries libegl1 and libgl1-mesa-dri, or MUJOCO_GL=osmesa and libosmesa6)"
        )
    return cause


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """The registered spec of an id or `module:id`. Raises ValueError if it does not exist."""
    module, _, name = env_id.rpartition(":")
    try:
        namespace, *_ = parse_env_id(name)
    except gymnasium.error.Error:
        raise ValueError(f"{env_id!r} is not the id of an env; ids look like CartPole-v1") from None
    if module:
        _import(module, env_id)
    elif namespace == "ALE" and not importlib.util.find_spec("ale_py"):
        raise ValueError(
            f"{env_id} needs packages that are missing: pip install ale-py opencv-python-headless"
        )
    elif name not in registry and importlib.util.find_spec("ale_py"):
        _import("ale_py", env_id)  # also for PongNoFrameskip-v4 and the like, which have no namespace
    if name in registry:
        return registry[name]
    where = "" if module else f"; if your own module registers it, write MODULE:{name}"
    raise ValueError(f"there is no env {env_id!r}{did_you_mean(name, module=module)}{where}")


def _import(module: str, env_id: str) -> None:
    """Imports the module that registers an id. Raises ValueError if this fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{env_id} needs the module {module}, which cannot be imported: {cause_of(error)}"
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
