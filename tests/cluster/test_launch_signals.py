"""How a launch is stopped: signals, Ctrl-C in a terminal, and processes that are killed or left behind."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import sysconfig
import time

import pytest
from launching import LAUNCH, PRELUDE, SAVE, Launch, until
from processes import ROOT, hangup

from benchmarks.process_tree import alive, family
from cluster.launch import AGENT

# Saves as a trainer does: for a second, and a second request before that ends it without.
SAVES = """
from tfrl.cli import endings
from tfrl.cli.endings import StopRequest
endings.OURS.of_command = True
stop = StopRequest(pathlib.Path("no such folder"))
with stop.listening(lambda name: note(f"saves for {name}"), lambda: note("lost")):
    note("ready")
    while not stop.exit_code:
        time.sleep(0.01)
    time.sleep(1.0)
    note("saved")
    sys.exit(stop.exit_code)
"""
SAVES = f"import pathlib\nsys.path += {[str(ROOT), sysconfig.get_path('purelib')]}\n{SAVES}"


@pytest.mark.parametrize("order", [1, -1], ids=["parents first", "children first"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_every_process_of_the_job_is_one_request_and_all_save(tmp_path, signum, order):
    """systemd and schedulers signal every process, and the parents pass the signal on as well."""
    launch = Launch(tmp_path, SAVES)
    launch.wait_for("ready")
    job = family(launch.process.pid)
    assert len(job) == 5, "a launcher, two agents and their workers"
    for _ in range(2):
        for process in job[::order]:
            os.kill(process, signum)
        time.sleep(0.02)
    code, _, err = launch.end()
    passed_on = signum if signum == signal.SIGINT else signal.SIGTERM
    assert (code, err) == (128 + passed_on, "")
    for worker in (0, 1):
        told, *rest = launch.notes(worker)[2:]
        # Parents pass SIGHUP on as SIGTERM, which may come first on a busy machine.
        assert told in (f"saves for {signum.name}", f"saves for {passed_on.name}") and rest == ["saved"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_each_worker_once_and_all_save(tmp_path, signum):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    launch.process.send_signal(signum)
    launch.process.send_signal(signum if signum != signal.SIGINT else signal.SIGTERM)
    passed = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
    code, _, err = launch.end()
    assert (code, err) == (128 + passed, "")
    for worker in (0, 1):
        assert launch.notes(worker)[2:] == [f"signal {int(passed)}"]


@pytest.mark.parametrize("order", [1, -1], ids=["parents first", "children first"])
def test_a_signal_to_every_process_ends_a_job_that_has_hardly_begun(tmp_path, order):
    """The signal comes at any moment while agents and workers start; the exit code is 143, without a
    traceback.
    """
    for delay in (0.25, 0.3, 0.35, 0.4, 0.5, 0.6):
        launch = Launch(tmp_path, SAVE)
        time.sleep(delay)
        job = family(launch.process.pid)
        for process in job[::order]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        code, _, err = launch.end()
        assert code in (143, -signal.SIGTERM) and err == ""
        until(lambda job=job: not any(alive(process) for process in job))


def test_a_stopped_worker_gets_no_second_signal_from_its_agent(tmp_path):
    launch = Launch(tmp_path, SAVES.replace("time.sleep(1.0)", "time.sleep(4.5)"))
    launch.wait_for("ready")
    launch.process.terminate()
    launch.wait_for("saves for SIGTERM")
    time.sleep(3.2)  # later than an echo comes
    launch.process.kill()
    launch.wait_for("saved")
    launch.end()


def test_a_launcher_that_nohup_started_outlives_its_terminal(tmp_path):
    launch = Launch(tmp_path, SAVE, preexec_fn=hangup(signal.SIG_IGN))
    launch.wait_for("ready")
    launch.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)  # more than the launcher takes to pass a signal on
    for worker in (0, 1):
        assert launch.notes(worker)[1:] == ["ready"]
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 130


def test_a_signal_to_the_workers_ends_the_run(tmp_path):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    for worker in (0, 1):
        os.kill(launch.pids(worker)[0], signal.SIGTERM)
    assert launch.end()[0] == 143
    assert len(launch.pids(0)) == 1


def test_one_worker_that_was_stopped_before_it_met_the_others_ends_the_run(tmp_path):
    """The other workers wait for it, or find that it is gone."""
    program = "all_started()\nif task == 0: os.kill(os.getpid(), signal.SIGTERM)\n"
    launch = Launch(tmp_path / "waiting", program + SAVE)
    assert launch.end()[0] == 143
    assert launch.notes(1)[-1] == "signal 15"
    launch = Launch(tmp_path / "gone", program + "time.sleep(0.5); sys.exit(75)")
    assert (launch.end()[0], len(launch.pids(1))) == (143, 1)


def test_a_worker_that_fails_while_stopping_is_not_restarted(tmp_path):
    launch = Launch(tmp_path, SAVE.replace("sys.exit(128 + signum)", "sys.exit(1)"))
    launch.wait_for("ready")
    launch.process.terminate()
    code, _, err = launch.end()
    assert (code, "while all were being stopped" in err) == (1, True)
    assert len(launch.pids(0)) == 1


def on_a_terminal(tmp_path, program, keys):
    """(exit code, screen) of the launcher in a terminal; `keys` gets a function that types."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        command = [sys.executable, "-S", "-c", PRELUDE + program, str(tmp_path)]
        os.execv(sys.executable, [*LAUNCH, "--workers", "2", "--", *command])
    keys(lambda text: os.write(terminal, text))
    screen = b""
    try:
        while data := os.read(terminal, 4096):
            screen += data
    except OSError:  # the terminal's way to say that all have closed it
        pass
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screen.decode()


def noted(folder, note):
    paths = [folder / f"worker-{worker}" for worker in (0, 1)]
    return lambda: all(path.exists() and note in path.read_text() for path in paths)


def test_ctrl_c_in_a_terminal_reaches_each_worker_once(tmp_path):
    def keys(send):
        until(noted(tmp_path, "ready"))
        send(b"\x03")

    code, _ = on_a_terminal(tmp_path, SAVE, keys)
    assert code == 130
    for worker in (0, 1):
        assert (tmp_path / f"worker-{worker}").read_text().count("signal 2") == 1


def test_a_second_ctrl_c_kills(tmp_path):
    def keys(send):
        until(noted(tmp_path, "ready"))
        send(b"\x03")
        until(noted(tmp_path, "signal 2"))
        time.sleep(1.1)  # else it repeats the first
        send(b"\x03")

    started = time.monotonic()
    assert on_a_terminal(tmp_path, SAVE.replace("time.sleep(0.3)", "time.sleep(60)"), keys)[0] == 130
    assert time.monotonic() - started < 20


def test_the_chief_has_the_terminal_and_the_others_do_not(tmp_path):
    program = """
note(sys.stdout.isatty())
print("progress 1\\rprogress 2", end="")
sys.stdout.flush()
time.sleep(0.3)
print("\\nlast")
"""
    code, screen = on_a_terminal(tmp_path, program, lambda send: None)
    assert code == 0
    notes = [(tmp_path / f"worker-{worker}").read_text().splitlines()[1] for worker in (0, 1)]
    assert notes == ["True", "False"]
    assert "progress 1\rprogress 2" in screen
    assert "\r\x1b[2K[1] last\r\n" in screen, "a line of another worker runs into the chief's progress"


def test_workers_save_and_end_when_the_launcher_is_killed(tmp_path):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    launch.process.kill()
    pids = [launch.pids(worker)[0] for worker in (0, 1)]
    until(lambda: not any(alive(pid) for pid in pids))
    assert [launch.notes(worker)[-1] for worker in (0, 1)] == ["signal 15"] * 2
    launch.end()


@pytest.mark.parametrize(("grace", "end"), [(0.5, "signal 15"), (60.0, "saved")])
def test_a_worker_without_its_launcher_has_time_to_save(tmp_path, grace, end):
    program = SAVE.replace("time.sleep(0.3)", "time.sleep(1.5); note('saved')")
    order = {
        "command": [sys.executable, "-S", "-c", PRELUDE + program, str(tmp_path)],
        "environment": {"TF_CONFIG": '{"task": {"index": 0}}'},
        "directory": str(tmp_path),
        "grace": grace,
    }
    agent = subprocess.Popen([sys.executable, "-IS", AGENT], stdin=subprocess.PIPE)
    agent.stdin.write(json.dumps(order).encode() + b"\n")
    agent.stdin.flush()
    notes = tmp_path / "worker-0"
    until(lambda: notes.exists() and "ready" in notes.read_text())
    agent.stdin.close()
    assert agent.wait(timeout=20) == (137 if end == "signal 15" else 143)
    assert notes.read_text().splitlines()[-1] == end


def test_a_worker_takes_signals_although_what_started_its_agent_ignores_them(tmp_path):
    order = {
        "command": [sys.executable, "-S", "-c", PRELUDE + "note('ready'); time.sleep(60)", str(tmp_path)],
        "environment": {"TF_CONFIG": '{"task": {"index": 0}}'},
        "directory": str(tmp_path),
        "grace": 60,
    }

    def ignored():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen([sys.executable, "-IS", AGENT], stdin=subprocess.PIPE, preexec_fn=ignored) as agent:
        agent.stdin.write(json.dumps(order).encode() + b"\n")
        agent.stdin.flush()
        notes = tmp_path / "worker-0"
        until(lambda: notes.exists() and "ready" in notes.read_text())
        agent.stdin.write(b"T")
        agent.stdin.flush()
        assert agent.wait(timeout=20) == 143


def test_a_worker_dies_with_its_agent_and_all_start_again(tmp_path):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    first = launch.pids(0) + launch.pids(1)
    os.kill(family(launch.process.pid)[2], signal.SIGKILL)
    until(lambda: [len(launch.pids(worker)) for worker in (0, 1)] == [2, 2])
    assert not any(alive(pid) for pid in first)
    launch.process.terminate()
    code, _, err = launch.end()
    assert (code, "worker 1 died (killed by signal 9); restarting" in err) == (143, True)


def test_child_processes_of_a_worker_end_with_it(tmp_path):
    program = """
import subprocess
note(f"child {subprocess.Popen(['sleep', '60']).pid}")
"""
    launch = Launch(tmp_path, program)
    assert launch.end()[0] == 0
    for worker in (0, 1):
        child = int(launch.notes(worker)[1].split()[1])
        until(lambda child=child: not alive(child))
