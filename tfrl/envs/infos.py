"""Numbers that envs report in their infos: `info["metrics"]`, and the keys of --log-info."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

METRICS = "metrics"
"""The key of an info with a dict of numbers by name."""

Sums = dict[str, np.ndarray]
"""Sums of the numbers of each of B envs, and how many there were, by name: float64 [2, B]."""


class InfoSums:
    """Sums of the numbers in the infos of B envs.

    Args:
      keys: the keys of an info that are numbers, beside those of `info["metrics"]`.
      num_envs: B.
    """

    def __init__(self, keys: Sequence[str], num_envs: int) -> None:
        self._keys, self._num_envs = tuple(keys), num_envs
        self._sums: Sums = {}

    def add(self, env: int, info: Mapping[str, Any]) -> None:
        """Adds the finite numbers of one step of an env, also flags; ignores other values."""
        given = info.get(METRICS)
        found = [*given.items()] if isinstance(given, Mapping) else []
        found += [(key, info[key]) for key in self._keys if key in info]
        for name, value in found:
            number = _number(value)
            if number is None:
                continue
            sums = self._sums.get(str(name))
            if sums is None:
                sums = self._sums[str(name)] = np.zeros((2, self._num_envs))
            sums[0, env] += number
            sums[1, env] += 1

    def take(self) -> Sums:
        """The sums since the last call."""
        taken, self._sums = self._sums, {}
        return taken


def _number(value: Any) -> float | None:
    """A finite number or a flag as a float; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_number = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    return float(value) if is_number and math.isfinite(value) else None


def joined(parts: Sequence[tuple[Sums, Sequence[int] | slice]], num_envs: int) -> Sums:
    """Joins the sums of parts of B envs, each with the places of its envs."""
    whole: Sums = {}
    for part, places in parts:
        for name, sums in part.items():
            whole.setdefault(name, np.zeros((2, num_envs)))[:, places] = sums
    return whole


def added(first: Sums, second: Sums) -> Sums:
    """The sums of two stretches of time of the same envs, the earlier one first."""
    both = {name: sums.copy() for name, sums in first.items()}
    for name, sums in second.items():
        both[name] = both[name] + sums if name in both else sums
    return both
