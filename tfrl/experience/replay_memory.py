"""The memory that a replay needs, known before there is one; imports no TensorFlow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfrl.cli import words
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.workers import machine

_SHARE = 0.8  # of the memory: the rest is TensorFlow's, the networks', and what makes checkpoints


def replay_bytes(config: Any) -> int:
    """The memory of the settings' replay, of all workers, without truncated episodes' last observations."""
    observation, action = registry.specs(config)
    row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in (observation, action))
    row += 4 + 2  # the reward and two flags
    if config.prioritized_replay:
        row += 64  # two trees of twice their leaves, which may be twice the rows
    return config.replay_size * row


def in_words(config: Any) -> str:
    """The replay of all workers: "1,000,000 transitions, 12.3 GB"."""
    return f"{config.replay_size:,} transitions, {words.size(replay_bytes(config))}"


def check_memory(config: Any, workers: int, here: int = 1) -> None:
    """Raise UserError, with what would fit, if the replay leaves too little memory for all else.

    The arrays are of zeros at first, which take memory only as they are filled: what is too large would be
    killed hours later.

    Args:
      config: the settings.
      workers: which share the replay evenly.
      here: how many of them share this machine's memory.
    """
    needed, memory = replay_bytes(config) * here // workers, machine.memory()
    if needed <= _SHARE * memory:
        return
    fits = int(_SHARE * memory / needed * config.replay_size)
    fits -= fits % 10 ** (len(str(fits)) - 1)  # one digit, rounded down
    held = "" if workers == 1 else f" for {here} of {workers} workers"
    raise UserError(
        f"--replay-size {config.replay_size} needs {words.size(needed)}{held}, and of the "
        f"{words.size(memory)} of memory here a replay may have {_SHARE:.0%}; {fits} would fit."
    )
