"""The parameter server, and the place of a process, on Ray."""

import os
import signal

import numpy as np
import pytest

from tfrl.run.stop import Stopped

WAIT = 120  # seconds


@pytest.fixture
def cluster(node):
    from tfrl.remote.cluster import Cluster

    one = Cluster(node.address, {"--actors": 1}, 0)
    yield one
    one.close()


def weights(version):
    return {"dense/kernel": np.full((3, 2), version, np.float32)}


def test_a_parameter_server_gives_the_newest_weights_and_comes_back_after_a_kill(node, cluster):
    from tfrl.remote.actors import serve_weights
    from tfrl.remote.cluster import ray

    server = serve_weights()
    first = server.wait_for.remote(0)  # before there are any
    ray.get(server.push.remote(0, weights(0)), timeout=WAIT)
    assert ray.get(first, timeout=WAIT).version == 0
    ray.get([server.push.remote(version, weights(version)) for version in (2, 1)], timeout=WAIT)
    newest = ray.get(server.wait_for.remote(0), timeout=WAIT)
    assert newest.version == 2
    np.testing.assert_array_equal(newest.weights["dense/kernel"], weights(2)["dense/kernel"])
    later = server.wait_for.remote(5)
    ray.get(server.push.remote(4, weights(4)), timeout=WAIT)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(later, timeout=0.5)
    ray.get(server.push.remote(5, weights(5)), timeout=WAIT)
    assert ray.get(later, timeout=WAIT).version == 5
    os.kill(node.processes(b"ray::ParameterServer")[0], signal.SIGKILL)
    pulled = server.wait_for.remote(0)
    ray.get(server.push.remote(6, weights(6)), timeout=WAIT)
    assert ray.get(pulled, timeout=WAIT).version in (5, 6)


def test_a_process_for_which_ray_has_no_cpu_is_reported_and_a_signal_ends_the_wait(cluster, monkeypatch):
    """Two runs that join one Ray at the same moment may both see its free CPUs."""
    from tfrl.remote import supervised_actors
    from tfrl.remote.cluster import ray

    class Idle:
        def begin_at(self, states):
            return None

    def raise_if_stopped():
        if said:
            raise Stopped(130)

    monkeypatch.setattr(supervised_actors, "_LATE_SECONDS", 0.5)
    said, other = [], ray.remote(num_cpus=6)(Idle).remote()
    ray.get(other.begin_at.remote(None), timeout=WAIT)
    hooks = supervised_actors.Hooks(WAIT, raise_if_stopped, said.append, cluster)
    actor = supervised_actors.SupervisedActor("actor 0", ray.remote(num_cpus=1)(Idle).remote, hooks)
    try:
        with pytest.raises(SystemExit) as ended:
            actor.wait_until_ready()
    finally:
        actor.end()
        ray.kill(other)
    assert ended.value.code == 130
    assert said == ["actor 0 still starts, or waits until Ray has a CPU free for it"]
