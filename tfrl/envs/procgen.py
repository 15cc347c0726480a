"""Procgen's 16 games through its own vectorised C++ implementation (Cobbe et al. 2020, arXiv:1912.01588).

Procgen reports its own time-outs like other ends of episodes and does not return their last frame, so they
count as terminal, as in the published results. Time-outs of `EnvSpec.max_episode_steps` are truncations.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import zlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np

from tfrl.cli.errors import UserError, summary
from tfrl.envs.spec import ArraySpec, Discrete, EnvSpec, Step, Sums, pack_state, step_of, unpack_state

_KEPT_LEVELS = 16_384  # first states in memory, about 11 kB each


class Procgen:
    """A vector of procgen envs; implements `VecEnv`. `act` returns while C++ threads step.

    With `EnvSpec.level_replay`, an env whose episode has ended gets the first state of a vector that has only
    its next level.

    A seed belongs to a whole procgen vector. So for a slice, the global vector is made, and the states of the
    wanted envs are copied to a smaller vector. Env i is then the same env on every worker.

    Args:
      spec: the global vector; `spec.render` makes `render` give 512 x 512 frames, at some cost in speed.
      indices: the global indices of the wanted envs.
    """

    exact_state = True
    observation_spec = ArraySpec((64, 64, 3), "uint8")
    action_spec = Discrete(15)

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.num_envs, self._spec = len(indices), spec
        self.levels = spec.first_levels(indices) if spec.level_replay else np.zeros(0, np.int64)
        whole = list(indices) == list(range(spec.num_envs))
        if spec.level_replay:
            states = [self._begin(level) for level in self.levels]
        else:
            states = [] if whole else _initial_states(spec, indices)
        self._env = _vector(spec, self.num_envs)
        if states:
            self._env.callmethod("set_state", states)
        self._limit = spec.max_episode_steps
        self._steps = np.zeros(self.num_envs, np.int64)  # steps of the running episodes, if they are limited
        self._next: np.ndarray | None = None  # the levels that envs begin after the present step
        self._keeps_step = spec.level_replay or self._limit is not None
        self._shown: Step | None = None  # the step of the last `observe`, if procgen would not show it again

    def observe(self) -> Step:
        """Waits for the step; observations are uint8 [B, 64, 64, 3]."""
        if self._shown is not None:
            return self._shown
        reward, observation, first = self._env.observe()
        step = Step(reward, observation["rgb"], first, np.zeros(self.num_envs, bool), None)
        if self._spec.level_replay:
            step = self._begin_levels(step)
        elif self._limit is not None:
            step = self._cut_off(step, self._limit)
        if self._keeps_step:
            self._shown = step
        return step

    def _begin(self, level: int) -> bytes:
        """The state of an env that begins a level."""
        return zlib.decompress(_first_state(self._spec.env, self._spec.distribution_mode, int(level)))

    def _begin_levels(self, step: Step) -> Step:
        """The step, where envs whose episodes have ended show the first frames of their next levels."""
        self._steps[step.first] = 0
        cut = self._steps >= (np.inf if self._limit is None else self._limit)
        ended = np.flatnonzero(step.first | cut)
        if self._next is None or not len(ended):  # None: before the first step
            return step
        for i in ended:
            state = self._begin(self._next[i])
            self._env.call_c_func("set_state", int(i), state, len(state))
        self.levels[ended], self._steps[ended] = self._next[ended], 0
        begun = self._env.observe()[1]["rgb"]
        observation = np.where((step.first | cut)[:, None, None, None], begun, step.observation)
        final = step.observation[cut] if cut.any() else None
        return Step(step.reward, observation, step.first | cut, cut, final)

    def _cut_off(self, step: Step, limit: int) -> Step:
        """The step with episodes of `limit` steps truncated there: these envs show their next ones."""
        self._steps[step.first] = 0
        cut = self._steps >= limit
        if not cut.any():
            return step
        # Only action -1 resets an env, and it steps all other envs, so their states are restored.
        before = self._env.callmethod("get_state")
        self._env.act(np.where(cut, -1, 0).astype(np.int32))
        begun = self._env.observe()[1]["rgb"]
        after = self._env.callmethod("get_state")
        self._env.callmethod("set_state", [b if c else a for a, b, c in zip(before, after, cut, strict=True)])
        self._steps[cut] = 0
        observation = np.where(cut[:, None, None, None], begun, step.observation)
        return Step(step.reward, observation, step.first | cut, cut, step.observation[cut])

    def act(self, actions: np.ndarray, levels: np.ndarray | None = None) -> None:
        """Starts one step with actions int32 [B]; see `VecEnv.act`."""
        self._shown, self._next = None, levels
        self._steps += 1
        self._env.act(actions)

    def get_state(self) -> list[bytes]:
        """One state per env, 20 to 40 kB: level, objects, timer, random generators."""
        if not self._keeps_step:
            return self._env.callmethod("get_state")
        step = self.observe()
        abouts = [{"steps": steps} for steps in self._steps.tolist()]
        if self._spec.level_replay:
            abouts = [a | {"level": n} for a, n in zip(abouts, self.levels.tolist(), strict=True)]
        return [
            pack_state(step, i, about, state=np.frombuffer(state, np.uint8))
            for i, (about, state) in enumerate(zip(abouts, self._env.callmethod("get_state"), strict=True))
        ]

    def set_state(self, states: Sequence[bytes]) -> None:
        """Continues exactly from `states`."""
        if not self._keeps_step:
            self._env.callmethod("set_state", list(states))
            return
        rows = list(map(unpack_state, states))
        self._env.callmethod("set_state", [row["state"].tobytes() for row in rows])
        self._steps = np.array([row["steps"] for row in rows])
        if self._spec.level_replay:
            self.levels = np.array([row["level"] for row in rows])
        self._next = None
        self._shown = step_of(rows)._replace(observation=self._env.observe()[1]["rgb"])

    def info(self) -> list[dict[str, Any]]:
        """Procgen's own facts per env: `level_seed`, `prev_level_seed`, `prev_level_complete`."""
        return self._env.get_info()

    def take_info(self) -> Sums:
        """{}: this env has no infos."""
        return {}

    def solved(self) -> np.ndarray:
        """Procgen's `prev_level_complete`, bool [B]."""
        return np.array([info["prev_level_complete"] for info in self._env.get_info()], bool)

    def render(self) -> list[np.ndarray]:
        """Frames uint8 [512, 512, 3] per env; needs `spec.render`."""
        return [info["rgb"] for info in self._env.get_info()]

    def close(self) -> None:
        """Stops the C++ threads."""
        self._env.close()


UNSEEN_LEVELS = (
    "the full distribution of levels, which also contains the training levels and levels that look like them "
    "(24 % of easy coinrun's, procgen's issue 100)"
)
"""The meaning of "unseen levels" in results and reports."""


def version() -> str:
    """The installed package of procgen and its version, such as "procgen-mirror 0.10.7"."""
    for package in ("procgen", "procgen-mirror", "procgen-gym"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    return "unknown"


def _initial_states(spec: EnvSpec, indices: Sequence[int]) -> list[bytes]:
    whole = _vector(spec, spec.num_envs)
    states = whole.callmethod("get_state")
    whole.close()
    return [states[i] for i in indices]


@functools.lru_cache(maxsize=_KEPT_LEVELS)
def _first_state(game: str, mode: str, level: int) -> bytes:
    """The state of an env at the beginning of a level, compressed; making it takes about 4 ms."""
    alone = _vector(EnvSpec(game, 1, 0, mode, num_levels=1, start_level=level, num_threads=1), 1)
    (state,) = alone.callmethod("get_state")
    alone.close()
    return zlib.compress(state, 1)


def _vector(spec: EnvSpec, num_envs: int) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):  # procgen imports the old gym, which prints a banner
        from procgen import ProcgenGym3Env

    levels = {"num_levels": spec.num_levels, "start_level": spec.start_level}
    if spec.distribution_mode == "exploration":  # in this mode, procgen chooses a single level
        levels = {}
    try:
        env = ProcgenGym3Env(
            num=num_envs,
            env_name=spec.env,
            distribution_mode=spec.distribution_mode,
            rand_seed=spec.seed,  # otherwise it would come from the system's random source
            num_threads=spec.num_threads,
            render_mode="rgb_array" if spec.render else None,
            **levels,
        )
    except OSError as error:  # of the dynamic linker, which names the library
        found = re.search(r"': (.+?)\.? +Additionally", str(error))
        raise UserError(
            f"procgen needs a library of the system ({found[1] if found else summary(error)}); on Debian and"
            " Ubuntu: apt-get install libgl1 libglib2.0-0."
        ) from error
    # Each vector opens procgen's library again, and cffi keeps all that were opened, 11 kB each. A vector
    # holds its own, and the first one keeps the library loaded, so the others are dropped here.
    for name in ("_libraries", "_function_caches"):
        del getattr(env._ffi, name, [])[1:]
    return env
