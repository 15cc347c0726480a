"""Observations: a plain array, or several named arrays and an action mask that are packed into one row.

Shape and dtype describe a single image or vector. All other observations (Dict, Tuple, Discrete, action masks
and so on) have `parts`, and buffers, replay and checkpoints store each observation as one row [n]. A row is
float32 if no part is an image, and otherwise consists of the bytes of all parts. Networks unpack the row
(`tfrl.networks.entrance`).
"""

from __future__ import annotations

import contextlib
import itertools
import keyword
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tfrl.envs.images import Layout

IMAGE, NUMBERS, CHOICES, FLAGS, MASK = KINDS = ("image", "numbers", "choices", "flags", "mask")
"""Kinds of parts, in the order of a row: uint8 images; real numbers; integers of a few values, which networks
take as one-hot vectors; numbers of 0 or 1; the action mask."""
ALONE, ACTION_MASK = "observation", "action_mask"
"""The names of a single array without keys, and of the mask."""
IN_INFO, IN_OBSERVATION, BY_METHOD = "info", "observation", "method"
"""The places of an action mask: `info["action_mask"]`, `observation["action_mask"]` (PettingZoo's form), or
`env.action_masks()` (sb3-contrib's form)."""
FORBIDDEN = np.float32(-1e9)
"""A network's output for a forbidden action (Huang and Ontañón 2022, arXiv:2006.14171): its probability and
gradient are exactly 0. It is finite, so that p log p is 0 for p = 0.
"""
WORD_FLAGS = 64
"""The number of flags of a text."""
_FEW = 4  # the most choices whose counts are shown in messages
_BYTES = {IMAGE: 1, NUMBERS: 4, CHOICES: 4, FLAGS: 1, MASK: 1}
_STORED = {NUMBERS: np.float32, CHOICES: np.int32}  # in rows of bytes; the other kinds are uint8


@dataclass(frozen=True)
class Part:
    """One of the arrays of an observation.

    Attributes:
      keys: its key in the env's Dict or its place in the Tuple, at each level; () for a single array.
      kind: one of `KINDS`.
      shape: the shape of the array; (H, W, C) for images.
      dtype: NumPy's name of the env's dtype; "str" for a text, which becomes `word_flags`.
      layout: how the env shows an image, if not as uint8 [H, W, C].
      counts: for choices, the number of values of each choice.
      starts: for choices, the smallest value of each choice in the env.
    """

    keys: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = None
    counts: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its keys joined by slashes, such as "arm/angles"; "observation" for a single array."""
        return "/".join(self.keys) or ALONE

    @property
    def size(self) -> int:
        """The number of values of the array."""
        return math.prod(self.shape)

    @property
    def env_shape(self) -> tuple[int, ...]:
        """The shape as the env shows it."""
        return self.shape if self.layout is None else self.layout.shape

    @property
    def env_dtype(self) -> str:
        """NumPy's name of the env's dtype; uint8 for a text, which becomes flags."""
        if self.layout is not None:
            return self.layout.dtype
        return "uint8" if self.dtype == "str" else self.dtype

    def __str__(self) -> str:
        if self.dtype == "str":
            return "text"
        if self.layout is not None:
            return f"{self.dtype} {list(self.shape)} {self.layout}"
        few = f" of {', '.join(map(str, self.counts))} values" if 0 < len(self.counts) <= _FEW else ""
        return f"{self.dtype} {list(self.env_shape)}{few}"

    def stored(self, shown: Any) -> np.ndarray:
        """The array [*shape] of an observation, in any dtype of its kind.

        Raises ValueError, with the end of a sentence, if the array does not fit the space.
        """
        if self.dtype == "str":
            if not isinstance(shown, str):
                raise ValueError(f"{_in_words(shown)} where its observation_space says a text")
            return word_flags(shown)
        try:
            array = np.asarray(shown)
        except ValueError:  # lists of different lengths
            raise ValueError(f"{_in_words(shown)} where its observation_space says an array") from None
        is_bytes = self.kind == IMAGE and self.env_dtype == "uint8"
        of_its_kind = array.dtype == np.uint8 if is_bytes else array.dtype.kind in "biuf"
        if array.shape != self.env_shape or not of_its_kind:
            wanted = "uint8" if is_bytes else "numbers"
            raise ValueError(
                f"{_in_words(shown)} where its observation_space says {wanted} {list(self.env_shape)}"
            )
        if self.layout is not None:
            return self.layout.stored(array)
        if self.kind == CHOICES:
            array = array.reshape(-1) - np.array(self.starts)
            if (array < 0).any() or (array >= np.array(self.counts)).any() or (array % 1 != 0).any():
                raise ValueError(f"{shown}, which its observation_space does not have")
            array = array.reshape(self.shape)
        elif self.kind == FLAGS and not np.isin(array, (0, 1)).all():
            raise ValueError("a number other than 0 and 1 where its observation_space says MultiBinary")
        return array


def word_flags(text: str) -> np.ndarray:
    """The words of a text as flags uint8 [64]; the checksum of a word chooses its flag.

    This is the hashing trick (Weinberger et al. 2009, arXiv:0902.2206) without signs. It needs no vocabulary,
    and two words may share a flag.
    """
    flags = np.zeros(WORD_FLAGS, np.uint8)
    for word in text.lower().split():
        flags[zlib.crc32(word.encode()) % WORD_FLAGS] = 1
    return flags


@dataclass(frozen=True)
class ArraySpec:
    """An array of one env, without the batch.

    Attributes:
      shape: for observations, (H, W, C) of images, (D,) of vectors, (n,) of rows with `parts`.
      dtype: NumPy's name: "uint8" of images, "float32" of vectors.
      layout: how the env shows a single image, if not as uint8 [H, W, C].
      parts: the arrays in a row, in order; empty for a single image or vector.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = None
    parts: tuple[Part, ...] = ()

    @classmethod
    def of_parts(cls, parts: Sequence[Part]) -> ArraySpec:
        """The spec of rows of these arrays, in the order of `KINDS`."""
        parts = tuple(sorted(parts, key=lambda part: KINDS.index(part.kind)))
        if any(part.kind == IMAGE for part in parts):
            return cls((sum(part.size * _BYTES[part.kind] for part in parts),), "uint8", parts=parts)
        return cls((sum(part.size for part in parts),), "float32", parts=parts)

    def with_mask(self, actions: int) -> ArraySpec:
        """The spec of rows of these observations and a mask with this many flags, `actions`."""
        return ArraySpec.of_parts([*self.arrays, Part((ACTION_MASK,), MASK, (actions,), "int8")])

    @cached_property
    def arrays(self) -> tuple[Part, ...]:
        """The arrays of an observation: `parts`, or the single image or vector."""
        kind = IMAGE if len(self.shape) == 3 else NUMBERS
        return self.parts or (Part((), kind, self.shape, self.dtype, self.layout),)

    @cached_property
    def identifiers(self) -> dict[Part, str]:
        """The name of each array as an input of networks and exports.

        "_" replaces all characters except letters and digits, and "of" precedes a "_". A number follows where
        that is a name of Python or of another array; TensorFlow does not tell "Q" from "q".
        """
        found: dict[Part, str] = {}
        taken = {"self", *map(str.lower, keyword.kwlist)}
        for part in self.arrays:
            plain = re.sub(r"\W", "_", part.name, flags=re.ASCII)
            plain = name = f"of{plain}" if plain.startswith("_") else plain
            for number in itertools.count(1):
                if name.lower() not in taken:
                    break
                name = f"{plain}_{number}"
            taken.add(name.lower())
            found[part] = name
        return found

    @property
    def env_shape(self) -> tuple[int, ...]:
        """The shape of a single image or vector as the env shows it."""
        return self.arrays[0].env_shape

    def __str__(self) -> str:
        if self.parts:
            return ", ".join(f"{part.name}: {part}" for part in self.parts)
        return f"{self.dtype} {list(self.shape)}" + (f" {self.layout}" if self.layout else "")

    # The inputs of networks

    def of_kind(self, kind: str) -> tuple[Part, ...]:
        """The arrays of a kind."""
        return tuple(part for part in self.arrays if part.kind == kind)

    @property
    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes (H, W, C) of all images."""
        return tuple(part.shape for part in self.of_kind(IMAGE))

    @property
    def num_numbers(self) -> int:
        """K, the number of real numbers of an observation, which running statistics normalise."""
        return sum(part.size for part in self.of_kind(NUMBERS))

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The numbers of values of all choices."""
        return tuple(itertools.chain.from_iterable(part.counts for part in self.of_kind(CHOICES)))

    @property
    def vector_size(self) -> int:
        """D, the size of the input vector of networks, without images and mask: K, one-hot vectors, flags."""
        return self.num_numbers + sum(self.choices) + sum(part.size for part in self.of_kind(FLAGS))

    @property
    def is_joined(self) -> bool:
        """True if networks take more than one image, or images and a vector."""
        return len(self.image_shapes) + (self.vector_size > 0) > 1

    @property
    def num_actions(self) -> int:
        """The number of flags of the mask; 0 without a mask."""
        return sum(part.size for part in self.of_kind(MASK))

    # Rows

    @cached_property
    def places(self) -> dict[Part, slice]:
        """The place of each part in a row."""
        found, begin = {}, 0
        for part in self.parts:
            end = begin + part.size * (_BYTES[part.kind] if self.dtype == "uint8" else 1)
            found[part] = slice(begin, end)
            begin = end
        return found

    @cached_property
    def kind_places(self) -> dict[str, slice]:
        """The place of all parts of a kind in a row; these parts are neighbours."""
        found, begin = {}, 0
        for kind in KINDS:
            places = [self.places[part] for part in self.of_kind(kind)]
            end = places[-1].stop if places else begin
            found[kind] = slice(begin, end)
            begin = end
        return found

    def store(self) -> Callable[..., np.ndarray]:
        """A function that makes an array [*shape] of an observation, and of its mask if the spec has one.

        It raises ValueError, with the end of a sentence, if the observation does not fit the space.
        """
        return Packer(self) if self.parts else self.arrays[0].stored

    def stored_type(self, kind: str) -> type[np.generic]:
        """The NumPy type of a kind in a row."""
        return np.float32 if self.dtype == "float32" else _STORED.get(kind, np.uint8)

    def of_rows(self, rows: np.ndarray, kind: str) -> np.ndarray:
        """All parts of a kind, [..., size], from rows [..., n]."""
        return rows[..., self.kind_places[kind]].view(self.stored_type(kind))

    def numbers(self, observations: np.ndarray) -> np.ndarray:
        """The real numbers float32 [..., K] of observations [..., *shape]."""
        return self.of_rows(observations, NUMBERS) if self.parts else observations

    def vectors(self, observations: np.ndarray) -> np.ndarray:
        """The vector that an mlp takes, float32 [..., D], of observations [..., *shape] without images."""
        if not self.parts:
            return observations
        leading, counts = observations.shape[:-1], self.choices
        found = [self.of_rows(observations, NUMBERS)]
        if counts:
            one_hot = np.zeros((*leading, sum(counts)), np.float32)
            offsets = np.cumsum((0, *counts[:-1]))
            at = self.of_rows(observations, CHOICES).astype(np.int64) + offsets
            np.put_along_axis(one_hot, at, np.float32(1), axis=-1)
            found.append(one_hot)
        return np.concatenate([*found, self.of_rows(observations, FLAGS)], axis=-1)

    def allowed(self, observations: np.ndarray) -> np.ndarray | None:
        """The mask, bool [..., A], of observations [..., *shape]; None without a mask."""
        return self.of_rows(observations, MASK) != 0 if self.num_actions else None


def batch_size(spec: ArraySpec, shown: Any) -> int | None:
    """The number of observations in a batch; None for a single observation.

    Raises ValueError, with the end of a sentence, if a part is missing or the parts have different numbers of
    rows.
    """
    parts = [part for part in spec.parts if part.kind != MASK]
    arrays = [_at(shown, part.keys) for part in parts]
    ranks = [0 if part.dtype == "str" else len(part.shape) for part in parts]
    given = [np.ndim(array) - rank for array, rank in zip(arrays, ranks, strict=True)]
    if not any(given):
        return None
    counts = {len(array) if extra == 1 else -1 for array, extra in zip(arrays, given, strict=True)}
    if len(counts) > 1 or -1 in counts:
        raise ValueError("arrays of different numbers of rows, or of other shapes than the env's")
    return counts.pop()


def flat_mask(given: Any) -> np.ndarray:
    """A mask as flags uint8 [..., A]; for MultiDiscrete it may be a tuple of arrays.

    Raises ValueError, with the end of a sentence, for parts of different lengths, and for other values than 0
    and 1. Such a mask may list the numbers of actions, or be added to logits.
    """
    try:
        flags = np.concatenate([np.asarray(x) for x in given], axis=-1) if isinstance(given, tuple) else given
        flags = np.asarray(flags)
    except ValueError:
        raise ValueError("parts of different lengths") from None
    if flags.dtype.kind not in "biuf" or not ((flags == 0) | (flags == 1)).all():
        raise ValueError("other numbers than 1 for allowed and 0 for forbidden actions")
    return flags.astype(np.uint8)


class Packer:
    """Packs an env's observations into rows of a spec with parts."""

    def __init__(self, spec: ArraySpec) -> None:
        self._row = np.zeros(spec.shape, spec.dtype)
        self._places: dict[Part, np.ndarray] = {}
        self._mask: np.ndarray | None = None
        for part in spec.parts:
            place = self._row[spec.places[part]].view(spec.stored_type(part.kind)).reshape(part.shape)
            if part.kind == MASK:
                self._mask = place
            else:
                self._places[part] = place

    def __call__(self, shown: Any, mask: np.ndarray | None = None, index: int | None = None) -> np.ndarray:
        """A new row [n] of an observation or of the one at `index` of a batch, with its mask if there is one.

        Raises ValueError, with the end of a sentence, if it does not fit the space.
        """
        for part, place in self._places.items():
            try:
                found = _at(shown, part.keys)
                with np.errstate(over="ignore"):
                    place[...] = part.stored(found if index is None else found[index])
                if part.kind == NUMBERS and not np.isfinite(place).all():
                    raise ValueError("a number that is not finite, or too large for float32")
            except ValueError as error:
                raise ValueError(f"{error}, in {part.name}" if part.keys else str(error)) from None
        if self._mask is not None:
            self._mask[...] = mask
        return self._row.copy()


def _at(shown: Any, keys: tuple[str, ...]) -> Any:
    """The value in a Dict or Tuple at these keys. Raises ValueError if it is missing."""
    for key in keys:
        if isinstance(shown, Mapping):
            if key not in shown:
                raise ValueError("nothing where its observation_space has an array")
            shown = shown[key]
        elif isinstance(shown, tuple | list) and key.isdecimal() and int(key) < len(shown):
            shown = shown[int(key)]
        else:
            raise ValueError(f"{_in_words(shown)} where its observation_space says a Dict or Tuple")
    return shown


def _in_words(shown: Any) -> str:
    if shown is None:
        return "None"
    if not isinstance(shown, str | Mapping | tuple):
        with contextlib.suppress(ValueError):
            array = np.asarray(shown)
            if array.dtype != object or array.ndim:
                return f"{array.dtype} {list(array.shape)}"
    return f"a value of type {type(shown).__name__}"
