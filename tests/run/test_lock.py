"""One process at a time trains a run, and a lock never outlives its process."""

import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest
import tensorflow  # noqa: F401 - conftest.py then splits the CPU
from processes import PATIENCE, ROOT, Answer, Training, rows, steps_done, train_here

from tfrl.algorithms.ppo import Config
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import PeerError, UserError
from tfrl.cli.settings import to_yaml
from tfrl.run import folder as folders
from tfrl.run.folder import LOCK_FILE, is_held, locked, take_run
from tfrl.workers import tf_config

from_yaml = reader("ppo_procgen").from_yaml

CATCH = "--env catch --torso cookbook --precision float32 --num-levels 0 --num-envs 16 --num-steps 16"
CATCH = [*CATCH.split(), "--num-minibatches", 4, "--epochs", 1, "--checkpoint-every", 2, "--eval-episodes", 2]
HOLDER = """
import sys, time
from pathlib import Path
from tfrl.run.folder import locked
with locked(Path(sys.argv[1])):
    print(flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(run, seconds):
    """A process that has the lock, for that long."""
    command = [sys.executable, "-c", HOLDER, str(run), str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "\n"
    return process


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Two trainers


def test_a_second_trainer_of_a_run_is_refused_and_harms_nothing(tmp_path):
    folder = tmp_path / "run"
    same = [*CATCH, "--total-steps", 10_000_000]
    first = Training(folder, *same)
    try:
        first.wait_until(5 * 256)
        first.process.send_signal(signal.SIGSTOP)  # so that what changes now is the second one's doing
        before = content(folder)
        second = Answer("--logdir", tmp_path, "--run-name", "run", *same)
        after = content(folder)
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert second.code == 2, second.stdout + second.stderr
    assert second.stderr.startswith(f"error: {folder} is in use: process {first.process.pid} on ")
    assert second.stderr.count("\n") == 1
    assert second.stdout == "TensorFlow imported: False\n"
    assert after == before
    first.wait_until(steps_done(folder) + 256)
    first.process.kill()
    first.end()
    assert (folder / LOCK_FILE).exists()
    total = steps_done(folder) + 256
    code, stdout, stderr = train_here(folder, *CATCH, "--total-steps", total)  # the kernel has freed it
    assert (code, stderr) == (0, ""), stdout + stderr
    assert "continues at" in stdout
    assert [int(row["env_steps"]) for row in rows(folder)] == list(range(256, total + 1, 256))
    assert not (folder / LOCK_FILE).exists()


def test_the_supervised_trainer_is_refused_as_well(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "resnet.train", "--logdir", str(tmp_path), "--run-name", "run"]
    with locked(run):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert [path.name for path in run.iterdir()] == [LOCK_FILE]
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {run} is in use: process {os.getpid()} on ")


# The lock


def test_the_lock_is_exclusive_and_leaves_no_trace(tmp_path):
    run = tmp_path / "logs" / "run"
    with locked(run):
        with pytest.raises(UserError, match="this process has it open.* --run-name.$"), locked(run):
            pytest.fail("held twice")
        assert (run / LOCK_FILE).exists()
    assert not run.exists() and is_held(run) is False
    with locked(run):
        (run / "config.yaml").touch()
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_a_killed_holder_frees_the_lock(tmp_path):
    process = holder(tmp_path, PATIENCE)
    with pytest.raises(UserError, match=f"process {process.pid} on "), locked(tmp_path):
        pytest.fail("held twice")
    assert is_held(tmp_path)
    process.kill()
    process.communicate()
    assert is_held(tmp_path) is False, "its file is there, but not its process"
    with locked(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK_FILE).read_text()


@pytest.mark.parametrize("number", [os.getpid(), 1], ids=["own", "first"])
def test_a_reused_process_number_does_not_hold_the_lock(tmp_path, number):
    """After a power failure and a reboot, another process may have the number in the lock's file."""
    (tmp_path / LOCK_FILE).write_text(f"process {number} on {os.uname().nodename}")
    assert is_held(tmp_path) is False


def test_a_lock_held_by_another_machine_counts_as_held(tmp_path):
    with locked(tmp_path):
        (tmp_path / LOCK_FILE).write_text("process 7 on elsewhere")
        assert is_held(tmp_path) is True


LOOKER = """
import sys
from pathlib import Path
from tfrl.run.folder import is_held
print(flush=True)
while True:
    is_held(Path(sys.argv[1]))
"""


def test_checking_the_lock_does_not_block_a_trainer(tmp_path):
    command = [sys.executable, "-c", LOOKER, str(tmp_path)]
    looker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert looker.stdout.readline() == "\n"
        for _ in range(100):
            (tmp_path / LOCK_FILE).touch()  # as a holder that was killed leaves it
            with locked(tmp_path):
                (tmp_path / "config.yaml").touch()
    finally:
        looker.kill()
        looker.communicate()


CLUSTER = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": %d}}'
CHIEF, OTHER = (tf_config.parse(CLUSTER % index) for index in (0, 1))


def taken(config, cluster):
    return take_run(config, cluster, from_yaml)


def test_a_cluster_waits_for_a_predecessor_that_still_ends_and_only_its_chief_does(tmp_path, capsys):
    config = Config(logdir=str(tmp_path), run_name="run", cluster_timeout=PATIENCE)
    process = holder(config.run_dir, 2)
    with taken(config, OTHER):
        assert process.poll() is None, "the other worker has waited"
    with taken(config, CHIEF) as found:
        assert f"process {os.getpid()} on " in (config.run_dir / LOCK_FILE).read_text()
        assert found == config
    assert capsys.readouterr().err == (
        f"waiting for process {process.pid} on {os.uname().nodename}, which trains {config.run_dir}\n"
    )
    process.communicate()


def test_a_chief_that_waits_in_vain_exits_with_the_code_for_a_restart(tmp_path):
    """The predecessor may need longer to save, and a scheduler does not restart exit code 2."""
    config = Config(logdir=str(tmp_path), run_name="run", cluster_timeout=0.5)
    with locked(config.run_dir), pytest.raises(PeerError, match="is in use: process "), taken(config, CHIEF):
        pytest.fail("held twice")


def test_settings_are_compared_with_those_that_a_predecessor_leaves(tmp_path, monkeypatch):
    config = Config(logdir=str(tmp_path), run_name="run", cluster_timeout=PATIENCE)
    process = holder(config.run_dir, 2)
    settings = to_yaml(dataclasses.replace(config, gamma=0.5))
    monkeypatch.setattr(folders, "tell", lambda line: (config.run_dir / "config.yaml").write_text(settings))
    with pytest.raises(UserError, match="--gamma 0.5 there"), taken(config, CHIEF):
        pytest.fail("it went on with another run")
    process.communicate()


def test_many_trainers_get_the_lock_one_after_another(tmp_path):
    """Each trainer removes the lock's file, which others may have opened."""
    run, busy = tmp_path / "run", tmp_path / "busy"
    code = """
import os, sys
from pathlib import Path
from tfrl.run import folder
folder._RETRY_EVERY = 0
for _ in range(200):
    with folder.locked(Path(sys.argv[1]), patience=600):
        os.close(os.open(sys.argv[2], os.O_CREAT | os.O_EXCL))
        os.unlink(sys.argv[2])
"""
    command = [sys.executable, "-c", code, str(run), str(busy)]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(PATIENCE) for process in processes] == [0, 0, 0]
    assert not run.exists()


@pytest.mark.parametrize("error", [FileExistsError, FileNotFoundError])
def test_a_folder_that_its_last_holder_removes_is_made_again(tmp_path, monkeypatch, capsys, error):
    """mkdir finds the folder, and it is gone when mkdir looks again: an error, but not of the disk."""
    make_folder, calls = folders.files.make_folder, []

    def interrupted(path):
        calls.append(path)
        if len(calls) < 3:
            raise error(errno.EEXIST, os.strerror(errno.EEXIST))
        make_folder(path)

    monkeypatch.setattr(folders.files, "make_folder", interrupted)
    with locked(tmp_path / "run"), pytest.raises(UserError, match="is in use"), locked(tmp_path / "run"):
        pytest.fail("held twice")
    assert capsys.readouterr().err == ""


def test_a_file_in_place_of_the_folder_is_told(tmp_path, capsys):
    (tmp_path / "run").touch()
    with locked(tmp_path / "run"):
        pass
    assert "run cannot be locked (File exists)" in capsys.readouterr().err


def test_a_disk_that_knows_no_locks_does_not_stop_the_training(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        (tmp_path / "config.yaml").touch()
    assert capsys.readouterr().err == (
        f"warning: {tmp_path} cannot be locked (No locks available); "
        "make sure that no other process trains it.\n"
    )


def test_a_run_that_may_not_start_leaves_no_folder(tmp_path):
    config = Config(logdir=str(tmp_path / "deep" / "logs"), run_name="run", resume="must")
    with pytest.raises(UserError, match="found no checkpoint"), taken(config, None):
        pytest.fail("it has nothing to resume")
    assert not list(tmp_path.iterdir())
