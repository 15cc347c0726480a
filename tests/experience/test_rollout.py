"""Double-buffered collection equals a plain loop, on any number of replicas, also after a checkpoint."""

import numpy as np
import pytest

from tfrl import envs
from tfrl.envs import EnvSpec
from tfrl.experience.rollout import Collector
from tfrl.run import rng

STEPS, ENVS = 12, 8


class Policy:
    """Actions from what is seen and the random number, so that any mix-up shows."""

    def __init__(self, num_actions):
        self.num_actions = num_actions

    def act(self, observations, uniforms):
        seen = observations.astype(np.int64).sum(axis=(-3, -2, -1))
        actions = (seen + np.floor(uniforms * self.num_actions).astype(np.int64)) % self.num_actions
        return actions.astype(np.int32), np.float32(uniforms), np.float32(seen)


def spec(name):
    return EnvSpec(name, num_envs=ENVS, seed=2, num_levels=0)


def uniforms(update):
    return rng.action_uniforms(1, update, range(ENVS), STEPS)


def plain_loop(env, policy, update):
    """What a rollout is: act, step, store; all envs at once. Arrays [T, N], and last values [N]."""
    rows = []
    for t in range(STEPS):
        observations = env.observe()[1].copy()
        actions, log_probs, values = policy.act(observations, uniforms(update)[t])
        env.act(actions)
        rewards, _, first = env.observe()
        rows.append((observations, actions, log_probs, values, rewards.copy(), first.copy()))
    names = ("observations", "actions", "log_probs", "values", "rewards", "first")
    rollout = dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=True))
    return rollout | {"last_values": policy.act(env.observe()[1], np.zeros(ENVS))[2]}


def in_env_order(rollout):
    """A rollout's arrays with the replicas' [R, T, B] joined to [T, N]."""
    joined = {}
    for name in ("observations", "actions", "log_probs", "values", "rewards", "first"):
        joined[name] = np.concatenate(list(getattr(rollout, name)), axis=1)
    return joined | {"last_values": rollout.last_values.reshape(-1)}


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["catch", "coinrun"])
def test_collecting_equals_a_plain_loop(name, replicas):
    env = envs.make(spec(name))
    policy = Policy(env.num_actions)
    collector = Collector(spec(name), range(ENVS), replicas=replicas, num_steps=STEPS)
    for update in range(3):
        rollout = collector.collect(policy, uniforms(update), lambda t: None)
        assert rollout.observations.shape[:3] == (replicas, STEPS, ENVS // replicas)
        assert_same(in_env_order(rollout), plain_loop(env, policy, update))
    assert name != "catch" or rollout.first.any()


def test_a_workers_share_is_its_part_of_the_whole():
    policy = Policy(3)
    whole = Collector(spec("catch"), range(ENVS), replicas=1, num_steps=STEPS)
    share = Collector(spec("catch"), range(4, 8), replicas=2, num_steps=STEPS)
    mine = in_env_order(share.collect(policy, uniforms(0)[:, 4:8], lambda t: None))
    everything = in_env_order(whole.collect(policy, uniforms(0), lambda t: None))
    last_values = {"last_values": everything.pop("last_values")[4:]}
    assert_same(mine, {name: array[:, 4:] for name, array in everything.items()} | last_values)


@pytest.mark.parametrize("name", ["catch", "coinrun"])
def test_a_state_continues_the_same_rollouts_on_another_number_of_replicas(name):
    before = Collector(spec(name), range(ENVS), replicas=1, num_steps=STEPS)
    policy = Policy(before.num_actions)
    before.collect(policy, uniforms(0), lambda t: None)
    indices, states, observations, first = before.get_state()
    assert sorted(indices) == list(range(ENVS))
    expected = in_env_order(before.collect(policy, uniforms(1), lambda t: None))
    after = Collector(spec(name), range(ENVS), replicas=4, num_steps=STEPS)
    after.set_state(dict(zip(indices, states, strict=True)))
    actual = in_env_order(after.collect(policy, uniforms(1), lambda t: None))
    assert_same(actual, expected)
    np.testing.assert_array_equal(observations[np.argsort(indices)], actual["observations"][0])
    assert first.shape == (ENVS,)


@pytest.mark.parametrize(("each", "group"), [(8, 4), (6, 3), (5, 5), (4, 2), (2, 2), (1, 1)])
def test_envs_step_in_two_groups_of_two_or_more(each, group):
    """While the policy looks at one, the other steps; a batch of one would be rounded in another way."""
    seen = []

    class Looking(Policy):
        def act(self, observations, uniforms):
            seen.append(observations.shape[:2])
            return super().act(observations, uniforms)

    spec = EnvSpec("catch", num_envs=2 * each, seed=2, num_levels=0)
    collector = Collector(spec, range(2 * each), replicas=2, num_steps=3)
    collector.collect(Looking(3), rng.action_uniforms(1, 0, range(2 * each), 3), lambda t: None)
    assert seen == [(2, group)] * (4 * each // group)  # three steps and the last values


def test_every_step_is_reported():
    collector = Collector(spec("catch"), range(ENVS), replicas=1, num_steps=STEPS)
    for _ in range(20):  # each with a clock of its own
        steps = []
        rollout = collector.collect(Policy(3), uniforms(0), steps.append)
        assert steps == list(range(1, STEPS + 1))
        assert 0 < rollout.env_wait_seconds < rollout.seconds


def test_observations_are_aligned_so_that_tensorflow_reads_them_in_place():
    collector = Collector(spec("coinrun"), range(ENVS), replicas=2, num_steps=STEPS)
    rollout = collector.collect(Policy(15), uniforms(0), lambda t: None)
    assert rollout.observations.ctypes.data % 64 == 0
