"""The types that a user's type checker sees."""

import subprocess
import sys

import pytest
from processes import ROOT

PROGRAM = """
import numpy as np
import tfrl

class Mine(tfrl.Callback):
    def on_update(self, run: tfrl.callbacks.RunOfCallback, metrics: dict[str, float]) -> None:
        reveal_type(run.config.env)

policy = tfrl.load("logs/mine")
reveal_type(policy(np.zeros(4)))
state = policy.initial_state()
action, state = policy(np.zeros(4), state)
reveal_type(action)
"""


@pytest.mark.long
def test_a_strict_type_checker_knows_settings_and_actions(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--config-file", ""]
    command += ["--follow-imports", "silent", str(tmp_path / "mine.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    revealed = [
        line.partition("Revealed type is ")[2] for line in done.stdout.splitlines() if "Revealed" in line
    ]
    assert done.returncode == 0 and revealed[0] == '"str"', done.stdout
    assert [kind.startswith('"int | numpy.ndarray[') for kind in revealed[1:]] == [True, True], done.stdout
