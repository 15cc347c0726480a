"""python -m resnet.train, killed or told to stop, is the run that nothing happened to: real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from processes import PATIENCE, ROOT
from worker_pair import FAULTY

pytestmark = pytest.mark.promise


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts the command, or another `program` with its flags, on a data set that it makes itself."""
    logdir = tmp_path_factory.mktemp("command")
    flags = ["--dataset", "procgen_frames/games-mini", "--max-steps", "8", "--batch-size", "16"]
    flags += ["--model", "cookbook", "--checkpoint-every", "2", "--precision", "float32"]
    env = os.environ | {"TFDS_DATA_DIR": str(logdir / "tfds"), "PYTHONPATH": str(ROOT)}
    settings = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(name, *program):
        program = program or ("-m", "resnet.train")
        where = ["--logdir", str(logdir), "--run-name", name]
        return logdir / name, subprocess.Popen([sys.executable, *program, *flags, *where], **settings)

    return start


def finish(command, name):
    """Goes on to the end; results.json."""
    folder, process = command(name)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert "accuracy" in stdout
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(command):
    """What comes out of the command when nothing happens to it."""
    return finish(command, "whole")


@pytest.mark.long
def test_a_killed_run_resumes_exactly(command, undisturbed):
    """Killed after a checkpoint."""
    folder, process = command("killed")
    end = time.monotonic() + PATIENCE
    while not list(folder.glob("checkpoints/update-*[0-9]")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    found = finish(command, "killed")
    assert found["weights_sha256"] == undisturbed["weights_sha256"]
    assert found["test"] == undisturbed["test"]


@pytest.mark.long
def test_a_signal_in_the_last_step_or_the_last_test_is_obeyed(command, undisturbed, tmp_path):
    for moment in ("7", "evaluation"):
        folder, process = command("told", *FAULTY, "SIGTERM", "0", moment, str(tmp_path / moment))
        stdout, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 143, stderr
        assert "Stopped, saved at 128 images (step 8);" in stdout
        assert not (folder / "results.json").exists()
    found = finish(command, "told")
    assert found["weights_sha256"] == undisturbed["weights_sha256"]
    assert found["test"] == undisturbed["test"]
