"""The files of one checkpoint: how they are named, written, sealed and read back. NumPy only, no pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.run import files, pieces
from tfrl.run.arrays import decode, encode, pack_json, unpack_json
from tfrl.run.pieces import Piece

FORMAT = 1
LEARNER = "learner.npz"
MANIFEST = "manifest.json"


class FaultError(Exception):
    """A checkpoint cannot be written or read; the text is the reason, as the second half of a sentence."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: the arrays as they were saved, `parts` in the workers' order.

    `pieces` are those of all workers.
    """

    update: int
    env_steps: int
    learner: dict[str, np.ndarray]
    parts: list[dict[str, np.ndarray]]
    pieces: list[Piece]


def with_pieces(
    part: Mapping[str, np.ndarray], written: Iterable[tuple[Piece, Path]]
) -> Mapping[str, np.ndarray]:
    """A worker's part, and what it refers to: its pieces in their files."""
    entries = [pieces.entry(piece, path) for piece, path in written]
    return {**part, pieces.KEY: pack_json(entries)} if entries else part


def pieces_of(part: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The entries of a worker's pieces in its part: name of the file, size in bytes, what it is about."""
    return unpack_json(part[pieces.KEY]) if pieces.KEY in part else []


def needed_pieces(folder: Path) -> Iterable[str]:
    """The files of a checkpoint's pieces. A damaged checkpoint needs none: it cannot be gone on from.

    Raises OSError where that cannot be told now: a file server that is away comes back.
    """
    try:
        return _read_manifest(folder / MANIFEST).get("pieces", {})
    except (FileNotFoundError, FaultError):
        return ()


def saved_steps(folder: Path) -> int:
    """The env steps of a checkpoint; 0 where it is damaged."""
    try:
        return _read_manifest(folder / MANIFEST)["env_steps"]
    except (OSError, FaultError):
        return 0


def part_name(worker: int, num_workers: int) -> str:
    """The file of one worker's part."""
    return f"worker-{worker:05d}-of-{num_workers:05d}.npz"


def file_names(num_workers: int) -> list[str]:
    """The files that a manifest lists: the learner's, and all workers' parts."""
    return [LEARNER, *(part_name(worker, num_workers) for worker in range(num_workers))]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays and, for the chief to check that all of it arrives, their checksum beside them."""
    data = encode(arrays)
    files.write_synced(path, data)
    files.write_synced(_checksum_path(path), _sha256(data).encode())


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def check_in(path: Path) -> dict[str, Any]:
    """Verifies a staged file against its writer's checksum and returns its entry in the manifest."""
    try:
        data, expected = path.read_bytes(), _checksum_path(path).read_text()
    except FileNotFoundError as error:
        raise FaultError(f"{path} did not arrive, and all workers must share one disk") from error
    if _sha256(data) != expected:
        raise FaultError(f"{path} does not hold what was written to it")
    _checksum_path(path).unlink()
    return {"bytes": len(data), "sha256": expected}


def seal(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON with a checksum of its own, so that no flipped bit in it goes unnoticed."""
    seal = _sha256(json.dumps(manifest, sort_keys=True).encode())
    return json.dumps({**manifest, "seal": seal}, indent=2, sort_keys=True).encode()


def is_whole(folder: Path, update: int) -> bool:
    """True if all of a checkpoint is there and matches its checksums. Raises OSError."""
    try:
        read_folder(folder, update, folder.parent / pieces.FOLDER)
    except FaultError:
        return False
    return True


def folder_bytes(folder: Path) -> int:
    """The size of a checkpoint's own files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def read_folder(folder: Path, update: int, pieces_folder: Path | None) -> Checkpoint:
    """A verified checkpoint; its pieces are left out where their folder is None. Raises FaultError."""
    try:
        manifest = _read_manifest(folder / MANIFEST)
        if manifest["update"] != update:
            raise FaultError(f"its manifest is of update {manifest['update']}")
        names = file_names(manifest["topology"]["num_workers"])
        learner, *parts = (_read_arrays(folder / name, manifest["files"][name]) for name in names)
        found = [] if pieces_folder is None else _find_pieces(parts, pieces_folder)
    except FileNotFoundError as error:
        raise FaultError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise FaultError(f"{error.filename} cannot be read ({error.strerror})") from error
    return Checkpoint(update, manifest["env_steps"], learner, parts, found)


def _find_pieces(parts: Iterable[Mapping[str, np.ndarray]], folder: Path) -> list[Piece]:
    """The verified pieces of all workers, each once."""
    entries = {each["file"]: each for part in parts for each in pieces_of(part)}
    for each in entries.values():
        reason = pieces.fault(folder / each["file"], each["bytes"])
        if reason is not None:
            raise FaultError(reason)
    return [Piece.saved(each["about"], folder / name) for name, each in entries.items()]


def _read_manifest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        intact = seal({key: value for key, value in manifest.items() if key != "seal"}) == data
    except (ValueError, AttributeError):
        intact = False
    if not intact:
        raise FaultError(f"{path.name} is damaged")
    if manifest["format"] != FORMAT:
        raise FaultError(
            f"it has format {manifest['format']}, and this version of tfrl reads format {FORMAT}"
        )
    return manifest


def _read_arrays(path: Path, entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    if len(data) != entry["bytes"]:
        raise FaultError(f"{path.name} has {len(data)} bytes instead of {entry['bytes']}")
    if _sha256(data) != entry["sha256"]:
        raise FaultError(f"{path.name} does not match its checksum")
    return decode(data)
