"""The order of the long tests, and their deadline (tests/conftest.py)."""

import os
import subprocess
import sys
import time

import pytest
from processes import ROOT

REPETITIONS = """
import pytest
@pytest.mark.long
def test_repetition(): pass
"""
MIXED = """
import pytest
@pytest.mark.long
def test_another_repetition(): pass
@pytest.mark.long
@pytest.mark.promise
def test_promise(): pass
@pytest.mark.promise
def test_short_promise(): pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs these tests with the project's settings; the lines of its output."""
    (tmp_path / "test_a.py").write_text(REPETITIONS)
    (tmp_path / "test_b.py").write_text(MIXED)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

    def lines(*flags):
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest"]
        command += ["-vv", "-p", "no:cacheprovider", *flags, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines


def outcomes(lines):
    """The names and outcomes of the tests, in order."""
    rows = [line.rpartition("::")[2].split() for line in lines if "::" in line and "left out" not in line]
    return [(row[0], row[1]) for row in rows if row[1:] and row[1] in ("PASSED", "SKIPPED")]


def test_among_the_long_tests_the_promises_come_first(run):
    lines = run("-m", "long", "--deadline", str(time.time() + 600))
    assert outcomes(lines) == [
        ("test_promise", "PASSED"),
        ("test_another_repetition", "PASSED"),
        ("test_repetition", "PASSED"),
    ]
    assert not [line for line in lines if "left out" in line]


def test_no_test_begins_after_the_deadline_and_they_are_named(run):
    lines = run("-m", "long", "--deadline", str(time.time() - 1))
    assert outcomes(lines) == [
        ("test_promise", "SKIPPED"),
        ("test_another_repetition", "SKIPPED"),
        ("test_repetition", "SKIPPED"),
    ]
    left_out = [line.rpartition("::")[2] for line in lines if line.startswith("left out, time is up: ")]
    assert left_out == [
        "test_repetition",
        "test_another_repetition",
        "test_promise",
    ]  # sorted, as their files are
