"""The standard streams: they survive a reader that goes away, and TensorFlow's noise does not reach the
screen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TextIO

from tfrl.cli.errors import PeerError, UserError

# Information and warnings of the C++ logs of TensorFlow and Ray, and TensorFlow's messages about a missing
# NVIDIA driver and about a CPU without float16 (`machine.note_float16`). Its warning about retracing is
# silenced by `tfrl.ops.graph.tf_function`.
_NOISE = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog|[IW]\d{4} \d\d:|\d{4}-\d\d-\d\d .*: [IW] )"
    rb"|^\[\d{4}-\d\d-\d\d [\d:,]+ [IW] "
    rb"|failed call to cuInit|cudart_stub|oneDNN supports DT_HALF only"
)
_SHOWN = 40  # lines of a log that are shown after a failure, the last ones


def open_missing() -> None:
    """Opens /dev/null in place of a stdin, stdout or stderr that the process was started without (`>&-`).

    Otherwise the next file that is opened gets the number of that stream, and C++ code and child processes
    print into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number is that of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, errors="backslashreplace"))


@contextlib.contextmanager
def surviving(stream: IO[str] | IO[bytes]) -> Iterator[None]:
    """Ignores the errors of a `stream` that cannot be written any more, such as a closed pipe or terminal."""
    try:
        yield
    except BrokenPipeError:
        send_nowhere(stream)
    except OSError:
        pass


def send_nowhere(stream: IO[str] | IO[bytes]) -> None:
    """Connects `stream` to /dev/null; otherwise Python fails to flush it when the process exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def flush(stream: IO[str]) -> None:
    """Flushes `stream`, even if nobody reads it."""
    with surviving(stream):
        stream.flush()


def tell(line: str, stream: TextIO | None = None) -> None:
    """Writes a line to `stream`, stderr by default, even if nobody reads it."""
    stream = stream or sys.stderr
    with surviving(stream):
        print(spelled(line), file=stream, flush=True)


_python_calls = [0]  # how many calls of the library are under way


@contextlib.contextmanager
def called_from_python() -> Iterator[None]:
    """Within the context, messages name settings as Python does."""
    _python_calls[0] += 1
    try:
        yield
    finally:
        _python_calls[0] -= 1


def spelled(text: str) -> str:
    """The text as it is, or with num_envs for --num-envs if Python code trains; commands keep their flags."""
    if not _python_calls[0]:
        return text
    names = r"python -m [^;`\n]*|(?<![\w-])--([a-z][a-z-]*[a-z])"
    return re.sub(names, lambda found: found[1].replace("-", "_") if found[1] else found[0], text)


class Unbreakable:
    """A text stream that ignores a missing reader, and replaces characters that it cannot encode."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Implements the method of the stream itself."""
        encoding = self._stream.encoding or "utf-8"
        with surviving(self._stream):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Implements the method of the stream itself."""
        flush(self._stream)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


# TensorFlow's noise


def set_log_level(name: str) -> None:
    """Shows messages of Python's logging and of TensorFlow from this --log-level on.

    Call it before TensorFlow is imported, and for another level than warning, which needs nothing.
    """
    logging.basicConfig(level=name.upper())
    logging.getLogger().setLevel(name.upper())
    logging.getLogger("tensorflow").setLevel(name.upper())
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of each font
    if shows_information():
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"


def shows_information() -> bool:
    """True if --log-level is info or debug."""
    return logging.NOTSET < logging.getLogger("tensorflow").level < logging.WARNING


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Removes the known noise of TensorFlow and Ray from stderr within the context, and then shows the rest.

    Some lines come before TensorFlow reads TF_CPP_MIN_LOG_LEVEL, so the file descriptor is redirected.
    With --log-level info or debug, nothing is removed.
    """
    if shows_information():
        yield
        return
    flush(sys.stderr)
    saved = os.dup(2)
    with _temporary_file() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            flush(sys.stderr)
            os.dup2(saved, 2)
            os.close(saved)
            _show(_worth_showing(held))


@contextlib.contextmanager
def native_log(path: Path, *, of_command: bool) -> Iterator[None]:
    """Sends the stderr of C++ code into a file; Python's `sys.stderr` is unchanged.

    When a worker dies, TensorFlow fills the screens of the others with errors that say less than our
    sentence. After a PeerError these errors stay in the file, because more come until the process ends.
    After any other exception they are shown. Without an exception the file is removed, unless it holds an
    error. A process that starts again appends to the file.

    Args:
      path: the log. If it cannot be written, a temporary file is used.
      of_command: the process ends soon afterwards. Then no later line of C++ code is shown, because to
        TensorFlow a worker that ends first is a lost one.
    """
    flush(sys.stderr)
    python, screen = sys.stderr, os.dup(2)
    log, began = _open_log(path)
    os.dup2(log.fileno(), 2)
    sys.stderr = os.fdopen(screen, "w", buffering=1, errors="backslashreplace", closefd=False)

    def show_again() -> None:
        flush(sys.stderr)
        os.dup2(screen, 2)
        os.close(screen)
        sys.stderr = python

    def clear() -> None:
        if not _worth_showing(log):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                path.parent.rmdir()  # fails while other workers have logs there

    try:
        yield
    except PeerError:
        raise
    except BaseException as why:
        show_again()
        if isinstance(why, Exception):  # a signal is no failure
            _show(_worth_showing(log, began)[-_SHOWN:])
        clear()
        raise
    if not of_command:
        show_again()
    clear()


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError:  # TensorFlow also needs such files, and would fail later
        raise UserError(
            "there is no folder for temporary files; set TMPDIR to one that can be written."
        ) from None


def _open_log(path: Path) -> tuple[IO[bytes], int]:
    """The file, for appending and reading, and its length so far."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a+b", buffering=0)
    except OSError:
        log = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  # open until the process ends
    return log, log.seek(0, os.SEEK_END)


def _show(lines: Sequence[bytes]) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more
        for line in lines:
            os.write(2, line)


def _worth_showing(log: IO[bytes], start: int = 0) -> list[bytes]:
    log.seek(start)
    return [line for line in log.read().splitlines(keepends=True) if not _NOISE.search(line)]
