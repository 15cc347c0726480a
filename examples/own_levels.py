"""An env of one's own with levels, and level replay: the run trains more on levels with more to learn.

    python examples/own_levels.py

or, in this folder: tfrl ppo --env own_levels:Maze --level-replay --num-levels 50. The env begins level n at
`reset(options={"level": n})`. A level may be anything that a number can decide, here the seed of a maze.
Without a level, as in evaluations, it draws one of all levels.
"""

from __future__ import annotations

import csv
from typing import Any

import gymnasium
import numpy as np

import tfrl

SIZE = 5
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Maze(gymnasium.Env):
    """A small grid with walls: walk from a corner to the goal. The level is the seed of walls and goal."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3 * SIZE * SIZE,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins the level of `options`, or any level."""
        super().reset(seed=seed)
        level = (options or {}).get("level")
        if level is None:
            level = int(self.np_random.integers(2**31))
        drawn = np.random.default_rng(level)
        self.cells = np.zeros((3, SIZE, SIZE), np.float32)  # walls, goal, agent
        self.cells[0] = drawn.random((SIZE, SIZE)) < 0.25
        goal = tuple(drawn.integers(1, SIZE, size=2))
        self.place, self.steps = (0, 0), 0
        self.cells[(0, *goal)] = self.cells[0, 0, 0] = 0.0
        self.cells[(1, *goal)] = self.cells[2, 0, 0] = 1.0
        return self._show(), {"level": level}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Walks one cell, unless a wall or the edge is there. The goal gives 1 and ends the episode."""
        row, column = (a + b for a, b in zip(self.place, MOVES[action], strict=True))
        if 0 <= row < SIZE and 0 <= column < SIZE and not self.cells[0, row, column]:
            self.cells[(2, *self.place)] = 0.0
            self.place = row, column
            self.cells[(2, *self.place)] = 1.0
        self.steps += 1
        found = bool(self.cells[(1, *self.place)])
        return self._show(), float(found), found, self.steps >= 30, {}

    def _show(self) -> np.ndarray:
        return self.cells.reshape(-1).copy()


if __name__ == "__main__":
    run = tfrl.train(
        "ppo",
        env=Maze,
        level_replay=True,
        num_levels=500,
        total_steps=100_000,
        seed=1,
        eval_episodes=256,
        eval_greedy=False,  # the most likely action may lead into the same wall for ever
    )
    with (run.folder / "levels.csv").open(newline="") as file:
        levels = sorted(csv.DictReader(file), key=lambda row: -float(row["score"]))
    print(f"levels with the most to learn: {', '.join(row['level'] for row in levels[:5])}")
    print(f"mean return on all levels: {run.results['eval']['test']['return']:.2f} (random actions: 0.27)")
