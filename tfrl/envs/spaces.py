"""Gymnasium's spaces as the specs of `tfrl.envs.spec`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gymnasium import spaces

from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, NUMBERS, WORD_FLAGS, ArraySpec, Part
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete

_FEW_CHANNELS = 16  # because the width of an image is larger


def observation_spec(env_id: str, space: spaces.Space | None) -> ArraySpec:
    """The spec of an env's observations. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1 and np.issubdtype(space.dtype, np.number):
            return ArraySpec(space.shape, "float32")
        if len(space.shape) == 3 and space.dtype == np.uint8:
            return _image_spec(env_id, space)
    parts = list(_parts(env_id, space, ()))
    if not sum(part.size for part in parts):
        raise ValueError(f"{env_id} has empty observations: {_describe(space)} without any numbers")
    return ArraySpec.of_parts(parts)


def _parts(env_id: str, space: spaces.Space | None, keys: tuple[str, ...]) -> Iterator[Part]:
    """The arrays of a space, at these keys of a Dict or Tuple. Raises ValueError for other spaces."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _parts(env_id, inner, (*keys, str(key)))
    elif isinstance(space, spaces.Tuple):
        for place, inner in enumerate(space.spaces):
            yield from _parts(env_id, inner, (*keys, str(place)))
    elif isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3:
        image = _image_spec(env_id, space)
        yield Part(keys, IMAGE, image.shape, "uint8", image.channels_first)
    elif isinstance(space, spaces.Box) and space.dtype.kind in "biuf":
        yield Part(keys, NUMBERS, space.shape, space.dtype.name)
    elif isinstance(space, spaces.Discrete):
        yield Part(keys, CHOICES, (), space.dtype.name, counts=(int(space.n),), starts=(int(space.start),))
    elif isinstance(space, spaces.MultiDiscrete):
        counts, starts = (tuple(np.ravel(x).tolist()) for x in (space.nvec, space.start))
        yield Part(keys, CHOICES, space.shape, space.dtype.name, counts=counts, starts=starts)
    elif isinstance(space, spaces.MultiBinary):
        yield Part(keys, FLAGS, space.shape, space.dtype.name)
    elif isinstance(space, spaces.Space) and getattr(space.dtype, "kind", "") == "U":
        yield Part(keys, FLAGS, (WORD_FLAGS,), "str")
    else:
        where = f" at {'/'.join(keys)}" if keys else ""
        raise ValueError(
            f"{env_id} shows {_describe(space)}{where}, which is not supported: observations must be Box, "
            "Discrete, MultiBinary, MultiDiscrete or Text, or a Dict or Tuple of them"
        )


def _image_spec(env_id: str, space: spaces.Box) -> ArraySpec:
    """The spec of images. Raises ValueError if the shape does not show which axis has the channels."""
    first, middle, last = shape = space.shape
    channels_last = last < min(first, middle) or first == middle != last
    channels_first = first <= _FEW_CHANNELS < last and first < middle or middle == last != first
    if channels_last:  # comes first: a small board may have fewer channels than cells in a row
        return ArraySpec(shape, "uint8")
    if channels_first:
        return ArraySpec((middle, last, first), "uint8", channels_first=True)
    raise ValueError(
        f"{env_id} shows {_describe(space)}, and this shape does not tell whether the first or the last "
        "number counts the channels: give images [H, W, C] with fewer channels than rows and columns"
    )


def action_spec(env_id: str, space: spaces.Space | None) -> ActionSpec:
    """The spec of an env's actions. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        return MultiDiscrete(tuple(space.nvec.tolist()), tuple(np.asarray(space.start).tolist()))
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        return _box(env_id, space)
    raise ValueError(
        f"{env_id} takes {_describe(space)}, which is not supported: "
        "actions must be Discrete or MultiDiscrete, or a Box that is a vector of real numbers"
    )


def _box(env_id: str, space: spaces.Box) -> Box:
    """The spec of a vector of real numbers. Raises ValueError if it has no bounds."""
    if not space.is_bounded():
        raise ValueError(f"{env_id} takes actions without bounds; give its action_space finite bounds")
    low, high = space.low, space.high
    if (high / 2 - low / 2 > np.finfo(np.float32).max / 2).any():
        raise ValueError(
            f"{env_id} takes actions between {low.min():.2g} and {high.max():.2g}, which are hardly "
            "bounds; give its action_space smaller ones"
        )
    return Box(tuple(low.tolist()), tuple(high.tolist()), space.dtype.name)


def _describe(space: spaces.Space | None) -> str:
    kind = type(space).__name__
    return f"a {kind} of {space.dtype} {list(space.shape)}" if isinstance(space, spaces.Box) else f"a {kind}"
