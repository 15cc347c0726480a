"""Random numbers that no topology changes: each is keyed by (seed, use, update, epoch, env) alone.

Philox (Salmon et al. 2011) is counter-based: any env's numbers can be drawn by whichever worker holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """What numbers are for. The values are part of a run's identity: never renumber."""

    ACTION = 0
    MINIBATCH = 1
    EVALUATION = 2
    IMAGE_ORDER = 3
    AUGMENTATION = 4


def generator(seed: int, use: Use, *key: int) -> np.random.Generator:
    """A fresh generator for (seed, use, key), independent of all others."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=(use, *key))))


def action_uniforms(seed: int, update: int, envs: Iterable[int], num_steps: int) -> np.ndarray:
    """Numbers in [0, 1) that choose actions, float32 [T, B], for global env indices `envs`."""
    rows = [generator(seed, Use.ACTION, update, i).random(num_steps, np.float32) for i in envs]
    return np.stack(rows, axis=1)


def minibatch_steps(
    seed: int, update: int, envs: Iterable[int], *, num_steps: int, epochs: int, num_minibatches: int
) -> np.ndarray:
    """Which time steps of each env make up each minibatch: int32 [E, M, B, T / M].

    Every env gives every minibatch the same number of steps (stratified by env), so all topologies form the
    same global minibatches without moving any data.
    """
    orders = [
        [generator(seed, Use.MINIBATCH, update, epoch, i).permutation(num_steps) for i in envs]
        for epoch in range(epochs)
    ]
    steps = np.asarray(orders, np.int32)  # [E, B, T]
    return steps.reshape(epochs, len(orders[0]), num_minibatches, -1).swapaxes(1, 2)
