"""The table of runs: their states, those of sweeps, and runs that cannot be read."""

import dataclasses
import json

import pytest
from made_runs import make_run

from resnet import config as supervised
from tfrl import status
from tfrl.algorithms import iql
from tfrl.algorithms.runs import of_run, reader
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.flags import ENDLESS
from tfrl.cli.settings import to_yaml
from tfrl.reporting import runs
from tfrl.run.checkpoint import CheckpointStore, State
from tfrl.run.folder import LEFT_FILE, locked, take_run


def test_the_state_of_a_run_is_that_of_its_files_and_its_lock(tmp_path):
    def state(run):
        return status.row(runs.load(run))[0]

    done = make_run(tmp_path, total_steps=40_000)
    half = make_run(tmp_path, seed=2, total_steps=40_000, finished=False)
    text = (half / "progress.csv").read_text().splitlines(keepends=True)
    (half / "progress.csv").write_text("".join(text[:2]))
    assert [state(done), state(half)] == ["done", "not running"]
    with locked(half):
        assert state(half) == "running"
    cells = status.row(runs.load(half))
    assert cells[1:3] == ["16,384", "33%"] and cells[6].endswith(" s ago")
    speed = float(cells[4])
    assert cells[5] == f"{int(2 * 16_384 / speed)} s"  # two thirds are left, at about 800 steps/s
    for run in (done, half):
        (run / LEFT_FILE).touch()
    assert [state(done), state(half)] == ["done", "ended early"]
    assert [status.row(runs.load(run))[5] for run in (done, half)] == ["-", "-"]


def test_an_endless_run_has_no_share_and_no_time_left(tmp_path):
    run = make_run(tmp_path, total_steps=ENDLESS, updates=1, finished=False)
    _, _, done, *_, left, _ = status.row(runs.load(run))
    assert (done, left) == ("endless", "-")


def test_a_run_from_recorded_data_has_its_speed_and_the_return_of_its_last_evaluation(tmp_path):
    config = iql.Config(env="CartPole-v1", preset="default", dataset="x", logdir=str(tmp_path), run_name="r")
    config = dataclasses.replace(config, total_steps=20_000)
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text(to_yaml(config.complete()))
    rows = "env_steps,eval_test/return,time/updates_per_second\n5000,7,100\n10000,,100\n"
    (config.run_dir / "progress.csv").write_text(rows)
    assert status.row(runs.load(config.run_dir))[1:6] == ["10,000", "50%", "7.00", "100", "1 min"]


@pytest.mark.parametrize(
    ("ends", "results"),
    [({"max_episodes": 10}, {"episodes": 12}), ({"solved_at": 5.0}, {"episode_return": 6.0})],
)
def test_a_run_that_ended_before_its_last_step_is_done_by_all_of_it(tmp_path, ends, results):
    run = make_run(tmp_path, total_steps=1_000_000_000, updates=1, **ends)
    written = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(written | results))
    state, _, done, *_, left, _ = status.row(runs.load(run))
    assert (state, done, left) == ("done", "100%", "-")


def test_the_share_of_a_run_with_a_number_of_episodes_counts_them(tmp_path):
    run = make_run(tmp_path, total_steps=1_000_000_000, updates=1, finished=False, max_episodes=10)
    header, row = (run / "progress.csv").read_text().splitlines()
    place = header.split(",").index("rollout/episodes")
    cells = row.split(",")
    cells[place] = "4"
    (run / "progress.csv").write_text(f"{header}\n{','.join(cells)}\n")
    assert status.row(runs.load(run))[2] == "40%"


def test_a_run_that_a_callback_stopped_is_done_until_it_is_trained_further(tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    rows = (run / "progress.csv").read_text().splitlines(keepends=True)
    (run / "results.json").write_text(json.dumps({"env_steps": 16_384, "stopped": "it has enough"}))
    for updates, state in ((1, "done"), (2, "not running")):
        (run / "progress.csv").write_text("".join(rows[: 1 + updates]))
        assert status.row(runs.load(run))[0] == state
        assert runs.group([runs.load(run)])[0].is_done == (state == "done")  # for the report


def test_status_lists_nested_and_damaged_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    damaged = make_run(tmp_path, seed=3, total_steps=40_000)
    (damaged / "config.yaml").write_text(json.dumps({"nothing": 1}))
    trial = make_run(tmp_path / "sweep", env="maze", total_steps=40_000)
    (trial / "export").mkdir()
    (trial / "export" / "config.yaml").write_text((trial / "config.yaml").read_text())
    make_run(tmp_path, env="maze", run_name="[b]:cat:", total_steps=40_000)
    assert status.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    names = [line.split()[0] for line in shown.splitlines() if " done " in line]
    assert names[1:] == ["[b]:cat:", "sweep/maze-seed1"]
    assert "unknown setting" in " ".join(shown.split())
    with pytest.raises(UserError, match="there is no run in"):
        status.main([str(tmp_path / "nowhere")])


def test_folders_inside_a_run_are_not_listed(tmp_path, capsys):
    kept = make_run(tmp_path, total_steps=40_000) / "policies" / "16384"
    kept.mkdir(parents=True)
    (kept / "config.yaml").write_text((kept.parents[1] / "config.yaml").read_text())
    assert status.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("fruitbot-seed1") == 1


def test_a_failed_run_is_named_with_its_reason_until_its_next_start(tmp_path):
    run = make_run(tmp_path, total_steps=40_000, updates=1, finished=False)
    config, read = of_run(run), reader("ppo").from_yaml
    with pytest.raises(TrainingError), take_run(config, None, read):
        raise TrainingError("the loss is\nnot a number")
    state, *_, left, _ = status.row(runs.load(run))
    assert (state, left) == ("failed: the loss is not a number", "-")
    with take_run(config, None, read):
        pass
    state, *_, left, _ = status.row(runs.load(run))
    assert state == "not running" and left != "-"


def test_a_run_that_was_stopped_before_its_first_row_has_the_steps_of_its_checkpoint(tmp_path):
    run = make_run(tmp_path, total_steps=40_000, updates=1, finished=False)
    header = (run / "progress.csv").read_text().splitlines(keepends=True)[0]
    (run / "progress.csv").write_text(header)
    CheckpointStore(run / "checkpoints", keep=1).save(1, State({}, [{}]), env_steps=10_000)
    assert status.row(runs.load(run))[1:3] == ["10,000", "20%"]


def test_in_a_pipe_each_run_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a-long-name-of-a-run-" * 8
    make_run(tmp_path, total_steps=40_000, run_name=name)
    assert status.main([str(tmp_path)]) == 0
    assert f"{name} done  " in capsys.readouterr().out


def test_supervised_runs_are_listed(tmp_path, capsys):
    config = supervised.Config(logdir=str(tmp_path), run_name="images", epochs=4)
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    text = "images,epoch,test/accuracy,time/images_per_second\n1000,0.5,,100\n2000,1,0.9125,100\n"
    (config.run_dir / "progress.csv").write_text(text)
    for titles in ("images done accuracy images/s", "env steps images done return accuracy"):
        assert status.main([str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        (row,) = (line.split() for line in lines if line.startswith(" images "))
        assert row[1:9] == ["not", "running", "2,000", "25%", "91.25%", "100", "1", "min"]
        assert {*titles.split()} <= {*" ".join(lines[:3]).replace(",", "").split()}
        make_run(tmp_path, total_steps=40_000)
    (config.run_dir / "results.json").write_text(json.dumps({"images": 2000}))
    assert status.main([str(config.run_dir)]) == 0
    assert " done " in capsys.readouterr().out.splitlines()[3]


@pytest.mark.parametrize("columns", [80, 90, 120])
def test_names_and_states_are_readable_on_a_terminal(columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "impala-CartPole-v1-seed1-again"
    run = make_run(tmp_path, run_name=name, total_steps=40_000, finished=False)
    text = (run / "progress.csv").read_text().splitlines(keepends=True)[:2]
    place = text[0].split(",").index("rollout/episode_return")
    cells = text[1].split(",")
    cells[place] = "8.2765e30"
    (run / "progress.csv").write_text(text[0] + ",".join(cells))
    (run / "failed").write_text("update 3: the loss is not a finite number; a lower --lr may help\n")
    assert status.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    (first,) = (line for line in lines if line.startswith(f" {name[:20]}"))
    assert "failed:" in first and "8.28e+30" in first
    assert {"update", "finite", "number;", "--lr"} <= {*" ".join(lines).split()}


def test_the_export_of_a_run_without_its_settings_is_no_run(tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    (run / "export").mkdir()
    (run / "config.yaml").rename(run / "export" / "config.yaml")
    with pytest.raises(UserError, match="there is no run in"):
        status.main([str(tmp_path)])
