"""Double-buffered collection equals a plain loop, on any number of replicas, also after a checkpoint."""

import dataclasses

import numpy as np
import pytest

from tfrl.algorithms import ppo
from tfrl.envs.registry import make
from tfrl.envs.spec import EnvSpec
from tfrl.experience.collector import Collector
from tfrl.run import rng

STEPS, ENVS = 12, 8
CONFIG = ppo.Config(num_steps=STEPS)


class Policy:
    """Actions from what is seen and the random number, so that any mix-up shows."""

    def __init__(self, num_actions):
        self.num_actions = num_actions

    def sample(self, observations, noise):
        seen = observations.astype(np.int64).sum(axis=(-3, -2, -1))
        actions = (seen + np.floor(noise[..., 0] * self.num_actions).astype(np.int64)) % self.num_actions
        return actions.astype(np.int32), {"drawn": noise, "seen": np.float32(seen)}

    def complete(self, rollout):
        self.completed = rollout.rewards.copy(), rollout.extras["seen"].copy()


def spec(name):
    return EnvSpec(name, num_envs=ENVS, seed=2, num_levels=0)


def noise(update, steps=STEPS, envs=ENVS):
    """[T, N, 2]"""
    draw = lambda generator, count: generator.random((count, 2), np.float32)  # noqa: E731
    return rng.action_noise(1, update, range(envs), steps, draw)


def plain_loop(env, policy, update):
    """What a rollout is: act, step, store; all envs at once. Arrays [T, N, ...] by name."""
    rows, final = [], {}
    for t in range(STEPS):
        observations = env.observe().observation.copy()
        actions, extras = policy.sample(observations, noise(update)[t])
        env.act(actions)
        step = env.observe()
        rows.append((observations, actions, *extras.values(), step.reward, step.first, step.truncated))
        rows[-1] = [x.copy() for x in rows[-1]]
        for k, n in enumerate(np.flatnonzero(step.truncated)):
            final[t, int(n)] = step.final_observation[k].copy()
    names = ("observations", "actions", "drawn", "seen", "rewards", "first", "truncated")
    rollout = dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True))
    last = env.observe().observation[None]
    return rollout | {"observations": np.concatenate([rollout["observations"], last]), "final": final}


def in_env_order(rollout):
    """A rollout's arrays with the replicas' [R, T, B] joined to [T, N], copied."""
    arrays = {name: getattr(rollout, name) for name in ("observations", "actions", "rewards", "first")}
    arrays |= rollout.extras | {"truncated": rollout.truncated}
    joined = {name: np.concatenate(list(array), axis=1) for name, array in arrays.items()}
    each = rollout.rewards.shape[2]
    final = {(t, r * each + b): shown.copy() for (r, t, b), shown in rollout.final_observations.items()}
    return joined | {"final": final}


def assert_same(actual, expected):
    assert set(actual) == set(expected) and set(actual["final"]) == set(expected["final"])
    actual, expected = (arrays | arrays["final"] for arrays in (actual, expected))
    for name, array in expected.items():
        if name == "final":
            continue
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["catch", "coinrun"])
def test_collecting_equals_a_plain_loop(name, replicas):
    env = make(spec(name))
    policy = Policy(env.action_spec.n)
    collector = Collector(CONFIG, spec(name), range(ENVS), replicas=replicas)
    for update in range(3):
        rollout = collector.collect(policy, noise(update), lambda t: None)
        assert rollout.observations.shape[:3] == (replicas, STEPS + 1, ENVS // replicas)
        assert_same(in_env_order(rollout), plain_loop(env, policy, update))
        for found, expected in zip(policy.completed, (rollout.rewards, rollout.extras["seen"]), strict=True):
            np.testing.assert_array_equal(found, expected, "the policy is told of the whole rollout")
    assert name != "catch" or rollout.first.any()


def test_a_workers_share_is_its_part_of_the_whole():
    policy = Policy(3)
    whole = Collector(CONFIG, spec("catch"), range(ENVS), replicas=1)
    share = Collector(CONFIG, spec("catch"), range(4, 8), replicas=2)
    mine = in_env_order(share.collect(policy, noise(0)[:, 4:8], lambda t: None))
    everything = in_env_order(whole.collect(policy, noise(0), lambda t: None))
    assert everything.pop("final") == mine["final"] == {}
    assert_same(mine, {name: array[:, 4:] for name, array in everything.items()} | {"final": {}})


@pytest.mark.parametrize("name", ["catch", "coinrun"])
def test_a_state_continues_the_same_rollouts_on_another_number_of_replicas(name):
    before = Collector(CONFIG, spec(name), range(ENVS), replicas=1)
    policy = Policy(before.action_spec.n)
    before.collect(policy, noise(0), lambda t: None)
    indices, states, observations, first = before.get_state()
    assert sorted(indices) == list(range(ENVS))
    expected = in_env_order(before.collect(policy, noise(1), lambda t: None))
    after = Collector(CONFIG, spec(name), range(ENVS), replicas=4)
    after.set_state(dict(zip(indices, states, strict=True)))
    actual = in_env_order(after.collect(policy, noise(1), lambda t: None))
    assert_same(actual, expected)
    np.testing.assert_array_equal(observations[np.argsort(indices)], actual["observations"][0])
    assert first.shape == (ENVS,)


@pytest.mark.parametrize(("each", "group"), [(8, 4), (6, 3), (5, 5), (4, 2), (2, 2), (1, 1)])
def test_envs_step_in_two_groups_of_two_or_more(each, group):
    """One group is stepped while the policy acts for the other; a batch of one env rounds differently."""
    seen = []

    class Looking(Policy):
        def sample(self, observations, noise):
            seen.append(observations.shape[:2])
            return super().sample(observations, noise)

    spec = EnvSpec("catch", num_envs=2 * each, seed=2, num_levels=0)
    collector = Collector(ppo.Config(num_steps=3), spec, range(2 * each), replicas=2)
    collector.collect(Looking(3), noise(0, 3, 2 * each), lambda t: None)
    assert seen == [(2, group)] * (3 * each // group)


def test_every_step_is_reported():
    collector = Collector(CONFIG, spec("catch"), range(ENVS), replicas=1)
    for _ in range(20):  # each with a clock of its own
        steps = []
        rollout = collector.collect(Policy(3), noise(0), steps.append)
        assert steps == list(range(1, STEPS + 1))
        assert 0 < rollout.env_wait_seconds < rollout.seconds


def test_observations_are_aligned_so_that_tensorflow_reads_them_in_place():
    collector = Collector(CONFIG, spec("coinrun"), range(ENVS), replicas=2)
    rollout = collector.collect(Policy(15), noise(0), lambda t: None)
    assert rollout.observations.ctypes.data % 64 == 0


def test_a_memory_begins_anew_in_an_env_that_cannot_go_on_exactly():
    config = dataclasses.replace(CONFIG, env="made_envs:made/Fifty-v0", memory="lstm", torso="mlp")
    envs = EnvSpec(config.env, num_envs=2, seed=1)
    ours, other = (Collector(config, envs, range(2), replicas=1) for _ in range(2))
    ours._groups[0].memory.values += 1
    other.set_state(dict(enumerate(ours.get_state().states)))
    assert other._groups[0].env.observe().first.all() and not other._groups[0].memory.values.any()
