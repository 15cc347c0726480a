"""The processes of `--learners N`: workers of one run, here or on Ray, started and watched by the command."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cluster import launch
from cluster.places import Place, local_places
from tfrl import remote
from tfrl.config.actors import LEARNER
from tfrl.config.run import RLSettings

_RESTARTS = 3  # in a row without a new checkpoint
_RESTART_WAIT = 5.0  # seconds before the first of them
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL after a failure


def lead(config: RLSettings, module: str, arguments: Sequence[str]) -> int:
    """Trains with --learners, each the same command as a worker of TF_CONFIG; the exit code.

    They are the workers that `cluster.launch` would start, so all that holds of those holds of them. Nothing
    here imports TensorFlow.

    Args:
      config: checked settings.
      module: of the command, tfrl.impala say.
      arguments: of the command line.
    """
    places = _Here(config) if config.ray_address is None else _on_nodes(config)
    with contextlib.closing(places):
        return launch.launch(
            places.find,
            [sys.executable, "-m", module, *arguments],
            max_restarts=_RESTARTS,
            restart_wait=_RESTART_WAIT,
            grace=_GRACE,
            called="learner",
        )


class _Here:
    """Places on this machine, beside a Ray of the run's own where it has actors."""

    def __init__(self, config: RLSettings) -> None:
        self._config = config
        self._cluster = None

    def find(self, told: Callable[[], bool], tell: Callable[[str], None]) -> list[Place]:
        """The learners' places.

        Raises UserError for too few GPUs, and TrainingError if Ray could not be started.
        """
        config, address = self._config, ""
        if config.actors:
            from tfrl.remote.cluster import Cluster, store_bytes  # which imports Ray, and may not be there

            if self._cluster is not None and not self._cluster.is_alive():
                self.close()
            if self._cluster is None:
                self._cluster = Cluster(
                    None, {"--actors": config.actors}, store_bytes(config, config.num_envs)
                )
            address = self._cluster.address
        places = local_places(config.learners, None)
        marked = ({**place.environment, LEARNER: address} for place in places)
        return [
            dataclasses.replace(place, environment=environment)
            for place, environment in zip(places, marked, strict=True)
        ]

    def close(self) -> None:
        """Ends Ray."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _on_nodes(config: RLSettings) -> Any:
    remote.reach_other_machines()
    from tfrl.remote.learners import Nodes  # which imports Ray, and may not be there

    return Nodes(config)
