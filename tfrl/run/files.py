"""Atomic writes of files and folders, also safe against power failures; imports no TensorFlow.

A disk may reorder writes. So a file that must exist before another one, like the export before results.json,
is synced first: its content, then the folder that has its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """Yields a temporary name for a file or a folder, which replaces `path` at the end of the context.

    Readers find the old content or the new (for a folder, briefly neither), and the new content is synced to
    disk at the end. After an exception the old content is unchanged, and nothing else is left. The temporary
    name has the ending of `path`, because many writers choose the format by it. It is the same each time, so
    that the next call removes what a killed process has left. So each of several processes that may write
    `path` at once gives another `writer`.

    Raises OSError.
    """
    name = f".{path.name}.{writer}" if writer else f".{path.name}"
    staged, old = (path.with_name(f"{name}.{kind}{path.suffix}") for kind in ("tmp", "old"))
    try:
        _remove(staged)  # left by a process that was killed
        yield staged
        _sync_all(staged)
        if path.is_dir() and not path.is_symlink():
            _remove(old)
            path.rename(old)
        try:
            staged.replace(path)
        except OSError:
            if not path.exists() and old.exists():
                old.rename(path)
            raise
    except BaseException:
        with contextlib.suppress(OSError):  # on a full disk, checkpoints need the room
            _remove(staged)
        raise
    sync_folder(path.parent)
    with contextlib.suppress(OSError):
        _remove(old)


def write(path: Path, content: str | bytes, writer: str = "") -> None:
    """Writes a whole file like `replacing`; text is UTF-8. Raises OSError, also where a folder is."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with replacing(path, writer) as staged:
        staged.write_bytes(content.encode() if isinstance(content, str) else content)


def read_text(path: Path) -> str | None:
    """A file's text; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def last_line(path: Path) -> str:
    """The last line of a file that is not blank; empty if there is none."""
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def last_change(paths: Iterable[Path]) -> float:
    """The newest modification time of files, as `time.time`; 0.0 if none exists."""
    newest = 0.0
    for path in paths:
        with contextlib.suppress(OSError):  # missing, or removed meanwhile
            newest = max(newest, path.stat().st_mtime)
    return newest


def write_synced(path: Path, data: bytes) -> None:
    """Writes and syncs a file in a folder that is not in use yet."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, and syncs them. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: without it a power failure may undo a rename."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def is_full(error: BaseException | None) -> bool:
    """True if the error says that a disk, or a user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def reason(error: OSError) -> str:
    """The operating system's text of an error, or else the library's, as a part of a sentence."""
    return error.strerror or next(iter(str(error).splitlines()), "") or type(error).__name__


def told_in(words: str) -> OSError | None:
    """The operating system's error that another program's text contains, or None."""
    number = next((number for number in errno.errorcode if os.strerror(number) in words), None)
    return None if number is None else OSError(number, os.strerror(number))


@contextlib.contextmanager
def tensorflow_writes() -> Iterator[None]:
    """Turns TensorFlow's errors about a disk, such as a full one, into OSErrors."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        found = told_in(error.message)
        if found is None:
            raise
        raise found from error


def _sync_all(path: Path) -> None:
    """Syncs a file, or a folder with its content."""
    if not path.is_dir():
        _sync(path, os.O_RDONLY)
        return
    for inner in path.iterdir():
        _sync_all(inner)
    sync_folder(path)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
