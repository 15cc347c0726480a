"""Runs one worker for `cluster.launch`, on this machine or at the far end of an ssh connection.

On stdin comes one JSON line, {"command", "environment", "directory", "terminal": [rows, columns] or null,
"grace"}, and then one byte for each signal to pass on: T (SIGTERM), I (SIGINT), K (SIGKILL). When stdin ends,
the launcher is gone (killed, or its connection lost): the worker gets SIGTERM, so that it can save, and
`grace` seconds later SIGKILL. The exit code is the worker's, or 128 + the signal that it died of, or 2 when
it cannot be started.

The worker leads a session of its own, so that a Ctrl-C in the launcher's terminal reaches it once, through
the launcher; and it dies with its agent. This file is started by its path with `python -IS`: it is there
within milliseconds, and imports nothing of ours.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import selectors
import signal
import struct
import subprocess
import sys
import termios
import time
from types import FrameType

SIGNALS = {ord("T"): signal.SIGTERM, ord("I"): signal.SIGINT, ord("K"): signal.SIGKILL}
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def main() -> int:
    """Runs the worker; returns the exit code."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # noqa: PTH123  # no byte more than the line
        order = json.loads(stdin.readline())
    wakeup = _wakeup_pipe()
    master, slave = _open_terminal(*order["terminal"]) if order["terminal"] else (None, None)
    try:
        worker = subprocess.Popen(
            order["command"],
            env={**os.environ, **order["environment"]},
            cwd=order["directory"],
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # no other threads here that a fork could catch in the middle
        )
    except OSError as error:
        print(f"error: cannot start {order['command'][0]!r}: {error.strerror}", file=sys.stderr)
        return 2
    if slave is not None:
        os.close(slave)
    code = _attend(worker, wakeup, master, order["grace"])
    _signal_group(worker, signal.SIGKILL)  # whatever it left behind would hold ports and GPUs
    return 128 - code if code < 0 else code


def _attend(worker: subprocess.Popen[bytes], wakeup: int, master: int | None, grace: float) -> int:
    """Passes signals on and the terminal's output back until the worker ends; returns Popen's return code."""

    def pass_on(signum: int, _: FrameType | None) -> None:
        _signal_group(worker, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for one who kills the agent
        signal.signal(signum, pass_on)
    selector = selectors.DefaultSelector()
    for fd in (0, wakeup) if master is None else (0, wakeup, master):
        selector.register(fd, selectors.EVENT_READ)
    kill_at = None
    while worker.poll() is None:
        for key, _ in selector.select(None if kill_at is None else max(0.0, kill_at - time.monotonic())):
            data = _read(key.fd)
            if key.fd == master:
                _write(data)
            elif key.fd == 0:
                for byte in data:
                    _signal_group(worker, SIGNALS[byte])
            if not data:
                selector.unregister(key.fd)
                if key.fd == 0:
                    _signal_group(worker, signal.SIGTERM)
                    kill_at = time.monotonic() + grace
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal_group(worker, signal.SIGKILL)
    if master is not None:
        os.set_blocking(master, False)
        while data := _read(master):
            _write(data)
    return worker.returncode


def _wakeup_pipe() -> int:
    """A descriptor that becomes readable at a signal, so that select wakes up when the worker ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader


def _open_terminal(rows: int, columns: int) -> tuple[int, int]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # the launcher's terminal turns \n into \r\n itself
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    return master, slave


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(worker: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signum)
        os.killpg(worker.pid, signal.SIGCONT)  # a stopped process takes no other signal but SIGKILL


def _read(fd: int) -> bytes:
    """What there is to read; nothing at the end, which a terminal tells by an error."""
    try:
        return os.read(fd, 1 << 16)
    except OSError:
        return b""


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, and stdin is about to end
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
