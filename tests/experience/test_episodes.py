"""The loop that every evaluation plays: which envs, numbers and levels, and what counts."""

import numpy as np
import pytest
from scripted import Acting, scripted, still

from tfrl.algorithms.ppo import Config
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.registry import LEVEL_SETS
from tfrl.envs.spec import EnvSpec
from tfrl.experience import episodes
from tfrl.experience.episodes import GAP, level_spec, play, split_episodes, with_gap
from tfrl.run import rng
from tfrl.run.rng import Use

parse = reader("ppo_procgen").parse


def test_short_episodes_do_not_count_more_often(monkeypatch):
    spec = scripted(monkeypatch, [1, 10, 100], [3.0, 0.0, -3.0])
    played = play(Acting(still), spec, range(3), episodes_each=4)
    np.testing.assert_array_equal(played.returns, [[3.0] * 4, [0.0] * 4, [-3.0] * 4])
    np.testing.assert_array_equal(played.lengths, [[1] * 4, [10] * 4, [100] * 4])
    np.testing.assert_array_equal(played.solved, [[True] * 4, [False] * 4, [False] * 4])


def test_an_endless_episode_is_cut_with_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(episodes, "LONGEST_EPISODE", 50)
    spec = scripted(monkeypatch, [10, 10**9], [1.0, 0.0])
    played = play(Acting(still), spec, range(2), episodes_each=2)
    np.testing.assert_array_equal(played.lengths, [[10, 10], [50, 50]])
    assert "warning: 2 episodes of" in capsys.readouterr().err


def test_a_watcher_sees_the_end_of_an_episode_that_is_cut_off_and_it_is_not_solved(monkeypatch):
    """Also if the env itself truncates another episode at the same step."""
    monkeypatch.setattr(episodes, "LONGEST_EPISODE", 5)
    seen = []

    class Seeing(episodes.Watcher):
        def before(self, env, observations, actions):
            monkeypatch.setattr(env, "solved", lambda: np.ones(3, bool))

        def after(self, step):
            seen.append(step)

    spec = scripted(monkeypatch, [5, 10**9, 3], [1.0, 0.0, 0.0])
    played = play(Acting(still), spec, range(3), episodes_each=1, watcher=Seeing())
    np.testing.assert_array_equal(played.solved, [[True], [False], [True]])
    np.testing.assert_array_equal(seen[4].first, [True, True, False])
    assert not any(step.first[1] for step in seen[:4])


def test_actions_are_computed_only_for_envs_with_episodes_left(monkeypatch):
    asked = []

    def act(observations, uniforms):
        asked.append(len(observations))
        return still(observations, uniforms)

    play(Acting(act), scripted(monkeypatch, [1, 2, 3], [1, 1, 1]), range(3), episodes_each=2)
    assert asked == [3, 3, 2, 2, 2, 2], "never a batch of one, which TensorFlow rounds in another way"


def test_each_env_has_its_own_observation_and_random_numbers(monkeypatch):
    """For more steps than numbers are drawn at once, while others have played all."""
    lengths = [300, 1, 2, 3]
    asked = [[] for _ in lengths]

    def act(observations, uniforms):
        for env, uniform in zip(observations.ravel(), uniforms[:, 0], strict=True):
            asked[env].append(uniform)
        return still(observations, uniforms)

    play(Acting(act), scripted(monkeypatch, lengths, [1] * 4), range(4), episodes_each=2)
    asked[0][6:] = asked[0][6::2]  # the last one alone is asked for twice
    for env, length in enumerate(lengths):
        expected = rng.generator(0, rng.Use.EVALUATION, env).random(600, np.float32)
        np.testing.assert_array_equal(asked[env], expected[: 2 * length])


def test_all_episodes_are_counted(monkeypatch):
    counts = []
    spec = scripted(monkeypatch, [3, 2, 7], [1, 1, 1])
    play(Acting(still), spec, range(3), episodes_each=2, on_episode=counts.append)
    assert counts == [1, 2, 3, 4, 5, 6]  # after 2, 3, 4, 6, 7 and 14 steps


@pytest.mark.parametrize(
    ("episodes", "split"), [(1, (1, 1)), (20, (20, 1)), (64, (64, 1)), (65, (64, 2)), (129, (64, 3))]
)
def test_at_least_as_many_episodes_as_asked_for(episodes, split):
    assert split_episodes(episodes) == split


def test_unseen_levels_are_all_of_the_same_mode():
    config = Config(env="coinrun", distribution_mode="hard", num_levels=500, start_level=7, seed=3)
    train, test = (level_spec(config, level_set, 4) for level_set in LEVEL_SETS)
    assert (train.num_levels, train.start_level) == (500, 7)
    assert (test.num_levels, test.start_level) == (0, 0)
    for spec in (train, test):
        assert (spec.env, spec.distribution_mode, spec.num_envs) == ("coinrun", "hard", 4)


def test_the_generalization_gap_uses_scores_or_else_returns():
    returns = {"eval_train/return": 8.0, "eval_test/return": 5.5}
    assert with_gap(Config(env="catch"), returns)[GAP] == 2.5
    scores = {"eval_train/normalized_return": 0.75, "eval_test/normalized_return": 0.5}
    assert with_gap(Config(env="coinrun"), returns | scores)[GAP] == 0.25
    assert np.isnan(with_gap(Config(env="coinrun", num_levels=0), returns | scores)[GAP])
    alone = {"eval_test/return": 8.0}
    assert with_gap(Config(env="CartPole-v1"), alone) == alone


def test_any_worker_plays_the_same_episodes():
    spec = EnvSpec(env="catch", num_envs=6, seed=3, num_levels=0)

    def act(observations, uniforms):
        return (uniforms[:, 0] * 3).astype(np.int32)

    whole = play(Acting(act), spec, range(6), episodes_each=5)
    part = play(Acting(act), spec, [1, 4], episodes_each=5)
    np.testing.assert_array_equal(part.returns, whole.returns[[1, 4]])


USES = [(use, s) for use in (Use.EVALUATION, Use.RECORDING) for s in LEVEL_SETS]


def test_training_evaluation_and_videos_use_different_env_seeds():
    """On all levels, counted seeds would overlap with those of the next run."""
    runs_seeds = [*range(300), *range(2**31 - 300, 2**31)]
    seeds = [*runs_seeds]  # training's are the runs' own
    for seed in runs_seeds:
        config = Config(env="coinrun", num_levels=0, seed=seed)
        seeds += [level_spec(config, level_set, 4, use).seed for use, level_set in USES]
    assert len(set(seeds)) == len(seeds) == 5 * 600
    assert min(seeds) == 0 and max(seeds) == 2**31 - 1


def test_each_use_of_each_seed_has_its_own_levels_and_random_numbers():
    """Compares the levels of training and of each kind of evaluation for seeds 1 and 2."""
    levels, noise = set(), set()
    for seed in (1, 2):
        config = Config(env="coinrun", num_levels=0, seed=seed)
        training = EnvSpec(env="coinrun", num_envs=4, seed=seed, num_levels=0)
        specs = [training, *(level_spec(config, level_set, 4, use) for use, level_set in USES)]
        for spec in specs:
            env = registry.make(spec)
            levels.add(tuple(info["level_seed"] for info in env._env.get_info()))
            env.close()
            asked = []
            play(
                Acting(lambda o, u, to=asked: to.append(u.tobytes()) or still(o, u)),
                spec,
                [0, 1],
                episodes_each=1,
                max_steps=1,
            )
            noise.update(asked)
    assert len(levels) == len(noise) == 10


def test_an_evaluation_of_more_episodes_begins_with_the_same_ones():
    """Whatever the number of envs: env i's level follows from the seed alone, as its actions do."""
    config = Config(env="coinrun", num_levels=0, seed=3)
    few, many = (registry.make(level_spec(config, "test", n)) for n in (2, 5))
    assert [i["level_seed"] for i in few._env.get_info()] == [
        i["level_seed"] for i in many._env.get_info()[:2]
    ]


@pytest.mark.parametrize("below_the_largest", [0, 1, 2])
@pytest.mark.parametrize("env", ["coinrun", "catch"])
def test_the_last_seeds_are_evaluated_as_well(env, below_the_largest):
    """A failure would come only at the end of a run, after hours."""
    config = parse(["--env", env, "--seed", str(2**31 - 1 - below_the_largest)])
    specs = [level_spec(config, level_set, 2) for level_set in LEVEL_SETS]
    assert len({config.seed, *(spec.seed for spec in specs)}) == 3
    for spec in specs:
        assert play(Acting(still), spec, range(2), episodes_each=1, max_steps=3).returns.shape == (2, 1)


def test_an_env_that_cannot_be_made_gives_a_one_sentence_error(monkeypatch):
    spec = EnvSpec(env="GymV21Environment-v0", num_envs=1, seed=0)
    with pytest.raises(UserError, match=r"GymV21Environment-v0.*\.$"):
        play(Acting(still), spec, [0], episodes_each=1)
