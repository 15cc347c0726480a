"""Real training processes for the tests, and what they leave behind."""

import contextlib
import csv
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from forking import ROOT, Forked

PATIENCE = 600  # seconds: never the reason for a failure on a busy machine, only the end of a hang


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
        process = Forked("tfrl.training.command", module, *flags, tells=True)
        self.stdout, self.stderr = process.communicate(PATIENCE)
        self.code, self.cpu_seconds = process.returncode, process.cpu_seconds


def assert_refused(answer, *parts):
    """One sentence that holds these parts, exit code 2, at once: before TensorFlow is imported."""
    assert answer.code == 2, answer.stdout + answer.stderr
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1
    for part in parts:
        assert part in answer.stderr
    assert answer.stdout == "TensorFlow imported: False\n"
    assert answer.cpu_seconds < 2


class Training:
    """A training process of the run `folder`, by default a fork that need not import TensorFlow first."""

    module = "tfrl.ppo_procgen"
    is_forked = True

    def __init__(self, folder, *flags):
        self.folder = folder
        flags = [*map(str, ("--logdir", folder.parent, "--run-name", folder.name, *flags))]
        if self.is_forked and os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":  # what keras knows of GPUs
            self.process = Forked("keras", self.module, *flags)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *flags],
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
