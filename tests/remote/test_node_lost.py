"""A machine of Ray is lost: what it did is done elsewhere, and the run ends with its bits."""

import os
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from launching import family, until
from processes import results, steps_done
from ray_nodes import Node, free_port
from test_own_ray import LONG, UPDATE, Impala, needs_ray, train

FOUND_SOON = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Starts nodes of one Ray, which stand for machines; the first is its head."""
    place = Path(tempfile.mkdtemp(prefix="r"))  # short: sockets have names of 107 characters at most
    (tmp_path / "token").write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    started, port = [], free_port()

    def start():
        folder = tmp_path / f"n{len(started)}"
        folder.mkdir()
        flags = ["--node-ip-address", "127.0.0.1"]
        if started:
            flags += ["--address", f"127.0.0.1:{port}"]
        else:
            flags += ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(place)]
        started.append(Node(folder, *flags, cpus=1, **FOUND_SOON))
        started[-1].address = f"127.0.0.1:{port}"
        started[-1].wait()
        return started[-1]

    yield start
    for node in reversed(started):
        node.end()
    shutil.rmtree(place)


@pytest.mark.long
@needs_ray
def test_a_lost_node_is_replaced_by_one_that_joins_later(nodes, tmp_path):
    """One actor on each of two nodes; one node is killed, and a third comes."""
    head, other = nodes(), nodes()
    flags = [*LONG, "--actors", 2, "--ray-address", head.address]
    training = Impala(tmp_path / "run", *flags)
    training.wait_until(3 * UPDATE)
    assert len(head.actors()) == len(other.actors()) == 1
    for pid in reversed(family(other.process.pid)):
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(head.actors()) == 1, 60)
    time.sleep(25)  # the run notices that it waits: Ray learns late that the node's CPU is gone, too
    third = nodes()
    until(lambda: len(third.actors()) == 1, 300)
    training.wait_until(steps_done(tmp_path / "run") + 2 * UPDATE)
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert code == 143, stdout + stderr
    said = stdout + stderr
    assert "has died; another takes its place" in said, said
    assert "waits until Ray has a CPU free for it" in said, said
    steps = steps_done(tmp_path / "run") + UPDATE
    for folder in (tmp_path / "run", tmp_path / "undisturbed"):
        code, stdout, stderr = train(folder, "--total-steps", steps)
        assert (code, stderr) == (0, ""), stdout + stderr
    digests = {results(tmp_path / name)["weights_sha256"] for name in ("run", "undisturbed")}
    assert len(digests) == 1
