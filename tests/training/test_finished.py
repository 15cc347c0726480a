"""A run that is complete is not trained again."""

import dataclasses
import json
import shutil

import pytest
from learners import train
from refusals import refusal
from small_run import SMALL

from tfrl.cli.settings import to_yaml
from tfrl.envs import callables
from tfrl.run.callbacks import Callback
from tfrl.run.console import Console
from tfrl.training.learner import next_commands


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = dataclasses.replace(SMALL, logdir=str(tmp_path_factory.mktemp("logs")), total_steps=256)
    config = dataclasses.replace(config, eval_episodes=2, epochs=1, num_minibatches=1)
    assert train(config) == 0
    return config


def test_a_complete_run_is_not_trained_again(config, capsys):
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    assert train(config) == 0
    assert f"{config.run_dir} is complete; more --total-steps would" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    assert after == before


def test_only_commands_that_can_find_the_functions_of_a_run_are_recommended(config):
    env, torso = (callables.give(make) for make in (lambda: None, lambda x: x))
    for changes, commands, place in (
        ({}, "report record evaluate", "Python"),
        ({"env": env}, "report", "Python"),
        ({"torso": torso}, "report", "this program"),
        ({"env": env, "critic_torso": torso}, "report", "this program"),
    ):
        shown = next_commands(dataclasses.replace(config, **changes))
        assert shown[0].startswith("tensorboard ") and f"in {place};" in shown[-1]
        assert [line.split()[2] for line in shown[1:-1]] == [f"tfrl.{name}" for name in commands.split()]


def test_a_complete_supervised_run_is_not_trained_again(tmp_path, capsys):
    from test_resnet_train import run

    first = run(tmp_path, "whole", epochs=1)
    assert first[0] == 0 and run(tmp_path, "whole", epochs=1, console=Console()) == first
    assert f"{tmp_path / 'whole'} is complete; see its results.json" in capsys.readouterr().out


def test_a_run_that_is_longer_than_asked_for_is_refused(config, tmp_path):
    """Whether it is complete or was stopped, and before anything is changed."""
    run = shutil.copytree(config.run_dir, tmp_path / config.run_name)
    config = dataclasses.replace(config, logdir=str(tmp_path))
    (run / "config.yaml").write_text(to_yaml(config))
    for ended in ("complete", "stopped"):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        words = refusal(train, dataclasses.replace(config, total_steps=128))
        assert words.startswith(f"{run} is at 256 env steps, and --total-steps 128 is less; give at least"), (
            ended
        )
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        (run / "results.json").unlink(missing_ok=True)


def test_a_resume_without_rows_warns_and_removed_files_are_named_at_the_end(config, tmp_path, capsys):
    run = shutil.copytree(config.run_dir, tmp_path / config.run_name)
    config = dataclasses.replace(config, logdir=str(tmp_path), total_steps=384)
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "progress.csv").unlink()

    class Removes(Callback):
        def on_update(self, run, metrics):
            (run.folder / "config.yaml").unlink(missing_ok=True)

    assert train(config, callbacks=[Removes()]) == 0
    said = capsys.readouterr().out
    assert (
        said.count(f"warning: {run / 'progress.csv'} lacks rows of earlier updates, up to 128 env steps.")
        == 1
    )
    assert said.splitlines()[-1] == f"warning: {run} lacks config.yaml."
    assert json.loads((run / "results.json").read_text())["missing"] == ["config.yaml"]
    (run / "config.yaml").write_text(to_yaml(config))
    assert train(dataclasses.replace(config, total_steps=512)) == 0
    assert "lacks" not in capsys.readouterr().out
