"""Runs with a Ray of their own end whole, whoever is told to, and go on bit for bit; skipped without Ray."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import until
from processes import PATIENCE, ROOT, Training, results, steps_done
from refusals import refusal

from benchmarks.process_tree import ACTOR, alive, family, named

pytestmark = pytest.mark.promise

CATCH = (
    "--env catch --torso linear --precision float32 --num-levels 0 --gamma 0.9 --num-envs 8 --num-steps 12"
)
CATCH += " --num-minibatches 2 --lr 1e-2 --eval-episodes 8 --checkpoint-every 2"
UPDATE = 96
LONG = ["--total-steps", 4000 * UPDATE]

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install -r requirements-ray.txt"
)


class Impala(Training):
    """A training process of IMPALA."""

    module = "tfrl.impala"
    is_forked = False  # Ray

    def __init__(self, folder, *flags):
        super().__init__(folder, *CATCH.split(), *flags)

    def actors(self):
        """The process numbers of its actors."""
        return named(self.process.pid, ACTOR)


def train(folder, *flags):
    return Impala(folder, *flags).end()


def open_to_all(pids):
    """What these processes listen on beside the loopback address."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(str(link.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in sockets:
                address = cells[1].split(":")[0]
                found += [] if address.endswith(("0100007F", "01000000")) else [line]
    return found


def of_ray(pids, name):
    """The process number of Ray's own process of this name: raylet, gcs_server."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in pids}
    return next(pid for pid in pids if commands[pid].endswith(name.encode()))


def end_all(pids, signum):
    """Signals all processes of a run, as a terminal or a batch system does."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


@pytest.mark.long
@pytest.mark.parametrize(
    "ends",
    [
        ((1, signal.SIGTERM, 143), (2, signal.SIGINT, 130)),
        ((2, signal.SIGKILL, -9),),  # Ray's agents look now and then
    ],
    ids=["signals", "kill"],
)
@needs_ray
def test_no_process_is_left_and_the_run_resumes_exactly(tmp_path, ends):
    """First the driver is killed; then all processes get SIGTERM, then SIGINT."""
    folder = tmp_path / "disturbed"
    for actors, signum, code in ends:
        training = Impala(folder, *LONG, "--actors", actors)
        training.wait_until(steps_done(folder) + 3 * UPDATE)
        everyone, mine = family(training.process.pid), training.actors()
        assert len(mine) == actors
        assert open_to_all(everyone) == []
        end_all(everyone[:1] if signum == signal.SIGKILL else everyone, signum)
        ended, stdout, stderr = training.end()
        assert ended == code, stdout + stderr
        until(lambda mine=mine: not any(map(alive, mine)), 20)
        until(lambda everyone=everyone: not any(map(alive, everyone)), 180)
    steps = steps_done(folder) + UPDATE
    for run in (folder, tmp_path / "undisturbed"):
        code, stdout, stderr = train(run, "--total-steps", steps)
        assert (code, stderr) == (0, ""), stdout + stderr
    digests = {results(run)["weights_sha256"] for run in (folder, tmp_path / "undisturbed")}
    assert len(digests) == 1


@pytest.mark.long
@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
@needs_ray
def test_a_run_whose_own_ray_dies_says_so_and_ends(tmp_path, process):
    """On a busy machine Ray may end the process before tfrl prints its sentence."""
    sentence = (
        "error: the run's own Ray has died; run the same command again to continue from the last checkpoint\n"
    )
    for _ in range(3):
        training = Impala(tmp_path / "run", *LONG, "--actors", 2)
        training.wait_until(steps_done(tmp_path / "run") + 3 * UPDATE)
        everyone, mine = family(training.process.pid), training.actors()
        os.kill(of_ray(everyone, process), signal.SIGKILL)
        code, _, stderr = training.end()
        assert code == 1, stderr
        until(lambda mine=mine: not any(map(alive, mine)), 20)
        until(lambda everyone=everyone: not any(map(alive, everyone)), 180)  # Ray's agents look now and then
        if stderr.endswith(sentence):
            break
    assert stderr.endswith(sentence), stderr


@needs_ray
def test_what_ray_writes_while_nothing_answers_is_not_shown(monkeypatch, capfd):
    from tfrl.remote import cluster

    def init(**options):
        os.write(2, b"[2026-11-29 00:38:17,006 W 22 22] gcs_client.cc:210: Failed to get cluster ID\n")
        raise ConnectionError("Failed to connect to Ray.")

    monkeypatch.setattr(cluster.ray, "init", init)
    said = refusal(cluster.Cluster, "10.0.0.1:6379", {"--parallel": 1}, 0)
    assert said.startswith("there is no Ray to join at --ray-address 10.0.0.1:6379")
    assert not capfd.readouterr().err


@needs_ray
@pytest.mark.promise
@pytest.mark.long
def test_no_other_user_can_enter_the_folder_of_the_runs_own_ray(tmp_path, monkeypatch):
    """Also tests a second Ray of the same process."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    program = (
        "import os, stat, subprocess, sys\n"
        "from tfrl.remote.cluster import Cluster, ray\n"
        "for _ in range(2):\n"
        "    cluster = Cluster(None, {'--actors': 1}, 0)\n"
        "    path = os.environ['RAY_AUTH_TOKEN_PATH']\n"
        "    where = ray.remote(lambda: os.environ['RAY_AUTH_TOKEN_PATH'])\n"
        "    assert ray.get(where.remote()) == path\n"
        "    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600\n"
        "    assert os.environ['RAY_AUTH_MODE'] == 'token'\n"
        "    folder = os.path.dirname(path)\n"
        "    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700\n"
        "    if os.getuid() == 0:\n"
        '        for action in (\'ls "$0"\', \'mv "$0/token" "$0/other"\', \'touch "$0/planted"\'):\n'
        "            other_user = subprocess.run(['sh', '-c', action, folder], user=65534, group=65534)\n"
        "            assert other_user.returncode != 0, action\n"
        "    cluster.close()\n"
        "    assert 'RAY_AUTH_TOKEN_PATH' not in os.environ and not os.path.exists(path)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.promise
@pytest.mark.long
@needs_ray
def test_a_run_can_be_stopped_while_its_ray_starts(tmp_path):
    """Ray installs its own signal handlers then."""

    def starts():
        found = []
        for pid in family(training.process.pid):
            with contextlib.suppress(OSError):
                found.append(b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return any(found)

    training = Impala(tmp_path / "run", *LONG, "--learners", 2, "--actors", 2)
    training.wait_for(starts)
    everyone = family(training.process.pid)
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert (code, stdout, stderr) == (143, "", "")
    until(lambda: not any(map(alive, everyone)), 60)


@pytest.mark.parametrize(
    ("command", "flags", "env", "asked", "without"),
    [
        ("impala", ["--actors", "2"], "catch", "--actors 2", ""),
        ("reinforce", ["--observers", "2"], "CartPole-v1", "--observers 2", ", or give --observers 0"),
    ],
)
def test_a_missing_ray_gives_a_one_sentence_error_with_the_packages_to_install(
    tmp_path, command, flags, env, asked, without
):
    """In a process where it cannot be found."""
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
        f"from tfrl import {command} as command\nfrom tfrl.cli import endings\n"
        f"sys.argv[1:] = ['--env', '{env}', *{flags}, '--logdir', sys.argv[1]]\n"
        "endings.run(command.main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
    )
    assert done.returncode == 2
    words = "needs Ray, which is not installed: pip install -r requirements-ray.txt"
    assert done.stderr == f"error: {asked} {words}{without}\n"
