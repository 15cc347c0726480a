"""Runs one worker for `cluster.launch`, on this machine or at the far end of an ssh connection.

On stdin comes one JSON line, {"command", "environment", "directory", "terminal": [rows, columns] or null,
"grace"}, and then one byte for each signal to pass on: T (SIGTERM), I (SIGINT), K (SIGKILL). When stdin ends,
the launcher is gone (killed, or its connection lost): the worker gets SIGTERM, so that it can save, and
`grace` seconds later SIGKILL. The exit code is the worker's, or 128 + the signal that it died of, or 2 when
it cannot be started. To the launcher the agent speaks by single bytes among the worker's stderr: STARTED, and
SAVED whenever the worker says by a datagram, to the socket that TFRL_SAVED names, that it made a checkpoint.

A stop of the whole job may signal launcher, agent and worker at once. So a worker that its agent has told to
stop is not told again by a byte or the end of stdin, which may come much later: it would take that for a
second request, and exit without saving.

The worker leads a session of its own, so that a Ctrl-C in the launcher's terminal reaches it once, through
the launcher; and it dies with its agent. This file is started by its path with `python -IS`: it is there
within milliseconds, and imports nothing of ours.
"""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import pty
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from types import FrameType

SIGNALS = {ord("T"): signal.SIGTERM, ord("I"): signal.SIGINT, ord("K"): signal.SIGKILL}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STARTED, SAVED = b"\x05", b"\x06"  # control characters that no text has (ENQ and ACK)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def main() -> int:
    """Runs the worker; returns the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until there is a worker to pass them on to
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # noqa: PTH123  # no byte more than the line
        line = stdin.readline()
    if not line:
        return 128 + signal.SIGTERM  # the launcher is gone already
    order = json.loads(line)
    saves = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = f"tfrl-{os.getpid()}-{time.time_ns()}"
    saves.bind(f"\0{name}")  # Linux keeps such names, without a file
    master, slave = _open_terminal(*order["terminal"]) if order["terminal"] else (None, None)
    try:
        process = subprocess.Popen(
            order["command"],
            env={**os.environ, **order["environment"], "TFRL_SAVED": name},
            cwd=order["directory"],
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_begin_worker,  # no other threads here that a fork could catch in the middle
        )
    except OSError as error:
        enters = error.filename == order["directory"]
        what = f"enter the folder {error.filename}" if enters else f"start {order['command'][0]!r}"
        print(f"error: cannot {what}: {error.strerror}", file=sys.stderr)
        return 2
    if slave is not None:
        os.close(slave)
    _write(2, STARTED)
    told = False

    def send(number: int) -> None:
        """Sends a signal to the worker and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # a stopped process takes nothing else but SIGKILL

    def pass_on(number: int, _: FrameType | None = None) -> None:
        """Sends a signal that tells the worker to stop, however often: the worker knows echoes."""
        nonlocal told
        told = True
        send(number)

    for number in STOPS:  # sent to the agent itself; nohup's SIGHUP stays ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    selector = selectors.DefaultSelector()
    for fd in (0, saves.fileno()) if master is None else (0, saves.fileno(), master):
        selector.register(fd, selectors.EVENT_READ)
    kill_at = math.inf
    while process.poll() is None:
        for key, _ in selector.select(0.1):
            data = _read(key.fd)
            if not data:
                selector.unregister(key.fd)
            if key.fd == master:
                _write(1, data)
            elif key.fd == saves.fileno():
                _write(2, SAVED)
            else:
                if not data:
                    kill_at = time.monotonic() + order["grace"]
                for number in [SIGNALS[byte] for byte in data] or [signal.SIGTERM]:
                    if number == signal.SIGKILL:
                        send(number)
                    elif not told:
                        pass_on(number)
        if time.monotonic() >= kill_at:
            send(signal.SIGKILL)
    if master is not None:
        os.set_blocking(master, False)
        while data := _read(master):
            _write(1, data)
    send(signal.SIGKILL)  # whatever the worker left behind would hold ports and GPUs
    code = process.returncode
    return 128 - code if code < 0 else code


def _open_terminal(rows: int, columns: int) -> tuple[int, int]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # the launcher's terminal turns \n into \r\n itself
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    return master, slave


def _begin_worker() -> None:
    """In the new process: it dies with its agent, and takes signals."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _read(fd: int) -> bytes:
    """What there is to read; nothing at the end, which a terminal tells by an error."""
    try:
        return os.read(fd, 1 << 16)
    except OSError:
        return b""


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, and stdin is about to end
        while data:
            data = data[os.write(fd, data) :]


if __name__ == "__main__":
    sys.exit(main())
