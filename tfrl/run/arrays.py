"""Named arrays as bytes, and JSON and byte strings as arrays. NumPy only, no pickle."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The arrays as an uncompressed .npz; unlike `np.savez` it never pickles and takes any name.

    Raises:
        ValueError: .npz cannot hold an array's type.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, value in arrays.items():
            array = np.asarray(value)
            # Objects, and bfloat16, which .npy would store as raw bytes.
            if array.dtype.kind not in "?biufcSU":
                raise ValueError(f"the array {name} has the type {array.dtype}, which .npz cannot hold")
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()


def decode(data: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz by name."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def num_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """The size of the arrays in memory, in bytes."""
    return sum(np.asarray(array).nbytes for array in arrays.values())


def pack_json(value: Any) -> np.ndarray:
    """A JSON value as an array, uint8 [n]."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def unpack_json(array: np.ndarray) -> Any:
    """The value that `pack_json` packed."""
    return json.loads(array.tobytes())


def pack_bytes(items: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Byte strings as two arrays: all of them in a row, uint8 [n], and their lengths, int64 [len(items)]."""
    return np.frombuffer(b"".join(items), np.uint8), np.array([len(item) for item in items], np.int64)


def unpack_bytes(flat: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    """The byte strings that `pack_bytes` packed."""
    data, ends = flat.tobytes(), np.cumsum(lengths)
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]
