"""Runs a trainer, and each worker notes when it begins which phase: for the benchmarks of recovery.

FOLDER MODULE FLAGS...: worker N, or learner N, appends to FOLDER/worker-N a line "SECONDS PID UPDATE PHASE"
for each phase. The seconds are of the clock that all processes of a machine share; UPDATE counts the finished
ones.
"""

import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfrl.cli import endings
from tfrl.training import command
from tfrl.workers.watchdog import NoWatchdog, Watchdog


def main(arguments: Sequence[str]) -> int:
    """Trains by the command of a module, with the flags after it."""
    folder, module, *flags = arguments
    index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    notes = os.open(Path(folder) / f"worker-{index}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    lead = command.launch_workers

    def noting(beat: Callable[..., None]) -> Callable[..., None]:
        def note_and_beat(self: NoWatchdog, phase: str | None = None, update: int | None = None) -> None:
            if update is not None:
                os.write(notes, f"{time.monotonic():.6f} {os.getpid()} {update} {phase}\n".encode())
            beat(self, phase, update)

        return note_and_beat

    def lead_noting(config: Any, _: str, __: Sequence[str]) -> int:
        return lead(config, __spec__.name, arguments)

    for kind in (Watchdog, NoWatchdog):  # of several workers, and of one
        kind.beat = noting(kind.beat)
    command.launch_workers = lead_noting
    return importlib.import_module(module).main(flags)


if __name__ == "__main__":
    endings.run(main)
