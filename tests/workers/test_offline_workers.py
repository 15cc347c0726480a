"""Workers that learn from recorded data together."""

import json
import subprocess
import sys

import pytest
from processes import PATIENCE, ROOT

from tfrl import collect


@pytest.mark.long
@pytest.mark.promise
@pytest.mark.parametrize(("algorithm", "env"), [("bc", "CartPole-v1"), ("td3_bc", "Pendulum-v1")])
def test_two_workers_end_with_the_weights_of_one(tmp_path, monkeypatch, algorithm, env):
    monkeypatch.chdir(tmp_path)
    assert collect.main(["--random", env, "--episodes", "8", "--out", "set"]) == 0
    python = [sys.executable, "-m"]
    command = [*python, f"tfrl.{algorithm}", "--dataset", "set", "--env", "none", "--hidden", "16,16"]
    command += ["--total-steps", "40", "--iteration-steps", "20", "--run-name"]
    launcher = [*python, "cluster.launch", "--workers", "2", "--"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([*command, "one"], check=True, timeout=PATIENCE)
    subprocess.run([*launcher, *command, "two"], check=True, timeout=2 * PATIENCE)
    one, two = (
        json.loads((tmp_path / "logs" / name / "results.json").read_text()) for name in ("one", "two")
    )
    assert two["workers"] == 2 and one["weights_sha256"] == two["weights_sha256"]
