"""Files with the arrays of many updates, mapped into memory, for the auxiliary phase of PPG.

The operating system caches what fits into memory. A file belongs to one update and one worker, and is written
once and atomically. A resumed run reads the files of any number of workers. The format is NumPy's, with a
checksum after the array, which `numpy.load` ignores.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from tfrl.cli.errors import TrainingError, UserError
from tfrl.run import files

_FILE = re.compile(r"(?P<kind>\w+)-(?P<update>\d{8})-envs-(?P<first>\d{7})-(?P<end>\d{7})\.npy")
_LEFT_BY_A_KILL = re.compile(rf"\.{_FILE.pattern}\.tmp\.npy")  # of unfinished files, see `files.replacing`
_CHECKSUM = 4  # bytes of the CRC-32 of all bytes before it


class PhaseFiles:
    """This worker's files of a phase.

    Args:
      folder: the folder of all workers' files; created with the first file.
      envs: the global indices of this worker's envs.
    """

    def __init__(self, folder: Path, envs: range) -> None:
        self._folder = folder
        self._envs = envs
        self._open: dict[tuple[str, int], list[np.ndarray]] = {}

    def add(self, kind: str, update: int, array: np.ndarray) -> None:
        """Writes [B, T, ...], a row for each of this worker's envs. Raises TrainingError on failure."""
        name = f"{kind}-{update:08d}-envs-{self._envs.start:07d}-{self._envs.stop:07d}.npy"
        self._open.pop((kind, update), None)
        try:
            files.make_folder(self._folder)
            with files.replacing(self._folder / name) as staged:
                # Contiguous, because NumPy writes a transposed array element by element.
                np.save(staged, np.ascontiguousarray(array), allow_pickle=False)
                with staged.open("ab") as file:
                    file.write(_checksum(np.memmap(staged, np.uint8, mode="r")))
        except OSError as error:
            reason = files.reason(error)
            raise TrainingError(f"{self._folder} cannot hold the rollouts of a phase: {reason}") from error

    def get(self, kind: str, update: int) -> list[np.ndarray]:
        """The rows of this worker's envs: arrays [B_i, T, ...] from the files that contain them, in order.

        The arrays are mapped into memory, and read at their use. Raises UserError if files are missing or
        damaged.
        """
        key = kind, update
        if key not in self._open:
            self._open[key] = self._load(kind, update)
        return self._open[key]

    def stretch(self, kind: str, update: int, begin: int, end: int) -> np.ndarray:
        """Time steps `begin` ... `end` - 1 of an update, [B, end - begin, ...], in memory."""
        return np.concatenate([array[:, begin:end] for array in self.get(kind, update)])

    def take(self, kind: str, updates: range, steps: np.ndarray) -> np.ndarray:
        """Rows [B, b, ...] at `steps` int [B, b], which count the time steps of all `updates` in order."""
        files_of = [self.get(kind, update) for update in updates]
        _, length, *shape = files_of[0][0].shape
        taken = np.empty((*steps.shape, *shape), files_of[0][0].dtype)
        which, t = np.divmod(steps, length)
        for k, arrays in enumerate(files_of):
            first = 0
            for array in arrays:
                rows = slice(first, first + len(array))
                env, place = np.nonzero(which[rows] == k)
                taken[rows][env, place] = array[env, t[rows][env, place]]
                first += len(array)
        return taken

    def keep(self, is_needed: Callable[[str, int], bool]) -> None:
        """Removes files that are not needed, by kind and update, and unfinished files.

        The chief calls it while no worker writes such files.
        """
        for path in list(self._folder.glob("*.npy")):
            found = _FILE.fullmatch(path.name) or _LEFT_BY_A_KILL.fullmatch(path.name)
            if found and not is_needed(found["kind"], int(found["update"])):
                path.unlink(missing_ok=True)

    def forget(self, updates: Collection[int]) -> None:
        """Closes the files of these updates."""
        self._open = {key: array for key, array in self._open.items() if key[1] not in updates}

    def _load(self, kind: str, update: int) -> list[np.ndarray]:
        wanted, arrays = self._envs.start, []
        while wanted < self._envs.stop:
            path, first, end = self._holding(kind, update, wanted)
            try:
                array = _read(path)
            except (OSError, ValueError, EOFError):
                raise UserError(
                    f"{path} is damaged, so the run cannot resume its phase; choose another --run-name."
                ) from None
            arrays.append(array[wanted - first : self._envs.stop - first])
            wanted = end
        return arrays

    def _holding(self, kind: str, update: int, env: int) -> tuple[Path, int, int]:
        """The file that has `env`, and the range of its envs."""
        for path in self._folder.glob(f"{kind}-{update:08d}-envs-*.npy"):
            found = _FILE.fullmatch(path.name)
            if found and int(found["first"]) <= env < int(found["end"]):
                return path, int(found["first"]), int(found["end"])
        raise UserError(
            f"{self._folder} lacks rollouts of update {update + 1}, which are needed to resume its phase; "
            "choose another --run-name."
        )


def _read(path: Path) -> np.ndarray:
    """The array of a file, mapped into memory. Raises OSError, ValueError or EOFError if it is damaged."""
    content = np.memmap(path, np.uint8, mode="r")
    if _checksum(content[:-_CHECKSUM]) != content[-_CHECKSUM:].tobytes():
        raise ValueError("the checksum does not match")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _checksum(content: np.ndarray) -> bytes:
    """The checksum of uint8 [n]."""
    return zlib.crc32(content.data).to_bytes(_CHECKSUM, "little")
