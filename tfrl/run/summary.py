"""Rows of the table that any trainer prints before it trains."""

from __future__ import annotations

import shlex

from tfrl.cli.settings import Settings
from tfrl.workers.strategy import Runtime


def network(name: str, width: int, num_parameters: int) -> str:
    """The network, in words: its name, width and size."""
    return f"{name}, {f'width {width}, ' if width != 1 else ''}{num_parameters:,} parameters"


def hardware(runtime: Runtime) -> dict[str, str]:
    """Rows that say where the trainer computes."""
    return {
        "computes on": f"{runtime.device}, {runtime.precision}",
        "strategy": f"{type(runtime.strategy).__name__}, {runtime.num_workers} worker(s), "
        f"{runtime.replicas} replica(s) in all",
    }


def folder(config: Settings) -> dict[str, str]:
    """Rows that say where the trainer writes."""
    return {"run": str(config.run_dir), "curves": tensorboard(config)}


def tensorboard(config: Settings) -> str:
    """The command that shows any trainer's curves, as a shell takes it."""
    return shlex.join(["tensorboard", "--logdir", config.logdir])
