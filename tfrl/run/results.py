"""results.json: what a finished run came to. TensorFlow-free, so that reports can read it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.run import files
from tfrl.run.folder import RESULTS_FILE, read_json


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """A fingerprint of names, shapes and bytes of float32 weights, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{weights[name].shape}".encode())
        digest.update(np.ascontiguousarray(weights[name], "<f4").tobytes())
    return digest.hexdigest()


def write(run: Path, results: Mapping[str, Any]) -> None:
    """Writes results.json, which vouches for the export: that is on the disk by now. What is not a number
    becomes null.

    Raises OSError.
    """
    files.write(run / RESULTS_FILE, json.dumps(_finite(results), indent=2) + "\n")


def read(run: Path) -> dict[str, Any] | None:
    """The content of results.json, or None if there is none that can be read."""
    return read_json(run / RESULTS_FILE)


def table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows for people."""
    header = [f"{results['env']}, {results['env_steps']:,} env steps", "return", "normalised", "episodes"]
    rows = [_row("while training", results, "last 100")]
    for level_set, score in results["eval"].items():
        if isinstance(score, Mapping):
            rows.append(_row(f"evaluation, {level_set}", score, str(score["episodes"])))
    return header, rows


def _row(name: str, score: Mapping[str, Any], episodes: str) -> list[str]:
    episode_return = score.get("return", score.get("episode_return"))
    cells = (episode_return, score["normalized_return"])
    return [name, *("-" if _finite(c) is None else f"{c:.2f}" for c in cells), episodes]


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
