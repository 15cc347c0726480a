"""A machine of Ray is lost: what it did is done elsewhere, and the run ends with its bits."""

import signal
import time

import pytest
from launching import until
from processes import steps_done
from test_learners import assert_same_as_undisturbed, learners_of
from test_own_ray import LONG, UPDATE, Impala, needs_ray

from benchmarks.ray_nodes import Nodes
from tfrl.remote import LOOPBACK

pytestmark = pytest.mark.promise

FOUND_SOON = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Starts nodes of one Ray, which stand for machines; the first is its head."""
    monkeypatch.delenv(LOOPBACK, raising=False)
    one = Nodes(tmp_path, FOUND_SOON)
    for name, value in one.environ.items():
        monkeypatch.setenv(name, value)
    yield one.start
    one.close()


def stopped(training):
    """Ends a run by SIGTERM; what it has said."""
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.end()
    assert code == 143, stdout + stderr
    return stdout + stderr


@pytest.mark.long
@needs_ray
def test_a_lost_node_is_replaced_by_one_that_joins_later(nodes, tmp_path):
    """One actor on each of two nodes; one node is killed, and a third comes."""
    head, other = nodes(), nodes()
    flags = [*LONG, "--actors", 2, "--ray-address", head.address]
    training = Impala(tmp_path / "run", *flags)
    training.wait_until(3 * UPDATE)
    assert len(head.actors()) == len(other.actors()) == 1
    other.kill()
    until(lambda: len(head.actors()) == 1, 60)
    time.sleep(25)  # the run notices that it waits: Ray learns late that the node's CPU is gone, too
    third = nodes()
    until(lambda: len(third.actors()) == 1, 300)
    training.wait_until(steps_done(tmp_path / "run") + 2 * UPDATE)
    said = stopped(training)
    assert "has died; another process replaces it" in said, said
    assert "waits until Ray has a CPU free for it" in said, said
    assert_same_as_undisturbed(tmp_path / "run")


@pytest.mark.long
@needs_ray
def test_a_node_with_a_learner_and_its_actors_is_lost_and_all_learners_begin_again(nodes, tmp_path):
    head, other = nodes(2), nodes(2)
    flags = [*LONG, "--learners", 2, "--actors", 2, "--ray-address", head.address]
    training = Impala(tmp_path / "run", *flags)
    training.wait_until(3 * UPDATE)
    assert [len(learners_of(node.process.pid)) for node in (head, other)] == [1, 1]
    other.kill()
    third = nodes(2)
    training.wait_for(lambda: len(learners_of(third.process.pid)) == 1)
    training.wait_until(steps_done(tmp_path / "run") + 2 * UPDATE)
    said = stopped(training)
    assert "restarting all 2 learners from the last checkpoint" in said, said
    assert_same_as_undisturbed(tmp_path / "run")
