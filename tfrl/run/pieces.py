"""Pieces: arrays of a checkpoint that are written once, and that later checkpoints refer to. No pickle.

    checkpoints/pieces/SHA256.npz

A file is named by the checksum of its content, so it never changes, and whoever refers to it can tell that it
is whole. It is written before the checkpoint that first needs it, and removed once none does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.run import files
from tfrl.run.arrays import decode, encode

FOLDER = "pieces"
KEY = "pieces"
"""The array of a worker's part that lists its pieces, as JSON."""
_BLOCK = 1 << 24  # bytes


class Piece:
    """Arrays that do not change any more.

    Args:
      about: JSON values that tell what they are; kept with every checkpoint that refers to them.
      arrays: what is to be saved; None where that is done.
    """

    def __init__(self, about: dict[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        self.about = about
        self.arrays = arrays
        self._path: Path | None = None

    @classmethod
    def saved(cls, about: dict[str, Any], path: Path) -> Piece:
        """The piece of a file."""
        piece = cls(about, None)
        piece._path = path
        return piece

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint has it."""
        return self._path is not None

    def load(self) -> dict[str, np.ndarray]:
        """The arrays of a saved one. Raises OSError."""
        return decode(self._path.read_bytes())

    def write(self, folder: Path) -> Path:
        """Writes it, unless it is saved, for good; its file. Raises OSError."""
        if self.is_saved:
            return self._path
        data = encode(self.arrays)
        path = folder / f"{hashlib.sha256(data).hexdigest()}.npz"
        if not path.exists():  # a run that goes the same way again writes the same pieces
            files.make_folder(folder)
            files.write(path, data)
        return path

    def keep(self, path: Path) -> None:
        """Remembers that a checkpoint has it, in this file: the arrays are no longer needed."""
        self._path, self.arrays = path, None


def entry(piece: Piece, path: Path) -> dict[str, Any]:
    """The entry of a piece in a checkpoint: name of its file, size in bytes, what it is about."""
    return {"file": path.name, "bytes": path.stat().st_size, "about": piece.about}


def fault(path: Path, size: int) -> str | None:
    """Returns the reason why a file is not the piece of that name and size, as the second half of a sentence.

    None if it is that piece. Raises OSError.
    """
    digest, found = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            found += len(block)
    if found != size:
        return f"the piece {path.name} has {found} bytes instead of {size}"
    return None if digest.hexdigest() == path.stem else f"the piece {path.name} does not match its checksum"


def sweep(folder: Path, needed: Iterable[str]) -> None:
    """Removes the files that no checkpoint needs, and what a killed process left. Raises OSError."""
    if not folder.is_dir():
        return
    needed = set(needed)
    for path in folder.iterdir():
        if path.name not in needed:
            path.unlink(missing_ok=True)
