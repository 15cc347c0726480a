"""Workers that learn from recorded data together."""

import json
import subprocess
import sys

import pytest
import worker_pair
from processes import PATIENCE, ROOT
from recordings import write

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


OF_WORKER = """
import json, os, sys
from tfrl import iql
from tfrl.cli import endings
from tfrl.experience import transitions
if json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
    exec(sys.argv[1])
del sys.argv[1]
endings.run(iql.main)
"""


@pytest.mark.long
def test_workers_hold_what_the_smallest_memory_holds_and_refuse_unlike_sets(tmp_path, monkeypatch):
    """Batches depend on what is held: workers of unlike machines would learn from other ones."""
    monkeypatch.chdir(tmp_path)
    for name, lengths in (("set", [12] * 12), ("other/set", [12] * 11 + [13])):
        write(tmp_path / name, "CartPole-v1", lengths, shard=3)
    flags = [
        "--dataset",
        "set",
        "--env",
        "none",
        "--hidden",
        "8",
        "--batch-size",
        "16",
        "--total-steps",
        "20",
    ]
    flags += ["--iteration-steps", "10", "--precision", "float32", "--run-name"]

    def pair(fault, name):
        worker = ["-c", OF_WORKER, fault, *flags, name]
        return worker_pair.run_workers(worker, worker)

    small = "transitions._SHARE = 4000 / transitions.machine.memory()"  # two of four shards and the next one
    for code, said in pair(small, "two"):
        assert code == 0, said
    subprocess.run(
        [sys.executable, "-m", "tfrl.iql", *flags, "one", "--held-shards", "2"],
        env=worker_pair.environment(),
        check=True,
        timeout=PATIENCE,
    )
    one, two = (json.loads((tmp_path / "logs" / n / "results.json").read_text()) for n in ("one", "two"))
    assert two["workers"] == 2 and one["weights_sha256"] == two["weights_sha256"]
    for code, said in pair("os.chdir('other')", "unlike"):
        assert code == 2, said
        assert "is another set on another worker; give all the same one." in said
