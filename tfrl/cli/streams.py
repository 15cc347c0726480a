"""The standard streams of a process whose reader may go away, or that was started without them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def open_missing() -> None:
    """Gives a process that was started without stdin, stdout or stderr (`>&-`) /dev/null instead.

    Python has None for such a stream. And the next file to be opened would get the stream's number, and with
    it all that C++ code and child processes print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: the stream's own
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, errors="backslashreplace"))


@contextlib.contextmanager
def surviving(stream: IO[str] | IO[bytes]) -> Iterator[None]:
    """Goes on where `stream` takes nothing any more, such as a closed pipe or terminal."""
    try:
        yield
    except BrokenPipeError:
        send_nowhere(stream)
    except OSError:
        pass


def send_nowhere(stream: IO[str] | IO[bytes]) -> None:
    """Lets what `stream` still has go to /dev/null: else Python fails with it when the process exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def tell(line: str, stream: TextIO | None = None) -> None:
    """Writes a line to `stream`, stderr by default, whether or not somebody reads it there."""
    stream = stream or sys.stderr
    with surviving(stream):
        print(line, file=stream, flush=True)


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Says each sentence once: what is tried again and again may stay wrong for days."""
    said = set[str]()

    def say_once(sentence: str) -> None:
        if sentence not in said:
            said.add(sentence)
            say(sentence)

    return say_once


class Unbreakable:
    """A stream of text that survives whatever happens to its reader, and what it cannot encode."""

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
        with surviving(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def console(**settings: Any) -> Console:
    """A console of rich's, to print tables on stdout: where nobody reads any more, `print`'s BrokenPipeError.

    Rich alone would end the command with 1 there.
    """
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Piped(**settings)
