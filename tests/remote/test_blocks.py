"""The blocks of tfrl.remote.blocks, on a Ray; skipped without Ray."""

import contextlib
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import PATIENCE, ROOT

from tfrl.algorithms.registry import reader
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience.collector import Collector
from tfrl.experience.replay import ReplayBuffer
from tfrl.experience.rollout import Rollout
from tfrl.run import rng

FLAGS = "--env Pendulum-v1 --num-envs 4 --replay-size 400 --batch-size 8 --iteration-steps 240 --seed 3"


@pytest.fixture
def blocks(node):
    from tfrl.remote import blocks
    from tfrl.remote.cluster import Cluster

    with contextlib.closing(Cluster(node.address, {"--workers": 1}, 0)):
        yield blocks


def test_a_sharded_parameter_server_gives_whole_versions(blocks):
    generator = np.random.default_rng(1)
    weights = {f"w{i}": generator.normal(size=(i + 1, 7)).astype(np.float32) for i in range(9)}
    server = blocks.ParameterServer(3)
    with pytest.raises(ValueError, match="no weights yet"):
        server.get()
    for version in range(4):
        server.put(version, {name: array + version for name, array in weights.items()})
    parts = blocks.ray.get([shard.get.remote(3) for shard in server._shards])
    sizes = [sum(array.nbytes for array in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= weights["w8"].nbytes and sum(map(len, parts)) == 9
    blocks.ray.get(server._shards[0].put.remote(4, parts[0]))  # the others do not have version 4 yet
    got = server.get()
    assert got.version == 3 and got.weights.keys() == weights.keys()
    for name, array in got.weights.items():
        np.testing.assert_array_equal(array, weights[name] + 3)
    assert blocks.ray.get(server._shards[1].get.remote(1)) is None, "old versions are forgotten"


class AtRandom:
    """A policy of random actions, for a collector."""

    def __init__(self):
        self._generator = np.random.default_rng(2)

    def sample(self, observations, noise, memory=None):
        return self._generator.uniform(-1, 1, (*observations.shape[:2], 1)).astype(np.float32), {}

    def complete(self, rollout):
        pass


def test_a_sharded_replay_draws_what_one_replay_would(blocks):
    """Two shards of three workers in all, and episodes that are truncated in between."""
    config = reader("sac").parse(FLAGS.split())
    observation, action = registry.specs(config)
    spec = EnvSpec.of(config, num_envs=4, seed=3)
    whole = ReplayBuffer(range(4), 100, observation=observation, action=action, gamma=config.gamma)
    envs = {0: [0], 1: [1], 2: [2, 3]}
    shards = [blocks.ReplayShard.remote(config, {w: envs[w] for w in group}, 2) for group in ((0, 1), (2,))]
    collector = Collector(config, spec, range(4), replicas=1, in_halves=False)
    policy, noise = AtRandom(), np.zeros((60, 4, 1), np.float32)
    for _ in range(4):
        first = collector.observe().first
        rollout = collector.collect(policy, noise, lambda t: None)
        whole.resume_round(rollout.observations[0, 0], first)
        for actions, step in rollout.steps():
            whole.act(actions)
            whole.show(step)
        for worker, mine in envs.items():
            part = Rollout(
                rollout.observations[:, :, mine],
                rollout.actions[:, :, mine],
                {},
                rollout.rewards[:, :, mine],
                rollout.first[:, :, mine],
                rollout.truncated[:, :, mine],
                final_observations={
                    (0, t, mine.index(i)): o
                    for (_, t, i), o in rollout.final_observations.items()
                    if i in mine
                },
            )
            count = blocks.ray.get(shards[worker // 2].add.remote(worker, part, first[mine]))
    assert count == 200 and rollout.first.any()
    drawn = blocks._join(blocks.ray.get([shard.sample.remote(17, 3) for shard in shards]))
    generators = [rng.generator(3, rng.Use.REPLAY, 17, i) for i in range(4)]
    expected = whole.sample(generators, 3, 2)
    for name, mine, theirs in zip(expected._fields, drawn.batch, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    shape = (3, 2, 2)
    noise = np.stack([g.standard_normal(shape, np.float32) for g in generators], axis=1)
    np.testing.assert_array_equal(drawn.noise, noise)


def test_a_block_that_dies_is_an_error_of_the_call(blocks):
    server = blocks.ParameterServer(2)
    server.put(0, {"w": np.zeros(2, np.float32), "v": np.zeros(2, np.float32)})
    blocks.ray.kill(server._shards[1])  # Ray kills a little later, so some calls may still be answered
    late = time.monotonic() + PATIENCE
    with pytest.raises(blocks.ray.exceptions.RayActorError):
        while time.monotonic() < late:
            server.get()


@pytest.mark.long
def test_the_example_trains_sac_with_blocks_and_a_gpu_for_the_learner(tmp_path, gpu_node):
    """A random policy has a mean reward of about -6.2."""
    environ = {**os.environ, **gpu_node.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "ray_blocks.py"), "--ray-address", gpu_node.address]
    command += ["--learner-gpus", "1", "--total-steps", "9000"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"mean reward (-?[\d.]+)", done.stdout)]
    assert len(rewards) == 9 and rewards[0] < -4 < -2 < rewards[-1], done.stdout
    too_many = [*command, "--learner-gpus", "9"]
    done = subprocess.run(
        too_many, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=PATIENCE
    )
    assert "--learner-gpus 9 needs a machine with so many GPUs" in done.stderr
