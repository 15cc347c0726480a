"""Random numbers that no topology changes, keyed by (seed, use, update, epoch, env).

Philox (Salmon et al. 2011) is counter-based, so any worker can draw the numbers of any env.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import numpy as np


class Use(IntEnum):
    """Uses of random numbers. The values are part of a run's identity: never renumber."""

    ACTION = 0
    MINIBATCH = 1
    EVALUATION = 2
    IMAGE_ORDER = 3
    AUGMENTATION = 4
    ENVS = 5
    RECORDING = 7
    WARM_UP = 8
    AUXILIARY = 9
    REPLAY = 10
    EXPLORATION = 11
    COLLECTION = 12
    RECORDED = 13
    ORDER = 20
    LEVEL = 21


def generator(seed: int, use: Use, *key: int) -> np.random.Generator:
    """A fresh generator for (seed, use, key), independent of all others."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=(use, *key))))


def env_seed(seed: int, use: Use, *key: int) -> int:
    """The seed in [0, 2^31) of a vector of envs for (seed, use, key).

    It is hashed, so that no use plays the episodes of another use or of a run with another seed. The training
    envs have the run's seed itself.
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(Use.ENVS, use, *key))
    return int(sequence.generate_state(1)[0]) >> 1


def action_noise(
    seed: int,
    update: int,
    envs: Iterable[int],
    num_steps: int,
    draw: Callable[[np.random.Generator, int], np.ndarray],
) -> np.ndarray:
    """Numbers that choose actions, float32 [T, B, K], for global env indices `envs`.

    draw: makes the numbers of one env, float32 [T, K], from a generator and T.
    """
    rows = [draw(generator(seed, Use.ACTION, update, i), num_steps) for i in envs]
    return np.stack(rows, axis=1)


def minibatch_sequences(
    seed: int,
    update: int,
    envs: Sequence[int],
    *,
    each: int,
    epochs: int,
    num_minibatches: int,
    size: int,
    block: int = 1,
) -> np.ndarray:
    """The sequences of steps in each minibatch: int32 [E, M, q], as local env * each + sequence.

    A block of neighbouring envs gives every minibatch the same number of sequences. So all topologies form
    the same global minibatches if no replica has a part of a block.

    Args:
      seed, update: key the order.
      envs: the global indices of envs, whole blocks of them.
      each: sequences of one env.
      epochs: E.
      num_minibatches: M.
      size: the sequences that a block gives each minibatch; the others of the block are not used.
      block: envs of a block.
    """
    in_block, begins = block * each, range(0, len(envs), block)
    orders = [
        [
            begin * each + generator(seed, Use.MINIBATCH, update, epoch, envs[begin]).permutation(in_block)
            for begin in begins
        ]
        for epoch in range(epochs)
    ]
    rows = np.asarray(orders, np.int32)[..., : num_minibatches * size]
    rows = rows.reshape(epochs, len(begins), num_minibatches, size)
    return rows.swapaxes(1, 2).reshape(epochs, num_minibatches, -1)


def augmentation_seeds(seed: int, update: int, envs: Iterable[int], num_steps: int) -> np.ndarray:
    """The augmentation seeds of each sample of an update, int32 [T, B, 2], for global env indices `envs`."""
    rows = [generator(seed, Use.AUGMENTATION, update, i).bytes(8 * num_steps) for i in envs]
    return np.stack([np.frombuffer(row, "<i4").reshape(num_steps, 2) for row in rows], axis=1).astype(
        np.int32
    )


def order_numbers(seed: int, update: int, envs: Iterable[int], num_steps: int) -> np.ndarray:
    """The numbers in [0, 1) that pair the steps of a rollout, float64 [T, B], for global indices `envs`."""
    return np.stack([generator(seed, Use.ORDER, update, i).random(num_steps) for i in envs], axis=1)


def level_numbers(seed: int, update: int, envs: Iterable[int], num_steps: int) -> np.ndarray:
    """The numbers in [0, 1) that choose the next levels of an update, float64 [T, B], for global `envs`."""
    return np.stack([generator(seed, Use.LEVEL, update, i).random(num_steps) for i in envs], axis=1)


def auxiliary_orders(seed: int, phase: int, epoch: int, envs: Iterable[int], num_steps: int) -> np.ndarray:
    """The order of each env's steps in an epoch of an auxiliary phase, int64 [B, T]."""
    return np.stack([generator(seed, Use.AUXILIARY, phase, epoch, i).permutation(num_steps) for i in envs])
