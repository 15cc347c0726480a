"""Told to stop: by signals while the main thread is in a write that waits or in C code; by a file."""

import fcntl
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from processes import PATIENCE, ROOT, hangup

from tfrl.cli.endings import StopRequest

ECHOES = {signal.SIGINT: 1.2, signal.SIGTERM: 3.2}  # seconds after which a signal is a second request
PRELUDE = """
import hashlib, threading, time
from pathlib import Path
from tfrl.cli import endings
from tfrl.run.console import Console
from tfrl.cli.endings import StopRequest
endings.OURS.of_command = True
console, stop, answered = Console(), StopRequest(Path("no such folder")), threading.Event()
def answer(name):
    console.message(f"{name}: saving")
    answered.set()
with stop.listening(answer, lambda: console.message("Ended")):
"""
WRITES = """
    for _ in range(1000):
        console.message("x" * 500)
    if stop.exit_code:
        answered.wait(60)  # by a thread, which on a busy machine may come late
    console.message(f"votes {stop.votes()}")
"""
# For ever in C code that lets other threads run but handles no signals, as a call of TensorFlow's does.
COMPUTES = """
    console.message("computing")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.fixture
def start():
    """Starts a program; it is killed at the end of the test."""
    started = []

    def run(program, **settings):
        command = [sys.executable, "-u", "-c", PRELUDE + program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        settings = {"preexec_fn": hangup(signal.SIG_DFL), **pipes, **settings}
        started.append(subprocess.Popen(command, cwd=ROOT, text=True, **settings))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until_full(pipe):
    """Until what is not read of a pipe has not grown for half a second."""
    before, since, end = -1, time.monotonic(), time.monotonic() + PATIENCE
    while before <= 0 or time.monotonic() - since < 0.5:
        assert time.monotonic() < end
        (now,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.02)


def test_a_signal_in_the_middle_of_a_line_is_answered_and_remembered(start):
    process = start(WRITES)
    wait_until_full(process.stdout)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines.count("x" * 500) == 1000
    assert "SIGTERM: saving" in lines
    assert lines[-1] == "votes [1.0, 0.0, 0.0]"


def test_a_signal_is_answered_while_one_call_goes_on(start):
    process = start(COMPUTES)
    assert process.stdout.readline() == "computing\n"
    process.send_signal(signal.SIGINT)
    assert select.select([process.stdout], [], [], 60)[0], "it must not wait for the call"
    assert process.stdout.readline() == "SIGINT: saving\n"


@pytest.mark.promise
@pytest.mark.parametrize(
    ("signum", "saved", "expected"),
    [
        (2, False, 130),
        (15, True, 143),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((15, False, 143), (2, True, 130))),
    ],
)
def test_a_second_signal_exits_at_once_and_says_what_is_not_saved(start, signum, saved, expected):
    process = start(f"    stop.saved = {saved}\n" + COMPUTES)
    assert process.stdout.readline() == "computing\n"
    process.send_signal(signum)
    process.stdout.readline()
    time.sleep(ECHOES[signum])
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (expected, "" if saved else "Ended\n", "")


def test_repeated_hangups_of_a_terminal_are_one_request_to_stop(start):
    process = start(WRITES)
    wait_until_full(process.stdout)
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)  # two that wait together are one
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.splitlines()[-1] == "votes [1.0, 0.0, 0.0]" and stdout.count("SIGHUP: saving") == 1


def test_nohup_is_respected(start):
    process = start(COMPUTES, preexec_fn=hangup(signal.SIG_IGN))
    assert process.stdout.readline() == "computing\n"
    process.send_signal(signal.SIGHUP)
    assert not select.select([process.stdout], [], [], 0.5)[0]
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM: saving\n"


def test_a_second_signal_ends_a_process_whose_output_nobody_reads(start):
    process = start(WRITES)
    wait_until_full(process.stdout)
    process.send_signal(signal.SIGTERM)
    time.sleep(ECHOES[signal.SIGTERM])
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_within_a_second_count_once(start, first):
    """Parents and schedulers may send the same signal several times."""
    process = start(WRITES)
    wait_until_full(process.stdout)
    for signum in (first, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, first):
        process.send_signal(signum)
        time.sleep(0.1)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.count(": saving\n") == 1 and f"{first.name}: saving" in stdout
    assert stdout.splitlines()[-1].startswith("votes [") and "Ended" not in stdout


def test_a_blocked_signal_is_obeyed_even_if_its_handler_was_replaced(start):
    """As TensorFlow does in C++ while it connects the workers."""
    process = start("""    pass
import ctypes, signal, sys
from tfrl.cli import endings
with endings.held_back():
    take = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: print("swallowed"))
    ctypes.CDLL(None).signal(15, take)
    print("held back", flush=True)
    time.sleep(0.5)
    print("waited", flush=True)
    stop = StopRequest(Path("no such folder"))
    with stop.listening(lambda name: print(name), lambda: None):
        print(f"told {stop.exit_code}")
""")
    assert process.stdout.readline() == "held back\n"
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr, "swallowed" in stdout) == (0, "", False)
    assert stdout.startswith("waited\n") and "told 143" in stdout


def test_a_stop_file_is_obeyed_and_removed_and_a_folder_is_ignored(tmp_path):
    file = tmp_path / "stop"
    stop = StopRequest(file)
    stop.forget_file()
    assert not any(stop.votes()), "there is none"
    file.touch()
    assert stop.votes() == [0.0, 0.0, 1.0]
    stop.forget_file()
    assert not any(stop.votes()) and not file.exists()
    file.mkdir()
    stop.forget_file()
    assert not any(stop.votes()) and file.is_dir()
