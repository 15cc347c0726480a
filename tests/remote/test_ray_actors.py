"""Runs whose envs are stepped on Ray have the bits of a run without it, whoever dies; skipped without Ray."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import alive, family, until
from processes import PATIENCE, Training, results

CATCH = (
    "--env catch --torso linear --precision float32 --num-levels 0 --gamma 0.9 --num-envs 8 --num-steps 12"
)
CATCH += " --num-minibatches 2 --lr 1e-2 --eval-episodes 8 --checkpoint-every 2"
UPDATE = 96
LONG = ["--total-steps", 400 * UPDATE]

needs_ray = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import ray"], capture_output=True).returncode != 0,
    reason="pip install -r requirements-ray.txt",
)


class Impala(Training):
    """A training process of IMPALA."""

    module = "tfrl.impala"

    def __init__(self, folder, *flags):
        super().__init__(folder, *CATCH.split(), *flags)

    def actors(self):
        """The process numbers of its actors."""
        found = []
        for pid in family(self.process.pid)[1:]:
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if name.startswith(b"ray::RemoteActor") else []
        return found


def train(folder, *flags):
    return Impala(folder, *flags).end()


def digest(folder):
    return results(folder)["weights_sha256"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Gives the weights' digest of a run of any length whose envs a thread steps."""
    logs = tmp_path_factory.mktemp("logs")

    def to(env_steps):
        folder = logs / str(env_steps)
        code, stdout, stderr = train(folder, "--total-steps", env_steps)
        assert (code, stderr) == (0, ""), stdout + stderr
        return digest(folder)

    return to


@needs_ray
def test_actors_may_die_hang_and_be_of_any_number(whole, tmp_path):
    """Four actors, of which two are killed and one stopped; then two, and one: the bits of a thread."""
    folder = tmp_path / "disturbed"
    training = Impala(folder, *LONG, "--actors", 4, "--actor-timeout", 60)
    training.wait_until(2 * UPDATE)
    actors = training.actors()
    assert len(actors) == 4
    os.kill(actors[0], signal.SIGKILL)
    os.kill(actors[3], signal.SIGKILL)
    training.wait_until(20 * UPDATE)
    os.kill(training.actors()[1], signal.SIGSTOP)
    training.wait_until(40 * UPDATE)
    everyone = family(training.process.pid)
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert code == 143, stdout + stderr
    assert "actor" in stderr + stdout and "has died; another takes its place" in stderr + stdout
    assert "has not answered for 60 s" in stderr + stdout
    until(lambda: not any(map(alive, everyone)), 20)
    for actors in (2, 1):
        steps = int(float((folder / "progress.csv").read_text().splitlines()[-1].split(",")[0])) + 2 * UPDATE
        code, stdout, stderr = train(folder, "--total-steps", steps, "--actors", actors)
        assert (code, stderr) == (0, ""), stdout + stderr
    assert digest(folder) == whole(steps)


@needs_ray
@pytest.mark.parametrize("whom", ["driver", "group"])
def test_no_process_is_left_and_the_run_goes_on_with_its_bits(whole, tmp_path, whom):
    """The driver is killed; or its whole process group is told to end, as a batch system does."""
    folder = tmp_path / whom
    training = Impala(folder, *LONG, "--actors", 2)
    training.wait_until(5 * UPDATE)
    everyone, actors = family(training.process.pid), training.actors()
    assert len(actors) == 2
    if whom == "driver":
        training.process.kill()
    else:
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    code, _, _ = training.end()
    assert code == (-signal.SIGKILL if whom == "driver" else 143)
    until(lambda: not any(map(alive, actors)), 20)
    until(lambda: not any(map(alive, everyone)), 180)  # Ray's agents look for their parent now and then
    steps = int(float((folder / "progress.csv").read_text().splitlines()[-1].split(",")[0])) + UPDATE
    code, stdout, stderr = train(folder, "--total-steps", steps)
    assert (code, stderr) == (0, ""), stdout + stderr
    assert digest(folder) == whole(steps)


@needs_ray
def test_it_listens_on_the_loopback_address_alone(tmp_path):
    training = Impala(tmp_path / "run", *LONG, "--actors", 1)
    training.wait_until(UPDATE)
    pids = {str(pid) for pid in family(training.process.pid)}
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(link.readlink()))
    open_to_all = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in sockets:
                address = cells[1].split(":")[0]
                open_to_all += [] if address.endswith(("0100007F", "01000000")) else [line]
    training.process.send_signal(signal.SIGINT)
    assert training.end()[0] == 130
    assert open_to_all == []


def test_without_ray_the_flag_says_what_to_install(tmp_path):
    """In a process where it cannot be found."""
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
        "from tfrl import impala\nfrom tfrl.cli import endings\n"
        "sys.argv[1:] = ['--env', 'catch', '--actors', '2', '--logdir', sys.argv[1]]\n"
        "endings.run(impala.main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    expected = "error: --actors 2 needs Ray, which is not installed: pip install -r requirements-ray.txt\n"
    assert done.stderr == expected
