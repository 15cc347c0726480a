"""A run that the first version began goes on as it would have: tests/data/first-version/README.md."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import results, rows, train

from tfrl import config as settings
from tfrl.run.results import weights_sha256

DATA = Path(__file__).parents[1] / "data" / "first-version"
COMMAND = (
    "--env catch --torso linear --precision float32 --num-envs 8 --num-steps 16 --num-minibatches 4 --lr 2e-3"
)
COMMAND += " --gamma 0.9 --eval-episodes 16 --seed 3 --checkpoint-every 1 --total-steps 1024"
# Evaluations play other episodes now: they are drawn by a seed that no other use shares.
OWN = ("time/", "eval")


def numbers(row):
    return {name: float(cell or "nan") for name, cell in row.items() if not name.startswith(OWN)}


def weights(path):
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the run, which the same command has continued."""
    folder = tmp_path_factory.mktemp("logs") / "half"
    shutil.copytree(DATA / "half", folder)
    code, stdout, stderr = train(folder, *COMMAND.split())
    assert code == 0, stdout + stderr
    return folder


def test_its_weights_are_those_of_the_run_that_was_not_interrupted(run):
    found, expected = weights(run / "export" / "weights.npz"), weights(DATA / "whole-weights.npz")
    told = json.loads((DATA / "whole-results.json").read_text())
    assert weights_sha256(expected) == told["weights_sha256"]
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
    assert results(run)["resumed_at"] == [512]
    assert results(run)["episode_return"] == pytest.approx(told["episode_return"])


def test_its_progress_goes_on_in_the_same_columns(run):
    before = (DATA / "half" / "progress.csv").read_text()
    after = (run / "progress.csv").read_text()
    assert after.startswith(before) and after.count("\n") == 1 + 8
    shutil.copy(DATA / "whole-progress.csv", run.parent / "progress.csv")
    for row, expected in zip(rows(run), rows(run.parent), strict=True):
        assert numbers(row) == pytest.approx(numbers(expected), rel=1e-4, abs=1e-6, nan_ok=True)
    assert rows(run)[-1]["eval_test/return"]


def test_its_settings_are_those_of_ppo(run):
    config = settings.from_yaml(DATA / "half" / "config.yaml")
    assert (config.algorithm, config.env, config.lr_schedule) == ("ppo", "catch", "constant")
    assert (run / "config.yaml").read_text().count("total_steps: 1024") == 1
    assert settings.from_yaml(run / "config.yaml").lr == 2e-3
