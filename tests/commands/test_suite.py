"""A suite: the runs it is of, what it refuses before it starts, how it starts, stops and reports them."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_runs import make_run
from processes import PATIENCE, ROOT, unread_pipe
from refusals import refusal

from tfrl import suite
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.settings import to_yaml
from tfrl.reporting import runs
from tfrl.run.folder import RESULTS_FILE, SETTINGS_FILE


def test_a_suite_is_games_times_seeds():
    tasks = suite.plan(suite.Options(envs="coinrun,maze", seeds="3,4"), ["--total-steps", "1e6"])
    assert [(t.config.env, t.config.seed) for t in tasks] == [
        ("coinrun", 3),
        ("coinrun", 4),
        ("maze", 3),
        ("maze", 4),
    ]
    assert all(t.config.total_steps == 1_000_000 for t in tasks)
    assert len({t.config.run_dir for t in tasks}) == 4
    assert len(suite.plan(suite.Options(), [])) == 48


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--envs", "pong"], "no env 'pong'"),
        (["--env", "maze"], "instead of --env"),
        (["--seeds", "x"], "--seeds must be a whole number; got 'x'"),
        (["--run-name", "a"], "instead of --run-name"),
        (["--envs"], "--envs needs a value"),
        (["--seeds", "1,1"], "would share the folder"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--workers", "1000"], "--workers must be at least 1 and at most"),
        (["--workers", "two"], "--workers must be a whole number"),
        (["--seeds", "1", "--", "--num-levels", "x"], "--num-levels must be a whole number"),
        (["--", "--seeds", "1"], "--seeds"),
    ],
)
def test_a_suite_is_checked_before_it_starts(arguments, sentence, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UserError, match=sentence):
        suite.main(arguments)


TRAINER = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from made_runs import make_run
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
logdir, seed = Path(flags["--logdir"]), int(flags["--seed"])
mark = logdir / f"{{seed}}.started"
mark.touch()
while len(list(logdir.glob("*.started"))) < {together}:
    time.sleep(0.02)
if seed in {ends}:
    sys.exit({ends}[seed])
make_run(logdir, "maze", seed, total_steps=40_000)
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Stands in for the trainer: leaves a finished run, or ends with a code, when `together` have started."""

    def make(together=1, **ends):
        script = tmp_path / "trainer.py"
        ends = {int(seed[1:]): code for seed, code in ends.items()}
        here = Path(__file__).parent
        script.write_text(
            TRAINER.format(paths=[str(here.parent), str(here.parent.parent)], together=together, ends=ends)
        )
        monkeypatch.setattr(suite, "_TRAINER", (str(script),))
        return ["--envs", "maze", "--total-steps", "40000", "--logdir", str(tmp_path)]

    return make


def test_a_suite_skips_what_is_done_runs_the_rest_and_reports(tmp_path, trainer, capsys):
    make_run(tmp_path, "maze", 1, total_steps=40_000)
    assert suite.main([*trainer(), "--seeds", "1,2"]) == 0
    assert {path.name for path in tmp_path.glob("*.started")} == {"2.started"}
    assert (tmp_path / "report.html").is_file()
    assert "maze-seed1: done before" in capsys.readouterr().out


def test_what_ends_a_suite_is_told_with_the_runs_that_are_left(tmp_path, trainer, capsys):
    make_run(tmp_path, "maze", 1, total_steps=40_000)
    assert suite.main([*trainer(_2=2), "--seeds", "1,2,3"]) == 2
    assert {path.name for path in tmp_path.glob("*.started")} == {"2.started"}
    said = "error: the other runs would fail in the same way: 2 runs are not done: maze-seed2, maze-seed3.\n"
    assert capsys.readouterr().err.endswith(said)


def test_runs_of_a_suite_go_side_by_side(tmp_path, trainer):
    """Each of the first two waits until both have started: one after another, none would end."""
    assert suite.main([*trainer(together=2), "--seeds", "1,2,3", "--workers", "2"]) == 0
    assert len(list(tmp_path.glob("*/output.txt"))) == 3


def test_a_suite_goes_on_when_nobody_reads_what_it_says(tmp_path, trainer, monkeypatch):
    flags = trainer()
    with unread_pipe("broken") as pipe, open(pipe, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert suite.main([*flags, "--seeds", "1,2"]) == 0
    assert (tmp_path / "report.html").is_file()


def test_a_suite_that_is_told_to_stop_stops(tmp_path, trainer):
    assert suite.main([*trainer(s1=143), "--seeds", "1,2"]) == 143
    assert not (tmp_path / "2.started").exists()


def test_a_run_that_was_stopped_is_told_as_that(tmp_path, trainer, capsys):
    """By what it says now, and not by what one before it has said in the same file."""
    output = tmp_path / "maze-seed1/output.txt"
    output.parent.mkdir()
    output.write_text("Ended without saving; there is no checkpoint yet.\n")
    assert suite.main([*trainer(together=2, s1=130), "--seeds", "1,2", "--workers", "2"]) == 130
    said = capsys.readouterr().out
    assert "maze-seed1: stopped; the same command continues it\n" in said and "with code" not in said


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, trainer, capsys):
    with pytest.raises(TrainingError, match="1 of 2 runs failed: maze-seed1"):
        suite.main([*trainer(together=2, s1=1), "--seeds", "1,2", "--workers", "2"])
    assert (tmp_path / "report.html").is_file()
    assert "ended with code 1" in capsys.readouterr().out


def test_a_suite_that_fails_itself_leaves_no_run_behind(tmp_path, trainer, monkeypatch):
    """The second run cannot be started while the first one waits for it."""
    flags = trainer(together=2)
    started = []

    def popen(*args, **settings):
        if started:
            raise OSError(12, "Cannot allocate memory")
        started.append(real(*args, **settings))
        return started[0]

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="allocate"):
        suite.main([*flags, "--seeds", "1,2", "--workers", "2"])
    assert started[0].returncode == -signal.SIGTERM


def test_a_damaged_run_is_found_before_a_suite_starts(tmp_path, trainer):
    run = tmp_path / "maze-seed2"
    run.mkdir()
    (run / "results.json").write_text("{}")
    (run / "config.yaml").write_text("nothing: 1")
    with pytest.raises(UserError, match="unknown setting 'nothing'"):
        suite.main([*trainer(), "--seeds", "1,2"])
    assert not list(tmp_path.glob("*.started"))


@pytest.mark.long
def test_ctrl_c_on_a_suite_saves_all_of_its_runs(tmp_path):
    flags = "--envs catch --torso cookbook --precision float32 --num-levels 0 --num-envs 8 --num-steps 16"
    flags += f" --num-minibatches 4 --total-steps 1e8 --seeds 1,2 --workers 2 --logdir {tmp_path}"
    command = [sys.executable, "-m", "tfrl.suite", *flags.split()]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        folders = [tmp_path / f"catch-seed{seed}" for seed in (1, 2)]
        while not all((folder / "progress.csv").is_file() for folder in folders):
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    for folder in folders:
        saved = int(max(folder.glob("checkpoints/update-*")).name.removeprefix("update-"))
        assert runs.load(folder).env_steps == saved * 8 * 16


@pytest.mark.long
def test_a_suite_of_two_algorithms_ends_with_one_report_of_both(tmp_path):
    flags = "--algorithms ppo,drac --envs catch --seeds 1 --torso cookbook --precision float32 --num-levels 0"
    flags += " --num-envs 8 --num-steps 16 --num-minibatches 4 --total-steps 256 --eval-episodes 2"
    command = [sys.executable, "-m", "tfrl.suite", *flags.split(), "--workers", "2", "--logdir", tmp_path]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/results.json"))]
    assert sorted(results["algorithm"] for results in found) == ["drac", "ppo"]
    page = (tmp_path / "report.html").read_text()
    assert all(f">{name}<" in page for name in ("ppo", "drac")), page[:2000]


def planned(tmp_path, arguments):
    """The tasks and the number of workers of a suite's command line."""
    options, rest = suite._split([*arguments.split(), "--logdir", str(tmp_path)])
    return suite.plan(options, rest), options.workers


def test_a_run_of_other_settings_does_not_pass_for_one_of_the_suite(tmp_path):
    """Also where it is done; what a run may change when it goes on may differ."""
    tasks, _ = planned(tmp_path, "--envs catch --seeds 1,2 --total-steps 1e6 --lr 1e-3")
    done = tasks[0].config
    done.run_dir.mkdir()
    (done.run_dir / SETTINGS_FILE).write_text(to_yaml(dataclasses.replace(done, precision="bfloat16")))
    (done.run_dir / "progress.csv").write_text(f"env_steps\n{done.run_steps}\n")
    (done.run_dir / RESULTS_FILE).write_text(json.dumps({"env_steps": done.run_steps}))
    assert suite.is_done(done)
    planned(tmp_path, "--envs catch --seeds 1,2 --total-steps 9e5 --lr 1e-3 --env-threads 1")
    with pytest.raises(
        UserError, match=r"catch-seed1 .*--lr 0.001 there, 0.0003 here.* or choose another --logdir"
    ):
        planned(tmp_path, "--envs catch --seeds 1,2 --total-steps 1e6 --lr 3e-4")


def test_a_flag_of_one_algorithm_alone_is_refused_with_the_name_of_the_other(tmp_path):
    for flags in ("--algorithms ppg,ppo", "--algorithms ppo,drac", ""):
        words = refusal(planned, tmp_path, f"--envs maze {flags} --policy-updates 4")
        assert "there is no flag --policy-updates (it is ppg's); " in words
        assert words.startswith("ppo: ") == bool(flags)
