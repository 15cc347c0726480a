"""The memory that a replay needs, known before there is one; imports no TensorFlow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfrl.cli import words
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.workers import machine


def replay_bytes(config: Any) -> int:
    """The memory of the settings' replay, of all workers, without truncated episodes' last observations."""
    observation, action = registry.specs(config.env)
    row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in (observation, action))
    row += 4 + 2  # the reward and two flags
    if config.prioritized_replay:
        row += 64  # two trees of twice their leaves, which may be twice the rows
    return config.replay_size * row


def check_memory(config: Any, workers: int) -> None:
    """Raise UserError, with what would fit, if a worker's share of the replay is more than its memory."""
    needed, memory = replay_bytes(config) // workers, machine.memory()
    if needed <= memory:
        return
    share = f" in each of {workers} workers" if workers > 1 else ""
    fits = int(0.8 * memory / needed * config.replay_size)
    fits -= fits % 10 ** (len(str(fits)) - 1)  # one digit, rounded down
    raise UserError(
        f"--replay-size {config.replay_size} needs {words.size(needed)}{share}, and there are "
        f"{words.size(memory)} of memory here; {fits} would fit."
    )
