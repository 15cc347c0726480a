"""Checkpoints: named arrays in, one committed folder out, and back bit for bit. NumPy only, no pickle.

    checkpoints/update-00000040/
        learner.npz                  everything global, written by the chief
        worker-00000-of-00002.npz    the states of one worker's envs, one file a worker
        manifest.json                written last: format, update, env steps, topology, sizes and checksums
    checkpoints/pieces/              what is written once and that several checkpoints need (tfrl.run.pieces)

A checkpoint is staged in `update-00000040.tmp/`, synced to the disk, verified there, and committed by one
rename. So whenever a process is killed, a folder without `.tmp` is a complete checkpoint. When an update is
saved again, the old folder steps aside as `update-00000040.replaced/`, which readers accept while nothing has
taken its place.
"""

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tfrl.cli.errors import TrainingError, UserError
from tfrl.run import files, pieces
from tfrl.run.arrays import decode, num_bytes
from tfrl.run.checkpoint_files import (
    FORMAT,
    LEARNER,
    MANIFEST,
    Checkpoint,
    FaultError,
    check_in,
    file_names,
    folder_bytes,
    is_whole,
    needed_pieces,
    part_name,
    pieces_of,
    read_folder,
    saved_steps,
    seal,
    with_pieces,
    write_arrays,
)
from tfrl.run.pieces import Piece

_STAGED = ".tmp"
_REPLACED = ".replaced"
_FOLDER = re.compile(rf"update-(\d{{8,}})({re.escape(_REPLACED)})?")


class CheckpointError(TrainingError):
    """A checkpoint could not be saved: one sentence. The earlier ones are as they were."""


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
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._directory = directory
        self._pieces = directory / pieces.FOLDER
        self._keep = keep
        self._worker = worker
        self._num_workers = num_workers
        self._agree = agree

    def save(
        self,
        update: int,
        *,
        learner: Mapping[str, np.ndarray],
        worker_part: Mapping[str, np.ndarray],
        env_steps: int,
        worker_pieces: Sequence[Piece] = (),
    ) -> int:
        """Saves the chief's `learner` and every worker's `worker_part`, then prunes. Call it on all workers.

        Of `worker_pieces`, this worker's, those that no checkpoint has yet are written.

        Later checkpoints are removed too: the run left them behind when it resumed from an earlier one.
        On a full disk the oldest make room, one after another, as long as a newer one that is whole stays.

        Returns:
            How many had to make room.

        Raises:
            CheckpointError: on every worker if any could not do its share; what was written of it is removed.
        """
        dropped = 0
        new = sum(num_bytes(piece.arrays) for piece in worker_pieces if not piece.is_saved)
        size = num_bytes(learner) + self._num_workers * (num_bytes(worker_part) + new)
        while True:
            done, failure = self._attempt(update, learner, worker_part, worker_pieces, env_steps)
            if done:
                self._prune(update)
                return dropped
            # Every worker takes part in both votes, so all try again or none does.
            for_room_alone = self._agree(failure is None or files.is_full(failure))
            if not (for_room_alone and self._agree(self._make_room(size))):
                break
            dropped += 1
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        reason = self._reason(failure, size)
        raise CheckpointError(f"The checkpoint of update {update} was not saved: {reason}.") from failure

    def updates(self) -> list[int]:
        """The updates that have a complete checkpoint (not yet verified), oldest first."""
        return [update for update, folder in self._folders().items() if (folder / MANIFEST).is_file()]

    def env_steps(self) -> int:
        """The env steps of the newest complete checkpoint (not yet verified) whose manifest can be read."""
        return next(filter(None, map(saved_steps, reversed(self._folders().values()))), 0)

    def load(
        self, on_skip: Callable[[str], None], update: int | None = None, *, verify_pieces: bool = False
    ) -> Checkpoint | None:
        """Reads and verifies the newest valid checkpoint, or that of `update` alone.

        Reading is local to each worker: workers that must start from the same one compare what they found and
        load the oldest of them by its `update`.

        Args:
            on_skip: called with one sentence for each checkpoint that is damaged.
            update: which one, instead of the newest.
            verify_pieces: its pieces, too, to go on with them: gigabytes may have to be read.

        Returns:
            The checkpoint, or None if there is none at all.

        Raises:
            UserError: there are checkpoints but none is valid, or none of `update`.
        """
        folders = self._folders()
        if update is not None:
            if update not in folders:
                there = ", ".join(map(str, folders)) or "none"
                raise UserError(f"{self._directory} has no checkpoint of update {update}; there: {there}.")
            folders = {update: folders[update]}
        if not folders:
            return None
        for candidate, folder in reversed(folders.items()):
            try:
                return read_folder(folder, candidate, self._pieces if verify_pieces else None)
            except FaultError as fault:
                on_skip(f"The checkpoint {folder} is skipped: {fault}.")
        raise UserError(
            f"{self._directory} has no valid checkpoint{'' if update is None else f' of update {update}'}; "
            "restore the folder from a copy, or start a new run under another name."
        )

    def _path(self, update: int, suffix: str = "") -> Path:
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

    def _attempt(
        self,
        update: int,
        learner: Mapping[str, np.ndarray],
        worker_part: Mapping[str, np.ndarray],
        worker_pieces: Sequence[Piece],
        env_steps: int,
    ) -> tuple[bool, BaseException | None]:
        """Whether every worker could do its share, and why this one could not. It leaves all or nothing."""
        staged = self._path(update, _STAGED)
        written: list[tuple[Piece, Path]] = []
        steps = (
            lambda: self._prepare(staged),
            lambda: written.extend((piece, piece.write(self._pieces)) for piece in worker_pieces),
            lambda: self._write_own_files(staged, learner, with_pieces(worker_part, written)),
            lambda: self._commit(staged, update, env_steps),
        )
        for step in steps:
            failure = None
            try:
                step()
            except BaseException as error:  # not even a Ctrl-C may leave the others waiting at the barrier
                failure = error
            if not self._agree(failure is None):
                self._discard()
                return False, failure
        for piece, path in written:
            piece.keep(path)
        return True, None

    def _prepare(self, staged: Path) -> None:
        if self._worker != 0:
            return
        files.make_folder(self._directory)
        self._tidy()
        staged.mkdir()

    def _write_own_files(
        self, staged: Path, learner: Mapping[str, np.ndarray], worker_part: Mapping[str, np.ndarray]
    ) -> None:
        if not staged.is_dir():
            raise FaultError(
                f"worker {self._worker} does not see {staged}, and all workers must share one disk"
            )
        if self._worker == 0:
            write_arrays(staged / LEARNER, learner)
        write_arrays(staged / part_name(self._worker, self._num_workers), worker_part)

    def _commit(self, staged: Path, update: int, env_steps: int) -> None:
        if self._worker != 0:
            return
        manifest = {
            "format": FORMAT,
            "update": update,
            "env_steps": env_steps,
            "topology": {"num_workers": self._num_workers},
            "files": {name: check_in(staged / name) for name in file_names(self._num_workers)},
            "pieces": self._check_in_pieces(staged),
        }
        files.write_synced(staged / MANIFEST, seal(manifest))
        files.sync_folder(staged)
        final, replaced = self._path(update), self._path(update, _REPLACED)
        if final.exists():
            final.rename(replaced)
        staged.rename(final)
        files.sync_folder(self._directory)

    def _check_in_pieces(self, staged: Path) -> dict[str, int]:
        """The sizes in bytes, by file, of all workers' pieces, which all must have arrived."""
        parts = (part_name(worker, self._num_workers) for worker in range(self._num_workers))
        entries = [e for part in parts for e in pieces_of(decode((staged / part).read_bytes()))]
        for each in entries:
            path = self._pieces / each["file"]
            if not path.is_file() or path.stat().st_size != each["bytes"]:
                raise FaultError(f"{path} did not arrive, and all workers must share one disk")
        return {each["file"]: each["bytes"] for each in entries}

    def _prune(self, update: int) -> None:
        """Removes what this checkpoint has made superfluous; what resists is left for the next time."""
        if self._worker != 0:
            return
        with contextlib.suppress(OSError):
            self._tidy()
            folders = self._folders()
            earlier = [other for other in folders if other <= update]
            self._drop(folders[other] for other in set(folders) - set(earlier[-self._keep :]))

    def _make_room(self, size: int) -> bool:
        """Drops the oldest checkpoint if that may help and a newer one is whole: the chief's vote."""
        if self._worker != 0:
            return True
        try:
            folders = self._folders()
            newest = next((u for u in reversed(folders) if is_whole(folders[u], u)), -1)
            older = [folder for update, folder in folders.items() if update < newest]
            free = shutil.disk_usage(self._directory).free + sum(map(folder_bytes, older))
            if not older or size > free:  # else all would go in vain
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

    def _discard(self) -> None:
        if self._worker == 0:
            with contextlib.suppress(OSError):
                self._tidy()

    def _tidy(self) -> None:
        """Ends what a killed or failed process left half done: staged and replaced folders."""
        for path in list(self._directory.iterdir()):
            if path.suffix == _REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (_STAGED, _REPLACED):
                shutil.rmtree(path, ignore_errors=True)
        try:
            needed = list(itertools.chain(*map(needed_pieces, self._folders().values())))
        except OSError:  # then the next save sweeps, which may know
            return
        pieces.sweep(self._pieces, needed)

    def _reason(self, failure: BaseException | None, size: int) -> str:
        if failure is None:
            return "another worker could not do its share, and says why in its own output"
        if not isinstance(failure, OSError):
            return str(failure) or type(failure).__name__
        if files.is_full(failure):
            place = next(path for path in (self._directory, *self._directory.parents) if path.is_dir())
            free_mb, needed_mb = shutil.disk_usage(place).free / 1e6, size / 1e6
            return f"the disk of {place} is full ({free_mb:.1f} MB free, about {needed_mb:.1f} MB needed)"
        return f"cannot write {failure.filename or self._directory} ({files.reason(failure)})"
