"""--resume restart deletes the run in its folder, nothing else, and only once."""

import dataclasses
import io
import json
import os
import pty
import subprocess
import sys

import pytest
from processes import ROOT, results, steps_done, train
from refusals import refusal

import tfrl
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.cli.settings import to_yaml
from tfrl.run import folder
from tfrl.run.folder import holds_run, take_run
from tfrl.workers import tf_config

READER = reader("ppo_procgen")
SHORT = "--env catch --num-levels 0 --torso linear --num-envs 4 --num-steps 8 --num-minibatches 2 --epochs 1"
SHORT += " --eval-episodes 1 --precision float32"
OWN = ("config.yaml", "results.json", "progress.csv", "eval.json", "events.out.tfevents.1.v2", "episodes.csv")
OWN += ("plots/learning_curve.png", "checkpoints/update-00000001/learner.npz", "export/weights.npz", "stop")
OWN += ("videos/catch-test-4096.mp4", "policies/4096_1.5.npz", "phase/logits.npy", "tensorflow/worker-0.log")
OWN += ("levels.csv", "plots/level_scores.png", "plots/generalization_gap.png", "policies/512/weights.npz")
OWN += ("dataset.json", "env.json")
OTHERS = ("notes.txt", "plots/mine.png", "videos/holiday.mp4", "data/x.npy", "policies/2026-11/weights.npz")


@pytest.fixture
def config(tmp_path):
    """Settings with --resume restart of a run that is there, beside files of the user."""
    config = READER.parse(
        [*SHORT.split(), "--logdir", str(tmp_path), "--run-name", "run", "--resume", "restart"]
    )
    for name in (*OWN, *OTHERS):
        path = config.run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (config.run_dir / "config.yaml").write_text(to_yaml(dataclasses.replace(config, resume="auto")))
    return config


def begin(config, cluster=None):
    """The settings with which the trainer begins, and the files that are then in the folder."""
    with take_run(config, cluster, READER.from_yaml) as begun:
        found = {str(p.relative_to(config.run_dir)) for p in config.run_dir.rglob("*") if p.is_file()}
    return begun, found - {".lock"}


def test_restart_deletes_the_files_of_the_run_and_no_others(config):
    begun, found = begin(dataclasses.replace(config, yes=True))
    assert found == {*OTHERS}
    # config.yaml must not say that the next run deletes this one.
    assert (begun.resume, begun.yes) == ("auto", False)


def test_restart_needs_yes_without_a_terminal(config, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert "without a terminal, add --yes" in refusal(begin, config)
    assert all((config.run_dir / name).is_file() for name in OWN)


@pytest.mark.parametrize(("answer", "deletes"), [("y", True), ("YES", True), ("n", False), ("", False)])
def test_restart_asks_on_a_terminal(config, answer, deletes, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer + "\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if deletes:
        assert begin(config)[1] == {*OTHERS}
    else:
        assert "nothing is deleted" in refusal(begin, config)
        assert all((config.run_dir / name).is_file() for name in OWN)
    assert "begin anew? [y/N]" in capsys.readouterr().err


def test_restart_without_a_run_asks_nothing(config):
    fresh = dataclasses.replace(config, run_name="other")
    assert begin(fresh)[1] == set()


def test_restart_leaves_files_of_other_programs_alone(config):
    other = dataclasses.replace(config, run_name="other", yes=True)
    (other.run_dir / "export").mkdir(parents=True)
    (other.run_dir / "export" / "mine.txt").write_text("x")
    assert "holds files that belong to no run" in refusal(begin, other)
    assert (other.run_dir / "export" / "mine.txt").is_file()


def test_restart_refuses_to_delete_the_run_that_it_starts_from(config):
    changed = dataclasses.replace(
        config, yes=True, start_from=str(config.run_dir / "checkpoints" / "update-1")
    )
    assert "which --start-from needs" in refusal(begin, changed)
    assert (config.run_dir / "config.yaml").is_file()


def worker(index):
    task = {
        "cluster": {"worker": ["127.0.0.1:21", "127.0.0.1:22"]},
        "task": {"type": "worker", "index": index},
    }
    return tf_config.parse(json.dumps(task))


def test_only_the_chief_of_several_workers_deletes(config):
    assert "with several workers needs --yes" in refusal(begin, config, worker(1))
    sure = dataclasses.replace(config, yes=True)
    begun, found = begin(sure, worker(1))
    assert {*OWN} <= found and begun.resume == "auto"  # the chief deletes them, also if it comes later
    assert begin(sure, worker(0))[1] == {*OTHERS}


@pytest.mark.parametrize("there", [True, False])
def test_a_launcher_that_starts_the_workers_again_resumes_their_run(config, there, monkeypatch):
    """Its first start deletes the old run, if there is one. A later start must not delete the new run."""
    sure = dataclasses.replace(config, yes=True, run_name="run" if there else "new")
    monkeypatch.setenv("TFRL_LAUNCH", "a")
    begin(sure, worker(0))
    (sure.run_dir / "config.yaml").write_text(to_yaml(dataclasses.replace(sure, resume="auto", yes=False)))
    monkeypatch.setenv("TFRL_RESTARTED", "1")
    assert "config.yaml" in begin(sure, worker(0))[1]
    monkeypatch.setenv(
        "TFRL_LAUNCH", "b"
    )  # a launcher whose first start failed before the chief deleted anything
    assert "config.yaml" not in begin(sure, worker(0))[1]


def test_a_damaged_run_can_be_deleted(config):
    (config.run_dir / "config.yaml").write_text("nothing: [")
    assert begin(dataclasses.replace(config, yes=True))[1] == {*OTHERS}
    assert not holds_run(config.run_dir)


@pytest.mark.long
def test_restart_trains_the_run_anew(tmp_path):
    folder = tmp_path / "run"
    assert tfrl.train("ppo_procgen", **_settings(folder, 128)).results["env_steps"] == 128
    with pytest.raises(tfrl.SettingsError, match="other settings"):
        tfrl.train("ppo_procgen", **_settings(folder, 64), lr=1e-2)
    run = tfrl.train("ppo_procgen", **_settings(folder, 64), lr=1e-2, resume="restart", yes=True)
    assert run.results["env_steps"] == steps_done(folder) == 64 and run.results["resumed_at"] == []
    # The settings that the run has written resume it.
    again = tfrl.train("ppo_procgen", config=str(folder / "config.yaml"), total_steps=96)
    assert again.results["resumed_at"] == [64]


def _settings(folder, steps):
    words = SHORT.split()
    named = {w[2:].replace("-", "_"): words[i + 1] for i, w in enumerate(words) if w.startswith("--")}
    return {**named, "logdir": str(folder.parent), "run_name": folder.name, "total_steps": steps}


@pytest.mark.long
def test_restart_works_with_two_workers_and_a_terminal(tmp_path):
    folder = tmp_path / "run"
    assert train(folder, *SHORT.split(), "--total-steps", "128")[0] == 0
    command = [
        sys.executable,
        "-m",
        "tfrl.ppo_procgen",
        *SHORT.split(),
        "--total-steps",
        "64",
        "--resume",
        "restart",
    ]
    command += ["--logdir", str(tmp_path), "--run-name", "run", "--learners", "2"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, b"y\n")
        process.communicate()
    os.close(ours)
    assert process.returncode == 0
    found = results(folder)
    assert (found["env_steps"], found["workers"], found["resumed_at"]) == (64, 2, [])


def test_a_supervised_run_begins_anew(tmp_path):
    from resnet.config import READER as SUPERVISED

    config = SUPERVISED.parse(["--logdir", str(tmp_path), "--run-name", "run", "--resume", "restart"])
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(UserError, match="add --yes"), take_run(config, None, SUPERVISED.from_yaml):
        pass
    sure = dataclasses.replace(config, yes=True)
    with take_run(sure, None, SUPERVISED.from_yaml):
        assert not (config.run_dir / "config.yaml").exists()
    assert folder.has_restarted(config.run_dir) is False


@pytest.mark.parametrize("key", ["yes", "'yes'"])
def test_yes_may_stand_in_a_file(tmp_path, key):
    (tmp_path / "file.yaml").write_text(f"{key}: true\nresume: restart\n")
    config = READER.parse(["--config", str(tmp_path / "file.yaml")])
    assert (config.resume, config.yes) == ("restart", True)
