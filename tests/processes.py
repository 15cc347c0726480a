"""Real training processes for the tests, and what they leave behind."""

import contextlib
import csv
import functools
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATIENCE = 600  # seconds: never the reason for a failure on a busy machine, only the end of a hang

# Runs commands as `python -m` does, each in a fork of a process that has imported what most of them need. A
# line of input is a command. A line of output has its exit code and its seconds of processor time. Each
# command tells at its end whether TensorFlow was imported.
_COMMANDS = """
import atexit, json, os, runpy, sys
import tfrl.training.command
for line in sys.stdin:
    module, flags, environ, *files = json.loads(line)
    child = os.fork()
    if not child:
        break
    _, status, used = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)
else:
    sys.exit()
for stream, path in enumerate((os.devnull, *files)):
    os.dup2(os.open(path, os.O_RDWR), stream)
os.environ.clear()
os.environ.update(environ)
sys.path[1:1] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
sys.argv[1:] = flags
atexit.register(lambda: print("TensorFlow imported:", "tensorflow" in sys.modules))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def hangup(handler):
    """A preexec_fn: SIG_IGN as under nohup, or SIG_DFL, under which the tests themselves may not run."""
    return lambda: signal.signal(signal.SIGHUP, handler)


@contextlib.contextmanager
def unread_pipe(kind):
    """The end to write to of a pipe that takes nothing: its reader is gone ("broken"), or asleep ("full")."""
    reader, writer = os.pipe()
    if kind == "broken":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    try:
        yield writer
    finally:
        os.close(writer)
        if kind == "full":
            os.close(reader)


def without_display(code, folder, **variables):
    """Runs Python code in a process of its own in `folder`, which can import the tests' modules."""
    unset = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER")
    env = {key: value for key, value in os.environ.items() if key not in unset} | variables
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)


class Answer:
    """How a command ended that was refused, or should have been, before any work."""

    def __init__(self, *flags, module="tfrl.ppo_procgen"):
        with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
            request = [module, [*map(str, flags)], dict(os.environ), stdout.name, stderr.name]
            print(json.dumps(request), file=_commands().stdin, flush=True)
            assert select.select([_commands().stdout], [], [], PATIENCE)[0], "the command hangs"
            self.code, self.cpu_seconds = json.loads(_commands().stdout.readline())
            self.stdout, self.stderr = stdout.read(), stderr.read()


@functools.cache
def _commands():
    command, pipes = [sys.executable, "-c", _COMMANDS], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def assert_refused(answer, *parts):
    """One sentence that holds these parts, exit code 2, at once: before TensorFlow is imported."""
    assert answer.code == 2, answer.stdout + answer.stderr
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1
    for part in parts:
        assert part in answer.stderr
    assert answer.stdout == "TensorFlow imported: False\n"
    assert answer.cpu_seconds < 2


class Training:
    """A training process of the run `folder`."""

    module = "tfrl.ppo_procgen"

    def __init__(self, folder, *flags):
        self.folder = folder
        where = ("--logdir", folder.parent, "--run-name", folder.name)
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *map(str, (*where, *flags))],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self):
        """Waits for the end: (exit code, stdout, stderr)."""
        try:
            stdout, stderr = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
            pytest.fail(f"the training hangs:\n{stdout[-2000:]}\n{stderr[-2000:]}")
        return self.process.returncode, stdout, stderr

    def wait_until(self, env_steps):
        """Waits until progress.csv tells of that many env steps."""
        self.wait_for(lambda: steps_done(self.folder) >= env_steps)

    def wait_for(self, condition):
        """Waits until it holds, while the process runs."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"did not come to what was waited for: {self.end()}")
            time.sleep(0.02)


def train(folder, *flags):
    """Trains to the end: (exit code, stdout, stderr)."""
    return Training(folder, *flags).end()


def train_here(folder, *flags, module="tfrl.ppo_procgen"):
    """Trains in this process, which has TensorFlow already: (exit code, stdout, stderr)."""
    where = ("--logdir", folder.parent, "--run-name", folder.name)
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = importlib.import_module(module).main([*map(str, (*where, *flags))])
    return code, stdout.getvalue(), stderr.getvalue()


def rows(folder):
    """The whole rows of progress.csv."""
    path = folder / "progress.csv"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return list(csv.DictReader(line for line in lines if line.endswith("\n")))


def steps_done(folder):
    """The env steps of the newest row."""
    found = rows(folder)
    return int(found[-1]["env_steps"]) if found else 0


def learned(folder):
    """The rows of progress.csv without what differs between equal runs: times, and when it was evaluated."""
    return [
        {name: cell for name, cell in row.items() if not name.startswith(("time/", "eval"))}
        for row in rows(folder)
    ]


def results(folder):
    """The content of results.json."""
    return json.loads((folder / "results.json").read_text())


def script(folder, text):
    """A program of a peer's in a file of its own, and the words that start it."""
    path = folder / "peer.py"
    path.write_text(text)
    return [sys.executable, str(path)]
