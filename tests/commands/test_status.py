"""Status: what it says of runs that are done, interrupted, running elsewhere, or damaged."""

import csv
import errno
import json
import os
import time

import numpy as np
import pytest
from made_runs import make_run

from tfrl import status
from tfrl.algorithms import ppg
from tfrl.cli import words
from tfrl.cli.errors import UserError
from tfrl.reporting import runs
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.folder import LEFT_FILE
from tfrl.run.lock import LOCK_FILE, locked


def test_status_tells_the_env_steps_of_a_checkpoint_that_no_row_tells_of(tmp_path):
    """Of a run that was stopped in its last evaluation, and of one that was within its last update."""
    run = make_run(tmp_path, total_steps=40_000, finished=False)
    config = runs.load(run).config
    rows = (run / "progress.csv").read_text().splitlines(keepends=True)
    (run / "progress.csv").write_text("".join(rows[:-1]))
    store = CheckpointStore(run / "checkpoints", keep=1)
    for update in (config.num_updates, config.num_updates - 1):
        store.save(update, learner={"a": np.zeros(1)}, worker_part={}, env_steps=config.run_steps)
        row = status.row(runs.load(run), time.time())
        assert row[1:4] == ["interrupted", f"{config.run_steps:,}", "100%"]
        assert row[7] == str(config.num_updates)


def test_a_run_that_may_not_be_read_is_a_row(tmp_path, capsys, monkeypatch):
    make_run(tmp_path, total_steps=40_000)
    theirs = make_run(tmp_path, seed=2, total_steps=40_000)
    load = runs.load

    def mine(path):
        if path == theirs:  # the tests may be root's, who reads everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return load(path)

    monkeypatch.setattr(runs, "load", mine)
    monkeypatch.setenv("COLUMNS", "120")
    assert status.main([str(tmp_path)]) == 0
    assert "cannot be read: Permission denied" in capsys.readouterr().out


def test_status_of_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    finished = runs.load(make_run(tmp_path))
    half = make_run(tmp_path, seed=2, finished=False)
    text = (half / "progress.csv").read_text().splitlines(keepends=True)
    (half / "progress.csv").write_text("".join(text[:20]))
    half_run, now = runs.load(half), time.time()
    assert status.row(finished, now)[1] == "done"
    assert status.row(half_run, now)[1] == "interrupted"
    finished.progress["time/env_steps_per_second"][-40:] = 10.0
    assert status.row(finished, now)[5] == f"{finished.speed():.0f}" != "10"  # of the whole run
    lock = half / LOCK_FILE
    for run in (finished, half_run):
        (run.path / LEFT_FILE).touch()
    assert [status.row(run, now)[1] for run in (finished, half_run)] == ["done", "ended early"]
    with locked(half):
        assert status.row(half_run, now + 3600)[1] == "running"
    (half / LEFT_FILE).unlink()
    lock.write_text(f"process {os.getpid()} on {os.uname().nodename}")  # left behind
    assert status.row(half_run, now)[1] == "interrupted"
    lock.write_text("process 1 on another-machine")
    assert status.row(half_run, now)[1] == "running"
    assert status.row(half_run, now)[6].endswith("min")
    assert status.row(half_run, now + 3600)[1] == "interrupted"
    damaged = make_run(tmp_path, seed=3)
    make_run(tmp_path, env="maze", run_name="[b]:cat:")
    (damaged / "config.yaml").write_text(json.dumps({"nothing": 1}))
    assert status.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{finished.name} done" in shown and f"{half_run.name} running" in shown  # in one line each
    assert "unknown setting" in " ".join(shown.split())
    assert "[b]:cat:" in shown
    with pytest.raises(UserError, match="unknown setting 'nothing'"):
        status.main([str(damaged)])
    with pytest.raises(UserError, match="does not exist"):
        status.main([str(tmp_path / "nowhere")])


def test_status_shows_the_runs_of_sweeps_and_suites_in_folders_below(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    make_run(tmp_path, total_steps=40_000)
    trial = make_run(tmp_path / "sweep", env="maze", total_steps=40_000)
    (trial / "export").mkdir()
    (trial / "export" / "config.yaml").write_text((trial / "config.yaml").read_text())
    assert status.main([str(tmp_path)]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "done " in line]
    assert shown[1:] == ["fruitbot-seed1", "sweep/maze-seed1"]


def test_status_counts_the_time_of_auxiliary_phases(tmp_path):
    """Every 16th update takes 10 times as long; none of them is among the last 8."""
    path = make_run(tmp_path, kind=ppg.Config, policy_updates=16, finished=False)
    with (path / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:30]
    with (path / "progress.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        for update, row in enumerate(rows, 1):
            table.writerow(row | {"time/env_steps_per_second": 100 if update % 16 == 0 else 1000})
    run, now = runs.load(path), time.time()
    assert status.row(run, now)[5] == "640"
    (path / LOCK_FILE).write_text("process 1 on another-machine")
    left = (run.config.run_steps - run.env_steps) / 640
    assert status.row(run, now)[6] == words.duration(left)
    later = now + 3600  # without a row, but with checkpoints
    assert status.row(run, later)[1] == "interrupted"
    (path / "checkpoints").mkdir()
    os.utime(path / "checkpoints", (later, later))
    assert status.row(run, later)[1] == "running"
