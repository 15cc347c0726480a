"""The errors that end a command, which `endings.run` turns into one sentence and an exit code each; and words
for the exceptions of a user's code.
"""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from types import TracebackType


class UserError(Exception):
    """Bad settings or input: one sentence with the fault, the value and what is allowed. Exit code 2."""

    exit_code = 2

    def __str__(self) -> str:
        """The sentence, without the trace that TensorFlow adds to an error in a function that it compiles."""
        return super().__str__().rpartition("UserError: ")[2].strip()


class SettingsError(UserError, ValueError):
    """A UserError of the Python library."""


class TrainingError(Exception):
    """The run itself failed, because of a NaN in a loss, for example: one sentence. Exit code 1."""

    exit_code = 1


class EnvError(TrainingError):
    """An env failed, or returned values that nothing can learn from: one sentence that names the env."""


class PeerError(TrainingError):
    """A worker died, hung or did not come, or a process of an earlier start still has the port or the run.
    A launcher may start all workers again, from the last checkpoint. Exit code 75.
    """

    exit_code = 75


def summary(error: BaseException) -> str:
    """The type of an exception and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def place(trace: TracebackType | None, home: Path | None) -> str:
    """The place where a user's code raised an exception, as ` (FILE:LINE)`; "" if there is none.

    Args:
      trace: that of the exception. Its first frame is the caller's own.
      home: the folder of the user's code. The last line there is named; without one, the last line of all.
    """
    frames = [frame for frame in traceback.extract_tb(trace)[1:] if not _imports(frame.filename)]
    own = [frame for frame in frames if home and _is_in(Path(frame.filename), home)]
    return "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or frames)[-1:])


def _is_in(file: Path, home: Path) -> bool:
    """True for a file in a folder, but not in an environment of packages there."""
    return file.is_relative_to(home) and "site-packages" not in file.relative_to(home).parts


def _imports(file: str) -> bool:
    """True for a file of Python's own code that imports modules."""
    return file.startswith("<frozen importlib") or file == importlib.__file__


def how_to_install(part: str) -> str:
    """The command that installs a part, such as "ray", for a checkout or for an installed package."""
    in_checkout = Path(__file__).parents[2].joinpath(f"requirements-{part}.txt").is_file()
    return f"pip install -r requirements-{part}.txt" if in_checkout else f"pip install 'tfrl[{part}]'"
