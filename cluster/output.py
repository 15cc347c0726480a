"""The output of many workers on one terminal or in one file."""

from typing import BinaryIO

from tfrl.cli.streams import surviving


class Output:
    """Writes the chief's output as it is and every other worker's lines behind its number: "[1] ...".

    Where the chief has a terminal, its bytes go through at once, so that a progress display works; elsewhere
    whole lines are written, so that workers never break into each other's. The same error from several
    workers is written once. If a stream's reader goes away, the workers go on, and their words are lost.
    """

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO, *, live: bool) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._live = live
        self._mid_line = False
        self._unfinished: dict[tuple[int, str], bytes] = {}
        self._errors: set[bytes] = set()

    def write(self, worker: int, stream: str, data: bytes) -> None:
        """Takes what a worker wrote to its "stdout" or "stderr"."""
        if self._live and worker == 0 and stream == "stdout":
            self._mid_line = not data.endswith(b"\n")
            self._put("stdout", data)
            return
        *lines, rest = (self._unfinished.pop((worker, stream), b"") + data).split(b"\n")
        if rest:
            self._unfinished[worker, stream] = rest
        for line in lines:
            self._write_line(worker, stream, line)

    def end(self, worker: int) -> None:
        """Writes the lines that the worker left unfinished when it ended."""
        for stream in self._streams:
            if rest := self._unfinished.pop((worker, stream), b""):
                self._write_line(worker, stream, rest)

    def tell(self, sentence: str) -> None:
        """The launcher's own word, on stderr."""
        self._put("stderr", self._fresh_line() + b"launch: " + sentence.encode() + b"\n")

    def _write_line(self, worker: int, stream: str, line: bytes) -> None:
        if line.startswith(b"error: "):
            if line in self._errors:
                return
            self._errors.add(line)
        number = b"" if worker == 0 else b"[%d] " % worker
        self._put(stream, self._fresh_line() + number + line + b"\n")

    def _fresh_line(self) -> bytes:
        """Clears the chief's progress line, which it is about to draw again anyway."""
        started, self._mid_line = self._mid_line, False
        return b"\r\x1b[2K" if started else b""

    def _put(self, stream: str, data: bytes) -> None:
        with surviving(self._streams[stream]):
            self._streams[stream].write(data)
            self._streams[stream].flush()
