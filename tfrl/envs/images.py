"""Images as envs show them, and as networks take them: uint8 [H, W, C] from 0 to 255.

Envs also show channels first, grey images without channels, stacks of frames, and numbers from 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_FEW = 16
"""The most channels in front of an image, because an image is wider, and the most frames of a stack."""
_SMALLEST = 16
"""The fewest rows and columns of an image whose dtype or number of axes does not show that it is one."""
_ROUNDING = 1e-4
"""Numbers may be outside their bounds by this share of the largest one."""


@dataclass(frozen=True)
class Layout:
    """The form in which an env shows an image.

    Attributes:
      axes: a letter for each axis of the env's array: N stacked frames, H rows, W columns, C channels.
      shape: the shape of the env's array.
      dtype: NumPy's name of the env's dtype.
      high: the largest number; the smallest one is 0.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: str
    high: float

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The env's axes in the order H, W, N, C; an image's channels are those of all frames."""
        return tuple(self.axes.index(axis) for axis in "HWNC" if axis in self.axes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of the network's image."""
        rows, columns, *channels = (self.shape[axis] for axis in self.order)
        return rows, columns, math.prod(channels)

    @property
    def is_plain(self) -> bool:
        """True if the env shows images as networks take them."""
        return self.axes == "HWC" and self.dtype == "uint8" and self.high == 255

    def stored(self, shown: np.ndarray) -> np.ndarray:
        """The network's images uint8 [..., H, W, C] of arrays [..., *shape] of the env.

        Raises ValueError, with the end of a sentence, if numbers are not within 0 and `high`.
        """
        before = shown.ndim - len(self.shape)
        images = shown.transpose(*range(before), *(before + axis for axis in self.order))
        images = images.reshape(*shown.shape[:before], *self.image_shape)
        if self.dtype == "uint8" and self.high == 255:
            return images
        low, high = images.min(), images.max()
        if not (low >= -_ROUNDING * self.high and high <= self.high * (1 + _ROUNDING)):
            raise ValueError(
                f"numbers from {low:g} to {high:g} where its observation_space says 0 to {self.high:g}"
            )
        scaled = np.rint(images.astype(np.float32) * np.float32(255 / self.high))
        return np.clip(scaled, 0, 255).astype(np.uint8)

    def __str__(self) -> str:
        text = f"from {self.dtype} {list(self.shape)}"
        if "N" in self.axes:
            text += ", the frames as channels"
        if self.high != 255 or self.dtype != "uint8":
            text += f", 0 to {self.high:g} in 256 levels"
        return text


def layout_of(shape: tuple[int, ...], dtype: np.dtype, low: np.ndarray, high: np.ndarray) -> Layout | None:
    """The layout of an env's images by the shape, dtype and bounds of a Box; None if it has no images."""
    most = _largest(dtype, low, high)
    if most is None:
        return None
    axes = _axes(shape, is_bytes=dtype == np.uint8, whole_range=most == 255)
    return None if axes is None else Layout(axes, shape, dtype.name, most)


def _largest(dtype: np.dtype, low: np.ndarray, high: np.ndarray) -> float | None:
    """The largest number of images with these bounds; None if they are not those of images."""
    uniform = low.size and (low == 0).all() and (high == high.flat[0]).all()
    most = float(high.flat[0]) if uniform else math.inf
    if dtype == np.uint8:
        return most if 1 <= most <= 255 else 255.0
    if most in ((1.0, 255.0) if dtype.kind == "f" else (255.0,)):
        return most
    return None


def _axes(shape: tuple[int, ...], *, is_bytes: bool, whole_range: bool) -> str | None:
    """The axes of an image; None if the shape does not tell them.

    Three axes of bytes are images of any size. Others are images only if they are large enough, because they
    could be boards or tables.
    """
    if len(shape) == 2:
        found = "HW" if is_bytes and whole_range else None  # others are rather tables
    elif len(shape) == 3:
        found = _color_axes(shape)
        if is_bytes:
            return found
    elif len(shape) == 4:
        frames_first = _color_axes(shape[1:]) if shape[0] <= _FEW else None
        rows, columns, *rest = shape
        frames_last = max(rest) < min(rows, columns) and max(rest) <= _FEW
        found = f"N{frames_first}" if frames_first else "HWCN" if frames_last else None
        if is_bytes:
            return found
    else:
        return None
    if found is None or min(shape[found.index("H")], shape[found.index("W")]) < _SMALLEST:
        return None
    return found


def _color_axes(shape: tuple[int, ...]) -> str | None:
    """HWC or CHW; None if the shape of three axes tells neither, or both."""
    first, middle, last = shape
    if last < min(first, middle) or first == middle != last:
        return "HWC"  # comes first: a small board may have fewer channels than cells in a row
    if first <= _FEW < last and first < middle or middle == last != first:
        return "CHW"
    return None
