"""Catch: a tiny pixel game, learned in seconds, after bsuite's (Osband et al. 2020, arXiv:1908.03568)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from tfrl.envs.spec import ArraySpec, Discrete, EnvSpec, Step


class Catch:
    """A ball falls down a 10 x 5 board. The reward is 1 if the paddle in the last row catches it, and -1
    otherwise.

    An episode takes 9 steps. Implements `VecEnv`: observations uint8 [B, 10, 5, 1], actions left, stay,
    right. As in procgen, each episode draws a level, which decides the column where the ball appears;
    `num_levels=0` means all of them.
    """

    rows, columns = 10, 5
    exact_state = True
    observation_spec = ArraySpec((rows, columns, 1), "uint8")
    action_spec = Discrete(3)

    def __init__(self, spec: EnvSpec, indices: Sequence[int]) -> None:
        self.num_envs = num_envs = len(indices)
        self._levels = (spec.start_level, spec.num_levels or 2**31 - 1)
        seeds = [np.random.SeedSequence(spec.seed, spawn_key=(i,)) for i in indices]
        self._generators = [np.random.Generator(np.random.PCG64(s)) for s in seeds]
        self._ball = np.zeros((num_envs, 2), np.int64)  # row, column
        self._paddle = np.zeros(num_envs, np.int64)
        self._reward = np.zeros(num_envs, np.float32)
        self._first = np.ones(num_envs, bool)
        self._limit = spec.max_episode_steps or self.rows
        self._finals: list[np.ndarray | None] = [None] * num_envs  # last boards of truncated episodes
        for i in range(num_envs):
            self._restart(i)

    def _restart(self, i: int) -> None:
        start, count = self._levels
        level = start + self._generators[i].integers(count)
        self._ball[i] = 0, np.random.SeedSequence(int(level)).generate_state(1)[0] % self.columns
        self._paddle[i] = self.columns // 2

    def observe(self) -> Step:
        """Observations are boards uint8 [B, 10, 5, 1]."""
        finals = [final for final in self._finals if final is not None]
        return Step(
            self._reward.copy(),
            self._boards(),
            self._first.copy(),
            np.array([final is not None for final in self._finals]),
            np.stack(finals) if finals else None,
        )

    def _boards(self) -> np.ndarray:
        board = np.zeros((self.num_envs, *self.observation_spec.shape), np.uint8)
        env = np.arange(self.num_envs)
        board[env, self._ball[:, 0], self._ball[:, 1]] = 255
        board[env, self.rows - 1, self._paddle] = 255
        return board

    def act(self, actions: np.ndarray) -> None:
        """One step with actions int32 [B]: 0 left, 1 stay, 2 right."""
        self._paddle = np.clip(self._paddle + np.asarray(actions) - 1, 0, self.columns - 1)
        self._ball[:, 0] += 1
        ended = self._ball[:, 0] == self.rows - 1
        caught = self._ball[:, 1] == self._paddle
        self._reward = np.where(ended, np.where(caught, 1.0, -1.0), 0.0).astype(np.float32)
        cut = ~ended & (self._ball[:, 0] >= self._limit)
        boards = self._boards() if cut.any() else ()
        self._finals = [boards[i] if is_cut else None for i, is_cut in enumerate(cut)]
        self._first = ended | cut
        for i in np.flatnonzero(self._first):
            self._restart(i)

    def solved(self) -> np.ndarray:
        """True where the last ball was caught, bool [B]; valid while `first` is True."""
        return self._reward > 0

    def render(self) -> Sequence[np.ndarray]:
        """The enlarged board, uint8 [512, 512, 3] per env."""
        scale = 512 // self.rows
        boards = self.observe().observation.repeat(scale, 1).repeat(scale, 2).repeat(3, 3)
        frames = np.full((self.num_envs, 512, 512, 3), 64, np.uint8)
        left = (512 - boards.shape[2]) // 2
        frames[:, : boards.shape[1], left : left + boards.shape[2]] = boards
        return list(frames)

    def get_state(self) -> list[bytes]:
        """JSON per env: board, pending reward, `first` and final board, random generator."""
        return [
            json.dumps(
                {
                    "ball": self._ball[i].tolist(),
                    "paddle": int(self._paddle[i]),
                    "reward": float(self._reward[i]),
                    "first": bool(self._first[i]),
                    "final": None if (final := self._finals[i]) is None else final.tolist(),
                    "generator": self._generators[i].bit_generator.state,
                }
            ).encode()
            for i in range(self.num_envs)
        ]

    def set_state(self, states: Sequence[bytes]) -> None:
        """Continues exactly from `states`."""
        for i, state in enumerate(map(json.loads, states)):
            self._ball[i], self._paddle[i] = state["ball"], state["paddle"]
            self._reward[i], self._first[i] = state["reward"], state["first"]
            final = state["final"]
            self._finals[i] = None if final is None else np.array(final, np.uint8)
            self._generators[i].bit_generator.state = state["generator"]

    def close(self) -> None:
        """Does nothing."""
