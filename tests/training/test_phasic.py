"""The learner of phases: resumes, kills, files that are damaged, full disks, ends of runs, what it shows."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow  # noqa: F401  (before tests begin, so that the CPU can be split into replicas)
from processes import PATIENCE, ROOT, learned, results, rows
from refusals import refusal
from small_phases import PARTS, SMALL, assert_same, finish, make, settings, train

from tfrl.cli.errors import TrainingError
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.session import Session
from tfrl.training.phasic import PhasicLearner


@pytest.fixture
def small(tmp_path):
    return functools.partial(settings, tmp_path)


@pytest.mark.promise
@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "moments", "memory"),
    [
        (1, (3,), "none"),
        (1, (1, 1 + PARTS), "none"),
        (2, (6,), "none"),
        (1, (3,), "gru"),
    ],
)
def test_a_run_restored_at_any_pause_continues_bit_for_bit(small, tmp_path, replicas, moments, memory):
    small = functools.partial(small, memory=memory)
    whole = make(small())
    states = []  # before each call of `update`
    for at in range(2 + PARTS):
        if at:
            shutil.copytree(tmp_path / "logs/small/phase", tmp_path / f"{at}")
        states.append((copy.deepcopy(whole.get_state()), whole.session.step))
        whole.update()
    assert whole.session.step == 2
    history, weights = finish(whole, 1)
    other = make(small(replicas=replicas, logdir=str(tmp_path / "others")))  # one, for the sake of tracing
    for at in moments:
        state, step = states[at]
        assert step == 1
        shutil.rmtree(tmp_path / "others/small/phase", ignore_errors=True)
        shutil.copytree(tmp_path / f"{at}", tmp_path / "others/small/phase")
        other.session.step = step
        other.set_state(state)
        found_history, found = finish(other, 2)
        assert found_history[-1] == pytest.approx(history[-1], rel=1e-6, nan_ok=True)
        assert_same(found, weights)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """The folder of a run and its state, within an auxiliary phase: one of two rollouts has its logits."""
    folder = tmp_path_factory.mktemp("distilled")
    learner = make(dataclasses.replace(SMALL, logdir=str(folder)))
    finish(learner, 1)
    for _ in range(2):
        assert learner.update() is None
    return folder / "small/phase", learner.get_state()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("observations-00000001-*", lambda path: path.unlink(), "lacks rollouts of update 2"),
        ("targets-00000001-*", lambda path: path.write_bytes(b""), "is damaged"),
        ("logits-00000000-*", lambda path: os.truncate(path, 200), "is damaged"),
        ("logits-00000000-*", lambda path: path.unlink(), "lacks rollouts of update 1"),
    ],
)
def test_rollouts_that_cannot_be_read_are_missed_before_anything_is_trained(
    small, distilled, name, change, words
):
    folder, state = distilled
    config = small()
    shutil.copytree(folder, config.run_dir / "phase")
    change(next((config.run_dir / "phase").glob(name)))
    other = make(config)
    other.session.step = 1
    found = refusal(other.set_state, state)
    assert words in found and found.endswith("choose another --run-name.")


def test_a_resume_does_not_read_files_that_it_writes_again(small, distilled):
    """A kill leaves later files of two workers; one worker continues, with other file names."""
    folder, state = distilled
    config = small()
    shutil.copytree(folder, config.run_dir / "phase")
    of_all = next(folder.glob("logits-00000000-*"))
    for name in ("logits-00000001", "observations-00000002", ".logits-00000001", "logits-00000000"):
        for envs in ("envs-0000000-0000004", "envs-0000004-0000008"):
            ending = ".tmp.npy" if name.startswith(".") else ""
            shutil.copy(of_all, config.run_dir / "phase" / f"{name}-{envs}.npy{ending}")
    (config.run_dir / "phase/notes.npy").touch()
    other = make(config)
    other.session.step = 1
    other.set_state(state)
    left = sorted(path.name.split("-envs")[0] for path in (config.run_dir / "phase").iterdir())
    names = ("logits-00000000", "observations-00000000", "observations-00000001")
    assert left == sorted((*names, "targets-00000000", "targets-00000001", "notes.npy", *2 * names[:1]))
    other.begin()  # a run that was killed before its first checkpoint begins anew
    assert [path.name for path in (config.run_dir / "phase").iterdir()] == ["notes.npy"]


@pytest.mark.long
def test_a_full_disk_ends_the_run_and_says_what_is_kept(small, small_disk):
    """Deleting all files that no checkpoint needs does not make enough room."""
    place = small_disk("200k")
    learner = make(small(logdir=str(place), policy_updates=1))
    folder = learner._config.run_dir / "phase"
    finish(learner, 1)
    old = folder / "observations-00000000-envs-0000000-0000008.npy"
    assert old.exists()
    litter = place / "litter"

    def fill():
        with contextlib.suppress(OSError), litter.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    fill()
    learner._tidy()
    assert not old.exists()
    fill()
    with pytest.raises(TrainingError) as caught:
        learner._keep("observations", 1, np.zeros((8, 16, 10, 5, 1), np.uint8))
    words = "cannot hold the rollouts of a phase: No space left on device; there is no checkpoint yet"
    assert str(caught.value) == f"{folder} {words}"


@pytest.mark.promise
@pytest.mark.long
def test_a_run_killed_in_the_auxiliary_phase_ends_with_the_same_weights(tmp_path):
    """One process runs to the end; the other is killed in the phase, with checkpoints before and after."""
    flags = "--env catch --torso cookbook --num-envs 8 --num-steps 16 --num-minibatches 2 --policy-updates 2"
    flags += " --aux-minibatches 4 --total-steps 512 --checkpoint-every 1 --eval-episodes 4 --aux-epochs 15"
    command = [sys.executable, "-m", "tfrl.ppg", *flags.split(), "--logdir", str(tmp_path), "--run-name"]

    def start(name):
        return subprocess.Popen([*command, name], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def hash_of(name):
        process = start(name)
        _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, error
        return json.loads((tmp_path / name / "results.json").read_text())["weights_sha256"]

    killed = start("killed")
    deadline = time.monotonic() + PATIENCE
    while not list((tmp_path / "killed").glob("phase/logits-00000001-*")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "results.json").exists()
    assert hash_of("killed") == hash_of("whole")
    rows = (tmp_path / "whole" / "progress.csv").read_text().splitlines()
    assert len(rows) == 1 + 4
    place = rows[0].split(",").index("train/aux_policy_kl")
    assert [bool(row.split(",")[place]) for row in rows[1:]] == [False, True, False, True]


@pytest.mark.long
def test_a_run_that_is_solved_at_the_end_of_a_phase_ends_with_it(small, capfd):
    """The update and its auxiliary phase are in progress.csv, results.json, the checkpoint and the export."""
    config = small(policy_updates=1, solved_at=-0.95, total_steps=12_800, eval_episodes=2)
    assert train(config) == 0
    found, history = results(config.run_dir), rows(config.run_dir)
    assert found["updates"] == len(history) < 100 and found["env_steps"] == 128 * len(history)
    assert all(row["train/aux_policy_kl"] for row in history)
    assert float(history[-1]["eval_test/return"]) == found["eval"]["test"]["return"]
    saved = CheckpointStore(config.run_dir / "checkpoints", keep=1).load(pytest.fail)
    assert saved.update == found["updates"]
    exported = np.load(config.run_dir / "export/weights.npz")
    assert_same({name: saved.learner["weights/" + name] for name in exported}, exported)
    assert train(config) == 0 and "is complete; with a higher --solved-at, it" in capfd.readouterr().out


@pytest.mark.long
def test_a_run_that_is_over_keeps_the_rollouts_that_more_env_steps_would_need(small, capfd):
    """Two rollouts of three are kept; without them, the same command still finds the run complete."""
    config = small(policy_updates=3, total_steps=5 * 128, checkpoint_every=1, eval_episodes=2)
    assert train(config) == 0
    left = {path.name.split("-envs")[0] for path in (config.run_dir / "phase").iterdir()}
    assert left == {f"{kind}-{update:08d}" for kind in ("observations", "targets") for update in (3, 4)}
    assert train(dataclasses.replace(config, total_steps=6 * 128)) == 0
    assert not list((config.run_dir / "phase").iterdir())
    shutil.rmtree(config.run_dir / "phase")
    assert train(dataclasses.replace(config, total_steps=6 * 128)) == 0
    assert "is complete; more --total-steps would continue it" in capfd.readouterr().out


@pytest.mark.promise
@pytest.mark.long
def test_a_kill_at_the_ends_of_an_auxiliary_phase_loses_one_part(small, monkeypatch):
    """Checkpoints count updates and parts."""
    told = []

    def noted(kind, method, mark):
        whole = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda *given: (told.append(mark), whole(*given))[1])

    noted(PhasicLearner, "update", "u")
    noted(Session, "save", " ")
    config = small(policy_updates=3, total_steps=8 * 128, checkpoint_every=5, eval_episodes=2)
    assert train(config) == 0
    units = [len(each) for each in "".join(told).split()]
    assert sum(units) > 20 and max(units) == 5, units


@pytest.mark.long
def test_a_checkpoint_within_a_phase_counts_the_env_steps_of_its_weights(small, tmp_path, capfd):
    """Tests a stopped run, and one that is killed after the phase."""
    import learners

    class Stopped(PhasicLearner):
        def _auxiliary_part(self, held):
            super()._auxiliary_part(held)
            if self._parts_done == 3:
                (self._config.run_dir / "stop").touch()

    config = small(total_steps=3 * 128, eval_episodes=2)
    assert learners.train(config, Stopped) == 0
    said = capfd.readouterr().out
    assert "66.6% | 256 / 384 env steps" in said.splitlines()[-2]
    place = "256 env steps (in the auxiliary phase of update 2)"
    assert f"Stopped, saved at {place}; the same command" in said
    saved = CheckpointStore(config.run_dir / "checkpoints", keep=1).load(pytest.fail)
    assert (saved.update, saved.env_steps) == (1, 256)
    for name in ("checkpoints", "phase"):
        shutil.copytree(config.run_dir / name, tmp_path / name)
    assert train(config) == 0
    said = capfd.readouterr().out
    assert re.search(f"^continues at +{re.escape(place)}$", said, re.MULTILINE)
    whole, history = results(config.run_dir), learned(config.run_dir)
    assert whole["resumed_at"] == [256] and [row["env_steps"] for row in history] == ["128", "256", "384"]
    episodes = (config.run_dir / "episodes.csv").read_text().splitlines()[1:]
    assert len(episodes) == int(history[-1]["rollout/episodes"]) > 0
    (config.run_dir / "results.json").unlink()
    for name in ("checkpoints", "phase"):
        shutil.rmtree(config.run_dir / name)
        shutil.copytree(tmp_path / name, config.run_dir / name)
    assert train(config) == 0
    assert learned(config.run_dir) == history
    assert results(config.run_dir)["weights_sha256"] == whole["weights_sha256"]


def test_a_run_that_is_cut_short_within_a_phase_ends_with_it(small, distilled):
    """--total-steps is lowered while the auxiliary phase is unfinished."""
    folder, state = distilled
    shorter = make(small(total_steps=128))
    shutil.copytree(folder, shorter._config.run_dir / "phase")
    shorter.session.step = 1
    shorter.set_state(state)
    assert shorter.steps_within == 128 and not shorter.is_over
    finish(shorter, 1)
    assert shorter.steps_within == 0 and shorter.is_over and shorter.steps_done == 256


@pytest.mark.parametrize(("updates", "phases"), [(1, 0), (5, 2)])
def test_a_run_tells_how_many_auxiliary_phases_it_has(small, updates, phases):
    learner = make(small(total_steps=updates * 128))
    assert learner.agent.summary["auxiliary phase"].startswith(f"{phases} in all, one every 2 updates")
    disk = f"of rollouts in {learner._config.run_dir / 'phase'}"
    assert disk in learner.agent.summary["disk and its cache"]


def test_the_display_names_the_parts_of_an_auxiliary_phase(small, monkeypatch):
    learner = make(small())
    session, phases = learner.session, []
    begin = session.phase
    monkeypatch.setattr(
        session,
        "phase",
        lambda name, detail="": (begin(name, detail), phases.append(session.console.progress.phase)),
    )
    finish(learner, 1)
    del phases[:]
    finish(learner, 1)
    kept, distilled = phases[2:4], phases[4:]
    assert kept == [f"keeping the policy, part {n} of 6" for n in (1, 2)]
    assert distilled == [f"distilling, part {n} of 6" for n in (3, 4, 5, 6)]
    known = learner.session.watchdog._known  # by which it tells a hang: not every part anew
    assert {name for name in known if "part" in name} == set() and "distilling" in known
