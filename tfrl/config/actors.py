"""The settings of actors: threads of this process, or processes of their own, step the training envs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from tfrl.cli.errors import UserError
from tfrl.cli.settings import Range


@dataclass(frozen=True)
class Actors:
    """The processes that step the envs. The result does not depend on them."""

    actors: int = 0
    """Processes on Ray that step the envs, each its share of them; 0: a thread of this process."""
    ray_address: str | None = None
    """The address of a Ray that runs, or auto; None: one is started for the run, and ended with it."""
    actor_timeout: float = 600.0
    """Seconds that an actor may take for a rollout before it is replaced."""


RANGES = {"actors": Range(0, 1024), "actor_timeout": Range(0, 1e7, above=True)}
MAY_CHANGE = frozenset(("actors", "ray_address", "actor_timeout"))
"""Names of the settings that a resumed run may change."""


def check_installed(config: Any) -> None:
    """Raise UserError if the run is to have actors, and Ray is not there."""
    if getattr(config, "actors", 0) and importlib.util.find_spec("ray") is None:
        raise UserError(
            f"--actors {config.actors} needs Ray, which is not installed: pip install -r requirements-ray.txt"
        )
