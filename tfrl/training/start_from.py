"""--start-from RUN: a run that starts with the weights of another run."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.config import of_run
from tfrl.config.run import DECIDE_MLP, DECIDE_WEIGHTS, RLSettings
from tfrl.envs import registry
from tfrl.evaluation import policy
from tfrl.networks.weights import PREFIX
from tfrl.run.checkpoint import CheckpointStore

if TYPE_CHECKING:  # it imports TensorFlow
    from tfrl.run.session import Session


def check(config: RLSettings) -> None:
    """Raises UserError if a run cannot start from that of --start-from; needs no TensorFlow."""
    run, name = Path(config.start_from or ""), f"--start-from {config.start_from}"
    if run.exists() and run.resolve() == config.run_dir.resolve():
        raise UserError(f"{name} is this run itself; leave it out, or give the new run another --run-name.")
    if getattr(config, "torso_weights", None) is not None:
        raise UserError(f"{name} gives all weights, and --torso-weights those of the torso: leave one out.")
    there = of_run(run)
    if not policy.has_policy(run):
        raise UserError(f"{name} has no checkpoint, and no export.")
    _check_same_network(name, config, there)


def _check_same_network(name: str, config: RLSettings, there: RLSettings) -> None:
    """Raises UserError if the settings of that run show other weights or another optimizer."""
    if type(config).make_network is not type(there).make_network:
        raise UserError(
            f"{name} is a run of {there.algorithm}, and {config.algorithm} cannot start from its networks."
        )
    if registry.specs(config) != registry.specs(there):
        raise UserError(
            f"{name} belongs to another network: it was trained on {there.env}, whose observations or "
            f"actions differ from those of {config.env}."
        )
    names = [name for name in (*DECIDE_WEIGHTS, *DECIDE_MLP) if name not in config.ineffective]
    pairs = [(n, getattr(there, n, None), getattr(config, n, None)) for n in names]
    if differing := [f"{flag(n)} {old} there, {new} here" for n, old, new in pairs if old != new]:
        raise UserError(f"{name} has another network or optimizer: {'; '.join(differing)}.")


def read(config: RLSettings, session: Session) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the newest checkpoint of --start-from, or its export, equally on all workers. A collective.

    Returns the arrays for `Agent.begin_with`, and what results.json says about their source. An export gives
    only weights.

    Raises UserError if there are no weights, if all are damaged, or if the workers find different weights.
    """
    run, warn = Path(config.start_from or ""), session.console.warn
    found = CheckpointStore(run / "checkpoints", keep=1).load(warn)
    if found is not None:
        state, env_steps, update = found.learner, found.env_steps, found.update
    else:
        source = policy.find(run, "last", warn)
        state = {PREFIX + name: array for name, array in source.weights.items()}
        env_steps, update = source.env_steps, None
    if np.ptp(session.of_workers(_checksum(state))) != 0:
        raise UserError(
            f"the workers do not see the same weights in --start-from {config.start_from}; wait for the end "
            "of that run if it trains."
        )
    return state, {"run": config.start_from, "env_steps": env_steps, "update": update}


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """The CRC-32 of all arrays, in the order of their names."""
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).data, checksum)
    return checksum
