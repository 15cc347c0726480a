"""Gymnasium's envs (Towers et al. 2024, arXiv:2407.17032): by id, such as CartPole-v1, or by a callable.

Errors become one sentence. `kwargs` are keyword arguments of an env as JSON text.
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
import math
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration

from tfrl.cli.flags import nearest
from tfrl.envs import atari, callables, registry
from tfrl.envs.calls import (
    RESET,
    STEP,
    Calling,
    check_calls,
    check_finite,
    get_own_state,
    mask_of,
    put_own_state,
    saves_exactly,
    saves_state,
    stored,
    summary,
)
from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, NUMBERS, WORD_FLAGS, ArraySpec, Part
from tfrl.envs.registry import Facts
from tfrl.envs.spec import (
    ActionSpec,
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    Step,
    pack_state,
    step_of,
    unpack_state,
)

_DM_CONTROL = "shimmy"  # registers the envs of DeepMind Control
LONGEST_REPLAY = 32_768
"""The longest episode, in steps, that can be replayed. Its actions take 128 kB per number of a Box, otherwise
10 kB.
"""
_FEW_CHANNELS = 16  # because the width of an image is larger


class GymnasiumVec:
    """Envs `indices` of the global vector of a Gymnasium env; implements `tfrl.envs.spec.VecEnv`.

    One Python loop in this process steps all of them. Processes are slower, except for slow envs. Two threads
    on two cores were not faster, although MuJoCo releases Python's lock for 65 % (InvertedDoublePendulum) to
    92 % (Humanoid) of a step.

    Every episode begins with its own seed, made from (seed, env, episode). The state of an env is this seed
    and the actions since then. `set_state` replays the actions, and checks that the env returns the same
    observation. A replay takes as long as the episode (50 ms for a whole episode of HalfCheetah, 0.3 s for
    Humanoid). It is exact for every deterministic env, with its wrappers. Only the first episode of an Atari
    game has a seed, because a reset with a seed loads the game again. For the other episodes, the emulator's
    state before the reset takes the seed's place (`tfrl.envs.atari`). A replay of Atari's longest episodes,
    27,000 steps, takes 20 s. A user's env with `get_state` and `set_state` saves its own state instead
    (`tfrl.envs.calls`).
    """

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.num_envs = len(indices)
        if spec.render:  # before the first env is made, for the facts
            _draw_off_screen()
        name, kwargs = spec.env, json.dumps(dict(spec.env_kwargs), sort_keys=True)
        known = registry.facts_of(spec)
        self.observation_spec, self.action_spec = known.specs(spec.action_masks)
        self._store, self._packs = self.observation_spec.store(), bool(self.observation_spec.parts)
        self.exact_state = True
        self._name, self._renders, self._limit = name, spec.render, spec.max_episode_steps or math.inf
        unlimited = spec.max_episode_steps is not None
        self._envs = [
            make_env(name, kwargs, frame_skip=spec.frame_skip, render=spec.render, unlimited=unlimited)
            for _ in indices
        ]
        self._resetting, self._stepping = (Calling(name, self._envs[0], call) for call in (RESET, STEP))
        self._atari = atari.is_atari(self._envs[0])
        self._plays: list[_Play] = [env.step for env in self._envs]
        if spec.frame_skip is not None and not self._atari:  # Atari's preprocessing skips its own frames
            self._plays = [_repeated(play, spec.frame_skip) for play in self._plays]
        self._saves_state = known.saves_state  # otherwise, episodes are replayed
        self._streams = [(int(spec.seed), int(i)) for i in indices]
        self._episodes = [0] * self.num_envs
        self._emulators: list[dict[str, np.ndarray]] = [{}] * self.num_envs  # before resets without a seed
        self._solved = np.zeros(self.num_envs, bool)
        self._shape = self.observation_spec.shape
        self._seen = np.dtype(self.observation_spec.dtype)  # of the last observation that was checked
        self._action_type = np.dtype(self.action_spec.dtype)  # made once: a step takes only microseconds
        # The agent's actions in the running episodes. Entry t is call number `_oldest + t` of `act`; env i's
        # episode began at call `_began[i]`.
        self._history: deque[np.ndarray] = deque()
        self._oldest = self._clock = 0
        self._began = [0] * self.num_envs
        zeros, first = np.zeros(self.num_envs, np.float32), np.ones(self.num_envs, bool)
        shown = np.stack([self._reset(i) for i in range(self.num_envs)])
        check_finite(self._name, zeros, shown)
        self._step = Step(zeros, shown, first, ~first, None)

    def _reset(self, i: int) -> np.ndarray:
        """Begins env i's next episode, and returns its first observation."""
        episode, env = self._episodes[i], self._envs[i]
        with self._resetting:
            seed = None if self._atari and episode > 0 else _episode_seed(*self._streams[i], episode)
            self._emulators[i] = atari.get(env) if seed is None else {}
            shown, info = env.reset(seed=seed)
            shown = self._stored(shown, info)
        self._began[i] = self._clock
        return shown.astype(self.observation_spec.dtype)  # a copy, because envs may share one array

    def observe(self) -> Step:
        """The step that `act` took; see `tfrl.envs.spec.Step`."""
        return self._step

    def act(self, actions: np.ndarray) -> None:
        """Takes a step with actions [B, *action_shape]; rescales a Box's actions from [-1, 1] to [low, high].

        Raises EnvError if an env fails, or returns values that no algorithm can learn from.
        """
        actions = np.array(actions, self._action_type)
        inputs = self.action_spec.env_inputs(actions)
        reward = np.empty(self.num_envs, np.float32)
        observation = np.empty_like(self._step.observation)
        first, cut = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        final, ndarray, shape, packs = [], np.ndarray, self._shape, self._packs
        self._clock += 1
        started_by = self._clock - self._limit  # an episode that began then or earlier reaches the time limit
        with self._stepping, np.errstate(over="ignore"):  # a reward beyond float32 gets a sentence below
            for i, (play, action) in enumerate(zip(self._plays, inputs, strict=True)):
                shown, reward[i], terminated, truncated, info = play(action)
                ends = terminated or truncated or self._began[i] <= started_by
                if packs:
                    shown = self._stored(shown, info, ends=ends) if not terminated else shown
                elif type(shown) is not ndarray or shown.shape != shape or shown.dtype is not self._seen:
                    shown = self._stored(shown, info)
                if ends:
                    first[i], cut[i] = True, not terminated
                    if not terminated:
                        final.append(shown.astype(observation.dtype))
                    self._solved[i] = info.get("is_success", info.get("success", False))
                    self._episodes[i] += 1
                    shown = self._reset(i)
                observation[i] = shown
        self._remember(actions)
        self._step = Step(reward, observation, first, cut, np.stack(final) if final else None)
        check_finite(self._name, reward, observation)
        if self._step.final_observation is not None:
            check_finite(self._name, reward, self._step.final_observation)

    def _stored(self, shown: Any, info: dict[str, Any], *, ends: bool = False) -> np.ndarray:
        """An observation and its mask as one array. If the episode `ends`, the mask may be missing.

        `act` does not check the next single image or vector of this type.
        """
        masked = self.observation_spec.num_actions
        mask = [mask_of(self._name, info, self.action_spec, ends=ends)] if masked else []
        shown = stored(self._name, self._store, shown, *mask)
        self._seen = shown.dtype
        return shown

    def _remember(self, actions: np.ndarray) -> None:
        """Adds to the history of the running episodes, and drops what they no longer need."""
        if self._saves_state:
            return
        self._history.append(actions)
        needed = max(min(self._began), self._clock - LONGEST_REPLAY)
        while self._oldest < needed:
            self._history.popleft()
            self._oldest += 1

    def solved(self) -> np.ndarray:
        """True where the last episode was a success by its `info["is_success"]`, bool [B]."""
        return self._solved.copy()

    def render(self) -> list[np.ndarray]:
        """Frames uint8 [H, W, 3] per env; needs `spec.render`. Raises ValueError if something is missing."""
        if not self._renders:
            raise ValueError(f"{self._name} was made without EnvSpec.render")
        try:
            return [np.asarray(env.render(), np.uint8) for env in self._envs]
        except Exception as error:  # OpenGL, EGL, GLFW, pygame and MuJoCo raise errors of different classes
            raise ValueError(f"{self._name} cannot be rendered: {summary(error)}") from error

    def get_state(self) -> list[bytes]:
        """One npz per env, 1 to 100 kB: its stream of seeds, the result of `observe`, and the actions of the
        episode, or the env's own state. An Atari game's also has the emulator's state before the episode.
        """
        return [self._get_state(i) for i in range(self.num_envs)]

    def _get_state(self, i: int) -> bytes:
        about = {
            "stream": self._streams[i],
            "episode": self._episodes[i],
            "steps": self._clock - self._began[i],
            "solved": bool(self._solved[i]),
        }
        arrays = dict(self._emulators[i])
        if self._saves_state:
            arrays = get_own_state(self._envs[i])
        elif self._began[i] >= self._oldest:
            actions = [self._history[t][i] for t in range(self._began[i] - self._oldest, len(self._history))]
            arrays["actions"] = np.array(actions, self.action_spec.dtype).reshape(-1, *self.action_spec.shape)
        return pack_state(self._step, i, about, **arrays)

    def set_state(self, states: Sequence[bytes]) -> None:
        """Continues exactly from `states`.

        An env that cannot continue exactly begins a new episode: the running one counts as truncated at its
        last observation. Afterwards `exact_state` is true if all envs continued exactly.
        """
        self.exact_state = True
        rows = list(map(unpack_state, states))
        played = [row["steps"] if self._saves_state else len(row.get("actions", ())) for row in rows]
        self._oldest, self._clock = 0, max(played)
        acts = 0 if self._saves_state else self._clock
        history = np.zeros((acts, self.num_envs, *self.action_spec.shape), self.action_spec.dtype)
        for i, row in enumerate(rows):
            if self._resume(i, row):
                self._began[i] = self._clock - played[i]
                if not self._saves_state:
                    history[self._began[i] :, i] = row["actions"]
                continue
            self.exact_state = False
            self._episodes[i] += 1
            if not row["first"]:
                row |= {"first": True, "truncated": True, "final_observation": row["observation"]}
            row["observation"] = self._reset(i)
        self._history = deque(history)
        self._step = step_of(rows)

    def _resume(self, i: int, row: dict[str, Any]) -> bool:
        """Restores the state of env i; False if an env that is replayed does something else than before."""
        self._streams[i] = tuple(row["stream"])
        self._episodes[i], self._solved[i] = row["episode"], row["solved"]
        if self._saves_state:
            self._reset(i)  # draws what the env does not save of its episode
            put_own_state(self._envs[i], row)
            return True
        if "actions" not in row:
            return False
        if "emulator" in row:
            atari.put(self._envs[i], row)
        shown, info = self._reset(i), None
        reward: SupportsFloat = row["reward"]
        with self._stepping:
            for action in self.action_spec.env_inputs(row["actions"]):
                try:
                    shown, reward, terminated, truncated, info = self._plays[i](action)
                except Exception:
                    if self.observation_spec.num_actions:  # the env may forbid the action now
                        return False
                    raise
                if terminated or truncated:
                    return False
            if info is not None:
                shown = self._stored(shown, info).astype(self.observation_spec.dtype)
        is_same = np.array_equal(shown, row["observation"], equal_nan=True)
        return is_same and np.float32(reward) == np.float32(row["reward"])

    def close(self) -> None:
        """Closes windows and simulators."""
        for env in self._envs:
            close(env)


_Play = Callable[[Any], tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]]


def _repeated(play: _Play, times: int) -> _Play:
    """`env.step` that repeats each action, at most to the end of the episode, and sums the rewards."""

    def step(action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(times):
            # A copy, because an env may change its action.
            shown, reward, terminated, truncated, info = play(copy.copy(action))
            total += float(reward)
            if terminated or truncated:
                break
        return shown, total, terminated, truncated, info

    return step


def _episode_seed(seed: int, env: int, episode: int) -> int:
    """The seed, below 2**31, of an episode of env `env` of the global vector."""
    return _episode_seeds(seed, env, episode // 64)[episode % 64]


@functools.lru_cache(maxsize=8192)
def _episode_seeds(seed: int, env: int, block: int) -> list[int]:
    # Seeds are drawn in blocks, because a SeedSequence takes longer than the reset of many envs.
    words = np.random.SeedSequence(seed, spawn_key=(env, block)).generate_state(64)
    return (words >> 1).tolist()


# One env


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
        _draw_off_screen()
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
            raise TypeError(f"it is of type {type(env).__name__} and not a gymnasium.Env")
    except Exception as error:  # a user's env may raise anything
        given = f" with {kwargs}" if kwargs != "{}" else ""
        raise ValueError(f"{env_id} cannot be made{given}: {summary(error)}") from error
    if render and env.render_mode != "rgb_array":
        close(env)
        advice = "" if draws else "; let it take render_mode, and give that to the env"
        raise ValueError(f"{env_id} cannot be drawn: its render_mode is not rgb_array{advice}")
    return _without_checks(env)


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


def _draw_off_screen() -> None:
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
        is_exact = False
        if saves_state(env) and not action_mask:  # because this check takes any actions
            with _open(env_id, kwargs) as other:
                is_exact = saves_exactly(env, other, observation)
        return Facts(
            observation,
            action,
            action_mask,
            fps=float(env.metadata.get("render_fps") or 30),
            with_opengl=_draws_with_opengl(env_id, env),
            saves_state=is_exact,
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
