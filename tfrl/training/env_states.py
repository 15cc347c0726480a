"""The envs of all workers in a checkpoint, and back, on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.run.arrays import pack_bytes, unpack_bytes
from tfrl.run.session import Session


class Envs(Protocol):
    """A worker's slice of the global envs, a `Collector` say."""

    exact_state: bool

    def get_state(self) -> tuple[list[int], list[bytes], np.ndarray, np.ndarray]:
        """Global env indices and, for each, the env's state, observation and `first` flag."""

    def set_state(self, states: dict[int, bytes]) -> None:
        """Continues from states by global env index; it may hold more envs than this worker's."""


def pack(envs: Envs) -> dict[str, np.ndarray]:
    """This worker's envs as arrays."""
    indices, states, observations, first = envs.get_state()
    data, lengths = pack_bytes(states)
    part = {"indices": np.array(indices), "states": data, "lengths": lengths}
    return part | {"observations": observations, "first": first}


def restore(
    envs: Envs, parts: Sequence[Mapping[str, np.ndarray]], config: Any, session: Session
) -> np.ndarray | None:
    """Continues from what `pack` gave on all workers, of which there may have been more or fewer.

    Envs that cannot go on exactly begin new episodes, and the chief says so. Raises UserError on all workers
    if other envs then show something else than they did.

    Returns:
      bool [N] of all envs, the same on all workers: those that stand at the beginning of an episode. None
      where all go on exactly.
    """
    states: dict[int, bytes] = {}
    for part in parts:
        packed = unpack_bytes(part["states"], part["lengths"])
        states |= dict(zip(part["indices"].tolist(), packed, strict=True))
    envs.set_state(states)
    if session.runtime.any_worker(not envs.exact_state):
        if session.runtime.is_chief:
            session.console.warn(f"Envs of {config.env} cannot go on exactly: they begin new episodes.")
        indices, _, _, first = envs.get_state()
        mine = first[np.argsort(indices)].astype(np.float32)
        return session.runtime.gather_envs(mine).astype(bool)
    if not session.runtime.all_agree(_shows(envs, parts)):
        raise UserError(
            f"the envs of {config.run_dir} do not show what they did when its checkpoint was "
            f"saved, so {config.env} is another build here; go on where the run began, or choose "
            "another --run-name."
        )
    return None


def shown(parts: Sequence[Mapping[str, np.ndarray]], envs: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Observations [B, *shape] and `first` flags [B] that some global envs had when `pack` gave `parts`."""
    saved = {i: (part, k) for part in parts for k, i in enumerate(part["indices"].tolist())}
    found = [saved[i] for i in envs]
    return tuple(np.stack([part[name][k] for part, k in found]) for name in ("observations", "first"))


def _shows(envs: Envs, parts: Sequence[Mapping[str, np.ndarray]]) -> bool:
    """Whether this worker's envs show what they showed when `pack` gave `parts`."""
    indices, _, *found = envs.get_state()
    return all(map(np.array_equal, found, shown(parts, indices)))
