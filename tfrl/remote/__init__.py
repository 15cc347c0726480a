"""Experience gathered by other processes, on Ray: the only folder that imports it."""

import os

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""An environment variable that Ray reads when it is imported; 0: it listens on the loopback address alone."""


def reach_other_machines() -> None:
    """Lets this process talk to nodes of Ray elsewhere. Call it before importing what is in this folder."""
    os.environ.setdefault(LOOPBACK, "1")
