"""The parameter server and the replay server, each in a process on Ray."""

import os
import signal

import numpy as np
import pytest

from tfrl import config as settings
from tfrl.envs.spec import ArraySpec, Discrete
from tfrl.experience.actor import Collected, EnvStates
from tfrl.experience.replay import Replay
from tfrl.experience.rollout import Rollout
from tfrl.run import rng
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
    from tfrl.remote import parameters
    from tfrl.remote.cluster import ray

    server = parameters.serve()
    first = server.pull.remote()  # before there are any
    ray.get(server.push.remote(0, weights(0)), timeout=WAIT)
    assert ray.get(first, timeout=WAIT).version == 0
    ray.get([server.push.remote(version, weights(version)) for version in (2, 1)], timeout=WAIT)
    newest = ray.get(server.pull.remote(), timeout=WAIT)
    assert newest.version == 2
    np.testing.assert_array_equal(newest.weights["dense/kernel"], weights(2)["dense/kernel"])
    later = server.wait_for.remote(5)
    ray.get(server.push.remote(4, weights(4)), timeout=WAIT)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(later, timeout=0.5)
    ray.get(server.push.remote(5, weights(5)), timeout=WAIT)
    assert ray.get(later, timeout=WAIT).version == 5
    os.kill(node.processes(b"ray::ParameterServer")[0], signal.SIGKILL)
    pulled = server.pull.remote()
    ray.get(server.push.remote(6, weights(6)), timeout=WAIT)
    assert ray.get(pulled, timeout=WAIT).version in (5, 6)


def test_a_process_for_which_ray_has_no_cpu_is_told_and_a_signal_ends_the_wait(cluster, monkeypatch):
    """Two runs that join one Ray at the same moment both find its CPUs free."""
    from tfrl.remote import seats
    from tfrl.remote.cluster import ray

    class Idle:
        def begin_at(self, states):
            return None

    def obey():
        if said:
            raise Stopped(130)

    monkeypatch.setattr(seats, "_LATE", 0.5)
    said, other = [], ray.remote(num_cpus=6)(Idle).remote()
    ray.get(other.begin_at.remote(None), timeout=WAIT)
    hooks = seats.Hooks(timeout=WAIT, obey=obey, tell=said.append, shared=True)
    seat = seats.Seat("actor 0", ray.remote(num_cpus=1)(Idle).remote, hooks)
    try:
        with pytest.raises(SystemExit) as ended:
            seat.wait_until_ready()
    finally:
        seat.end()
        ray.kill(other)
    assert ended.value.code == 130
    assert said == ["actor 0 still starts, or waits until Ray has a CPU free for it"]


def rounds(generator, envs, steps, count):
    """Rounds of made-up envs that end at random, some cut off, each from where the one before ended."""
    last = None
    for _ in range(count):
        one = Rollout.empty(
            1, steps, envs, observation=ArraySpec((4,), "float32"), action=Discrete(2), extras={}
        )
        one.observations[:] = generator.normal(size=one.observations.shape)
        one.rewards[:] = generator.normal(size=one.rewards.shape)
        one.actions[:] = generator.integers(2, size=one.actions.shape)
        one.first[:] = generator.random(one.first.shape) < 0.2
        one.truncated[:] = one.first & (generator.random(one.first.shape) < 0.5)
        for place in zip(*np.nonzero(one.truncated), strict=True):
            one.final_observations[tuple(map(int, place))] = generator.normal(size=4).astype(np.float32)
        if last is not None:
            one.observations[:, 0] = last
        last = one.observations[:, -1].copy()
        yield one


def columns(rollout, envs):
    """What the envs of a slice did."""
    arrays = ("observations", "actions", "rewards", "first", "truncated")
    part = Rollout(
        *(getattr(rollout, name)[:, :, envs] for name in arrays[:2]),
        {},
        *(getattr(rollout, name)[:, :, envs] for name in arrays[2:]),
    )
    part.final_observations = {
        (r, t, b - envs.start): o
        for (r, t, b), o in rollout.final_observations.items()
        if envs.start <= b < envs.stop
    }
    return part


@pytest.mark.parametrize("prioritized", [False, True])
def test_replay_servers_give_the_batches_of_one_replay_of_all_envs(cluster, prioritized):
    from tfrl.remote import replay
    from tfrl.remote.cluster import ray

    flags = "--env CartPole-v1 --preset default --num-envs 4 --batch-size 16 --replay-size 160 --n-step 3"
    flags += " --iteration-steps 80 --prioritized" if prioritized else " --iteration-steps 80"
    config = settings.reader("dqn").parse(flags.split())
    exponent = config.priority_exponent if prioritized else None
    specs = {"observation": ArraySpec((4,), "float32"), "action": Discrete(2)}
    whole = Replay(range(4), 40, **specs, gamma=config.gamma, n_step=3, priority_exponent=exponent)
    slices = (slice(0, 1), slice(1, 4))
    servers = [replay.serve(config, range(part.start, part.stop)) for part in slices]
    generator = np.random.default_rng(0)
    for number, rollout in enumerate(rounds(generator, 4, 20, 4)):
        if not number:
            first = np.ones(4, bool)
            whole.stand_at(rollout.observations[0, 0], first)
            for server, part in zip(servers, slices, strict=True):
                at = EnvStates([], [], rollout.observations[0, 0, part], first[part])
                ray.get(server.begin.remote(at), timeout=WAIT)
        for actions, step in rollout.steps():
            whole.act(actions)
            whole.show(step)
        sizes = [
            s.add.remote(Collected(columns(rollout, part), None))
            for s, part in zip(servers, slices, strict=True)
        ]
        assert ray.get(sizes, timeout=WAIT) == [len(whole)] * 2
        generators = [rng.generator(config.seed, rng.Use.REPLAY, number, i) for i in range(4)]
        expected = whole.sample(generators, 3, 5, beta=0.5)
        least = None
        if prioritized:
            least = min(ray.get([s.least_share.remote() for s in servers], timeout=WAIT))
        shares = [s.sample.remote(number, 3, 5, 0.5, least) for s in servers]
        found = replay.join(ray.get(shares, timeout=WAIT))
        for name, array in expected._asdict().items():
            np.testing.assert_array_equal(getattr(found, name), array, err_msg=name)
        errors = generator.normal(size=found.rows.shape).astype(np.float32)
        whole.set_priorities(found.rows, errors)
        ray.get(
            [
                server.set_priorities.remote(found.rows[:, part], errors[:, part])
                for server, part in zip(servers, slices, strict=True)
            ],
            timeout=WAIT,
        )
