"""UCB-DrAC (Raileanu et al. 2021, arXiv:2006.12862): augmentations of images, and a bandit to choose one.

The eight augmentations are those of the appendix. Each takes images uint8 [B, H, W, C] and seeds int32
[B, 2], and returns images of the same shape and dtype. The bits of result i depend only on images[i] and
seeds[i]. Sizes are those of the authors' code for 64 x 64 pixels, in proportion for others. `grayscale`,
`cutout_color` and `color_jitter` need C = 3, `rotate` H = W (`tfrl.algorithms.drac.fitting`).

Let XLA compile them, which makes one loop over the pixels of dozens of operations. That takes a second or two
at the first call of each shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfrl.ops.graph import tf

Augmentation = Callable[[Any, Any], Any]

_SIDE = 64  # of the images that the following sizes are for, pixels
_PAD = 12
_SMALLEST_BOX, _LARGEST_BOX = 7, 21
_BOX_TOP, _BOX_LEFT = 12, 24  # plus the box's own height and width

_GREY = (299, 587, 114)  # thousandths of red, green and blue (ITU-R BT.601)

_FACTORS = (0.6, 1.4)  # of brightness, contrast and saturation
_HUE_SHIFT = 0.5 * 255 / 360  # the greatest, in turns


def crop(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Moves by up to 12 pixels in each direction; the edges are repeated."""
    _, height, width, channels = images.shape
    rows, columns = _shifted(seeds, 0, height), _shifted(seeds, 1, width)
    places = rows[:, :, None] * width + columns[:, None, :]
    return tf.gather(tf.reshape(images, (-1, height * width, channels)), places, batch_dims=1)


def grayscale(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Three equal channels, 0.299 R + 0.587 G + 0.114 B; the seeds are not used."""
    del seeds
    channels = tf.unstack(tf.cast(images, tf.int32), axis=-1)
    grey = (sum(w * x for w, x in zip(_GREY, channels, strict=True)) + 500) // 1000
    return tf.repeat(tf.cast(grey, tf.uint8)[..., None], 3, axis=-1)


def cutout(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """A black box of 7 to 21 pixels a side."""
    return tf.where(_box(images, seeds), tf.constant(0, tf.uint8), images)


def cutout_color(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """A box as of `cutout`, in a random colour."""
    color = tf.cast(tf.floor(256.0 * uniforms(seeds, 5)[:, 2:]), tf.uint8)
    return tf.where(_box(images, seeds), color[:, None, None, :], images)


def flip(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Every second image with left and right exchanged."""
    flips = uniforms(seeds, 1)[:, 0] < 0.5
    return tf.where(flips[:, None, None, None], images[:, :, ::-1], images)


def rotate(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Turned to the left by 0, 90, 180 or 270 degrees."""
    turns = _integers(uniforms(seeds, 1)[:, 0], 4)[:, None, None, None]
    turned = images
    for quarters in (1, 2, 3):
        turned = tf.where(turns == quarters, tf.image.rot90(images, quarters), turned)
    return turned


def random_convolution(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """A 3 x 3 convolution with random weights for each image (Lee et al. 2020, arXiv:1910.05396).

    The weights are normal, and pixels beyond the edges are 0. The result is stretched so that its smallest
    number becomes 0 and its largest 255, because uint8 cannot hold others; the papers do not stretch. So the
    variance of the weights does not matter here.
    """
    _, height, width, channels = images.shape
    weights = normals(seeds, 9 * channels * channels)
    weights = tf.reshape(weights, (-1, 3, 3, channels, 1, 1, channels))
    padded = tf.pad(tf.cast(images, tf.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    total = tf.zeros_like(images, tf.float32)
    for i in range(3):  # one after the other, so that sums are the same in any batch
        for j in range(3):
            for k in range(channels):
                total += weights[:, i, j, k] * padded[:, i : i + height, j : j + width, k : k + 1]
    low, high = (f(total, axis=(1, 2, 3), keepdims=True) for f in (tf.reduce_min, tf.reduce_max))
    return _to_uint8(255.0 * tf.math.divide_no_nan(total - low, high - low))


def color_jitter(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Multiplies brightness, contrast and saturation by 0.6 to 1.4 each, and turns the hue by up to 0.35 of a
    circle.

    A random number decides whether the contrast changes before or after the other three.
    """
    numbers = uniforms(seeds, 5)
    low, high = _FACTORS
    brightness, saturation, contrast = tf.unstack(
        low + (high - low) * numbers[:, :3, None, None, None], axis=1
    )
    turn = _HUE_SHIFT * (2.0 * numbers[:, 3, None, None] - 1.0)
    early = numbers[:, 4, None, None, None] < 0.5
    images = _adjust_contrast(images, tf.where(early, contrast, 1.0))
    hue, chroma, value = tf.unstack(tf.image.rgb_to_hsv(tf.cast(images, tf.float32) / 255.0), axis=-1)
    hue = tf.math.floormod(hue + turn, 1.0)
    chroma = tf.clip_by_value(chroma * saturation[..., 0], 0.0, 1.0)
    value = tf.clip_by_value(value * brightness[..., 0], 0.0, 1.0)
    images = _to_uint8(255.0 * tf.image.hsv_to_rgb(tf.stack([hue, chroma, value], axis=-1)))
    return _adjust_contrast(images, tf.where(early, 1.0, contrast))


AUGMENTATIONS: dict[str, Augmentation] = {
    "crop": crop,
    "random-conv": random_convolution,
    "grayscale": grayscale,
    "flip": flip,
    "rotate": rotate,
    "cutout": cutout,
    "cutout-color": cutout_color,
    "color-jitter": color_jitter,
}


def _integers(uniform: tf.Tensor, below: int) -> tf.Tensor:
    """Whole numbers 0 ... below - 1, int32; the product is below `below` in float32 too."""
    return tf.cast(tf.floor(uniform * float(below)), tf.int32)


def _shifted(seeds: tf.Tensor, axis: int, size: int) -> tf.Tensor:
    """The source of each row (axis 0) or column (axis 1) of a cropped image, int32 [B, size]."""
    pad = size * _PAD // _SIDE
    shifts = _integers(uniforms(seeds, 2)[:, axis], 2 * pad + 1) - pad
    return tf.clip_by_value(tf.range(size)[None] + shifts[:, None], 0, size - 1)


def _box(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """True for the pixels that a random box covers, bool [B, H, W, 1]."""
    _, height, width, _ = images.shape
    sides = _SMALLEST_BOX + _integers(uniforms(seeds, 2), _LARGEST_BOX - _SMALLEST_BOX + 1)
    covers = []
    for axis, size, start in ((0, height, _BOX_TOP), (1, width, _BOX_LEFT)):
        side = sides[:, axis, None]
        place = tf.range(size)[None]
        begin, end = ((start + n * side) * size // _SIDE for n in (1, 2))
        covers.append((place >= begin) & (place < end))
    return (covers[0][:, :, None] & covers[1][:, None, :])[..., None]


def _adjust_contrast(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Each channel's distance from its mean in the image, times `factor` [B, 1, 1, 1]; 1 changes nothing."""
    _, height, width, _ = images.shape
    # Whole numbers are summed, so that the order does not matter.
    sums = tf.reduce_sum(tf.cast(images, tf.int32), axis=(1, 2), keepdims=True)
    means = tf.cast(sums, tf.float32) / float(height * width)
    return _to_uint8((tf.cast(images, tf.float32) - means) * factor + means)


def _to_uint8(x: tf.Tensor) -> tf.Tensor:
    """The nearest of 0 ... 255."""
    return tf.cast(tf.round(tf.clip_by_value(x, 0.0, 255.0)), tf.uint8)


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

    The seeds are int32 [B, 2]. The first values do not depend on `count`.
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

    They are computed in float64, because vectorised logarithms and cosines round a number by its place in the
    batch. The seeds are int32 [B, 2].
    """
    pairs = tf.cast(tf.reshape(uniforms(seeds, 2 * count), (-1, count, 2)), tf.float64)
    radius = tf.sqrt(-2.0 * tf.math.log(1.0 - pairs[..., 0]))  # of a number in (0, 1]
    return tf.cast(radius * tf.cos(2.0 * math.pi * pairs[..., 1]), tf.float32)


def _rotate_left(x: tf.Tensor, bits: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(x, tf.constant(bits, tf.uint32))
    return left | tf.bitwise.right_shift(x, tf.constant(32 - bits, tf.uint32))


class SlidingWindowUCB:
    """An upper-confidence-bound bandit with a short memory (Raileanu et al. 2021, arXiv:2006.12862).

        choose argmax_f Q(f) + c sqrt(log t / N(f))     eq. 8
        Q(f) = mean of the last K returns after f       eq. 9

    N(f) is the number of choices of f, and t the number of all choices. Choices without a return count too,
    so no f is chosen again before its first return. At first, each f is chosen once (UCB1, Auer et al. 2002).
    The authors' code begins with Q = 0 instead, and may choose its first f for ever if returns are positive.
    Among equals, the first is chosen, so that runs are reproducible.

    Args:
      num_choices: A.
      exploration: c, in the units of the returns.
      window: K.
    """

    def __init__(self, num_choices: int, *, exploration: float = 0.1, window: int = 10) -> None:
        self._exploration = exploration
        self._counts = np.zeros(num_choices, np.int64)
        self._returns = np.zeros((num_choices, window), np.float64)  # a ring for each choice

    def choose(self, pending: Sequence[int] = ()) -> int:
        """The next choice, 0 ... A - 1. `pending` are earlier choices without a recorded return."""
        counts = self._counts + np.bincount(np.array(pending, np.int64), minlength=len(self._counts))
        if (counts == 0).any() or not self._counts.any():
            return int(np.argmin(counts))
        bonus = self._exploration * np.sqrt(np.log(counts.sum()) / counts)
        return int(np.argmax(np.where(self._counts > 0, self.mean_returns() + bonus, -np.inf)))

    def record(self, choice: int, mean_return: float) -> None:
        """Records the `mean_return` after a `choice`."""
        self._returns[choice, self._counts[choice] % self._returns.shape[1]] = mean_return
        self._counts[choice] += 1

    def mean_returns(self) -> np.ndarray:
        """Q, float64 [A]; 0 for a choice that was never tried."""
        return self._returns.sum(axis=1) / np.clip(self._counts, 1, self._returns.shape[1])

    def counts(self) -> np.ndarray:
        """N, int64 [A]."""
        return self._counts.copy()

    def get_state(self) -> dict[str, np.ndarray]:
        """Copies of the arrays that decide the future choices, by name."""
        return {"counts": self._counts.copy(), "returns": self._returns.copy()}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the arrays of `get_state`."""
        self._counts = np.array(state["counts"], np.int64)
        self._returns = np.array(state["returns"], np.float64)
