"""Real launchers for the tests; the commands they run are small programs, no TensorFlow."""

import os
import signal
import subprocess
import sys
import time

from processes import ROOT, hangup

LAUNCH = [sys.executable, "-m", "cluster.launch"]
PRELUDE = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
folder = sys.argv[1]
def note(what):
    with open(os.path.join(folder, f"worker-{task}"), "a") as file:
        file.write(f"{what}\\n")
note(f"start {os.getpid()}")
starts = open(os.path.join(folder, f"worker-{task}")).read().count("start ")
def all_started(count=2):
    while sum(name.startswith("worker-") for name in os.listdir(folder)) < count:
        time.sleep(0.02)
"""
SAVE = """
def stop(signum, frame):
    note(f"signal {signum}")
    time.sleep(0.3)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note("ready")
time.sleep(60)
"""


class Launch:
    """A launcher that runs a small Python program on its workers."""

    def __init__(self, folder, program, *flags, workers=2, environ=None, **options):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-S", "-c", PRELUDE + program, str(folder)]
        where = [] if "--hosts" in flags else ["--workers", str(workers)]
        where += [] if "--restart-wait" in flags else ["--restart-wait", "0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"preexec_fn": hangup(signal.SIG_DFL), **pipes, **options}
        environ = {**os.environ, **(environ or {})}
        self.process = subprocess.Popen(
            [*LAUNCH, *where, *flags, "--", *command], cwd=ROOT, env=environ, text=True, **options
        )

    def end(self, timeout=20):
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def notes(self, worker):
        path = self.folder / f"worker-{worker}"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, worker):
        return [int(note.split()[1]) for note in self.notes(worker) if note.startswith("start ")]

    def wait_for(self, note, workers=(0, 1)):
        until(lambda: all(note in self.notes(worker) for worker in workers))


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)
