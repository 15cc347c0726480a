"""Random numbers inside compiled functions, a stream for each sample of a batch, whatever the batch.

TensorFlow's stateless generators take one seed for a whole tensor, so what a sample draws would depend on its
place in the batch. Here each row has a seed of its own.
"""

from __future__ import annotations

import math

from tfrl.ops.lazy import tf

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_UNIT = 2.0**-24  # of the numbers in [0, 1) that float32 spaces evenly


def threefry_2x32(key: tuple[tf.Tensor, tf.Tensor], counter: tuple[tf.Tensor, tf.Tensor]) -> list[tf.Tensor]:
    """The Threefry-2x32 block cipher of 20 rounds (Salmon et al. 2011, doi:10.1145/2063384.2063405).

    Args:
      key: two uint32 tensors.
      counter: two uint32 tensors, of shapes that broadcast with the key's.

    Returns:
      Two tensors of uint32: for each key, a random-looking permutation of the counters.
    """
    keys = (*key, key[0] ^ key[1] ^ tf.constant(_PARITY, tf.uint32))
    x = [counter[0] + keys[0], counter[1] + keys[1]]
    for turn in range(5):
        for bits in _ROTATIONS[turn % 2]:
            x[0] += x[1]
            x[1] = _rotate_left(x[1], bits) ^ x[0]
        x[0] += keys[(turn + 1) % 3]
        x[1] += keys[(turn + 2) % 3] + tf.constant(turn + 1, tf.uint32)
    return x


def uniforms(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """Numbers in [0, 1), multiples of 2^-24: float32 [B, count], row i from seeds[i] alone.

    Args:
      seeds: int32 [B, 2].
      count: how many for each row; the first ones do not depend on it.
    """
    seeds = tf.bitcast(seeds, tf.uint32)
    counters = tf.cast(tf.range(count), tf.uint32)[None]
    bits, _ = threefry_2x32((seeds[:, :1], seeds[:, 1:]), (counters, tf.zeros_like(counters)))
    return (
        tf.cast(tf.cast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.int32), tf.float32)
        * _UNIT
    )


def normals(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """Standard normal numbers, float32 [B, count], row i from seeds[i] alone (Box and Muller 1958).

    In float64 inside: vectorised logarithms and cosines round a number by its place in the batch.

    Args:
      seeds: int32 [B, 2].
      count: how many for each row.
    """
    pairs = tf.cast(tf.reshape(uniforms(seeds, 2 * count), (-1, count, 2)), tf.float64)
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - pairs[..., 0]))  # of a number in (0, 1]
    return tf.cast(radius * tf.cos(2.0 * math.pi * pairs[..., 1]), tf.float32)


def _rotate_left(x: tf.Tensor, bits: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(x, tf.constant(bits, tf.uint32))
    return left | tf.bitwise.right_shift(x, tf.constant(32 - bits, tf.uint32))
