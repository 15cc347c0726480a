"""Gymnasium's spaces as the specs of `tfrl.envs.spec`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gymnasium import spaces

from tfrl.envs.images import Layout, layout_of
from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, NUMBERS, WORD_FLAGS, ArraySpec, Part
from tfrl.envs.spec import ActionSpec, Box, Discrete, MultiDiscrete


def observation_spec(env_id: str, space: spaces.Space | None) -> ArraySpec:
    """The spec of an env's observations. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1 and space.shape[0] and np.issubdtype(space.dtype, np.number):
            return ArraySpec(space.shape, "float32")
        if (layout := _layout(env_id, space)) is not None:
            return ArraySpec(layout.image_shape, "uint8", None if layout.is_plain else layout)
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
    elif isinstance(space, spaces.Box) and (layout := _layout(env_id, space)) is not None:
        yield Part(keys, IMAGE, layout.image_shape, "uint8", None if layout.is_plain else layout)
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


def _layout(env_id: str, space: spaces.Box) -> Layout | None:
    """The layout of images; None for other arrays. Raises ValueError if the channels cannot be told."""
    found = layout_of(space.shape, space.dtype, space.low, space.high)
    if found is None and space.dtype == np.uint8 and len(space.shape) == 3:
        raise ValueError(
            f"{env_id} shows {_describe(space)}, and this shape does not tell whether the first or the last "
            "number counts the channels: give images [H, W, C] with fewer channels than rows and columns"
        )
    return found


def action_spec(env_id: str, space: spaces.Space | None) -> ActionSpec:
    """The spec of an env's actions. Raises ValueError if the space is not supported."""
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary) and space.shape:
        size = int(np.prod(space.shape))
        counts, starts = (2,) * size, (0,) * size
        if isinstance(space, spaces.MultiDiscrete):
            counts, starts = (tuple(np.ravel(x).tolist()) for x in (space.nvec, space.start))
        return MultiDiscrete(counts, starts, space.shape, space.dtype.name)
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return _box(env_id, space)
    advice = ""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        advice = "; a wrapper that flattens it to one of these helps"
    elif isinstance(space, spaces.Box) and space.shape and space.dtype.kind in "biu":
        advice = "; MultiDiscrete fits whole numbers"
    raise ValueError(
        f"{env_id} takes {_describe(space)}, which is not supported: actions must be Discrete, MultiDiscrete "
        f"or MultiBinary, or a Box of real numbers{advice}"
    )


def _box(env_id: str, space: spaces.Box) -> Box:
    """The spec of real numbers. Raises ValueError if they have no bounds."""
    if not space.is_bounded():
        raise ValueError(
            f"{env_id} takes actions without bounds; give its action_space finite bounds, without ClipAction"
        )
    low, high = space.low.ravel(), space.high.ravel()
    if (high / 2 - low / 2 > np.finfo(np.float32).max / 2).any():
        raise ValueError(
            f"{env_id} takes actions between {low.min():.2g} and {high.max():.2g}, which are hardly "
            "bounds; give its action_space smaller ones"
        )
    return Box(tuple(low.tolist()), tuple(high.tolist()), space.dtype.name, space.shape)


def _describe(space: spaces.Space | None) -> str:
    kind = type(space).__name__
    return f"a {kind} of {space.dtype} {list(space.shape)}" if isinstance(space, spaces.Box) else f"a {kind}"
