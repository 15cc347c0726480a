"""The launcher with real processes and signals; the commands it runs are small programs, no TensorFlow."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import output, places, team
from tfrl import tf_config
from tfrl.errors import UserError

ROOT = Path(__file__).parents[1]
LAUNCH = [sys.executable, "-m", "cluster.launch"]
PRELUDE = """
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
folder = sys.argv[1]
def note(what):
    with open(os.path.join(folder, f"worker-{task}"), "a") as file:
        file.write(f"{what}\\n")
note(f"start {os.getpid()}")
starts = open(os.path.join(folder, f"worker-{task}")).read().count("start ")
def all_started(count=2):
    while sum(name.startswith("worker-") for name in os.listdir(folder)) < count:
        time.sleep(0.02)
"""
SAVE = """
def stop(signum, frame):
    note(f"signal {signum}")
    time.sleep(0.3)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note("ready")
time.sleep(60)
"""


class Launch:
    """A launcher that runs a small Python program on its workers."""

    def __init__(self, folder, program, *flags, workers=2, environ=None, **options):
        self.folder = folder
        command = [sys.executable, "-S", "-c", PRELUDE + program, str(folder)]
        where = [] if "--hosts" in flags else ["--workers", str(workers)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        environ = {**os.environ, **(environ or {})}
        self.process = subprocess.Popen(
            [*LAUNCH, *where, *flags, "--", *command], cwd=ROOT, env=environ, text=True, **options
        )

    def end(self, timeout=20):
        """(exit code, stdout, stderr)"""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def notes(self, worker):
        path = self.folder / f"worker-{worker}"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, worker):
        return [int(note.split()[1]) for note in self.notes(worker) if note.startswith("start ")]

    def wait_for(self, note, workers=(0, 1)):
        until(lambda: all(note in self.notes(worker) for worker in workers))


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_share_the_machine_and_their_output_says_whose_it_is(tmp_path):
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
    shares = places.thread_shares(len(os.sched_getaffinity(0)), 3)
    assert [int(lines[prefix]["OMP_NUM_THREADS"]) for prefix in ("", "[1] ", "[2] ")] == shares
    assert [int(lines[prefix]["TF_NUM_INTRAOP_THREADS"]) for prefix in ("", "[1] ", "[2] ")] == shares
    assert lines[""]["PYTHONUNBUFFERED"] == "1"


def test_a_users_own_thread_counts_are_kept():
    chosen = places.local_places(2, None, {"OMP_NUM_THREADS": "7"})
    assert [place.environment["OMP_NUM_THREADS"] for place in chosen] == ["7", "7"]


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [(2, 2, [1, 1]), (8, 3, [3, 3, 2]), (1, 2, [1, 1]), (7, 1, [7]), (5, 4, [2, 1, 1, 1])],
)
def test_thread_shares(cores, workers, shares):
    assert places.thread_shares(cores, workers) == shares


def test_gpus_are_shared_out(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: H (UUID: GPU-$i)\"; done\necho '  MIG 1g'\n"
    )
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert places.visible_gpus(environ) == ["0", "1", "2", "3"]
    assert places.visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "3,1"}) == ["3", "1"]
    assert places.visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert places.visible_gpus({"PATH": "/nowhere"}) == []
    mine = [place.environment["CUDA_VISIBLE_DEVICES"] for place in places.local_places(4, None, environ)]
    assert mine == ["0", "1", "2", "3"]
    assert places.gpu_shares(["0", "1", "2", "3"], 2) == ["0,1", "2,3"]
    assert places.gpu_shares([], 2) == []
    with pytest.raises(UserError, match="--workers 3 is more than the GPUs"):
        places.gpu_shares(["0", "1"], 3)


@pytest.mark.parametrize(
    ("host", "target", "address"),
    [
        ("a", "a", "a:2222"),
        ("me@a", "me@a", "a:2222"),
        ("a:7", "a", "a:7"),
        ("me@[::1]:7", "me@::1", "[::1]:7"),
        ("[::1]", "::1", "[::1]:2222"),
    ],
)
def test_hosts(host, target, address):
    (place,) = places.remote_places([host], 2222)
    assert (place.host, tf_config.read(place.environment).workers) == (target, (address,))


def test_the_launcher_starts_quickly_and_without_tensorflow(tmp_path):
    code = "import sys, cluster.launch; print(sorted({'tensorflow', 'numpy', 'keras'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
    seconds = []
    for attempt in range(3):  # the best of three, because the machine may be busy
        folder = tmp_path / str(attempt)
        folder.mkdir()
        started = time.time()
        launch = Launch(folder, "note(time.time())")
        assert launch.end()[0] == 0
        seconds.append(max(float(launch.notes(worker)[1]) for worker in (0, 1)) - started)
    assert min(seconds) < 1.0


def test_all_start_again_on_fresh_ports_when_one_is_killed(tmp_path):
    program = """
note(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
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
        _, first, _, second = launch.notes(worker)
        assert first != second


def test_it_gives_up_after_max_restarts_and_tells_the_reason(tmp_path):
    launch = Launch(tmp_path, "sys.exit(75 if task == 0 else 0)", "--max-restarts", "2")
    code, _, err = launch.end()
    assert code == 1
    assert len(launch.pids(0)) == 3
    assert "restart 2 of 2" in err
    assert err.splitlines()[-1] == (
        "launch: worker 0 gave up on a worker that died or stalled (exit code 75); "
        "no restarts are left (--max-restarts 2)"
    )


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
    assert (code, "worker 1 failed (exit code 1); no restarts are left" in err) == (1, True)
    assert launch.notes(0).count("told") == 1
    assert not alive(launch.pids(0)[0])


def test_bad_settings_are_told_once_and_not_tried_again(tmp_path):
    launch = Launch(tmp_path, 'print("error: --lr is -1", file=sys.stderr); sys.exit(2)')
    code, _, err = launch.end()
    assert code == 2
    assert err.count("error: --lr is -1") == 1
    assert "refused its settings" in err.splitlines()[-1]
    assert len(launch.pids(0)) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_each_worker_once_and_all_save(tmp_path, signum):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    launch.process.send_signal(signum)
    launch.process.send_signal(signum if signum != signal.SIGINT else signal.SIGTERM)
    passed = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
    code, _, err = launch.end()
    assert (code, err) == (128 + passed, "")
    for worker in (0, 1):
        assert launch.notes(worker)[2:] == [f"signal {int(passed)}"]


def test_workers_that_were_told_directly_end_the_run(tmp_path):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    for worker in (0, 1):
        os.kill(launch.pids(worker)[0], signal.SIGTERM)
    assert launch.end()[0] == 143
    assert len(launch.pids(0)) == 1


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
    assert "[1] last\r\n" in screen


def test_a_line_of_another_worker_does_not_run_into_the_chiefs_progress(tmp_path):
    with (tmp_path / "out").open("wb") as stdout, (tmp_path / "err").open("wb") as stderr:
        writer = output.Output(stdout, stderr, live=True)
        writer.write(0, "stdout", b"50 %")
        writer.write(1, "stdout", b"half a li")
        writer.write(1, "stdout", b"ne\n")
        writer.write(0, "stdout", b"\r60 %\n")
        writer.write(2, "stdout", b"unfinished")
        writer.end(2)
    assert (tmp_path / "out").read_bytes() == b"50 %\r\x1b[2K[1] half a line\n\r60 %\n[2] unfinished\n"


def test_workers_save_and_end_when_the_launcher_is_killed(tmp_path):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    launch.process.kill()
    pids = [launch.pids(worker)[0] for worker in (0, 1)]
    until(lambda: not any(alive(pid) for pid in pids))
    assert [launch.notes(worker)[-1] for worker in (0, 1)] == ["signal 15"] * 2
    launch.end()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_worker_dies_with_its_agent_and_all_start_again(tmp_path):
    launch = Launch(tmp_path, SAVE)
    launch.wait_for("ready")
    first = launch.pids(0) + launch.pids(1)
    os.kill(children(launch.process.pid)[1], signal.SIGKILL)
    until(lambda: [len(launch.pids(worker)) for worker in (0, 1)] == [2, 2])
    assert not any(alive(pid) for pid in first)
    launch.process.terminate()
    code, _, err = launch.end()
    assert (code, "worker 1 died (killed by signal 9); restarting" in err) == (143, True)


def test_what_a_worker_leaves_behind_is_ended_with_it(tmp_path):
    program = """
import subprocess
note(f"child {subprocess.Popen(['sleep', '60']).pid}")
"""
    launch = Launch(tmp_path, program)
    assert launch.end()[0] == 0
    for worker in (0, 1):
        child = int(launch.notes(worker)[1].split()[1])
        until(lambda child=child: not alive(child))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "2"], ["no command", "--"]),
        (["--workers", "2", "--"], ["no command"]),
        (["--", "true"], ["--workers N"]),
        (["--workers", "0", "--", "true"], ["--workers"]),
        (["--workers", "-2", "--", "true"], ["--workers -2"]),
        (["--workers", "two", "--", "true"], ["'two'"]),
        (["--workers", "3", "--hosts", "a,b", "--", "true"], ["--workers 3"]),
        (["--hosts", "a,a", "--", "true"], ["'a:2222'", "of its own"]),
        (["--hosts", "a b,c", "--", "true"], ["'a b:2222'"]),
        (["--wrokers", "2", "--", "true"], ["--wrokers"]),
        (["--workers", "2", "--max-restarts", "-1", "--", "true"], ["--max-restarts -1"]),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(flags, words):
    done = subprocess.run([*LAUNCH, *flags], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


def test_a_command_that_does_not_exist_is_told_and_not_tried_again():
    done = subprocess.run(
        [*LAUNCH, "--workers", "1", "--", "no-such"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot start 'no-such': No such file")
    assert "restart" not in done.stderr


def ssh_stand_in(folder):
    """An `ssh` that runs the command here, with a bare environment, as a login on another machine has."""
    tool = folder / "ssh"
    tool.write_text(
        "#!/bin/bash\n"
        'while [[ $1 != -- ]]; do shift; done; echo "$2" >> "${0%/*}/targets"; shift 2\n'
        'cd / && exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"\n'
    )
    tool.chmod(0o755)


REMOTE = """
note(os.getcwd())
note(os.environ.get("TFRL_TEST"))
note(os.environ.get("SECRET"))
"""


def test_hosts_get_the_same_directory_and_environment(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    ssh_stand_in(tools)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "TFRL_TEST": "two words; $x", "SECRET": "1"}
    launch = Launch(tmp_path, REMOTE + SAVE, "--hosts", "me@a,b:2223", environ=environ)
    launch.wait_for("ready")
    assert sorted((tools / "targets").read_text().split()) == ["b", "me@a"]
    for worker in (0, 1):
        assert launch.notes(worker)[1:4] == [str(ROOT), "two words; $x", "None"]
    launch.process.terminate()
    assert launch.end()[0] == 143


@pytest.fixture
def sshd(tmp_path):
    """A real ssh server on loopback; gives a folder with an `ssh` that knows its port and key."""
    server, client = shutil.which("sshd", path="/usr/sbin:/usr/bin"), shutil.which("ssh")
    if server is None or client is None:
        pytest.skip("no ssh server here: apt-get install openssh-server runs this test")
    folder = tmp_path / "ssh"
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (port,) = places.free_ports(1)
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    tool = folder / "ssh"
    tool.write_text(
        f"#!/bin/sh\nexec {client} -F none -p {port} -i {folder}/user -o StrictHostKeyChecking=no "
        '-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
    )
    tool.chmod(0o755)
    log = (folder / "log").open("wb")
    process = subprocess.Popen([server, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    until(lambda: b"listening" in (folder / "log").read_bytes())
    yield {"PATH": f"{folder}:{os.environ['PATH']}"}
    process.terminate()
    process.wait()
    log.close()


HOSTS = ("--hosts", "127.0.0.1:2301,127.0.0.1:2302")


def test_over_real_ssh_signals_and_output_come_through(tmp_path, sshd):
    launch = Launch(tmp_path, REMOTE + "print('hello')" + SAVE, *HOSTS, environ={**sshd, "TFRL_TEST": "$x"})
    launch.wait_for("ready")
    assert launch.notes(1)[1:4] == [str(ROOT), "$x", "None"]
    launch.process.terminate()
    code, out, err = launch.end()
    assert (code, sorted(out.splitlines()), err) == (143, ["[1] hello", "hello"], "")
    assert [launch.notes(worker)[-1] for worker in (0, 1)] == ["signal 15"] * 2


def test_over_real_ssh_a_killed_worker_is_restarted_and_a_lost_launcher_stops_all(tmp_path, sshd):
    launch = Launch(tmp_path, SAVE, *HOSTS, environ=sshd)
    launch.wait_for("ready")
    os.kill(launch.pids(1)[0], signal.SIGKILL)
    until(lambda: [launch.notes(worker).count("ready") for worker in (0, 1)] == [2, 2])
    launch.process.kill()
    pids = [pid for worker in (0, 1) for pid in launch.pids(worker)]
    until(lambda: not any(alive(pid) for pid in pids))
    assert [launch.notes(worker)[-1] for worker in (0, 1)] == ["signal 15"] * 2
    assert "worker 1 on 127.0.0.1 died (killed by signal 9)" in launch.end()[2]


def test_over_real_ssh_a_worker_that_ignores_sigterm_is_killed(tmp_path, sshd):
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
all_started()
if task == 1:
    sys.exit(1)
time.sleep(60)
"""
    launch = Launch(tmp_path, program, *HOSTS, "--max-restarts", "0", "--grace", "0.3", environ=sshd)
    assert launch.end()[0] == 1
    until(lambda: not alive(launch.pids(0)[0]))


def test_a_host_that_ssh_cannot_reach_is_named(tmp_path):
    launch = Launch(tmp_path, "", "--hosts", "no-such-host.invalid", "--max-restarts", "0")
    code, _, err = launch.end()
    assert (code, "worker 0 on no-such-host.invalid is out of reach" in err) == (1, True)


def test_the_environment_that_goes_to_hosts():
    given = {"TFRL_A": "1", "PATH": "/bin", "TF_CPP_MIN_LOG_LEVEL": "2", "AWS_SECRET": "x", "HOME": "/h"}
    assert team.passed_on(given).keys() == {"TFRL_A", "PATH", "TF_CPP_MIN_LOG_LEVEL"}
