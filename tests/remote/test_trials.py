"""A trial of a sweep, without Ray: what it tells and when, how it fails, and with whose weights it begins.

Its command is a small program, `tfrl.small` of a folder made here, which does as its run's folder says.
"""

import fcntl
import functools
import threading
from types import SimpleNamespace

import pytest
from checkpoints import assert_same_arrays, learner_arrays, save
from launching import until

from tfrl.cli.errors import TrainingError
from tfrl.remote.trials import Sweep, TrialRun, begin, current, is_over, leave, outcome, rows_with, run_to_end
from tfrl.run.checkpoint import CheckpointStore
from tfrl.run.folder import LEFT_FILE, LOCK_FILE

SMALL = """
import os, sys, time
from pathlib import Path
place = Path(sys.argv[sys.argv.index("--logdir") + 1], sys.argv[sys.argv.index("--run-name") + 1])
def row(env_steps, value):
    with (place / "progress.csv").open("a") as file:
        file.write(f"{env_steps},{value}\\n")
def wait_for(name):
    while not (place / name).exists():
        time.sleep(0.02)
exec((place / "program").read_text())
"""
METRIC = "eval_test/return"


@pytest.fixture
def make(tmp_path):
    """Makes a trial of 30 env steps whose run is a program; what it tells goes into its list `told`."""

    def trial(program, own=None):
        own = own or TrialRun("trial-000")
        (tmp_path / "tfrl").mkdir(exist_ok=True)
        (
            tmp_path / "tfrl" / "__init__.py"
        ).touch()  # before the installed package, whichever way that is found
        (tmp_path / "tfrl" / "small.py").write_text(SMALL)
        run = tmp_path / own.name
        run.mkdir(exist_ok=True)
        (run / "program").write_text(program)
        (run / "progress.csv").write_text(f"env_steps,{METRIC}\n")
        sweep = Sweep("small", (), ({"lr": 1e-3},), (), "none", METRIC, 30)
        told = []
        where = {"environment": {}, "folder": str(tmp_path)}
        tell = lambda own, row: told.append((own, row))  # noqa: E731
        run = functools.partial(run_to_end, sweep, tmp_path, {"lr": 1e-3}, own, **where, tell=tell)
        return SimpleNamespace(run=run, told=told)

    return trial


def steps(trial):
    return [metrics["env_steps"] for _, metrics in trial.told]


def test_the_last_evaluation_is_reported_as_the_last_at_the_end(make, tmp_path):
    """Before that, a scheduler could continue the trial from other weights."""
    trial = make(
        "row(10, 1.0)\nrow(20, 'nan')\nwait_for('more')\nrow(25, 3.0)\nrow(30, 2.0)\nwait_for('end')\n"
        "(place / 'results.json').write_text('{}')",
    )
    thread = threading.Thread(target=trial.run)
    thread.start()
    try:
        until(lambda: steps(trial) == [10])
        (tmp_path / "trial-000" / "more").touch()
        until(lambda: steps(trial) == [10, 25])
        thread.join(1.5)
        assert steps(trial) == [10, 25]
    finally:
        (tmp_path / "trial-000" / "end").touch()
        thread.join()
    run, last = trial.told[-1]
    assert last == {
        **{"value": 2.0, "env_steps": 30, "evaluations": 3, "run": "trial-000"},
        **{"done": True, "finished": True},
    }
    assert run == TrialRun("trial-000", evaluations=3, seen=30)
    assert not any("done" in metrics for _, metrics in trial.told[:-1])


def test_a_run_that_ended_unobserved_is_reported_by_its_last_row(make, tmp_path):
    """It may have ended before the sweep was cut off; then it is not started again."""
    program = "[row(n, n) for n in (10, 20, 30)]\n(place / 'results.json').write_text('{}')"
    trial = make(program, TrialRun("trial-000-at-5-ab", "start", 5, 2, 10))
    (tmp_path / "trial-000-at-5-ab" / "results.json").touch()
    for n in (10, 20, 25):
        with (tmp_path / "trial-000-at-5-ab" / "progress.csv").open("a") as file:
            file.write(f"{n},{n}\n")
    trial.run()
    assert steps(trial) == [30] and trial.told[0][1]["evaluations"] == 4 and trial.told[0][1]["done"]
    assert not (tmp_path / "trial-000-at-5-ab" / "output.txt").exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('curves: ...', flush=True)\nos.kill(os.getpid(), 9)", "killed by signal 9"),
        ("print('saved')", "stopped by its stop file; the same command continues"),
        ("print('error: it is broken', file=sys.stderr)\nsys.exit(1)", "error: it is broken"),
    ],
)
def test_a_trial_that_does_not_complete_says_why(make, program, words):
    trial = make(f"row(10, 1.0)\n{program}")
    with pytest.raises(TrainingError, match=f"^{words}$"):
        trial.run()


# The weights of another trial


def donor(logdir, *updates, name="trial-003"):
    """A run with checkpoints of these updates, of 1,000 env steps each."""
    store = CheckpointStore(logdir / name / "checkpoints", keep=9)
    for update in updates:
        save(store, update)
    (logdir / name / "config.yaml").write_text("algorithm: ppo\n")
    return {"trial": "trial-003", "part": TrialRun(name, evaluations=4, seen=2000)}


def sweep_of(scheduler="pbt"):
    return Sweep("ppo", (), ({"lr": 1e-3},), (), scheduler, METRIC, 30_000)


def begun(logdir, told, lr=1e-3):
    return begin(sweep_of(), logdir, "trial-000", {"lr": lr}, told)


def test_a_trial_begins_with_the_weights_that_were_compared_and_says_so_in_its_name(tmp_path):
    told = donor(tmp_path, 1, 2, 3)
    run = begun(tmp_path, told)
    assert run.name.startswith("trial-000-at-2000-")
    assert run == TrialRun(run.name, f"{run.name}/weights-of-trial-003", 2000, 4)
    kept = CheckpointStore(tmp_path / run.start / "checkpoints", keep=1).load(pytest.fail)
    assert (kept.update, kept.env_steps) == (2, 2000)
    assert_same_arrays(kept.learner, learner_arrays(2))
    assert (tmp_path / run.start / "config.yaml").read_text() == "algorithm: ppo\n"


def test_a_resumed_sweep_finds_the_current_run_of_each_trial(tmp_path):
    (tmp_path / "trial-000").mkdir()
    assert current(tmp_path, "trial-000", {"lr": 1e-3}) == (TrialRun("trial-000"), {"lr": 1e-3})
    told = donor(tmp_path, 2)
    one, other = (begun(tmp_path, told, lr) for lr in (2e-3, 4e-3))
    assert one.name != other.name and one.offset == other.offset == 2000
    assert current(tmp_path, "trial-000", {"lr": 1e-3}) == (other, {"lr": 4e-3})
    assert begun(tmp_path, None, 4e-3) == other
    rows = f"env_steps,{METRIC}\n100,1.0\n200,2.0\n300,3.0\n"
    (tmp_path / other.name / "progress.csv").write_text(rows)
    again = begun(tmp_path, None, 4e-3)  # PBT compares what there is now, and not what there was
    assert again == other._replace(seen=200, evaluations=other.evaluations + 2)
    assert not is_over(tmp_path, "trial-000")
    leave(tmp_path, "trial-000", None)
    assert is_over(tmp_path, "trial-000")
    found = outcome(sweep_of(), tmp_path, 0)
    assert (found.run, found.settings) == (tmp_path / other.name, {"lr": 4e-3})


def test_a_resumed_asha_does_not_judge_earlier_evaluations_again(tmp_path):
    (tmp_path / "trial-000").mkdir()
    rows = f"env_steps,{METRIC}\n100,1.0\n200,2.0\n300,3.0\n"
    (tmp_path / "trial-000" / "progress.csv").write_text(rows)
    run = begin(sweep_of("asha"), tmp_path, "trial-000", {"lr": 1e-3}, None)
    assert (run.seen, run.evaluations) == (200, 2)


def test_a_trial_that_a_callback_stopped_has_the_value_of_its_last_evaluation(tmp_path):
    run = tmp_path / "trial-000"
    run.mkdir()
    (run / "progress.csv").write_text(f"env_steps,{METRIC}\n100,1.0\n200,\n")
    (run / "results.json").write_text('{"env_steps": 200, "eval": {"test": {"return": 8.0}}}')
    assert [row.value for row in rows_with(run, METRIC)] == [1.0, 8.0]
    (run / "progress.csv").write_text(f"env_steps,{METRIC}\n100,1.0\n200,8.0\n")
    assert [row.value for row in rows_with(run, METRIC)] == [1.0, 8.0], "once"
    (run / "progress.csv").write_text(f"env_steps,{METRIC}\n100,1.0\n200,\n300,\n")
    assert [row.value for row in rows_with(run, METRIC)] == [1.0], "the results are older than the rows"


def test_an_untrained_policy_is_not_compared(tmp_path):
    """--eval-at-start evaluates it."""
    (tmp_path / "progress.csv").write_text(f"env_steps,{METRIC}\n0,9.0\n100,1.0\n")
    assert rows_with(tmp_path, METRIC) == [(100, 1.0)]


def test_a_paused_trial_continues_once_its_earlier_process_has_saved(make, tmp_path):
    trial = make("row(30, 1.0)\n(place / 'results.json').write_text('{}')")
    with (tmp_path / "trial-000" / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=trial.run)
        thread.start()
        thread.join(1.5)
        assert not trial.told, "it waits"
    thread.join()
    assert steps(trial) == [30]


def test_where_the_compared_weights_are_pruned_the_next_ones_are_taken_and_counted(tmp_path):
    run = begun(tmp_path, donor(tmp_path, 1, 3, 4))
    assert run.offset == 3000 and run.name.startswith("trial-000-at-3000-")
    # Of a run that has itself begun with another's weights, all env steps count.
    told = donor(tmp_path, 2, name="trial-003-at-7000-abcdef")
    told["part"] = told["part"]._replace(offset=7000)
    assert begun(tmp_path, told).offset == 9000


def test_abandoned_runs_of_a_trial_are_marked(tmp_path):
    """The mark goes when the sweep continues with one of them; runs of other trials are not marked."""
    later, others = "trial-000-at-5-ab", ("trial-001", "trial-0001")
    for name in ("trial-000", later, *others):
        (tmp_path / name).mkdir()

    def left():
        return sorted(path.parent.name for path in tmp_path.glob(f"*/{LEFT_FILE}"))

    leave(tmp_path, "trial-000", later)
    assert left() == ["trial-000"]
    leave(tmp_path, "trial-000", "trial-000")
    assert left() == [later]
    leave(tmp_path, "trial-000", None)
    assert left() == ["trial-000", later]
    leave(tmp_path, "trial-002", "trial-002")  # which has no folder yet
    assert left() == ["trial-000", later]
