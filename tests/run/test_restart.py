"""--resume restart: a run begins anew in its folder, and what is not its own stays."""

import dataclasses
import os
import pty
import subprocess
import sys

import pytest
from made_runs import make_run
from processes import ROOT
from refusals import refusal

from tfrl import suite
from tfrl.algorithms.ppo import from_yaml
from tfrl.cli.settings import to_yaml
from tfrl.config.of_run import settings
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.folder import check_restart
from tfrl.run.lock import LOCK_FILE, take_run
from tfrl.workers import tf_config
from tfrl.workers.tf_config import LAUNCH

CLUSTER = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": %d}}'
CHIEF, OTHER = (tf_config.parse(CLUSTER % index) for index in (0, 1))
OWN = """export/weights.npz export/config.yaml export/policy/saved_model.pb eval.json report.html stop
checkpoints/best.npz checkpoints/update-00000009.tmp/learner.npz checkpoints/shards/a.npy
phase/value-00000001-envs-0000000-0000008.npy videos/fruitbot-test-512.mp4 plots/learning_curve.png
events.out.tfevents.1.host.1.tfrl"""
FOREIGN = """notes.txt export/mine.txt checkpoints/notes.txt videos/holiday.mp4 plots/mine.png
events.out.tfevents.1.host.1.v2"""


def made(logdir):
    """Settings to begin a run anew, in whose folder there are files of all kinds, and others' files."""
    run = make_run(logdir, total_steps=40_000)
    for name in (OWN + " " + FOREIGN).split():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    store = CheckpointStore(run / "checkpoints", keep=1)
    store.save(1, learner={}, worker_part={}, env_steps=16384)
    # With another --lr, with which it could not go on.
    return dataclasses.replace(settings(run), logdir=str(logdir), resume="restart", lr=1e-3)


def names(run):
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("cluster", [None, CHIEF])
def test_the_files_of_the_run_are_removed_and_no_others(tmp_path, cluster):
    config = made(tmp_path)
    with take_run(config, cluster, from_yaml) as taken:
        assert names(config.run_dir) == {LOCK_FILE, *FOREIGN.split()}
        assert taken == dataclasses.replace(config, resume="auto")


def test_a_worker_beside_the_chief_looks_at_nothing(tmp_path):
    """It may come before the chief has removed the old run, with whose settings it could not go on."""
    config = made(tmp_path)
    before = names(config.run_dir)
    with take_run(config, OTHER, from_yaml) as taken:
        assert taken.resume == "auto" and names(config.run_dir) == before


def test_a_launcher_s_second_attempt_goes_on(tmp_path, monkeypatch):
    config = made(tmp_path)
    (config.run_dir / "export" / "mine.txt").unlink()
    monkeypatch.setenv(LAUNCH, "a")
    with take_run(config, CHIEF, from_yaml) as taken:
        (config.run_dir / "config.yaml").write_text(to_yaml(taken))
    with take_run(config, CHIEF, from_yaml):
        assert (config.run_dir / "config.yaml").exists()
    monkeypatch.setenv(LAUNCH, "another")
    with take_run(config, CHIEF, from_yaml):
        assert not (config.run_dir / "config.yaml").exists()


def test_a_folder_of_another_program_is_left_alone(tmp_path):
    config = dataclasses.replace(made(tmp_path), run_name="theirs")
    config.run_dir.joinpath("export").mkdir(parents=True)
    assert "holds no run, but export" in refusal(lambda: take_run(config, None, from_yaml).__enter__())
    assert [path.name for path in config.run_dir.iterdir()] == ["export"]
    (config.run_dir / "config.yaml").write_text("dataset: cifar10\n")
    assert "holds a run of another trainer" in refusal(check_restart, config, ["--yes"])
    (config.run_dir / "config.yaml").unlink()
    (config.run_dir / "progress.csv").write_text("a,b\n1,2\n")
    assert "the progress.csv of another program" in refusal(check_restart, config, ["--yes"])


def test_a_suite_does_not_begin_its_runs_anew(tmp_path):
    """It passes over those that are done."""
    flags = ["--envs", "catch", "--logdir", str(tmp_path), "--resume", "restart", "--yes"]
    assert "a suite cannot --resume restart" in refusal(suite.main, flags)


def test_without_a_terminal_it_needs_yes(tmp_path):
    config = made(tmp_path)
    sentence = refusal(check_restart, config, [])
    assert (
        f"removes the run in {config.run_dir}, 49,152 steps long; without a terminal it needs --yes"
        in sentence
    )
    check_restart(config, ["--yes"])
    check_restart(dataclasses.replace(config, run_name="new"), [])  # there is nothing to remove


@pytest.mark.parametrize("answer", [b"\n", b"y\n"])
def test_a_terminal_is_asked(tmp_path, answer):
    config = made(tmp_path)
    before = names(config.run_dir)
    code = "from tfrl.run.folder import check_restart\nfrom tfrl.algorithms.ppo import parse\n"
    code += "from tfrl.cli import endings\n"
    code += "endings.run(lambda argv: check_restart(parse(argv), argv) or print('agreed'))"
    flags = ["--env", config.env, "--logdir", str(tmp_path), "--run-name", config.run_name]
    main, terminal = pty.openpty()
    os.write(main, answer)
    done = subprocess.run(
        [sys.executable, "-c", code, *flags, "--resume", "restart"],
        cwd=ROOT,
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"Remove the run in {config.run_dir}, 49,152 steps long, and begin anew? [y/N]" in done.stdout
    agreed = answer == b"y\n"
    assert (done.returncode, "agreed" in done.stdout) == ((0, True) if agreed else (2, False)), done.stderr
    assert agreed or f"error: the run in {config.run_dir} is left as it is." in done.stderr
    assert names(config.run_dir) == before
