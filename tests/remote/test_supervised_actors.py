"""A process on Ray that waits for a CPU."""

import time
from types import SimpleNamespace

import pytest
from refusals import refusal

from tfrl.cli.endings import Stopped

WAIT = 120  # seconds


@pytest.fixture
def cluster(node):
    from tfrl.remote.cluster import Cluster

    one = Cluster(node.address, {"--actors": 1}, 0)
    yield one
    one.close()


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
    session = SimpleNamespace(
        raise_if_stopped_here=raise_if_stopped,
        console=SimpleNamespace(warn=said.append),
        watchdog=SimpleNamespace(beat=lambda: None),
    )
    group = supervised_actors.SupervisedActors(cluster, session, WAIT)
    actor = supervised_actors.SupervisedActor("actor 0", ray.remote(num_cpus=1)(Idle).remote, group)
    try:
        with pytest.raises(SystemExit) as ended:
            actor.wait_until_ready()
    finally:
        actor.end()
        ray.kill(other)
    assert ended.value.code == 130
    assert said == ["actor 0 still starts, or waits until Ray has a CPU free for it"]


def test_a_process_without_a_cpu_is_waited_for_and_not_replaced(cluster, monkeypatch):
    """No get times out meanwhile: Ray would then drop what has come of a large answer from another node."""
    from tfrl.remote import supervised_actors
    from tfrl.remote.cluster import ray

    class Idle:
        def begin_at(self, states):
            return SimpleNamespace(place="there", exact_state=True)

    monkeypatch.setattr(supervised_actors, "_START_SECONDS", 5.0)
    said, other = [], ray.remote(num_cpus=6)(Idle).remote()
    ray.get(other.begin_at.remote(None), timeout=WAIT)
    began = time.monotonic()

    def beat():
        if time.monotonic() - began > 8:
            ray.kill(other)

    session = SimpleNamespace(
        raise_if_stopped_here=lambda: None,
        console=SimpleNamespace(warn=said.append),
        watchdog=SimpleNamespace(beat=beat),
    )
    late, get = [], ray.get

    def timed(*arguments, **options):
        try:
            return get(*arguments, **options)
        except ray.exceptions.GetTimeoutError:
            late.append(arguments)
            raise

    monkeypatch.setattr(ray, "get", timed)
    group = supervised_actors.SupervisedActors(cluster, session, 5.0)
    actor = supervised_actors.SupervisedActor("actor 0", ray.remote(num_cpus=1)(Idle).remote, group)
    actor.wait_until_ready()
    actor.end()
    assert actor.after == "there" and not any("replaces" in sentence for sentence in said) and not late


def test_a_program_that_already_uses_ray_keeps_it(cluster):
    from tfrl.remote.cluster import Cluster, ray

    for address in (None, cluster.address):
        said = refusal(Cluster, address, {"--actors": 2}, 0)
        assert said.startswith("this process already uses Ray")
        assert ray.cluster_resources()["CPU"] == 6


def test_an_actor_chooses_the_device_of_the_run_first(node, monkeypatch):
    from tfrl.remote import actors

    class AllThereError(Exception):
        pass

    def set_up():
        raise AllThereError

    chosen = []
    monkeypatch.setattr(actors, "serve_driver", lambda: None)
    monkeypatch.setattr(actors.machine, "choose_device", chosen.append)
    monkeypatch.setattr(actors, "set_up_tensorflow", set_up)
    with pytest.raises(AllThereError):
        actors.RemoteActor(SimpleNamespace(device="cpu"), None, [0], "float32", 1)
    assert chosen == ["cpu"]
