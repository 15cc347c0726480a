"""Runs the trainer, and each worker notes when it begins which phase: for benchmarks/recovery.py.

FOLDER FLAGS...: worker N appends to FOLDER/worker-N a line "SECONDS PID UPDATE PHASE" for each phase. The
seconds are of the clock that all processes of a machine share; UPDATE counts the finished ones.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tfrl import ppo_procgen
from tfrl.cli import endings
from tfrl.cli.quiet import quiet_start


def main(arguments: Sequence[str]) -> int:
    """Trains with the flags after the folder."""
    with quiet_start():
        from tfrl.run.session import Session
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    notes = os.open(Path(arguments[0]) / f"worker-{index}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    begin = Session.phase

    def note_and_begin(self: Session, name: str) -> None:
        os.write(notes, f"{time.monotonic():.6f} {os.getpid()} {self.step} {name}\n".encode())
        begin(self, name)

    Session.phase = note_and_begin
    return ppo_procgen.main(arguments[1:])


if __name__ == "__main__":
    endings.run(main)
