"""Catch: a tiny pixel game, learned in seconds, after bsuite's (Osband et al. 2020, arXiv:1908.03568)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfrl.envs.spec import ArraySpec, Discrete, EnvSpec, Step, Sums, pack_state, step_of, unpack_state


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
        self._limit = spec.max_episode_steps or self.rows
        for i in range(num_envs):
            self._restart(i)
        first = np.ones(num_envs, bool)
        self._step = Step(np.zeros(num_envs, np.float32), self._boards(), first, ~first, None)

    def _restart(self, i: int) -> None:
        start, count = self._levels
        level = start + self._generators[i].integers(count)
        self._ball[i] = 0, np.random.SeedSequence(int(level)).generate_state(1)[0] % self.columns
        self._paddle[i] = self.columns // 2

    def observe(self) -> Step:
        """Observations are boards uint8 [B, 10, 5, 1]."""
        return self._step

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
        reward = np.where(ended, np.where(caught, 1.0, -1.0), 0.0).astype(np.float32)
        cut = ~ended & (self._ball[:, 0] >= self._limit)
        finals = self._boards()[cut] if cut.any() else None
        for i in np.flatnonzero(ended | cut):
            self._restart(i)
        self._step = Step(reward, self._boards(), ended | cut, cut, finals)

    def take_info(self) -> Sums:
        """{}: this env has no infos."""
        return {}

    def solved(self) -> np.ndarray:
        """True where the last ball was caught, bool [B]; valid while `first` is True."""
        return self._step.reward > 0

    def render(self) -> Sequence[np.ndarray]:
        """The enlarged board, uint8 [512, 512, 3] per env."""
        scale = 512 // self.rows
        boards = self.observe().observation.repeat(scale, 1).repeat(scale, 2).repeat(3, 3)
        frames = np.full((self.num_envs, 512, 512, 3), 64, np.uint8)
        left = (512 - boards.shape[2]) // 2
        frames[:, : boards.shape[1], left : left + boards.shape[2]] = boards
        return list(frames)

    def get_state(self) -> list[bytes]:
        """One npz per env: the last step, ball, paddle and random generator."""
        return [
            pack_state(
                self._step,
                i,
                {
                    "ball": self._ball[i].tolist(),
                    "paddle": int(self._paddle[i]),
                    "generator": self._generators[i].bit_generator.state,
                },
            )
            for i in range(self.num_envs)
        ]

    def set_state(self, states: Sequence[bytes]) -> None:
        """Continues exactly from `states`."""
        rows = list(map(unpack_state, states))
        for i, row in enumerate(rows):
            self._ball[i], self._paddle[i] = row["ball"], row["paddle"]
            self._generators[i].bit_generator.state = row["generator"]
        self._step = step_of(rows)._replace(observation=self._boards())

    def close(self) -> None:
        """Does nothing."""
