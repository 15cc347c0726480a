"""Small recorded sets for tests. Importing it needs no TensorFlow."""

import numpy as np

from tfrl import collect
from tfrl.config.run import Task
from tfrl.envs import registry
from tfrl.experience.recorded import Episode, Manifest, Spaces, write_shard


def spaces_of(env):
    return Spaces(*registry.specs(Task(env=env)))


def episodes_of(env, lengths, seed=0):
    """Made-up episodes; observation 0 of step t of episode e is e + t / 100, every second is truncated."""
    spaces, generator = spaces_of(env), np.random.default_rng(seed)
    found = []
    for e, length in enumerate(lengths):
        shown = generator.normal(size=(length + 1, *spaces.observation.shape)).astype(np.float32)
        shown[:, 0] = e + np.arange(length + 1) / 100
        actions = spaces.action.uniform(generator, length)
        found.append(Episode(shown, actions, np.arange(length, dtype=np.float32), terminated=e % 2 == 0))
    return found


def write(folder, env, lengths, shard=4, seed=0, **settings):
    """A set of such episodes, `shard` of them in a file; its folder, and the episodes.

    The set names `env` and these settings of it.
    """
    spaces, episodes = spaces_of(env), episodes_of(env, lengths, seed)
    manifest = Manifest.of(folder, env, {"env": env, **settings})
    folder.mkdir(parents=True, exist_ok=True)
    for number, begin in enumerate(range(0, len(episodes), shard)):
        path, some = manifest.shard(number), episodes[begin : begin + shard]
        manifest.shards.append(write_shard(path, spaces, some, begin))
    manifest.save(spaces, collect.facts_text(Task(env=env)))
    return folder, episodes
