"""Several suites, as on several machines, work through the same runs on one disk."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE, ROOT

from tfrl.run import agenda
from tfrl.run.lock import LOCK_FILE, locked

# A suite that looks at once again, with a stand-in for the trainer.
SUITE = """
import sys
from tfrl import suite
from tfrl.run import agenda
from tfrl.cli import endings
agenda.LOOK_EVERY = 0.1
suite._TRAINER = (sys.argv.pop(1),)
endings.run(suite.main)
"""
# Notes that it trains, as the only one, then waits for a word to end with: `done`, `stop`, or an exit code.
# The word is a file named after the seed or, for a trainer of this suite alone, after both.
TRAINER = f"""
import os, sys, time
from pathlib import Path
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT)!r}]
from made_runs import make_run
from tfrl.run.lock import locked
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
logdir, seed, name = Path(flags["--logdir"]), int(flags["--seed"]), os.environ["SUITE"]
with locked(logdir / f"maze-seed{{seed}}"), open(logdir / f"{{seed}}.trained", "a") as trained:
    trained.write(f"{{name}} {{os.getpid()}}\\n")
    trained.flush()
    busy = os.open(logdir / f"{{seed}}.busy", os.O_CREAT | os.O_EXCL)
    words = [logdir / f"{{seed}}.{{name}}.word", logdir / f"{{seed}}.word", logdir / "all.word"]
    try:
        while not (told := [word for word in words if word.exists()]):
            time.sleep(0.01)
    finally:
        os.unlink(logdir / f"{{seed}}.busy")
    word = told[0].read_text()
    if word == "done":
        make_run(logdir, "maze", seed, total_steps=40_000)
    elif word != "stop":
        sys.exit(int(word))
"""


class Suites:
    """Suites by name, in processes, that share a folder."""

    def __init__(self, folder, held):
        self.folder = folder
        self._held = held
        (folder / "trainer.py").write_text(TRAINER)

    def start(self, name, seeds, *flags):
        command = [sys.executable, "-c", SUITE, str(self.folder / "trainer.py")]
        command += ["--envs", "maze", "--total-steps", "40000", "--logdir", str(self.folder)]
        process = subprocess.Popen(
            [*command, "--seeds", seeds, *flags],
            cwd=ROOT,
            env={**os.environ, "SUITE": name},
            stdout=(self.folder / f"{name}.out").open("w"),
            stderr=subprocess.STDOUT,
        )
        self._held.callback(process.kill)
        return process

    def said(self, name):
        return (self.folder / f"{name}.out").read_text()

    def word(self, which, word):
        """How a trainer is to end."""
        staged = self.folder / "staged"
        staged.write_text(word)
        staged.rename(self.folder / f"{which}.word")

    def trained(self, seed):
        """Who has begun to train it: names of suites, and process numbers."""
        path = self.folder / f"{seed}.trained"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, {p.name: p.read_text() for p in self.folder.glob("*.out")}
            time.sleep(0.02)

    def wait_until_trained(self, seed, name, times=1):
        self.wait_for(lambda: [who for who, _ in self.trained(seed)].count(name) == times)


@pytest.fixture
def suites(tmp_path):
    with contextlib.ExitStack() as held:
        yield Suites(tmp_path, held)


def wait(process):
    return process.wait(PATIENCE)


def test_suites_that_start_together_train_each_run_once(suites):
    suites.word("all", "done")
    names = ["a", "b", "c"]
    processes = [suites.start(name, "1,2,3,4,5,6", "--workers", "2") for name in names]
    assert [wait(process) for process in processes] == [0, 0, 0], [suites.said(name) for name in names]
    assert [len(suites.trained(seed)) for seed in range(1, 7)] == [1] * 6
    assert (suites.folder / "report.html").is_file()
    assert not list(suites.folder.rglob(LOCK_FILE))
    assert not list(suites.folder.rglob("*.tmp"))
    for name in names:
        assert suites.said(name).count(": done") == 6, suites.said(name)


def test_a_run_in_use_is_passed_over_and_looked_at_again(suites):
    """By somebody who trains it by hand, and then does not finish it."""
    run = suites.folder / "maze-seed1"
    with locked(run):
        process = suites.start("a", "1,2")
        suites.wait_until_trained(2, "a")
        suites.word("all", "done")
        suites.wait_for(lambda: "maze-seed2: done" in suites.said("a"))
        time.sleep(0.5)
        assert process.poll() is None and not suites.trained(1)
    assert wait(process) == 0, suites.said("a")
    assert len(suites.trained(1)) == 1
    assert suites.said("a").count("maze-seed1: in use by process ") == 1


def test_who_only_waits_for_others_can_be_told_to_stop(suites):
    with locked(suites.folder / "maze-seed1"):
        process = suites.start("a", "1")
        suites.wait_for(lambda: "in use by" in suites.said("a"))
        process.send_signal(signal.SIGINT)
        assert wait(process) == 130
    assert not suites.trained(1)


def test_ctrl_c_on_one_leaves_its_run_to_the_other(suites):
    first = suites.start("a", "1,2")
    suites.wait_until_trained(1, "a")
    second = suites.start("b", "1,2")
    suites.wait_until_trained(2, "b")
    first.send_signal(signal.SIGINT)
    assert wait(first) == 130
    suites.word("2", "done")
    suites.wait_until_trained(1, "b")
    suites.word("1.b", "done")
    assert wait(second) == 0, suites.said("b")


@pytest.mark.parametrize("trainer_too", [False, True])
def test_the_runs_of_a_suite_that_was_killed_are_taken_over_when_their_trainers_are_gone(suites, trainer_too):
    first = suites.start("a", "1")
    suites.wait_until_trained(1, "a")
    second = suites.start("b", "1")
    suites.wait_for(lambda: "in use by" in suites.said("b"))
    ((_, trainer),) = suites.trained(1)
    first.kill()
    first.wait()
    time.sleep(0.5)
    assert len(suites.trained(1)) == 1, "its trainer holds the lock"
    if trainer_too:
        (suites.folder / "1.busy").unlink()
        os.kill(int(trainer), signal.SIGKILL)
        suites.wait_until_trained(1, "b")
    suites.word("all", "done")
    assert wait(second) == 0, suites.said("b")
    assert len(suites.trained(1)) == 1 + trainer_too


def test_what_fails_on_one_machine_is_tried_once_on_each(suites):
    first = suites.start("a", "1,2")
    suites.wait_until_trained(1, "a")
    suites.word("1.a", "1")
    suites.wait_until_trained(2, "a")
    second = suites.start("b", "1,2")
    suites.wait_until_trained(1, "b")
    suites.word("1.b", "done")
    suites.wait_for(lambda: "maze-seed1: done" in suites.said("b"))
    suites.word("2", "1")
    assert wait(first) == wait(second) == 1
    for name in ("a", "b"):  # the first is done after all, and the second is no worse for two tries
        assert "error: 1 of 2 runs failed: maze-seed2.\n" in suites.said(name)
        assert [who for who, _ in suites.trained(2)].count(name) == 1


def test_a_run_that_was_stopped_by_its_file_is_not_done_and_no_suite_goes_on_with_it(suites):
    first, second = (suites.start(name, "1,2") for name in ("a", "b"))
    suites.wait_for(lambda: suites.trained(1) and suites.trained(2))
    suites.word("1", "stop")
    time.sleep(0.5)
    suites.word("2", "done")
    assert [wait(first), wait(second)] == [1, 1]
    ((stopping, _),) = suites.trained(1)
    for name in ("a", "b"):
        where = "" if name == stopping else "elsewhere "
        assert f"maze-seed1: stopped {where}by its stop file" in suites.said(name)
        assert "maze-seed1: done" not in suites.said(name)
        assert "error: 1 of 2 runs were stopped: maze-seed1.\n" in suites.said(name)
    suites.word("1", "done")
    assert wait(suites.start("c", "1,2")) == 0, suites.said("c")  # the same command again
    assert [who for who, _ in suites.trained(1)] == [stopping, "c"]


def test_workers_of_a_cluster_train_the_same_run_together(tmp_path):
    """Each has a suite: they must not divide the runs, of which the chief's trainer takes the lock."""
    agendas = [agenda.Agenda([tmp_path / "x"], lambda _: False, print, shared=False) for _ in range(2)]
    for chooses in agendas:
        with chooses:
            assert chooses.choose() == 0
            assert chooses.lock(0) is None
    assert not (tmp_path / "x").exists()


def test_two_real_suites_heed_the_stop_files_of_their_runs(tmp_path):
    flags = "--envs catch --torso cookbook --precision float32 --num-levels 0 --num-envs 8 --num-steps 16"
    flags += f" --num-minibatches 4 --total-steps 1e8 --seeds 1,2 --logdir {tmp_path}"
    command = [sys.executable, "-m", "tfrl.suite", *flags.split()]
    folders = [tmp_path / f"catch-seed{seed}" for seed in (1, 2)]
    with contextlib.ExitStack() as held:
        both = [
            held.enter_context(
                subprocess.Popen(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
            for _ in range(2)
        ]
        for process in both:
            held.callback(process.terminate)
        end = time.monotonic() + PATIENCE
        while not all((folder / "progress.csv").is_file() for folder in folders):
            assert time.monotonic() < end and all(process.poll() is None for process in both)
            time.sleep(0.2)
        for folder in folders:
            (folder / "stop").touch()
        said = [process.communicate(timeout=PATIENCE)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1], said
    for text in said:
        assert "2 of 2 runs were stopped: " in text and ": done" not in text
        assert text.count(": starts") == 1
    assert not list(Path(tmp_path).rglob(LOCK_FILE))
