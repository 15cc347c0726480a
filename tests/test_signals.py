"""A signal that reaches every process of a job, whichever started it: all that was trained is saved."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from launching import until
from processes import PATIENCE, ROOT, hangup, steps_done

from benchmarks.process_tree import alive, family

pytestmark = pytest.mark.promise

FLAGS = "--env catch --torso cookbook --precision float32 --num-levels 0 --num-envs 8 --num-steps 16"
FLAGS += " --num-minibatches 4 --epochs 2 --total-steps 100_000_000 --checkpoint-every 7"
TRAINER = [sys.executable, "-m", "tfrl.ppo_procgen"]


class Job:
    """A command that trains runs of `logdir`, and all of its processes."""

    def __init__(self, command, logdir, interrupt=signal.SIG_DFL):
        def begin():
            hangup(signal.SIG_DFL)()
            signal.signal(signal.SIGINT, interrupt)

        self.logdir = logdir
        self._said = (logdir / "said.txt").open("w+")
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            preexec_fn=begin,
        )

    def train(self, runs, updates):
        """Until all of so many runs have trained for so many updates."""
        until(
            lambda: (
                self.process.poll() is not None
                or sum(steps_done(run) >= 128 * updates for run in self.logdir.glob("*/")) == runs
            ),
            PATIENCE,
        )
        assert self.process.poll() is None, self.said()

    def told(self, signum, order):
        """The exit code, once each process has got the signal, in that order, within 50 ms."""
        job = family(self.process.pid)
        for process in {"parents first": job, "children first": job[::-1]}[order]:
            time.sleep(random.uniform(0, 0.04 / len(job)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signum)
        code = self.process.wait(PATIENCE)
        assert not any(alive(process) for process in job)
        return code

    def said(self):
        self._said.seek(0)
        return self._said.read()


def lost(run):
    """Env steps that the run's rows tell of and its checkpoints do not hold."""
    saved = max(int(folder.name.removeprefix("update-")) for folder in run.glob("checkpoints/update-*[0-9]"))
    return steps_done(run) - 128 * saved


@pytest.mark.parametrize(
    ("way", "signum", "order"),
    [
        pytest.param("launch", signal.SIGTERM, "children first", marks=pytest.mark.long),
        ("make", signal.SIGTERM, "parents first"),
    ],
)
def test_the_run_is_saved_when_every_process_gets_the_signal(tmp_path, way, signum, order):
    flags = f"{FLAGS} --logdir {tmp_path} --run-name run"
    command = {
        "launch": [sys.executable, "-m", "cluster.launch", "--workers", "2", "--", *TRAINER, *flags.split()],
        # -o: nothing is to be installed.
        "make": ["make", "-o", f"{sys.prefix}/.installed", "train", f"VENV={sys.prefix}", f"ARGS={flags}"],
    }[way]
    job = Job(command, tmp_path)
    job.train(1, random.randint(1, 20))
    code = job.told(signum, order)
    # Make ends by the signal itself, which a shell tells in the same way.
    assert code == (-signum if way == "make" else 128 + signum), job.said()
    assert "Ended without saving" not in job.said() and "Traceback" not in job.said()
    for run in tmp_path.glob("*/"):
        assert lost(run) == 0


@pytest.mark.parametrize(
    ("trainer", "flags", "signum"),
    [
        (TRAINER, FLAGS, signal.SIGTERM),
        pytest.param(TRAINER, FLAGS, signal.SIGINT, marks=pytest.mark.long),
        pytest.param([sys.executable, "-m", "resnet.train"], "", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_trainer_that_still_imports_ends_without_a_trace_and_says_so(tmp_path, trainer, flags, signum):
    job = Job([*trainer, *flags.split(), "--logdir", str(tmp_path), "--run-name", "run"], tmp_path)
    maps = f"/proc/{job.process.pid}/maps"

    def imports():
        with open(maps) as file:  # noqa: PTH123
            return re.search("libtensorflow", file.read())

    until(imports, PATIENCE)
    assert job.told(signum, "parents first") == 128 + signum
    assert job.said() == "Stopped before training began: there is nothing to save.\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("module", ["tfrl.ppo_procgen", pytest.param("resnet.train", marks=pytest.mark.long)])
def test_ctrl_c_in_the_first_second_gives_one_sentence_and_130(tmp_path, module, interrupt):
    """The signal comes during Python's imports, before the command has signal handlers. A background process
    of a script would ignore it.
    """
    command = [sys.executable, "-X", "importtime", "-m", module, "--logdir", str(tmp_path)]
    job = Job(command, tmp_path, interrupt)
    until(lambda: re.search(r"\| +tfrl$", job.said(), re.MULTILINE), PATIENCE)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(PATIENCE) == 130
    # The times of imports have bars. The signal may cut such a line, and its rest is then a part of a name.
    said = [line for line in job.said().splitlines() if "|" not in line and not re.fullmatch(r"[\w.]*", line)]
    # On a slow machine, the command itself answers.
    assert len(said) == 1 and re.fullmatch(r"Stopped before \w+ began: there is nothing to save\.", said[0])
