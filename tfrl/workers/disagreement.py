"""Differences between workers, in words, from what each says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfrl.workers.channel import plain
from tfrl.workers.tf_config import TFConfig


def differences(config: TFConfig, fingerprints: Mapping[int, Mapping[str, str]]) -> list[str]:
    """The keys in which workers differ, each with its values and the workers that have them."""
    keys = sorted({key for fingerprint in fingerprints.values() for key in fingerprint})
    differing = []
    for key in keys:
        workers_of: dict[str, list[int]] = {}
        for worker in sorted(fingerprints):
            workers_of.setdefault(fingerprints[worker].get(key, "missing"), []).append(worker)
        if len(workers_of) > 1:
            values = (
                f"{plain(value, 1000)} on {_named(config, workers)}" for value, workers in workers_of.items()
            )
            differing.append(f"{plain(key)} is {' and '.join(values)}")
    return differing


def sentence(differing: Sequence[str]) -> str:
    """The sentence for the user, from `differences`."""
    return f"the workers differ: {listed(differing, '; ')}; start all of them with the same settings and code"


def listed(items: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """The first few of the items, and how many there are besides."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])


def _named(config: TFConfig, workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return config.name(workers[0])
    return f"workers {listed([str(worker) for worker in workers])}"
