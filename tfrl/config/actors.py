"""Where the training envs are stepped: by threads of this process, or by processes of their own."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from tfrl.cli.errors import UserError
from tfrl.cli.settings import Range


@dataclass(frozen=True)
class Actors:
    """Who steps the envs. The result is the same."""

    actors: int = 0
    """Processes on Ray that step the envs, each its share of them; 0: a thread of this process."""
    ray_address: str | None = None
    """The address of a Ray that runs, or auto; None: one is started for the run, and ended with it."""
    actor_timeout: float = 600.0
    """Seconds that an actor may take for a rollout before it is replaced."""


RANGES = {"actors": Range(0, 1024), "actor_timeout": Range(0, 1e7, above=True)}
MAY_CHANGE = frozenset(("actors", "ray_address", "actor_timeout"))
"""What a run may go on with otherwise than it began."""


def check_installed(config: Any) -> None:
    """Raise UserError if the run is to have actors, and Ray is not there."""
    if getattr(config, "actors", 0) and importlib.util.find_spec("ray") is None:
        raise UserError(
            f"--actors {config.actors} needs Ray, which is not installed: pip install -r requirements-ray.txt"
        )
