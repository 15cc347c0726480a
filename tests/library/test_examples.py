"""Each example runs as a program, in an empty folder."""

import ast
import re
import runpy
import sys

import pytest
import tensorflow  # noqa: F401 - conftest.py then gives operations one thread each
from processes import ROOT

SHOWN = {
    "own_env": "95 % interval",
    "own_levels": "levels with the most to learn",
    "own_network": "own_network:residual and own_network:wide",
    "own_heads": "mean return",
    "own_callback": "ended after",
    "own_algorithm": "mean return",
    "own_loop": "evaluated again",
    "use_a_policy": "actions of a batch: [[",
    "offline": "after PPO",
}
# What the other examples show has tests of its own in other files.
SHORT = ("own_env",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in SHOWN]
)
def test_an_example_runs(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    try:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    finally:
        sys.modules.pop(name, None)
    assert SHOWN[name] in capsys.readouterr().out


def test_updates_without_an_episode_cost_the_example_no_patience():
    plateau = runpy.run_path(str(ROOT / "examples" / "own_callback.py"))["StopOnPlateau"](2)
    for _ in range(3):
        metrics = {"rollout/episode_return": float("nan"), "rollout/episodes": 0}
        plateau.on_update(None, metrics)
    assert metrics["plateau/updates_since"] == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--workers 3", "--num-envs 4 must be divisible by --workers 3."),
        ("--workers 0", "--num-envs 4 must be divisible by --workers 0."),
        ("--workers 4 --replay-shards 3", "--workers 4 must be divisible by --replay-shards 3."),
        ("--workers 2 --replay-shards 4", "--workers 2 must be divisible by --replay-shards 4."),
    ],
)
def test_the_example_of_blocks_refuses_shares_that_are_not_whole(monkeypatch, capsys, flags, sentence):
    monkeypatch.setattr(sys, "argv", ["ray_blocks.py", *flags.split()])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without Ray it ends here
    main = runpy.run_path(str(ROOT / "examples" / "ray_blocks.py"))["main"]
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_own_algorithms_are_short():
    assert len((ROOT / "examples" / "own_algorithm.py").read_text().splitlines()) < 80


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error"]
    assert (tmp_path / "logs" / "blind" / "results.json").is_file()
    assert "env: __main__:make_env" in (tmp_path / "logs" / "blind" / "config.yaml").read_text()


def test_no_example_imports_tensorflow_before_a_run_does():
    """Otherwise TensorFlow prints its messages. The imports of functions count only when they run."""
    for path in (ROOT / "examples").glob("*.py"):
        found = [ast.unparse(node) for node in ast.parse(path.read_text()).body]
        assert not [line for line in found if re.match("(import|from) (keras|tensorflow)", line)], path
