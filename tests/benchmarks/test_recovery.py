"""The benchmarks of recovery: what they refuse, their files and tables, and a fault's cost by the notes."""

import json
import os
import signal
import time

import pytest
from processes import Answer, assert_refused
from refusals import refusal

from benchmarks import recovery, recovery_of_actors, trials
from benchmarks.disturbed_run import DisturbedRun
from tfrl.cli.errors import TrainingError

pytestmark = pytest.mark.promise


@pytest.mark.parametrize(
    ("module", "flags", "part"),
    [
        ("recovery", ["--faults", "flood"], "--faults flood is not among kill, term, hang, disk."),
        ("recovery", ["--eval-every", "0"], "--eval-every must be at least 1"),
        ("recovery", ["kill"], "'kill' is not a flag; usage: python -m benchmarks.recovery"),
        ("recovery_of_actors", ["--faults", "kill,disk"], "--faults disk is not among kill, hang, learner"),
        ("recovery_of_actors", ["--trials", "0"], "--trials must be at least 1"),
        ("recovery_of_actors", ["--actor-timeout", "0"], "--actor-timeout must be above 0"),
        ("recovery", ["--results", "nowhere/it.json"], "nowhere is no folder to write in."),
    ],
)
def test_impossible_measurements_are_refused_at_once(module, flags, part):
    assert_refused(Answer(*flags, module=f"benchmarks.{module}"), part)


@pytest.mark.parametrize("options", [recovery.Options(), recovery_of_actors.Options()])
def test_trials_are_added_to_those_in_the_results_file(tmp_path, options):
    path = tmp_path / "recovery.json"
    done = {"settings": options.flags, "weights": "0", "seconds": {}, "trials": [{"fault": "kill"}]}
    trials.write(path, done)
    assert trials.read(path, options.flags, pytest.fail) == done
    for other in ("[]", "{", json.dumps(done | {"settings": []})):
        path.write_text(other)
        sentence = refusal(trials.read, path, options.flags, pytest.fail)
        assert "recovery.json holds no results of these settings;" in sentence


MADE = [
    {"fault": fault, "seconds": seconds, "lost": lost, "equal": equal, "run": run}
    | {"hit": "updating", "victim": run % 2}
    for fault, seconds, lost, equal, run in (
        ("kill", 8.0, 0, True, 0),
        ("kill", 9.04, 0, True, 0),
        ("kill", 12.0, 0, False, 5),
        ("driver", 21.0, 256, True, 0),
        ("driver", 22.0, 1024, True, 0),
    )
]


def test_a_row_counts_the_trials_of_a_fault_and_the_undisturbed_weights():
    assert recovery_of_actors.report(MADE, 1280).splitlines() == [
        "| fault | trials | seconds to the next new update: median, most "
        "| env steps lost, of 1280: median, most | runs with the undisturbed weights |",
        "|---|---|---|---|---|",
        "| kill | 3 | 9.0, 12.0 | 0, 0 | 1 of 2 |",
        "| driver | 2 | 21.5, 22.0 | 640, 1024 | 1 of 1 |",
    ]


def test_a_second_table_of_workers_shows_what_the_faults_hit():
    assert recovery.report(MADE, 1280).splitlines() == [
        "| fault | trials | seconds to the next new update: median, most "
        "| env steps lost, of 1280: median, most | equal |",
        "|---|---|---|---|---|",
        "| kill | 3 | 9.0, 12.0 | 0, 0 | 2 |",
        "| driver | 2 | 21.5, 22.0 | 640, 1024 | 2 |",
        "",
        "| hit while | chief | trials | seconds | lost | equal |",
        "|---|---|---|---|---|---|",
        "| driver, updating | yes | 2 | 21.5, 22.0 | 640, 1024 | 2 |",
        "| kill, updating | no | 1 | 12.0, 12.0 | 0, 0 | 0 |",
        "| kill, updating | yes | 2 | 8.5, 9.0 | 0, 0 | 2 |",
    ]


@pytest.fixture
def ended(tmp_path):
    """Makes a run whose process ends at once, and whose notes are made up."""

    def make(*notes):
        run = DisturbedRun(tmp_path / "run", "no.such.trainer", [])
        run.wait()
        lines = (f"{at:.6f} {process} {update} {phase}\n" for at, process, update, phase in notes)
        (run.folder / "worker-0").write_text("".join(lines))
        return run

    return make


def test_a_restart_costs_the_updates_that_are_taken_again(ended):
    """Killed at 10 s, when 7 updates are finished; 5 are in the checkpoint that another process has."""
    before = [(9.0, 1, 6, "saving"), (9.5, 1, 7, "collecting"), (10.5, 1, 7, "updating")]
    after = [(20.0, 2, 5, "collecting"), (21.0, 2, 6, "collecting"), (22.0, 2, 7, "collecting")]
    found = ended(*before, *after, (23.0, 2, 8, "collecting")).restarted(10.0, 1)
    assert (found.seconds, found.resumed, found.updates) == (13.0, 10.0, 2)


def test_a_replaced_actor_costs_the_time_until_the_update_that_waited_for_it(ended):
    notes = [(9.5, 1, 7, "collecting"), (10.2, 1, 8, "collecting"), (17.0, 1, 8, "updating")]
    found = ended(*notes, (18.0, 1, 9, "collecting")).recovered(10.0, 8)
    assert (found.seconds, found.updates) == (8.0, 0)


def test_a_run_that_does_not_resume_is_an_error(ended):
    run = ended((9.5, 1, 7, "collecting"))
    with pytest.raises(TrainingError, match="was not restarted:"):
        run.restarted(10.0, 1)
    with pytest.raises(TrainingError, match="did not recover:"):
        run.recovered(10.0, 7)
    with pytest.raises(TrainingError, match="is over before the trial; give more --updates"):
        run.wait_until_aimed(lambda: run.finished > 7)


@pytest.mark.long
def test_a_killed_run_resumes_and_records_the_cost(tmp_path):
    """A real run without actors, with two updates between its checkpoints."""
    flags = "--env catch --torso linear --precision float32 --num-envs 8 --num-steps 32 --num-minibatches 2"
    flags += f" --eval-episodes 8 --checkpoint-every 2 --total-steps {60 * trials.BATCH}"
    run = DisturbedRun(tmp_path / "run", "tfrl.impala", flags.split())
    try:
        run.wait_until_aimed(lambda: run.finished >= 3)
        chief, struck = run.note(0).process, time.monotonic()
        os.kill(run.pid, signal.SIGKILL)
        run.start_again(-signal.SIGKILL)
        found = run.restarted(struck, chief)
        run.finish()
    finally:
        run.stop()
    assert 0 <= found.updates <= 2 and 0 < found.resumed < found.seconds
