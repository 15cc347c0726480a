"""Where do the lines go that C++ code writes to stderr? Real processes: a descriptor belongs to one."""

import subprocess
import sys

import pytest
from processes import ROOT

PROGRAM = """
import os, sys
from pathlib import Path
from tfrl.cli.endings import OURS, run
from tfrl.cli.errors import PeerError, TrainingError
from tfrl.cli.streams import native_log, quiet_start

def main(arguments):
    with native_log(Path(arguments[0]), of_command=OURS.of_command):
        os.write(2, b"I0000 00:00:1 1 a.cc:1] said in passing\\n")
        os.write(2, b"E0000 00:00:1 1 b.cc:1] from C++\\n")
        print("from Python", file=sys.stderr)
        {ending}
    return 0

run(main)
"""


def end(log, ending):
    """Exit code and screen of a process in which C++ code complains, and then this happens."""
    program = PROGRAM.replace("{ending}", ending)
    done = subprocess.run(
        [sys.executable, "-c", program, str(log)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.fixture
def log(tmp_path):
    return tmp_path / "run" / "tensorflow" / "worker-0.log"


def test_a_fault_of_another_worker_shows_one_sentence(log):
    code, screen = end(log, "raise PeerError('worker 1 is gone')")
    assert (code, screen) == (75, "from Python\nerror: worker 1 is gone\n")
    assert "from C++" in log.read_text()


@pytest.mark.parametrize("last", ["raise PeerError('worker 1 is gone')", "pass"])
def test_lines_written_while_a_process_ends_are_not_shown(log, last):
    """TensorFlow reports a worker as lost that has ended before this one."""
    assert "late" not in end(log, f"import atexit; atexit.register(os.write, 2, b'late'); {last}")[1]


def test_the_stderr_of_a_users_program_is_its_own_again_after_training(log):
    program = PROGRAM.replace("{ending}", "pass").replace("run(main)", "main(sys.argv[1:])")
    program += "os.write(2, b'mine')"
    done = subprocess.run([sys.executable, "-c", program, str(log)], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "from Python\nmine"


def test_a_failure_of_this_worker_shows_its_errors(log):
    code, screen = end(log, "raise TrainingError('TensorFlow failed')")
    assert code == 1
    assert screen == "from Python\nE0000 00:00:1 1 b.cc:1] from C++\nerror: TensorFlow failed\n"


def test_only_this_process_lines_are_shown(log):
    log.parent.mkdir(parents=True)
    log.write_text("E0000 of an earlier process\n")
    assert "earlier" not in end(log, "raise TrainingError('TensorFlow failed')")[1]


def test_a_crash_leaves_its_last_words_in_the_file(log):
    code, screen = end(log, "os.write(2, b'F0000 check failed'); os.abort()")
    assert code == -6
    assert screen == "from Python\n"
    assert "check failed" in log.read_text()


def test_a_file_is_left_only_if_there_were_errors(log):
    assert end(log, "pass") == (0, "from Python\n")
    assert "from C++" in log.read_text()
    log.unlink()
    for ending, code in (("pass", 0), ("raise TrainingError('a NaN')", 1)):
        assert end(log, f"os.ftruncate(2, 0); {ending}")[0] == code
        assert not log.parent.exists()


def test_training_continues_without_a_place_for_the_file(tmp_path):
    (tmp_path / "file").touch()
    code, screen = end(tmp_path / "file" / "log", "raise TrainingError('TensorFlow failed')")
    assert code == 1
    assert "from C++" in screen


def test_a_cpu_without_float16_is_not_reported_in_the_middle_of_a_training():
    """TensorFlow writes it once, as an error, when a bfloat16 network computes its first ReLU in float16."""
    program = """
from tfrl.cli.streams import quiet_start
with quiet_start():
    import tensorflow as tf
    from tfrl.workers import machine
    machine.note_float16("bfloat16")
tf.nn.relu(tf.zeros([1], tf.float16))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_traces_of_many_agents_give_no_warning_and_those_of_a_users_function_do(caplog):
    import tensorflow as tf

    from tfrl.ops.graph import compiled

    class Agent:
        @compiled()
        def ours(self, x):
            return x + 1.0

    def theirs(x):
        return x + 1.0

    for _ in range(6):
        Agent().ours(tf.zeros([]))
        tf.function(theirs)(tf.zeros([]))
    assert "theirs" in caplog.text and "triggered tf.function retracing" in caplog.text
    assert "ours" not in caplog.text
