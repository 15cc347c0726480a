"""The run's folder: whether a run may write there, results.json, and its lock. TensorFlow is not needed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.flags import flag
from tfrl.cli.settings import SETTINGS_FILE, Settings, SettingsT, algorithm_of, is_of_earlier_version
from tfrl.cli.streams import tell
from tfrl.run import files
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.metrics import EPISODES_FILE, EVENT_FILES, LEVELS_FILE, PROGRESS_FILE, logged_steps
from tfrl.workers.tf_config import LAUNCH, RESTARTED, TFConfig

DATA_FILE = "dataset.json"
RESULTS_FILE = "results.json"
EVALUATION_FILE = "eval.json"
BEST_FILE = "checkpoints/best.npz"
LEFT_FILE = "left-by-sweep"  # marks a run that its sweep has replaced
FAILED_FILE = "failed"  # why the last process of the run failed, if it could say so

# Any of these makes a folder that of a run.
_TRACES = (SETTINGS_FILE, "checkpoints", PROGRESS_FILE, RESULTS_FILE)
# These files exist only after the first checkpoint.
_LATER = (RESULTS_FILE, "export", BEST_FILE)
# A run also writes these names. In a folder without a run, another program has written them.
_OTHERS = (
    *("export", "policies", "videos", "plots", EPISODES_FILE, LEVELS_FILE, EVALUATION_FILE),
    *("report.html", EVENT_FILES),
)


def check_run(config: SettingsT, read: Callable[[Path], SettingsT]) -> SettingsT:
    """The settings to start or resume the run with; an existing run keeps its precision for `auto`.

    The trainer checks whether the run is complete, because it knows the run's step.

    Args:
      config: the settings that are asked for.
      read: reads the settings from a file.

    Raises:
      UserError: `--resume` forbids it, the run in the folder has other settings, or its checkpoints are
        missing. A run that was killed before its first checkpoint may start again.
    """
    check_run_folder(config)
    run = config.run_dir
    if config.resume == "restart":
        if not holds_run(run):
            _check_unused(run)
        return config
    goes_on = has_checkpoint(run)
    if config.resume == "must" and not goes_on:
        raise UserError(f"--resume must found no checkpoint in {run}; leave --resume out to start this run.")
    if not holds_run(run):
        _check_unused(run)
        return config
    if config.resume == "never" and RESTARTED not in os.environ:
        raise UserError(
            f"{run} already holds a run, and --resume never does not continue it; choose another --run-name."
        )
    if not (run / SETTINGS_FILE).exists():
        raise UserError(
            f"{run} holds a run without its {SETTINGS_FILE}, so the run cannot be resumed; choose another "
            "--run-name."
        )
    named = algorithm_of(run / SETTINGS_FILE)
    if named and (named == "resnet") != (config.algorithm == "resnet"):
        raise UserError(f"{run} holds a run of another trainer; choose another --run-name.")
    existing = read(run / SETTINGS_FILE)
    if is_of_earlier_version(run / SETTINGS_FILE):
        raise UserError(
            f"{run} holds a run of tfrl 0.1.0, and only tfrl 0.1.0 can resume it; choose another --run-name."
        )
    config = as_it_began(config, existing)
    if not goes_on:
        _check_young(run, existing)
    return config


def holds_run(run: Path) -> bool:
    """True if the folder contains a run or remains of a run."""
    return any((run / trace).exists() for trace in _TRACES)


def as_it_began(config: SettingsT, existing: SettingsT, *, instead: str = "--run-name") -> SettingsT:
    """The settings to resume with; `auto` becomes the precision of the existing run.

    Args:
      config: the settings that are asked for.
      existing: the settings of the existing run.
      instead: the flag that chooses another folder for a new run.

    Raises:
      UserError: settings differ that a resumed run may not change.
    """
    if config.precision == "auto":
        # Its file has what `auto` meant where it began. All workers read it before any of them writes it.
        config = dataclasses.replace(config, precision=existing.precision)
    differing = []
    for name, here in vars(config).items():
        there = getattr(existing, name)
        left_open = name == "precision" and there == "auto"  # in a file that a person wrote
        if here != there and name not in config.may_change and not left_open:
            reason = " (its schedules follow it)" if name == "total_steps" else ""
            differing.append(f"{flag(name)} {there} there, {here} here{reason}")
    if differing:
        raise UserError(
            f"{config.run_dir} holds a run with other settings: {'; '.join(differing)}. Give the same "
            f"settings to resume it, begin anew by --resume restart, or choose another {instead}."
        )
    return config


def has_checkpoint(run: Path) -> bool:
    """True if the run in this folder has checkpoints; whether one of them is valid is not looked at."""
    return bool(CheckpointStore(run / "checkpoints", keep=1).updates())


def check_run_folder(config: Settings) -> None:
    """Raise UserError if the run's folder cannot be made or written in; leaves nothing behind."""
    folder = config.run_dir
    try:
        while not (folder.exists() or folder.is_symlink()):
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tfrl-"):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write in {folder} for the run's folder {config.run_dir}: {error.strerror}; "
            "choose another --logdir."
        ) from None


def _check_unused(run: Path) -> None:
    """Raises UserError if the folder has files of other programs with names that a run also uses."""
    found = [path.name for name in _OTHERS for path in sorted(run.glob(name))[:1]]
    if found:
        raise UserError(
            f"{run} holds files that belong to no run ({', '.join(found)}); choose another --run-name."
        )


def _check_young(run: Path, existing: Settings) -> None:
    """Raises UserError if a run without checkpoints has results, which a new start would overwrite."""
    # An export that found the disk full has left an empty folder.
    found = [name for name in _LATER if (run / name).is_file() or any((run / name).glob("*"))]
    steps = logged_steps(run / PROGRESS_FILE)
    if steps > existing.checkpoint_every * existing.steps_per_update:
        found.append(f"{steps:,} steps in its {PROGRESS_FILE}")
    if found:
        raise UserError(
            f"{run} holds a run without checkpoints, but with {', '.join(found)}, so it cannot be resumed; "
            "choose another --run-name, or remove the folder."
        )


# results.json


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """A fingerprint of names, shapes and bytes of float32 weights, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{weights[name].shape}".encode())
        digest.update(np.ascontiguousarray(weights[name], "<f4").tobytes())
    return digest.hexdigest()


def read_results(run: Path) -> dict[str, Any] | None:
    """The content of results.json, or None if it is missing or unreadable."""
    return read_json(run / RESULTS_FILE)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def finite(value: Any) -> Any:
    """A value for JSON, which has no NaN: NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --resume restart
#
# It deletes the run in the folder, after a question, so that the run begins anew there.

# The files of a run, as patterns. The settings are deleted last, so that a deletion that was interrupted can
# be repeated.
_RUN_FILES = (
    *("results.json", "eval.json", "report.html", PROGRESS_FILE, EPISODES_FILE, LEVELS_FILE, EVENT_FILES),
    *(DATA_FILE, "env.json"),
    *("stop", LEFT_FILE, FAILED_FILE, "videos/*-[0-9]*.mp4", "videos/*-[0-9]*.gif", "policies/*.npz"),
    *(f"plots/{name}.png" for name in ("learning_curve", "learning_curves", "final_scores", "training")),
    *(f"plots/{name}.png" for name in ("level_scores", "generalization_gap", "performance_profiles")),
    SETTINGS_FILE,
)
_RUN_FOLDERS = ("checkpoints", "export", "phase", "heartbeats", "tensorflow")
_BEGUN_BY = ".restarted"
"""A file with the launch (`LAUNCH`) that has deleted the run before."""


def confirm_restart(config: Settings, cluster: TFConfig | None = None) -> None:
    """Asks whether --resume restart may delete the run in the folder, unless --yes says so.

    With several workers, the outcome does not depend on the folder, which other workers may see later.

    Raises UserError if the answer is no, or nobody can answer.
    """
    run = config.run_dir
    if cluster is not None and cluster.evaluator is not None:
        raise UserError(
            "--resume restart cannot be given with an evaluator in TF_CONFIG, which may see the old run: "
            "choose another --run-name."
        )
    for name in ("start_from", "torso_weights"):
        path = getattr(config, name, None)
        if path is not None and Path(path).resolve().is_relative_to(run.resolve()):
            raise UserError(
                f"--resume restart would delete {run}, which --{name.replace('_', '-')} needs: choose "
                "another --run-name."
            )
    if config.yes:
        return
    if cluster is not None:
        raise UserError("--resume restart with several workers needs --yes, because no terminal asks them.")
    if not holds_run(run):
        return
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"--resume restart deletes the run in {run}; without a terminal, add --yes.")
    print(f"Delete the run in {run} and begin anew? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"nothing is deleted: {run} is left as it was.")


def has_restarted(run: Path) -> bool:
    """True if an earlier start by the same launcher has deleted the old run, so this start resumes.

    Only the chief asks it.
    """
    launch = os.environ.get(LAUNCH, "")
    return RESTARTED in os.environ and bool(launch) and files.read_text(run / _BEGUN_BY) == launch


def _remove_run(run: Path) -> None:
    """Deletes the files of a run, and nothing else in its folder. Raises UserError if this fails."""
    try:
        policies = [path for path in run.glob("policies/*") if path.name.isdigit()]
        for path in [*(run / name for name in _RUN_FOLDERS), *policies]:
            if path.is_symlink():
                path.unlink()
            elif path.is_dir():
                shutil.rmtree(path)
        for pattern in _RUN_FILES:
            for path in list(run.glob(pattern)):
                path.unlink(missing_ok=True)
        for name in ("videos", "plots", "policies"):
            with contextlib.suppress(OSError):  # it is missing, or has files of others
                (run / name).rmdir()
        (run / _BEGUN_BY).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot delete {error.filename or run}: {files.reason(error)}.") from None


def _note_restart(run: Path) -> None:
    """Notes that this launch has begun the run anew. Raises UserError if the folder cannot be written."""
    if launch := os.environ.get(LAUNCH):
        try:
            files.write(run / _BEGUN_BY, launch)
        except OSError as error:
            raise UserError(f"cannot write in {run}: {files.reason(error)}.") from None


# The lock
#
# One process at a time trains a run: the chief holds a lock on the folder until it ends. A second trainer
# would overwrite the rows, curves and checkpoints of the first. The lock is the kernel's (`flock`), so it
# ends with its process, and a restart after a kill finds it free. Readers of a run (reports, the evaluator)
# do not need it.

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
      UserError: `check_run` raised it, another process trains this run, or --resume restart may not delete
        it.
      PeerError: the chief waited too long. A restart of all workers may help.
    """
    if config.resume == "restart":
        confirm_restart(config, cluster)
        if cluster is not None and not cluster.is_chief:
            # The chief deletes the old run before it meets this worker, which looks at no file until then.
            check_run_folder(config)
            yield dataclasses.replace(config, resume="auto", yes=False)
            return
        if has_restarted(config.run_dir):
            config = dataclasses.replace(config, resume="auto", yes=False)
    with contextlib.ExitStack() as held:
        if cluster is None:
            held.enter_context(locked(config.run_dir))
        elif cluster.is_chief:
            held.enter_context(locked(config.run_dir, config.cluster_timeout))
        config = check_run(config, read)  # no other process writes there now
        if cluster is None or cluster.is_chief:
            held.enter_context(_noting_failures(config.run_dir))
        if config.resume == "restart":
            if holds_run(config.run_dir):
                _remove_run(config.run_dir)
            _note_restart(config.run_dir)
            config = dataclasses.replace(config, resume="auto", yes=False)
        yield config


@contextlib.contextmanager
def _noting_failures(run: Path) -> Iterator[None]:
    """Writes the error that ends the run to FAILED_FILE, for `tfrl.status`. The next process removes it."""
    with contextlib.suppress(OSError):
        (run / FAILED_FILE).unlink(missing_ok=True)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's callback may raise anything
        reason = error if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            if holds_run(run):
                files.write(run / FAILED_FILE, f"{reason}\n")
        raise


@contextlib.contextmanager
def locked(
    run: Path, patience: float = 0.0, *, does: str = "trains", instead: str = "--run-name"
) -> Iterator[None]:
    """Holds the lock of a run's folder within the context; on a disk without locks, only warns.

    Args:
      run: the folder; made with its parents if it is missing, and removed with these at the end if it is
        empty.
      patience: seconds to wait for another process that holds it.
      does: the verb for the other process in messages.
      instead: the flag that chooses another folder.

    Raises:
      UserError: another process holds it, or this one does already.
      PeerError: it still does, after the patience.
    """
    file: IO[str] | None = None
    made = [run, *(parent for parent in run.parents if not parent.exists())]
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
                for folder in made:
                    folder.rmdir()  # fails unless the folder is empty


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
    path, told, failures = run / LOCK_FILE, False, 0
    own = f"process {os.getpid()} on {socket.gethostname()}"
    end = time.monotonic() + max(patience, _GLANCES)
    while True:
        try:
            files.make_folder(run)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except (FileExistsError, FileNotFoundError):
            failures += 1
            if failures == 100:
                raise
            continue  # the last holder has just removed the folder
        failures = 0
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
                    os.pwrite(descriptor, own.encode(), 0)
                opened.pop_all()
                return file
        if time.monotonic() >= end:
            if holder == own and not patience:  # a predecessor with patience may have had the same number
                raise UserError(
                    f"{run} is in use: this process has it open already; close it first, or choose another "
                    f"{instead}."
                )
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
