"""The counts of `benchmarks.house`: the functions that a run calls."""

import importlib.util
import inspect
import sys

import pytest

from benchmarks import house

MODULE = """
class Kind:
    value = [each for each in (1, 2)]

    def called(self):
        return sum(map(lambda x: x, {*self.value}))

    def never(self):
        return 0


def outer():
    def inner():
        return Kind().called()

    return inner()


outer()
"""


def test_functions_count_once_and_bodies_and_lambdas_do_not(tmp_path, monkeypatch):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    spec = importlib.util.spec_from_file_location("module", path)
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code) if event == "call" else None)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        sys.setprofile(None)
    assert {inspect.getmodulename(code.co_filename) for code in called} > {"module"}
    assert house._reach_of(called, [path]) == house.Reach(3, {"module.py": 2 + 5 + 2})


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_the_reach_of_a_run_has_its_files(algorithm):
    found = house.reach(algorithm)
    assert {
        f"tfrl/algorithms/{algorithm}.py",
        "tfrl/run/loop.py",
        "tfrl/cli/endings.py",
    } <= found.lines.keys()
    assert not any("/.venv/" in name or name.startswith("tests") for name in found.lines)
    assert 200 < found.functions < 1000 and sum(found.lines.values()) > 2000


@pytest.mark.long
def test_the_reach_is_printed_and_a_run_that_fails_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(house, "_REACHED", {"reinforce": "--env catch"})
    with pytest.raises(RuntimeError, match="the run of reinforce failed:"):
        house.main(["--reach"])
    monkeypatch.setattr(house, "reach", lambda _: house.Reach(3, {"tfrl/ppo.py": 1200, "tfrl/sac.py": 9}))
    assert house.main(["--reach"]) == 0
    shown = capsys.readouterr().out
    assert "reinforce: 3 functions of 1,209 lines in 2 files\n   1,200 tfrl/ppo.py" in shown
