"""Weights by version, in a process of their own: who learns pushes them, who acts pulls the newest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfrl.experience.collector import Versioned
from tfrl.remote.cluster import end_with_parent, leave_stopping_to_driver, ray


class ParameterServer:
    """Holds the newest weights; `serve` makes one on Ray.

    One that has died is made anew by Ray, and holds nothing until the next `push`: calls wait for that.
    """

    def __init__(self) -> None:
        end_with_parent()
        leave_stopping_to_driver()
        self._newest: Versioned | None = None
        self._pushed = asyncio.Condition()

    async def push(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Takes weights, float32 by name; those that are older than what it has are forgotten at once."""
        async with self._pushed:
            if self._newest is None or version >= self._newest.version:
                self._newest = Versioned(version, weights)
            self._pushed.notify_all()

    async def wait_for(self, version: int) -> Versioned:
        """The newest weights, once they are of this version or a later one."""
        async with self._pushed:
            while self._newest is None or self._newest.version < version:
                await self._pushed.wait()
            return self._newest


def serve() -> Any:
    """Starts a `ParameterServer` on Ray, without a CPU of its own; the handle of it."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    options["max_concurrency"] = 4096
    return ray.remote(**options)(ParameterServer).remote()
