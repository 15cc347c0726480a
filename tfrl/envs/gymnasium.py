"""Gymnasium's envs (Towers et al. 2024, arXiv:2407.17032): as a vector."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import numpy as np

from tfrl.cli.errors import summary
from tfrl.envs.calls import (
    RESET,
    STEP,
    Calling,
    check_finite,
    checked_ends,
    get_own_state,
    level_reset,
    mask_of,
    put_own_state,
    stored,
)
from tfrl.envs.facts import facts_of
from tfrl.envs.making import close, draw_off_screen, emulator_state, is_atari, make_env, put_emulator_state
from tfrl.envs.spec import (
    METRICS,
    EnvSpec,
    InfoSums,
    Step,
    Sums,
    pack_state,
    step_of,
    unpack_state,
)

_BOOLS = (bool, np.bool_)
LONGEST_REPLAY = 32_768
"""The longest episode, in steps, that can be replayed. Its actions take 128 kB per number of a Box, otherwise
10 kB.
"""


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
    state before the reset takes the seed's place (`tfrl.envs.making`). A replay of Atari's longest episodes,
    27,000 steps, takes 20 s. A user's env with `get_state` and `set_state` saves its own state instead
    (`tfrl.envs.calls`).
    """

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.num_envs = len(indices)
        if spec.render:  # before the first env is made, for the facts
            draw_off_screen()
        name, kwargs = spec.env, json.dumps(dict(spec.env_kwargs), sort_keys=True)
        known = facts_of(spec)
        self.observation_spec, self.action_spec = known.specs(spec.action_masks)
        self._store, self._packs = self.observation_spec.store(), bool(self.observation_spec.parts)
        self._mask_source = known.mask_source if self.observation_spec.num_actions else ""
        self._converts = self.observation_spec.layout is not None
        self.exact_state = True
        self._name, self._renders, self._limit = name, spec.render, spec.max_episode_steps or math.inf
        unlimited = spec.max_episode_steps is not None
        self._envs = [
            make_env(name, kwargs, frame_skip=spec.frame_skip, render=spec.render, unlimited=unlimited)
            for _ in indices
        ]
        self._resetting, self._stepping = (Calling(name, self._envs[0], call) for call in (RESET, STEP))
        self._atari = is_atari(self._envs[0])
        self._plays: list[_Play] = [env.step for env in self._envs]
        if spec.frame_skip is not None and not self._atari:  # Atari's preprocessing skips its own frames
            self._plays = [_repeated(play, spec.frame_skip) for play in self._plays]
        self._saves_state = known.saves_state  # otherwise, episodes are replayed
        self._repeats = not known.draws_globally
        self._streams = [(int(spec.seed), int(i)) for i in indices]
        self._episodes = [0] * self.num_envs
        self.levels = spec.first_levels(indices) if spec.level_replay else None
        self._emulators: list[dict[str, np.ndarray]] = [{}] * self.num_envs  # before resets without a seed
        self._solved = np.zeros(self.num_envs, bool)
        self._info, self._logs_info = InfoSums(spec.log_info, self.num_envs), bool(spec.log_info)
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
        seed = None if self._atari and episode > 0 else _episode_seed(*self._streams[i], episode)
        level = None if self.levels is None else int(self.levels[i])
        options = {} if level is None else {"options": {"level": level}}
        with self._resetting if level is None else Calling(self._name, env, level_reset(seed, level)):
            self._emulators[i] = emulator_state(env) if seed is None else {}
            shown, info = env.reset(seed=seed, **options)
            shown = self._stored(i, shown, info)
        self._began[i] = self._clock
        return shown.astype(self.observation_spec.dtype)  # a copy, because envs may share one array

    def observe(self) -> Step:
        """The step that `act` took; see `tfrl.envs.spec.Step`."""
        return self._step

    def act(self, actions: np.ndarray, levels: np.ndarray | None = None) -> None:
        """Takes a step with actions [B, *action_shape]; rescales a Box's actions from [-1, 1] to [low, high].

        Raises EnvError if an env fails, or returns values that no algorithm can learn from.
        """
        actions = np.array(actions, self._action_type)
        inputs = self.action_spec.env_inputs(actions)
        reward = np.empty(self.num_envs, np.float32)
        observation = np.empty_like(self._step.observation)
        first, cut = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        final, ndarray, shape, packs = [], np.ndarray, self._shape, self._packs
        converts = self._converts
        self._clock += 1
        started_by = self._clock - self._limit  # an episode that began then or earlier reaches the time limit
        with self._stepping, np.errstate(over="ignore"):  # a reward beyond float32 gets a sentence below
            for i, (play, action) in enumerate(zip(self._plays, inputs, strict=True)):
                shown, reward[i], terminated, truncated, info = play(action)
                if type(terminated) not in _BOOLS or type(truncated) not in _BOOLS:
                    terminated, truncated = checked_ends(self._name, terminated, truncated)
                ends = terminated or truncated or self._began[i] <= started_by
                if self._logs_info or METRICS in info:
                    self._info.add(i, info)
                if packs:
                    shown = self._stored(i, shown, info, ends=ends) if not terminated else shown
                elif (
                    converts
                    or type(shown) is not ndarray
                    or shown.shape != shape
                    or shown.dtype is not self._seen
                ):
                    shown = self._stored(i, shown, info)
                if ends:
                    first[i], cut[i] = True, not terminated
                    if not terminated:
                        final.append(shown.astype(observation.dtype))
                    self._solved[i] = info.get("is_success", info.get("success", False))
                    self._episodes[i] += 1
                    if self.levels is not None and levels is not None:
                        self.levels[i] = levels[i]
                    shown = self._reset(i)
                observation[i] = shown
        self._remember(actions)
        self._step = Step(reward, observation, first, cut, np.stack(final) if final else None)
        check_finite(self._name, reward, observation)
        if self._step.final_observation is not None:
            check_finite(self._name, reward, self._step.final_observation)

    def _stored(self, i: int, shown: Any, info: dict[str, Any], *, ends: bool = False) -> np.ndarray:
        """Env i's observation and its mask as one array. If the episode `ends`, the mask may be missing.

        `act` does not check the next single image or vector of this type.
        """
        source, mask = self._mask_source, []
        if source:
            mask = [mask_of(self._name, self._envs[i], source, shown, info, self.action_spec, ends=ends)]
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

    def take_info(self) -> Sums:
        """Implements `VecEnv.take_info`."""
        return self._info.take()

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
        if self.levels is not None:
            about["level"] = int(self.levels[i])
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
        if self.levels is not None:
            self.levels[i] = row["level"]
        if self._saves_state:
            self._reset(i)  # draws what the env does not save of its episode
            put_own_state(self._envs[i], row)
            return True
        if "actions" not in row or not self._repeats:
            return False
        if "emulator" in row:
            put_emulator_state(self._envs[i], row)
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
                shown = self._stored(i, shown, info).astype(self.observation_spec.dtype)
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
