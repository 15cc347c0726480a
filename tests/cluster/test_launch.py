"""The launcher with real processes: shares, restarts, and what it refuses."""

import json
import os
import resource
import subprocess
import sys

import pytest
from launching import LAUNCH, Launch
from processes import ROOT, unread_pipe

from benchmarks.process_tree import alive
from cluster import launch as launcher
from cluster.launch import thread_shares
from tfrl.workers import tf_config


def test_workers_share_the_machine_and_their_output_has_prefixes(tmp_path):
    program = 'print(json.dumps(dict(os.environ))); print("to stderr", file=sys.stderr)'
    environ = {"OMP_NUM_THREADS": "", "TF_NUM_INTRAOP_THREADS": ""}
    launch = Launch(tmp_path, program, workers=3, environ=environ)
    code, out, err = launch.end()
    assert (code, sorted(err.splitlines())) == (0, ["[1] to stderr", "[2] to stderr", "to stderr"])
    lines = {line.partition("{")[0]: json.loads("{" + line.partition("{")[2]) for line in out.splitlines()}
    assert lines.keys() == {"", "[1] ", "[2] "}
    configs = [tf_config.read(lines[prefix]) for prefix in ("", "[1] ", "[2] ")]
    assert [config.worker for config in configs] == [0, 1, 2]
    assert len({config.workers for config in configs}) == 1
    shares = thread_shares(len(os.sched_getaffinity(0)), 3)
    assert [int(lines[prefix]["OMP_NUM_THREADS"]) for prefix in ("", "[1] ", "[2] ")] == shares
    assert [int(lines[prefix]["TF_NUM_INTRAOP_THREADS"]) for prefix in ("", "[1] ", "[2] ")] == shares
    assert lines[""]["PYTHONUNBUFFERED"] == "1"


def cpu_seconds_of_children():
    """Of the processes that have ended, and of their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_launcher_starts_quickly_and_without_tensorflow(tmp_path):
    code = "import sys, cluster.launch; print(sorted({'tensorflow', 'numpy', 'keras'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
    before = cpu_seconds_of_children()
    assert Launch(tmp_path, "").end()[0] == 0
    assert cpu_seconds_of_children() - before < 1, "the machine may be busy, so wall time tells little"


def test_all_start_again_on_fresh_ports_when_one_is_killed(tmp_path):
    program = """
note(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
note(os.environ.get("TFRL_RESTARTED"))
all_started()
if starts == 1:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""
    launch = Launch(tmp_path, program)
    code, _, err = launch.end()
    assert code == 0
    assert err == (
        "launch: worker 1 died (killed by signal 9); restarting all 2 workers from the last checkpoint "
        "(restart 1 of 3)\n"
    )
    for worker in (0, 1):
        _, first, never, _, second, once = launch.notes(worker)
        assert first != second and (never, once) == ("None", "1")


def test_it_gives_up_after_max_restarts_and_tells_the_reason(tmp_path):
    launch = Launch(tmp_path, "sys.exit(75 if task == 0 else 0)", "--max-restarts", "2")
    code, _, err = launch.end()
    assert code == 1
    assert len(launch.pids(0)) == 3
    assert "restart 2 of 2" in err
    assert err.splitlines()[-1] == (
        "launch: worker 0 gave up on another process (exit code 75); no restarts are left (--max-restarts 2)"
    )


SAVES = "saved = lambda: print(os.environ['TFRL_SAVED'], end='', file=sys.stderr, flush=True)\n"


def test_waits_for_restarts_grow_fourfold_until_a_checkpoint(tmp_path):
    program = SAVES + "note(time.monotonic())\nif starts == 3: saved(); time.sleep(0.2)\nsys.exit(75)"
    launch = Launch(tmp_path, program, "--restart-wait", "0.2", workers=1)
    code, _, err = launch.end()
    began = [float(note) for note in launch.notes(0) if not note.startswith("start")]
    waits = [after - before for before, after in zip(began, began[1:], strict=False)]
    # Failures in a row: 1, 2, 1 (it has saved), 2, 3, and the fourth is the end.
    for wait, expected in zip(waits, (0.2, 0.8, 0.0, 0.8, 3.2), strict=True):
        assert expected <= wait < expected + 2.5
    assert code == 1
    said = [line.partition("checkpoint")[2] for line in err.splitlines()]
    assert said == [
        " in 0.2 s (restart 1 of 3)",
        " in 0.8 s (restart 2 of 3)",
        " (restart 1 of 3)",
        " in 0.8 s (restart 2 of 3)",
        " in 3.2 s (restart 3 of 3)",
        "",
    ]


def test_restarts_count_afresh_after_each_checkpoint(tmp_path):
    program = SAVES + "saved(); time.sleep(0.1); os.kill(os.getpid(), 9 if starts < 5 else 0)"
    launch = Launch(tmp_path, program, "--max-restarts", "1", "--restart-wait", "60", workers=1)
    code, _, err = launch.end()
    assert (code, len(launch.pids(0)), err.count("(restart 1 of 1)")) == (0, 5, 4)


def test_a_trainers_own_failure_is_not_restarted(tmp_path):
    """The other workers lose a peer then, and may report that first."""
    launch = Launch(tmp_path, "time.sleep(0.4 * task); sys.exit(75 if task == 0 else 1)")
    code, _, err = launch.end()
    assert (code, len(launch.pids(0))) == (1, 1)
    assert err == "launch: worker 1 failed (exit code 1); not restarted, because it would fail again\n"


def test_a_signal_ends_the_wait_for_a_restart(tmp_path):
    launch = Launch(tmp_path, "sys.exit(75)", "--restart-wait", "60", workers=1)
    for line in launch.process.stderr:
        if "in 60 s (restart 1 of 3)" in line:
            break
    launch.process.terminate()
    assert launch.end()[0] == 143
    assert len(launch.pids(0)) == 1


def test_after_a_crash_it_says_where_the_last_errors_are(tmp_path):
    launch = Launch(tmp_path, "os.abort() if task == 1 else time.sleep(60)", "--max-restarts", "0")
    code, _, err = launch.end()
    where = "tensorflow/worker-1.log in the run's folder"
    said = f"launch: worker 1 crashed (killed by signal 6; the last errors are in {where}); no restarts"
    assert (code, err.splitlines()[-1].startswith(said)) == (1, True)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    program = """
signal.signal(signal.SIGTERM, lambda *_: note("told"))
note("ready")
all_started()
if task == 1:
    while "ready" not in open(os.path.join(folder, "worker-0")).read():
        time.sleep(0.02)
    sys.exit(1)
while True:
    time.sleep(1)
"""
    launch = Launch(tmp_path, program, "--max-restarts", "0", "--grace", "0.5")
    code, _, err = launch.end()
    assert (code, "worker 1 failed (exit code 1); not restarted" in err) == (1, True)
    assert launch.notes(0).count("told") == 1
    assert not alive(launch.pids(0)[0])


@pytest.mark.parametrize("lost", [("stdout",), ("stdout", "stderr")])
def test_workers_train_when_nobody_reads_their_output(tmp_path, lost):
    program = """
for _ in range(5):
    print("said"); print("complained", file=sys.stderr)
    time.sleep(0.1)
if starts == 1:
    sys.exit(75)  # the launcher has something to say as well
note("done")
"""
    with unread_pipe("broken") as pipe:
        launch = Launch(tmp_path, program, workers=1, **dict.fromkeys(lost, pipe))
        assert launch.end()[0] == 0
    assert len(launch.pids(0)) == 2 and launch.notes(0)[-1] == "done"


def test_each_attempt_shows_its_error_once(tmp_path):
    program = 'all_started(); print("error: the peers did not come", file=sys.stderr); sys.exit(75)'
    code, _, err = Launch(tmp_path, program, "--max-restarts", "1").end()
    assert code == 1
    assert err.count("error: the peers did not come") == 2


def test_bad_settings_are_reported_once_and_not_restarted(tmp_path):
    launch = Launch(tmp_path, 'print("error: --lr is -1", file=sys.stderr); sys.exit(2)')
    code, _, err = launch.end()
    assert code == 2
    assert err.count("error: --lr is -1") == 1
    assert "refused its settings" in err.splitlines()[-1]
    assert len(launch.pids(0)) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "2"], ["no command", "--"]),
        (["--workers", "2", "--"], ["no command"]),
        (["--", "true"], ["--workers N"]),
        (["--workers", "0", "--", "true"], ["--workers"]),
        (["--workers", "-2", "--", "true"], ["--workers", "got -2"]),
        (["--workers", "two", "--", "true"], ["'two'"]),
        (["--workers", "3", "--hosts", "a,b", "--", "true"], ["--workers 3"]),
        (["--hosts", "a,a", "--", "true"], ["'a:2222'", "of its own"]),
        (["--hosts", "a b,c", "--", "true"], ["'a b:2222'"]),
        (["--wrokers", "2", "--", "true"], ["--wrokers"]),
        (["--workers", "2", "--max-restarts", "-1", "--", "true"], ["--max-restarts", "got -1"]),
        (["--workers", "2", "--grace", "nan", "--", "true"], ["--grace", "got nan"]),
        (["--workers", "2", "--grace", "inf", "--", "true"], ["--grace", "got inf"]),
        (["--workers", "2", "--restart-wait", "nan", "--", "true"], ["--restart-wait", "got nan"]),
        (["--workers", "2", "--restart-wait", "61", "--", "true"], ["--restart-wait", "got 61"]),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(flags, words):
    done = subprocess.run([*LAUNCH, *flags], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("separator", [[], ["--"]], ids=["bare", "--"])
def test_the_command_stands_with_or_without_a_separator(monkeypatch, separator):
    commands = []
    monkeypatch.setattr(launcher, "launch", lambda places, command, **rest: commands.append(command) or 0)
    command = ["python", "-m", "tfrl.ppo", "--", "--workers", "3"]
    assert launcher.main(["--workers", "2", "--grace=3", *separator, *command]) == 0
    assert commands == [command]


def test_a_missing_command_is_reported_and_not_restarted():
    done = subprocess.run(
        [*LAUNCH, "--workers", "2", "--", "no-such"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: cannot start 'no-such': No such file or directory\n"
