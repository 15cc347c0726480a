"""How commands end where nobody reads what they say, and where they were given nothing to say it to."""

import os
import signal
import subprocess
import sys

import pytest
from processes import ROOT, unread_pipe

RUN = """
from tfrl.cli import endings
from tfrl.run import console
from tfrl.cli import streams
from tfrl.cli.errors import PeerError, TrainingError, UserError
def main(arguments):
    {body}
    return 0
endings.run(main)
"""


def run(body, **streams):
    return subprocess.run(command(body), cwd=ROOT, text=True, timeout=60, **streams)


def command(body):
    return [sys.executable, "-c", RUN.replace("{body}", body)]


@pytest.mark.parametrize("kind", ["broken", "full"])
def test_a_lost_peer_ends_a_worker_also_if_nobody_reads_its_stderr(kind):
    with unread_pipe(kind) as stderr:
        assert run("raise PeerError('worker 1 is gone')", stderr=stderr).returncode == 75


@pytest.mark.parametrize(("error", "code"), [("UserError('--lr')", 2), ("MemoryError()", 1)])
def test_the_exit_code_outlives_the_reader_of_stderr(error, code):
    with unread_pipe("broken") as stderr:
        assert run(f"raise {error}", stderr=stderr).returncode == code


def test_a_reader_that_closes_early_is_no_error_for_a_table():
    with unread_pipe("broken") as stdout:
        done = run("print('x' * 100_000)", stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_closes_early_is_no_error_for_a_rich_table():
    """rich itself raises SystemExit(1)."""
    body = "from rich.console import Console; Console().print('x' * 1000)"
    with unread_pipe("broken") as stdout:
        done = run(body, stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_character_that_stdout_cannot_encode_is_escaped():
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run(r"print('\u00b1')", env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xb1\n", "")


def test_output_to_a_full_disk_fails_with_one_sentence():
    with open("/dev/full", "w") as stdout:  # noqa: PTH123
        done = run("print('x')", stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "error: the output: No space left on device\n")


def test_a_folder_that_may_not_be_read_gives_a_one_sentence_error():
    done = run("raise PermissionError(13, 'Permission denied', 'logs/theirs')", stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "error: logs/theirs: Permission denied\n")


@pytest.mark.parametrize("stream", [1, 2])
def test_work_continues_without_output_streams(stream, tmp_path):
    body = "console.Console().message('trains')\n    with streams.quiet_start(): pass"
    body += "\n    print('shown')\n    import subprocess; subprocess.run(['echo', 'child'], check=True)"
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        done = run(body, stdout=out, stderr=err, preexec_fn=lambda: os.close(stream))
    assert done.returncode == 0, (tmp_path / "err").read_text()
    shown = ["", "trains\nshown\nchild\n"][stream == 2]
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == (shown, "")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_waits_for_the_end_of_an_import_also_where_another_thread_takes_it(name, code):
    """NumPy's threads may take the signal; TensorFlow's import may swallow an exception."""
    body = f"""
    import os, signal, threading, time
    from tfrl.cli import endings
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    with endings.held_back():
        with endings.held_back():
            try:
                os.kill(os.getpid(), signal.{name})
                time.sleep(0.2)
            except BaseException:
                print('lost')
        print('imported')
    print('went on')
"""
    done = run(body.strip(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (code, "imported\n", "")


def test_a_signal_after_the_end_of_python_does_not_change_the_exit_code():
    """C functions run then, the last one first: this process says that it ends, and waits for its stdin."""
    body = "import ctypes; c = ctypes.CDLL(None)"
    body += "\n    for function in (c.getchar, c.perror): c.__cxa_atexit(function, None, None)"
    with subprocess.Popen(command(body), cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stderr.readline()
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_signal_that_an_import_swallows_ends_the_command_before_it_trains():
    body = """
    import contextlib, os, signal
    with endings.before_training():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError
        print('imported')
    print('trains')
"""
    done = run(body.strip(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said = "Stopped before training began: there is nothing to save.\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "imported\n", said)


def test_a_command_without_streams_ends_with_its_own_code():
    def without():
        for number in (0, 1, 2):
            os.close(number)

    command = [sys.executable, "-m", "tfrl.ppo_procgen", "--lr", "-1"]
    assert subprocess.run(command, cwd=ROOT, timeout=60, preexec_fn=without).returncode == 2
