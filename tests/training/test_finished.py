"""A run that is complete is told so at once."""

import dataclasses
import shutil
import subprocess
import sys

import pytest
from learners import train
from processes import ROOT
from refusals import refusal
from small_run import SMALL

from tfrl.cli.errors import UserError
from tfrl.cli.settings import to_yaml
from tfrl.training import command

TOLD = """
import sys, {module}
code = {module}.main(["--config", {settings!r}])
print(code, "tensorflow" in sys.modules)
"""


def again(module, run):
    """What the same command prints, its exit code, and whether it imported TensorFlow."""
    script = TOLD.format(module=module, settings=str(run / "config.yaml"))
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = dataclasses.replace(SMALL, logdir=str(tmp_path_factory.mktemp("logs")), total_steps=256)
    config = dataclasses.replace(config, eval_episodes=2)
    assert train(config) == 0
    return config


def test_a_complete_run_is_reported_before_tensorflow_is_imported(config):
    said = again("tfrl.ppo", config.run_dir)
    assert f"{config.run_dir} is complete; more --total-steps would" in said and said.endswith("0 False\n")


def test_a_complete_supervised_run_is_reported_before_tensorflow_is_imported(tmp_path):
    from test_resnet_train import run

    assert run(tmp_path, "whole", epochs=1)[0] == 0
    said = again("resnet.train", tmp_path / "whole")
    assert f"{tmp_path / 'whole'} is complete; see its results.json" in said and said.endswith("0 False\n")


def test_a_run_is_complete_by_its_settings_and_its_newest_checkpoint(config):
    assert command.told_complete(config)
    assert command.told_complete(dataclasses.replace(config, total_steps=512)) is None
    with pytest.raises(UserError, match="is at 256 env steps"):
        command.told_complete(dataclasses.replace(config, total_steps=128))
    (newest,) = (config.run_dir / "checkpoints").glob("update-00000002")
    newest.rename(newest.parent / "elsewhere")
    try:
        assert command.told_complete(config) is None
    finally:
        (newest.parent / "elsewhere").rename(newest)


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
