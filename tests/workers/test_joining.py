"""What workers must have in common before they train together."""

import dataclasses

import pytest

from tfrl.workers import strategy
from tfrl.workers.strategy import resolve_precision

OWN = {"logdir", "resume", "yes", "log_level", "device", "threads", "env_threads", "env_processes"}
OWN |= {"cluster_timeout", "stall_timeout"}


def test_workers_compare_all_settings_except_those_of_a_machine(small):
    config = small()
    expected = strategy.fingerprint(config)
    for field in dataclasses.fields(config):
        changed = strategy.fingerprint(dataclasses.replace(config, **{field.name: "another"}))
        differing = {name for name in expected if changed[name] != expected[name]}
        assert differing == {field.name} - OWN
    assert {field.name for field in dataclasses.fields(config)} > OWN


def test_workers_agree_on_whether_an_evaluator_follows_the_run(small):
    config = small()
    assert strategy.fingerprint(config, evaluated=True) != strategy.fingerprint(config)


def test_workers_compare_the_precision_that_auto_means(small):
    meant = resolve_precision("auto")
    assert strategy.fingerprint(small(precision="auto")) == strategy.fingerprint(small(precision=meant))


@pytest.fixture
def checksum(tmp_path, monkeypatch):
    """Computes that of the code in a folder of the test's own."""
    for package in ("tfrl/envs", "resnet"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "code.py").write_text("x = 1")
    monkeypatch.setattr(strategy, "__file__", str(tmp_path / "tfrl" / "workers" / "strategy.py"))
    return lambda config: strategy.fingerprint(config)["the code (its checksum)"]


@pytest.mark.parametrize("file", ["tfrl/envs/code.py", "resnet/code.py"])
def test_workers_compare_every_line_of_code(small, tmp_path, checksum, file):
    before = checksum(small())
    (tmp_path / "tfrl" / "notes.txt").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "code.py").touch()
    assert checksum(small()) == before
    (tmp_path / file).write_text("x = 2")
    changed = checksum(small())
    assert changed != before
    (tmp_path / file).write_text("x = 1")
    assert checksum(small()) == before
    (tmp_path / file).rename((tmp_path / file).with_name("other.py"))
    assert checksum(small()) not in (before, changed)
