"""The launcher over ssh: a stand-in, and a real server on loopback where there is one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import SAVE, Launch, until
from processes import ROOT

from benchmarks.process_tree import alive, family
from cluster import launch


def ssh_that(folder, does):
    """PATH with an `ssh` in front that does so in bash."""
    tool = folder / "bin" / "ssh"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/bash\n{does}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


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


@pytest.mark.parametrize("seconds", [0, 0.1, 1])
@pytest.mark.parametrize("code", [255, 0])
def test_an_ssh_that_ends_early_is_reported_as_a_failure(tmp_path, seconds, code):
    """It does not matter whether ssh took the order, or what ssh printed."""
    environ = ssh_that(tmp_path, f"sleep {seconds}; exit {code}")
    launch = Launch(tmp_path, "", "--hosts", "a,b", "--max-restarts", "1", environ=environ)
    code, out, err = launch.end()
    assert (code, out) == (1, "")
    first, last = err.splitlines()
    assert first.startswith("launch: worker ") and "is out of reach: it was not started, or" in first
    assert last.endswith("no restarts are left (--max-restarts 1)")


def test_an_ssh_that_dies_at_once_is_never_a_success(tmp_path):
    """ssh may end before or after the order is written; many tries see both."""
    environ = ssh_that(tmp_path, "exit 255")
    for _ in range(6):
        launch = Launch(tmp_path, "", "--hosts", "a,b,c", "--max-restarts", "0", environ=environ)
        code, _, err = launch.end()
        assert (code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize(("missing", "words"), [("folder", "cannot enter the folder "), ("agent", "python")])
def test_a_host_without_the_folder_or_the_code_is_reported(tmp_path, missing, words):
    """Such a host must not look like a worker that refused its settings (exit code 2)."""
    tools = tmp_path / "bin"
    tools.mkdir()
    ssh_stand_in(tools)
    tool = tools / "ssh"
    if missing == "agent":
        tool.write_text(tool.read_text().replace('"$*"', '"${*/agent.py/nothing.py}"'))
    here = tmp_path / "here"
    here.mkdir()
    if missing == "folder":
        tool.write_text(tool.read_text().replace("cd /", f"rmdir {here}; cd /"))
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cluster.launch", "--hosts", "a", "--", sys.executable, "-c", ""]
    done = subprocess.run(command, cwd=here, env=os.environ | environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert words in done.stderr
    assert done.stderr.splitlines()[-1].startswith("launch: worker 0 on a could not be started (exit code 2)")


def test_without_ssh_it_says_so_in_one_sentence(tmp_path):
    launch = Launch(tmp_path, "", "--hosts", "a,b", environ={"PATH": str(tmp_path)})
    code, out, err = launch.end()
    assert (code, out) == (2, "")
    assert err == "error: cannot start 'ssh' on this machine: No such file or directory\n"


def test_a_connection_outlives_the_signal_that_stops_the_job(tmp_path):
    """The remote worker still saves; the launcher passes the signal on."""
    (tmp_path / "bin").mkdir()
    ssh_stand_in(tmp_path / "bin")
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    launch = Launch(tmp_path, SAVE, "--hosts", "a,b", environ=environ)
    launch.wait_for("ready")
    for child in family(launch.process.pid)[1:3]:
        os.kill(child, signal.SIGTERM)
    launch.process.terminate()
    assert launch.end()[0] == 143
    assert [launch.notes(worker)[-1] for worker in (0, 1)] == ["signal 15"] * 2


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
    (port,) = launch.free_ports(1)
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


def test_hosts_get_only_variables_that_affect_training():
    given = {"TFRL_A": "1", "PATH": "/bin", "TF_CPP_MIN_LOG_LEVEL": "2", "AWS_SECRET": "x", "HOME": "/h"}
    assert launch.passed_on(given).keys() == {"TFRL_A", "PATH", "TF_CPP_MIN_LOG_LEVEL"}
