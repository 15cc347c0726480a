"""Gymnasium's ids: the env of one, its specs, its registered facts, and a sentence for an unknown one.

`kwargs` are keyword arguments of the env as JSON text, so that functions can be cached by them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import difflib
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator, parse_env_id, registry

from tfrl.envs import atari
from tfrl.envs.gymnasium_spaces import RESET, STEP, Calling, actions_of, check_calls, observation_spec
from tfrl.envs.spec import ActionSpec, ArraySpec

# By the namespace of ids: the packages whose import registers them, and what to install.
_PLUGINS = {
    "ALE": (("ale_py",), "ale-py opencv-python-headless"),
    "dm_control": (("dm_control", "shimmy"), "'shimmy[dm-control]'"),
}
# What to install for envs whose module starts so.
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
    """Takes each action `skip` times, or until the episode ends; sums the rewards, shows the last frame."""

    def __init__(self, env: gymnasium.Env, skip: int) -> None:
        super().__init__(env)
        self._skip = skip

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One action; what `gymnasium.Env.step` gives."""
        total = 0.0
        for _ in range(self._skip):
            shown, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return shown, total, terminated, truncated, info


def make_env(
    env_id: str,
    kwargs: str = "{}",
    *,
    frame_skip: int | None = None,
    unlimited: bool = False,
    render: bool = False,
) -> gymnasium.Env:
    """One env without wrappers that only check, and with its family's usual preprocessing.

    Atari's is `tfrl.envs.atari.preprocess`; the dicts that dm_control shows are flattened.

    Args:
      env_id: Gymnasium's id, or module:id.
      kwargs: as above.
      frame_skip: times that each action is taken; None: 4 of Atari's games, else 1.
      unlimited: leaves out the time limit that the env is registered with.
      render: makes `env.render()` give frames uint8 [H, W, 3].

    Raises:
      ValueError: one sentence: there is no such id, a package is missing, it does not take these arguments,
        or it gives no pictures.
    """
    spec = copy.deepcopy(_find(env_id))
    spec.order_enforce = False
    if unlimited:
        spec.max_episode_steps = None
    options = json.loads(kwargs) | ({"render_mode": "rgb_array"} if render else {})
    obs_type = options.get("obs_type", spec.kwargs.get("obs_type"))
    is_atari = spec.entry_point == "ale_py.env:AtariEnv" and obs_type != "ram"
    if is_atari:
        if taken := atari.NO_SKIP.keys() & options.keys():
            raise ValueError(
                f"the preprocessing of {env_id} sets {min(taken)}, which --env-kwargs may not (--frame-skip "
                "chooses how often each action is taken)"
            )
        options |= atari.NO_SKIP
    if render:
        _draw_off_screen()
    try:
        maker = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        _silence_mujoco()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions before the newest, and of render modes
            shown = not render or _has_pictures(maker)  # if not, it may not even take the option
            if not shown:
                del options["render_mode"]
            env = gymnasium.make(spec, disable_env_checker=True, **options)
            env = atari.preprocess(env, frame_skip or atari.FRAME_SKIP) if is_atari else env
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise ValueError(f"{env_id} needs a package that is missing{_remedy(spec, error)}") from error
    except Exception as error:  # an env of anybody's, which may raise anything
        given = f" with --env-kwargs {kwargs}" if kwargs != "{}" else ""
        raise ValueError(f"{env_id} cannot be made{given}: {_cause(error)}") from error
    if not is_atari and frame_skip not in (None, 1):
        env = FrameSkip(env, frame_skip)
    if render and not (shown and _has_pictures(env)):
        raise ValueError(f"{env_id} gives no pictures: it has no render mode rgb_array")
    if env_id.startswith("dm_control/") and isinstance(env.observation_space, gymnasium.spaces.Dict):
        env = gymnasium.wrappers.FlattenObservation(env)
    return env


def _has_pictures(maker: Any) -> bool:
    metadata = getattr(maker, "metadata", None)  # a function that makes envs has none
    return not isinstance(metadata, dict) or "rgb_array" in metadata.get("render_modes", ())


def _silence_mujoco() -> None:
    """Keeps MuJoCo from writing MUJOCO_LOG.TXT into the working folder, for its own models' old keywords."""
    if "mujoco" in sys.modules:
        sys.modules["mujoco"].set_mju_user_warning(lambda message: None)


def _draw_off_screen() -> None:
    """Chooses how to draw where there is no display and the user has chosen nothing.

    MuJoCo and dm_control read MUJOCO_GL when they are imported, and fail then if its library is missing.
    """
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame's; else it complains on stderr
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    if "MUJOCO_GL" not in os.environ:
        found = next((name for name, library in libraries.items() if ctypes.util.find_library(library)), None)
        os.environ.update({"MUJOCO_GL": found} if found else {})


def _cause(error: BaseException) -> str:
    """What was raised, in one line, with what MuJoCo needs if it came from its graphics."""
    cause = f"{type(error).__name__}: {_line(error)}"
    if any("mujoco" in frame.filename.lower() for frame in traceback.extract_tb(error.__traceback__)):
        cause += (
            f" (MUJOCO_GL is {os.environ.get('MUJOCO_GL', 'unset')}; without a display MuJoCo draws with "
            "MUJOCO_GL=egl and the libraries libegl1 and libgl1-mesa-dri, or MUJOCO_GL=osmesa and libosmesa6)"
        )
    return cause


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _remedy(spec: gymnasium.envs.registration.EnvSpec, error: Exception) -> str:
    """`: pip install ...` where it is known what is missing, else what the error says."""
    module = spec.entry_point if isinstance(spec.entry_point, str) else spec.entry_point.__module__
    needed = next((package for start, package in _EXTRAS.items() if module.startswith(start)), None)
    return f": pip install {needed}" if needed else f" ({_line(error)})"


def _find(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """The registered spec of an id, `module:id` too. Raises ValueError if there is none."""
    module, _, name = env_id.rpartition(":")
    try:
        namespace, base, version = parse_env_id(name)
    except gymnasium.error.Error:
        raise ValueError(f"{env_id!r} is no id of an env: they look like CartPole-v1") from None
    if module:
        _import(module, env_id)
    elif namespace in _PLUGINS:
        modules, packages = _PLUGINS[namespace]
        _draw_off_screen()
        for plugin in modules:
            _import(plugin, env_id, packages)
    elif name not in registry and importlib.util.find_spec("ale_py"):
        _import("ale_py", env_id)  # PongNoFrameskip-v4 and the like have no namespace
    known = registry.get(name)
    if known is not None and _can_be_made(known):
        return known
    if known is not None and re.match(r"GymV\d+Environment", base):
        raise ValueError(f"{env_id} is a shell for an env of old Gym, which must be given to it in Python")
    hint = nearest(name, module=module)
    if known is not None and known.entry_point is not None:
        raise ValueError(f"{env_id} is an old version that Gymnasium no longer has{hint}")
    where = "" if module else f"; an env that a module of yours registers is named MODULE:{name}"
    raise ValueError(f"there is no env {env_id!r}{hint}{where}")


def _import(module: str, env_id: str, packages: str = "") -> None:
    """Imports what registers an id; `packages` is what to install for it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dm_control's, that there is no display
            imported = importlib.import_module(module)
    except Exception as error:  # a module of anybody's
        if isinstance(error, ModuleNotFoundError) and packages:
            raise ValueError(f"{env_id} needs a package that is missing: pip install {packages}") from error
        raise ValueError(
            f"{env_id} needs the module {module}, which cannot be imported: {_cause(error)}"
        ) from error
    if module == "ale_py":
        imported.ALEInterface.setLoggerMode(imported.LoggerMode.Error)  # no banner


def _can_be_made(spec: gymnasium.envs.registration.EnvSpec) -> bool:
    """False for Gymnasium's own entries that only say why there is no such env."""
    made = spec.entry_point
    of_gymnasium = callable(made) and made.__module__ == "gymnasium.envs"
    return made is not None and not of_gymnasium and not re.match(r"GymV\d+Environment", spec.name)


def nearest(typed: str, others: Iterable[str] = (), module: str = "") -> str:
    """` (did you mean CartPole-v1?)`: the id, or other name, that is most like `typed`, or nothing.

    `module` stands before the suggested id, as before the typed one.
    """
    ids = [spec.id for spec in registry.values() if _can_be_made(spec)]
    by_lower = {name.lower(): name for name in (*ids, *others)}
    close = difflib.get_close_matches(typed.lower(), by_lower, n=1)
    return f" (did you mean {module and f'{module}:'}{by_lower[close[0]]}?)" if close else ""


class Facts(NamedTuple):
    """Facts about an env.

    Attributes:
      observation, action: the specs.
      action_mask: its info has an "action_mask", which no algorithm here uses.
      fps: its own speed for people, 30 where it names none.
    """

    observation: ArraySpec
    action: ActionSpec
    action_mask: bool
    fps: float


@functools.cache
def facts_of(env_id: str, kwargs: str = "{}") -> Facts:
    """The facts about an env, from its first reset and step.

    Raises:
      ValueError: as `make_env`, or this program cannot handle the env's observations or actions.
      EnvError: its first reset or step fails, or does not give what it should.
    """
    with _open(env_id, kwargs) as env:
        spaces = (getattr(env, f"{kind}_space", None) for kind in ("observation", "action"))
        observation, actions = observation_spec(env_id, next(spaces)), actions_of(env_id, next(spaces))
        masks = check_calls(env_id, env, observation)
        return Facts(observation, actions.spec, masks, float(env.metadata.get("render_fps") or 30))


@contextlib.contextmanager
def _open(env_id: str, kwargs: str) -> Iterator[gymnasium.Env]:
    """An env that is closed again. Raises as `make_env`."""
    env = make_env(env_id, kwargs)
    try:
        yield env
    finally:
        close(env)


def close(env: gymnasium.Env) -> None:
    """Closes an env; what goes wrong there costs nothing."""
    with contextlib.suppress(Exception):
        env.close()


@functools.cache
def can_repeat(env_id: str, kwargs: str = "{}") -> bool:
    """True if two runs of 20 steps from one seed are the same, and the id is not marked nondeterministic.

    Replaying an episode brings back the state of such an env alone. Raises as `facts_of`.
    """
    facts_of(env_id, kwargs)
    with _open(env_id, kwargs) as env:
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(20)]
        outlines = [_outline(env_id, env, actions) for _ in range(2)]
    return not _find(env_id).nondeterministic and outlines[0] == outlines[1]


def _outline(env_id: str, env: gymnasium.Env, actions: list) -> list[tuple]:
    """All that an episode's first steps show, from seed 1."""
    with Calling(env_id, env, RESET):
        seen = [(np.asarray(env.reset(seed=1)[0]).tobytes(), 0.0, False, False)]
    with Calling(env_id, env, STEP):
        for action in actions:
            shown, reward, terminated, truncated, _ = env.step(action)
            seen.append((np.asarray(shown).tobytes(), float(reward), bool(terminated), bool(truncated)))
            if terminated or truncated:
                break
    return seen


def reward_threshold(env_id: str) -> float | None:
    """The mean return from which Gymnasium counts an env as solved; None if it names none.

    Raises ValueError if there is no such id.
    """
    threshold = _find(env_id).reward_threshold
    return None if threshold is None else float(threshold)


# Modules whose envs draw by pygame, or by an emulator of their own, and not by OpenGL.
_WITHOUT_OPENGL = (
    *("gymnasium.envs.classic_control", "gymnasium.envs.box2d", "gymnasium.envs.toy_text"),
    "ale_py",
)


def draws_with_opengl(env_id: str) -> bool:
    """True if an env's pictures need OpenGL, or may need it. Raises ValueError if there is no such id."""
    return not str(_find(env_id).entry_point).startswith(_WITHOUT_OPENGL)


def rendering_error(env_id: str, error: Exception) -> str:
    """One sentence for a failure to render, with what to install where it is OpenGL that is missing."""
    spec = _find(env_id)
    if isinstance(error, gymnasium.error.DependencyNotInstalled):
        return f"{env_id} cannot be rendered without a package that is missing{_remedy(spec, error)}"
    return f"{env_id} cannot be rendered: {_cause(error)}"
