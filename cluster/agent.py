"""Runs one worker for `cluster.launch`, on this machine or at the far end of an ssh connection.

The agent reads one JSON line from stdin, {"command", "environment", "directory", "grace"}, and then one byte
for each signal to pass on: T (SIGTERM), I (SIGINT), K (SIGKILL). When stdin ends, the launcher is gone
(killed, or its connection lost): the worker gets SIGTERM, so that it can save, and `grace` seconds later
SIGKILL. The exit code is the worker's, or 128 + the signal that killed it, or 2 if it cannot be started. The
worker writes to the agent's stdout and stderr, after each checkpoint also the content of TFRL_SAVED. The
agent itself writes only STARTED to stderr.

A stop of the whole job may signal launcher, agent and worker at once. So an agent tells its worker only once
to stop: a byte or the end of stdin may come much later, and the worker would take it for a second request and
exit without saving.

The worker leads a session of its own, so that a Ctrl-C in the launcher's terminal reaches it once, through
the launcher; and it dies with its agent. This file is started by its path with `python -IS`: so it starts
within milliseconds, and it imports nothing of this project.
"""

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from types import FrameType

SIGNALS = {ord("T"): signal.SIGTERM, ord("I"): signal.SIGINT, ord("K"): signal.SIGKILL}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STARTED, SAVED = b"\x05", b"\x06"  # control characters that no text has (ENQ and ACK)
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, because a forked process must not


def main() -> int:
    """Runs the worker; returns the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until a worker runs that gets them
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # noqa: PTH123  # no byte more than the line
        line = stdin.readline()
    if not line:
        return 128 + signal.SIGTERM  # the launcher is gone already
    order = json.loads(line)
    try:
        process = subprocess.Popen(
            order["command"],
            env={**os.environ, **order["environment"], "TFRL_SAVED": SAVED.decode()},
            cwd=order["directory"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_begin_worker,  # no other threads here that a fork could catch in the middle
        )
    except OSError as error:
        enters = error.filename == order["directory"]
        what = f"enter the folder {error.filename}" if enters else f"start {order['command'][0]!r}"
        print(f"error: cannot {what}: {error.strerror}", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # the launcher is gone, and stdin is about to end
        os.write(2, STARTED)
    told = False

    def send(number: int) -> None:
        """Sends a signal to the worker and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)  # a stopped process takes only this and SIGKILL

    def pass_on(number: int, _: FrameType | None = None) -> None:
        """Sends a signal that tells the worker to stop. The worker itself ignores repetitions."""
        nonlocal told
        told = True
        send(number)

    for number in STOPS:  # for signals to the agent itself; nohup's SIGHUP stays ignored
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    kill_at = math.inf
    while process.poll() is None:
        for key, _ in selector.select(0.1):
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
                kill_at = time.monotonic() + order["grace"]
            for number in [SIGNALS[byte] for byte in data] or [signal.SIGTERM]:
                if number == signal.SIGKILL:
                    send(number)
                elif not told:
                    pass_on(number)
        if time.monotonic() >= kill_at:
            send(signal.SIGKILL)
    send(signal.SIGKILL)  # whatever the worker left behind would hold ports and GPUs
    code = process.returncode
    return 128 - code if code < 0 else code


def _begin_worker() -> None:
    """Called in the new process: it dies with its agent, and takes signals."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):  # what started the agent may ignore them
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


if __name__ == "__main__":
    sys.exit(main())
