"""One process at a time trains a run: the chief holds a lock on the run's folder until it ends.

A second trainer would overwrite the rows, curves and checkpoints of the first. The lock is the kernel's
(`flock`), so it ends with its process, and a restart after a kill finds it free. Readers of a run (reports,
the evaluator) do not need it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tfrl.cli.errors import PeerError, UserError
from tfrl.cli.settings import SettingsT
from tfrl.cli.streams import tell
from tfrl.run import files
from tfrl.run.folder import check_run
from tfrl.workers.tf_config import TFConfig

LOCK_FILE = ".lock"
_RETRY_EVERY = 0.2  # seconds
_GLANCES = 0.5  # seconds; longer than a check holds the lock
_LONGEST = 400  # characters that are read of a lock's file


@contextlib.contextmanager
def take_run(
    config: SettingsT, cluster: TFConfig | None, read: Callable[[Path], SettingsT]
) -> Iterator[SettingsT]:
    """Holds the lock of the run within the context, and yields the settings of `check_run`.

    Workers other than the chief hold no lock. The chief waits for the lock as long as workers wait for each
    other, because the workers of an earlier start may still be ending.

    Raises:
      UserError: `check_run` raised it, or another process trains this run.
      PeerError: the chief waited too long. A restart of all workers may help.
    """
    check_run(config, read)  # before anything is made
    with contextlib.ExitStack() as held:
        if cluster is None:
            held.enter_context(locked(config.run_dir))
        elif cluster.is_chief:
            held.enter_context(locked(config.run_dir, config.cluster_timeout))
        yield check_run(config, read)  # read again, because no other process writes there now


@contextlib.contextmanager
def locked(
    run: Path, patience: float = 0.0, *, does: str = "trains", instead: str = "--run-name"
) -> Iterator[None]:
    """Holds the lock of a run's folder within the context; on a disk without locks, only warns.

    Args:
      run: the folder; made if it is missing, and removed at the end if it is empty.
      patience: seconds to wait for another process that holds it.
      does: the verb for the other process in messages.
      instead: the flag that chooses another folder.

    Raises:
      UserError: another process holds it.
      PeerError: it still does, after the patience.
    """
    file: IO[str] | None = None
    try:
        file = _take(run, patience, does, instead)
    except OSError as error:
        tell(
            f"warning: {run} cannot be locked ({error.strerror}); make sure that no other process trains it."
        )
    try:
        yield
    finally:
        if file is not None:
            with file, contextlib.suppress(OSError):
                if _is_at(run / LOCK_FILE, file):
                    (run / LOCK_FILE).unlink()  # while the lock is held, so that others notice it
                run.rmdir()  # fails unless the folder is empty


def is_held(run: Path) -> bool:
    """True if a process of this machine trains the run.

    This checks the lock and not the process number in it, which may belong to another process after a reboot.
    The check holds a shared lock for microseconds; a trainer that starts at this moment tries again.
    """
    try:
        with (run / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _take(run: Path, patience: float, does: str, instead: str) -> IO[str]:
    """Takes the lock, and returns its file, which holds the lock until it is closed.

    Raises UserError or PeerError if the time is up, and OSError if the folder cannot be locked.
    """
    path, told = run / LOCK_FILE, False
    end = time.monotonic() + max(patience, _GLANCES)
    while True:
        files.make_folder(run)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # the last holder has removed the folder
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = " ".join(file.read(_LONGEST).split()) or "another process"
            else:
                if not _is_at(path, file):
                    continue  # the last holder has removed the file
                with contextlib.suppress(OSError):  # on a full disk the holder stays unnamed
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                opened.pop_all()
                return file
        if time.monotonic() >= end:
            raise (PeerError if patience else UserError)(
                f"{run} is in use: {holder} {does} it; wait until that process ends, or choose another "
                f"{instead}."
            )
        if patience and not told:
            tell(f"waiting for {holder}, which {does} {run}")
            told = True
        time.sleep(_RETRY_EVERY)


def _is_at(path: Path, file: IO[str]) -> bool:
    """True if `path` is still the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
