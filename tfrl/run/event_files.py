"""TensorBoard's event files of a run: which are its own, and where one is cut when the run goes on.

They are written with TensorBoard's own protocol buffers rather than with `tf.summary`: no TensorFlow op runs
for it, a kill loses at most the record being written, and after a failed write (a full disk) the file is cut
back to its last whole record, where `tf.summary` leaves a torn one that hides everything after it.

A record is its length (8 bytes), a checksum of that (4), an `Event` and a checksum of that (4). An `Event`
begins with its time, and then, where it is not 0, its step. So much is read of each to find where to cut: the
videos that they show may be gigabytes.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tfrl.run import files

PATTERN = "events.out.tfevents.*"
"""Pattern of the names that TensorBoard takes for event files, whoever wrote them."""
_OWN = ".tfrl"
_LENGTH = struct.Struct("<Q")
_DATA = 12  # where a record's data begins
_FRAME = 16  # bytes of a record beside its data
_TIME = b"\x09"  # what announces the field, a double
_STEP = b"\x10"  # the same, a number in groups of 7 bits, the lowest first
_HEAD = _DATA + 1 + 8 + 1 + 10


def new_name() -> str:
    """The name of a file that no other process writes, after those of earlier seconds."""
    prefix = PATTERN.removesuffix("*")
    return f"{prefix}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}{_OWN}"


def of_run(directory: Path) -> list[Path]:
    """The event files in a run's folder that tfrl wrote: others are not to be touched."""
    return [path for path in directory.glob(PATTERN) if path.suffix == _OWN]


def total_bytes(directory: Path) -> int:
    """The size of the run's event files."""
    total = 0
    for path in of_run(directory):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def encode(**fields: Any) -> bytes:
    """One record: an Event of this moment with the given fields."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return record.getvalue()


def head() -> bytes:
    """The first record of a file."""
    return encode(file_version="brain.Event:2")


def trim(path: Path, last_step: int) -> None:
    """Cuts a file of this run after its last whole record of at most `last_step`; without any, the file goes.

    Steps only grow within a file. Raises OSError.
    """
    with path.open("r+b", buffering=0) as file:
        descriptor = file.fileno()
        size, records, end = 0, 0, os.fstat(descriptor).st_size
        while begin := os.pread(descriptor, _HEAD, size):
            length = _LENGTH.unpack(begin[:8])[0] if len(begin) > _DATA else 0
            if not 0 < length <= end - size - _FRAME or _step(begin[_DATA:]) > last_step:
                break
            size, records = size + length + _FRAME, records + 1
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    if records <= 1:  # the first one shows nothing
        path.unlink()
        files.sync_folder(path.parent)


def _step(event: bytes) -> int:
    """The step of an Event, of which at least the beginning is given; 0 where it has none."""
    if event[:1] != _TIME or event[9:10] != _STEP:
        return 0
    step = 0
    for place, group in enumerate(event[10:20]):
        step |= (group & 0x7F) << 7 * place
        if group < 0x80:
            break
    return step
