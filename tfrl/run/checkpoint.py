"""Checkpoints: save named arrays in one atomically committed folder, and read them bit for bit, without
pickle.

    checkpoints/update-00000040/
        learner.npz                  everything global, written by the chief
        worker-00000-of-00002.npz    the states of one worker's envs, one file a worker
        manifest.json                written last: format, update, env steps, topology, sizes and checksums
    checkpoints/shards/SHA256.npz    arrays that are written once and that several checkpoints refer to

A checkpoint is staged in `update-00000040.tmp/`, synced to the disk, verified there, and committed by one
rename. So whenever a process is killed, a folder without `.tmp` is a complete checkpoint. When an update is
saved again, the old folder steps aside as `update-00000040.replaced/`, which readers accept while nothing has
taken its place.

The name of a shard is the checksum of its content, so it never changes, and a reader can verify it. It is
written before the first checkpoint that needs it, and removed after the last one.
"""

import contextlib
import hashlib
import io
import itertools
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.errors import TrainingError, UserError
from tfrl.run import files

FORMAT = 6
LEARNER = "learner.npz"
MANIFEST = "manifest.json"
SHARDS = "shards"
"""The folder of shards, and the array of a worker's part that lists them."""
_STAGED = ".tmp"
_REPLACED = ".replaced"
_FOLDER = re.compile(rf"update-(\d{{8,}})({re.escape(_REPLACED)})?")
_BLOCK = 1 << 24  # bytes


class CheckpointError(TrainingError):
    """A checkpoint could not be saved; earlier checkpoints are unchanged."""


class FaultError(Exception):
    """A checkpoint cannot be written or read; the text is the reason, as the second half of a sentence."""


class CheckpointShard:
    """Arrays that do not change any more.

    Args:
      about: JSON values that describe the arrays; every checkpoint that refers to the shard has them.
      arrays: the arrays to save; None after they are saved.
      path: the file of a saved shard.
    """

    def __init__(
        self, about: dict[str, Any], arrays: Mapping[str, np.ndarray] | None, path: Path | None = None
    ) -> None:
        self.about = about
        self.arrays = arrays
        self._path = path

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint contains the shard."""
        return self._path is not None

    def load(self) -> dict[str, np.ndarray]:
        """The arrays, from the file if the shard is saved. Raises OSError."""
        return dict(self.arrays or {}) if self._path is None else decode(self._path.read_bytes())

    def write(self, folder: Path) -> Path:
        """Writes and syncs the shard unless it is saved; returns its file. Raises OSError."""
        if self._path is not None:
            return self._path
        data = encode(self.arrays or {})
        path = folder / f"{_sha256(data)}.npz"
        # A resumed run writes the same shards again, perhaps because a file of them is damaged.
        if not path.exists() or path.read_bytes() != data:
            files.make_folder(folder)
            files.write(path, data)
        return path

    def keep(self, path: Path) -> None:
        """Notes that a checkpoint contains the shard in this file, and drops the arrays."""
        self._path, self.arrays = path, None


@dataclass(frozen=True)
class State:
    """The arrays that a run must remember, by name, of three kinds.

    A worker's own state has one part, and its shards. A checkpoint has those of all workers, and may be
    restored by another number of workers.

    Attributes:
      learner: arrays that are equal on all workers.
      parts: the arrays of each worker's envs, in the workers' order.
      shards: arrays that are written once, for this and later checkpoints.
    """

    learner: dict[str, np.ndarray]
    parts: Sequence[dict[str, np.ndarray]]
    shards: Sequence[CheckpointShard] = ()


@dataclass(frozen=True, kw_only=True)
class SavedState(State):
    """The state of all workers as a checkpoint has it, and when it was saved."""

    update: int
    env_steps: int


class CheckpointStore:
    """Saves and loads the checkpoints of one run.

    Args:
        directory: the run's `checkpoints` folder, on a disk that all workers share.
        keep: how many of the newest checkpoints stay.
        worker, num_workers: this process; worker 0 is the chief, which commits and tidies up.
        agree: a barrier over all workers that is true if every worker passed true. `save` calls it equally
            often on every worker, whatever fails on any of them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        worker: int = 0,
        num_workers: int = 1,
        agree: Callable[[bool], bool] = lambda ok: ok,
    ) -> None:
        self._directory = directory
        self._shards = directory / SHARDS
        self._keep = keep
        self._worker = worker
        self._num_workers = num_workers
        self._agree = agree

    # Saving

    def save(self, update: int, state: State, *, env_steps: int) -> int:
        """Saves the states of all workers, then prunes. Call it on all workers, each with its own state.

        It writes the shards of this worker that no checkpoint has yet. It removes later checkpoints,
        because the run has resumed from an earlier one. If the disk is full, it removes the oldest
        checkpoints, one after another, while a newer valid one stays.

        Returns the number of checkpoints that were removed to make room. Raises CheckpointError on every
        worker, and removes the new files, if one worker could not save its part.
        """
        dropped = 0
        while True:
            done, failure = self._attempt(update, state, env_steps)
            if done:
                self._prune(update)
                return dropped
            own = [*state.parts, *(shard.arrays or {} for shard in state.shards if not shard.is_saved)]
            size = num_bytes(state.learner) + self._num_workers * sum(map(num_bytes, own))
            # Every worker takes part in both votes, so all try again or none does.
            for_room_alone = self._agree(failure is None or files.is_full(failure))
            if not (for_room_alone and self._agree(self._make_room(size))):
                break
            dropped += 1
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        reason = self._reason(failure, size)
        raise CheckpointError(f"The checkpoint of update {update} was not saved: {reason}.") from failure

    def _attempt(self, update: int, state: State, env_steps: int) -> tuple[bool, BaseException | None]:
        """Tries to save; True if every worker saved its part, and the reason why this worker could not.
        Leaves no partial files.
        """
        staged, final, is_chief = self.path(update, _STAGED), self.path(update), self._worker == 0
        written: list[tuple[CheckpointShard, Path]] = []

        def prepare() -> None:
            if is_chief:
                files.make_folder(self._directory)
                self._tidy()
                staged.mkdir()

        def write() -> None:
            if not staged.is_dir():
                raise FaultError(
                    f"worker {self._worker} does not see {staged}, and all workers must share one disk"
                )
            written.extend((shard, shard.write(self._shards)) for shard in state.shards)
            if is_chief:
                files.write_synced(staged / LEARNER, encode(state.learner))
            entries = [
                {"file": path.name, "bytes": path.stat().st_size, "about": shard.about}
                for shard, path in written
            ]
            listed = {SHARDS: pack_json(entries)} if entries else {}  # a worker lists its shards in its part
            own = _part_name(self._worker, self._num_workers)
            files.write_synced(staged / own, encode({**state.parts[0], **listed}))

        def commit() -> None:
            if not is_chief:
                return
            self._write_manifest(staged, update, env_steps)
            if final.exists():
                final.rename(self.path(update, _REPLACED))
            staged.rename(final)
            files.sync_folder(self._directory)

        for step in (prepare, write, commit):
            failure = None
            try:
                step()
            except (
                BaseException
            ) as error:  # after Ctrl-C, too: the others must not wait at the barrier for ever
                failure = error
            if not self._agree(failure is None):
                if is_chief:
                    with contextlib.suppress(OSError):
                        self._tidy()
                return False, failure
        for shard, path in written:
            shard.keep(path)
        return True, None

    def _write_manifest(self, staged: Path, update: int, env_steps: int) -> None:
        """Verifies what all workers have written, and writes the manifest."""
        entries, shards = {}, {}
        for name in _file_names(self._num_workers):
            data, arrays = _arrived(staged / name)
            entries[name] = {"bytes": len(data), "sha256": _sha256(data)}
            for each in _listed_shards(arrays):
                path = self._shards / each["file"]
                if not path.is_file() or path.stat().st_size != each["bytes"]:
                    raise FaultError(f"{path} did not arrive, and all workers must share one disk")
                shards[each["file"]] = each["bytes"]
        manifest = {
            "format": FORMAT,
            "update": update,
            "env_steps": env_steps,
            "topology": {"num_workers": self._num_workers},
            "files": entries,
            "shards": shards,
        }
        files.write_synced(staged / MANIFEST, _seal(manifest))
        files.sync_folder(staged)

    def _prune(self, update: int) -> None:
        """Removes the files that this checkpoint made superfluous; the next save retries after an error."""
        if self._worker != 0:
            return
        with contextlib.suppress(OSError):
            self._tidy()
            folders = self._folders()
            earlier = [other for other in folders if other <= update]
            if superfluous := set(folders) - set(earlier[-self._keep :]):
                self._drop(folders[other] for other in superfluous)

    def _make_room(self, size: int) -> bool:
        """Drops the oldest checkpoint if that may help and a newer one is whole: the chief's vote."""
        if self._worker != 0:
            return True
        try:
            folders = self._folders()
            newest = next((u for u in reversed(folders) if _is_whole(folders[u], u)), -1)
            older = [folder for update, folder in folders.items() if update < newest]
            gone = [path for folder in older for path in folder.iterdir()]
            needed = set(itertools.chain(*(_needed_shards(folders[u]) for u in folders if u >= newest)))
            if self._shards.is_dir():
                gone += [path for path in self._shards.iterdir() if path.name not in needed]
            freed = sum(path.stat().st_size for path in gone)
            if not older or size > shutil.disk_usage(self._directory).free + freed:  # it would not help
                return False
            self._drop(older[:1])
        except OSError:
            return False
        return True

    def _drop(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            # Renamed first: a half-deleted checkpoint must not look like one.
            folder.rename(folder.with_suffix(_STAGED))
        self._tidy()

    def _tidy(self) -> None:
        """Finishes or removes the incomplete work of a killed process, and removes unneeded shards."""
        for path in list(self._directory.iterdir()):
            if path.suffix == _REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (_STAGED, _REPLACED):
                shutil.rmtree(path, ignore_errors=True)
        if not self._shards.is_dir():
            return
        try:
            needed = set(itertools.chain(*map(_needed_shards, self._folders().values())))
        except OSError:  # the file server does not answer; the next save tries again
            return
        for path in self._shards.iterdir():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def _reason(self, failure: BaseException | None, size: int) -> str:
        if failure is None:
            return "another worker could not save its part; its output says why"
        if not isinstance(failure, OSError):
            return str(failure) or type(failure).__name__
        if files.is_full(failure):
            place = next(path for path in (self._directory, *self._directory.parents) if path.is_dir())
            free_mb, needed_mb = shutil.disk_usage(place).free / 1e6, size / 1e6
            return f"the disk of {place} is full ({free_mb:.1f} MB free, about {needed_mb:.1f} MB needed)"
        return f"cannot write {failure.filename or self._directory} ({files.reason(failure)})"

    # Loading

    def updates(self) -> list[int]:
        """The updates that have a complete checkpoint (not yet verified), oldest first."""
        return [update for update, folder in self._folders().items() if (folder / MANIFEST).is_file()]

    def env_steps(self) -> int:
        """The env steps of the newest complete checkpoint (not yet verified) whose manifest can be read."""
        for folder in reversed(self._folders().values()):
            with contextlib.suppress(OSError, FaultError):
                return _read_manifest(folder / MANIFEST)["env_steps"]
        return 0

    def load(
        self, on_skip: Callable[[str], None], update: int | None = None, *, verify_shards: bool = False
    ) -> SavedState | None:
        """Reads and verifies the newest valid checkpoint, or that of `update` alone.

        Reading is local to each worker: workers that must start from the same one compare what they found and
        load the oldest of them by its `update`.

        Args:
            on_skip: called with one sentence for each checkpoint that is damaged.
            update: the update of the wanted checkpoint, instead of the newest.
            verify_shards: also verify the shards, to resume from them. This may read gigabytes.

        Returns:
            The checkpoint, or None if none exists.

        Raises:
            UserError: there are checkpoints but none is valid, or none of `update`.
        """
        folders = self._folders()
        if update is not None:
            if update not in folders:
                there = ", ".join(map(str, folders)) or "none"
                raise UserError(
                    f"{self._directory} has no checkpoint of update {update}; its checkpoints: {there}."
                )
            folders = {update: folders[update]}
        if not folders:
            return None
        for candidate, folder in reversed(folders.items()):
            try:
                return _read_folder(folder, candidate, with_shards=verify_shards)
            except FaultError as fault:
                on_skip(f"The checkpoint {folder} is skipped: {fault}.")
        raise UserError(
            f"{self._directory} has no valid checkpoint{'' if update is None else f' of update {update}'}; "
            "restore the folder from a copy, or start a new run under another name."
        )

    def path(self, update: int, suffix: str = "") -> Path:
        """The folder of the checkpoint of an update; with a suffix, while it is staged or replaced."""
        return self._directory / f"update-{update:08d}{suffix}"

    def _folders(self) -> dict[int, Path]:
        """The folder of each update, oldest first; a replaced one only where its successor is not there."""
        found: dict[int, Path] = {}
        paths = self._directory.iterdir() if self._directory.is_dir() else ()
        for match in filter(None, (_FOLDER.fullmatch(path.name) for path in paths)):
            update, replaced = int(match[1]), match[2] is not None
            if not replaced or update not in found:
                found[update] = self._directory / match[0]
        return dict(sorted(found.items()))


# The files of one checkpoint


def _part_name(worker: int, num_workers: int) -> str:
    return f"worker-{worker:05d}-of-{num_workers:05d}.npz"


def _file_names(num_workers: int) -> list[str]:
    """The files that a manifest lists: the learner's, and all workers' parts."""
    return [LEARNER, *(_part_name(worker, num_workers) for worker in range(num_workers))]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _arrived(path: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    """The content of a staged file, and its arrays, whose checksums an .npz has. Raises FaultError."""
    try:
        data = path.read_bytes()
        return data, decode(data)
    except FileNotFoundError as error:
        raise FaultError(f"{path} did not arrive, and all workers must share one disk") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FaultError(f"{path} does not hold what was written to it") from error


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON with its own checksum, so that flipped bits are detected."""
    seal = _sha256(json.dumps(manifest, sort_keys=True).encode())
    return json.dumps({**manifest, "seal": seal}, indent=2, sort_keys=True).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
        intact = _seal({key: value for key, value in manifest.items() if key != "seal"}) == data
    except (ValueError, AttributeError):
        intact = False
    if not intact:
        raise FaultError(f"{path.name} is damaged")
    if manifest["format"] != FORMAT:
        raise FaultError(
            f"it has format {manifest['format']}, and this version of tfrl reads format {FORMAT}"
        )
    return manifest


def _read_folder(folder: Path, update: int, *, with_shards: bool) -> SavedState:
    """A verified checkpoint, with its shards or without. Raises FaultError."""
    try:
        manifest = _read_manifest(folder / MANIFEST)
        if manifest["update"] != update:
            raise FaultError(f"its manifest belongs to update {manifest['update']}")
        arrays = []
        for name in _file_names(manifest["topology"]["num_workers"]):
            data, entry = (folder / name).read_bytes(), manifest["files"][name]
            if len(data) != entry["bytes"]:
                raise FaultError(f"{name} has {len(data)} bytes instead of {entry['bytes']}")
            if _sha256(data) != entry["sha256"]:
                raise FaultError(f"{name} does not match its checksum")
            arrays.append(decode(data))
        learner, *parts = arrays
        shards = _find_shards(parts, folder.parent / SHARDS) if with_shards else []
    except FileNotFoundError as error:
        raise FaultError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise FaultError(f"{error.filename} cannot be read ({error.strerror})") from error
    return SavedState(learner, parts, shards, update=update, env_steps=manifest["env_steps"])


def _is_whole(folder: Path, update: int) -> bool:
    """True if all of a checkpoint is there and matches its checksums. Raises OSError."""
    try:
        _read_folder(folder, update, with_shards=True)
    except FaultError:
        return False
    return True


def _listed_shards(part: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The entries of a worker's shards in its part: name of the file, size in bytes, what it is about."""
    return unpack_json(part[SHARDS]) if SHARDS in part else []


def _needed_shards(folder: Path) -> Iterable[str]:
    """The files of a checkpoint's shards; none for a damaged checkpoint, which cannot be resumed.

    Raises OSError if a file cannot be read now, for example because the file server does not answer.
    """
    try:
        return _read_manifest(folder / MANIFEST)["shards"]
    except (FileNotFoundError, FaultError):
        return ()


def _find_shards(parts: Iterable[Mapping[str, np.ndarray]], folder: Path) -> list[CheckpointShard]:
    """The verified shards of all workers, each once. Raises FaultError and OSError."""
    entries = {each["file"]: each for part in parts for each in _listed_shards(part)}
    for name, entry in entries.items():
        digest, size = hashlib.sha256(), 0
        with (folder / name).open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
        if size != entry["bytes"]:
            raise FaultError(f"the shard {name} has {size} bytes instead of {entry['bytes']}")
        if digest.hexdigest() != Path(name).stem:
            raise FaultError(f"the shard {name} does not match its checksum")
    return [CheckpointShard(entry["about"], None, folder / name) for name, entry in entries.items()]


# Arrays as bytes, and JSON and byte strings as arrays


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


def with_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with the prefix added to their names."""
    return {prefix + name: array for name, array in arrays.items()}


def under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin with the prefix, without the prefix: the inverse of `with_prefix`."""
    return {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}


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
