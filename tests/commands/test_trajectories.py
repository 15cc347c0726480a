"""Trajectories of a policy, written as examples, against the envs that are stepped once more."""

import numpy as np

from tfrl import collect
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.evaluation.episodes import play
from tfrl.evaluation.uniform import UniformPolicy


class Examples:
    def __init__(self):
        self.found = []

    def add_examples(self, examples):
        self.found += examples["train"]


def test_trajectories_are_what_the_envs_did():
    spec = EnvSpec(env="catch", num_envs=3, seed=5, num_levels=0)
    examples = Examples()
    buffer = collect.EpisodeBuffer(3, 2, examples)
    played = play(UniformPolicy(*registry.specs(spec)), spec, range(3), episodes_each=2, watcher=buffer)
    assert len(examples.found) == 6
    env, pending = registry.make(spec), [[], [], []]
    for example in examples.found:
        pending[example["env_index"]].append(example["steps"])
    for episode in range(2):
        for t in range(9):
            observations = env.observe().observation
            steps = [pending[i][episode][t] for i in range(3)]
            np.testing.assert_array_equal([s["observation"] for s in steps], observations)
            env.act(np.array([s["action"] for s in steps]))
            after = env.observe()
            np.testing.assert_array_equal([s["reward"] for s in steps], after.reward)
            np.testing.assert_array_equal([s["discount"] for s in steps], ~after.first)
            assert [s["is_first"] for s in steps] == [t == 0] * 3
            assert not any(s["is_last"] for s in steps)
        lasts = [pending[i][episode][9] for i in range(3)]
        assert all(s["is_last"] and s["is_terminal"] and s["reward"] == 0 for s in lasts)
        returns = [sum(s["reward"] for s in pending[i][episode]) for i in range(3)]
        np.testing.assert_allclose(returns, played.returns[:, episode])
