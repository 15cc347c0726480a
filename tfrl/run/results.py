"""results.json: the results of a finished run. It needs no TensorFlow, so that reports can read it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.envs.registry import level_set_title
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
    """Writes results.json after the export is on disk; NaN becomes null. Raises OSError."""
    files.write(run / RESULTS_FILE, json.dumps(_finite(results), indent=2) + "\n")


def read(run: Path) -> dict[str, Any] | None:
    """The content of results.json, or None if it is missing or unreadable."""
    return read_json(run / RESULTS_FILE)


def table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header and rows of the last table of a run."""
    env = results["env"]
    found: dict[str, Mapping[str, Any]] = {}
    found["while training"] = {**results, "return": results["episode_return"], "episodes": "last 100"}
    for level_set, score in results["eval"].items():
        if isinstance(score, Mapping):
            title = level_set_title(env, level_set)
            found[title if title == "evaluation" else f"evaluation, {title}"] = score
    names = ["return", "episodes"]
    if any(_finite(score["normalized_return"]) is not None for score in found.values()):
        names.insert(1, "normalized_return")
    title = f"{results['algorithm']} on {env}, {results['env_steps']:,} env steps"
    header = [title, *("normalised" if name == "normalized_return" else name for name in names)]
    return header, [[title, *(_cell(score[name]) for name in names)] for title, score in found.items()]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
