"""Starts modules as `python -m` does, in forks of a process that has already imported what takes seconds."""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Forked:
    """A process that runs a module, as far as the tests use `subprocess.Popen`.

    Its `cpu_seconds` are known once it has ended.
    """

    def __init__(self, imported, module, *flags, tells=False):
        """`imported` is the module that the process has already imported.

        With `tells`, the last line of stdout says whether TensorFlow is imported, too.
        """
        self._server = _server(imported)
        self._outputs = [tempfile.TemporaryFile("w+") for _ in ("stdout", "stderr")]  # noqa: SIM115
        self.pid = self._server.start([tells, module, *map(str, flags)], self._outputs)
        self.returncode = self.cpu_seconds = None

    def poll(self):
        """Its exit code; None while it runs."""
        if self.returncode is None and (end := self._server.end_of(self.pid)) is not None:
            self.returncode, self.cpu_seconds = end
        return self.returncode

    def wait(self, timeout=float("inf")):
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout=float("inf")):
        """Its stdout and stderr, once it has ended."""
        self.wait(timeout)
        for output in self._outputs:
            output.seek(0)
        return tuple(output.read() for output in self._outputs)

    def send_signal(self, number):
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Sends SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks, and collects those that have ended."""

    def __init__(self, imported):
        self._ends = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "PYTHONPATH": ""}
        subprocess.Popen([sys.executable, __file__, imported], stdin=theirs, cwd=ROOT, env=environ)
        theirs.close()

    def start(self, words, outputs):
        request = json.dumps([words, dict(os.environ)]).encode()
        socket.send_fds(self._socket, [request], [output.fileno() for output in outputs])
        while (message := self._receive(None))[1:]:
            self._ends[message[0]] = message[1:]
        return message[0]

    def end_of(self, pid):
        while message := self._receive(0):
            self._ends[message[0]] = message[1:]
        return self._ends.pop(pid, None)

    def _receive(self, timeout):
        """A message: [pid] of a new process, or [pid, exit code, seconds] of one that has ended."""
        if select.select([self._socket], [], [], timeout)[0]:
            return json.loads(self._socket.recv(1024))
        return None


@functools.cache
def _server(imported):
    return _Server(imported)


def serve(tests):
    """Forks for each request, and returns it in the child; the parent and its children end with the tests."""
    running = set()
    ended, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([tests, ended], [], [])
        if ended in ready:
            ended.recv(1024)
            for pid, status, used in iter(_collected, (0, 0, 0)):
                running.discard(pid)
                end = [pid, os.waitstatus_to_exitcode(status), used]
                tests.send(json.dumps(end).encode())
        if tests in ready:
            request, outputs, _, _ = socket.recv_fds(tests, 1 << 20, 2)
            if not request:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for mine in (tests, ended, wakes):
                    mine.close()
                return json.loads(request), outputs
            running.add(pid)
            tests.send(json.dumps([pid]).encode())
            for output in outputs:
                os.close(output)


def _collected():
    """A process that has ended: its number, status and seconds of processor time; zeros for none."""
    try:
        pid, status, used = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0, 0
    return (pid, status, used.ru_utime + used.ru_stime) if pid else (0, 0, 0)


if __name__ == "__main__":
    import atexit
    import importlib
    import runpy

    sys.path[0] = str(ROOT)
    import tfrl
    from tfrl.cli.streams import quiet_start

    with quiet_start():
        importlib.import_module(sys.argv[1])
    with socket.socket(fileno=os.dup(0)) as pytest_process:
        ((tells, module, *flags), environ), files = serve(pytest_process)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDWR), *files)):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[1:1] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv[1:] = flags
    sys.orig_argv[:] = [sys.executable, "-m", module, *flags]
    signal.signal(signal.SIGINT, tfrl._end_at_once)
    if tells:
        atexit.register(lambda: print("TensorFlow imported:", "tensorflow" in sys.modules))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
