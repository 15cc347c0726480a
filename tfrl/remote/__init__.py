"""Processes on Ray: actors, observers, learners and the trials of sweeps. Only this folder imports Ray."""

import os

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""An environment variable that Ray reads at its import; 0: it only listens on the loopback address."""


def reach_other_machines() -> None:
    """Lets this process talk to nodes on other machines. Call it before importing this folder's modules."""
    os.environ.setdefault(LOOPBACK, "1")
