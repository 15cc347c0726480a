"""Runs with level replay: other topologies, actors behind the learner, exact resume, and what they write."""

import contextlib
import copy
import csv
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from learners import make, train, updated
from processes import ROOT
from refusals import refusal

import tfrl
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import EnvError
from tfrl.collect import record
from tfrl.envs import callables, registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience.levels import LevelSampler
from tfrl.record import UniformPolicy
from tfrl.training.callbacks import LevelScores
from tfrl.training.command import learner_class, of_algorithm
from tfrl.training.on_policy import random_observations

BIGFISH = "--env bigfish --torso linear --precision float32 --level-replay --num-levels 30 --start-level 5"
BIGFISH += " --num-envs 8 --num-steps 64 --num-minibatches 2 --epochs 1 --lr 1e-3 --total-steps 100_000"


def parsed(algorithm, *more):
    return reader(algorithm).parse([*BIGFISH.split(), *map(str, more)])


def learner(algorithm, *more):
    config = parsed(algorithm, *more)
    return contextlib.closing(make(config, learner_class(config)))


def assert_same(found, expected):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert str(mine) == str(theirs)  # NaN is equal here
    for name, weight in expected[1].items():
        np.testing.assert_array_equal(found[1][name], weight, err_msg=name)


@pytest.mark.parametrize("counts", [(2,), pytest.param((1, 2), marks=pytest.mark.long)])
def test_the_scores_follow_from_the_rollouts_and_are_equal_on_two_replicas(tmp_path, counts):
    """The levels of the rollouts are those that the probabilities of the update before gave."""
    states = []
    for replicas in counts:
        config = parsed("ppo", "--replicas", replicas)
        with contextlib.closing(make(config)) as one:
            levels, current = one._levels, None
            for update in range(3):
                drawn = levels.draw(update, range(8), 64, levels.probabilities())
                rollout = one.collect()
                found = rollout.by_env(rollout.levels).copy()
                assert current is None or (found[0] == current).all()
                first = rollout.by_env(rollout.first)
                np.testing.assert_array_equal(found[1:], np.where(first, drawn, found[:-1]))
                assert first.any()
                scores = copy.deepcopy(levels)
                one.learn(rollout)
                errors = np.abs(rollout.by_env(one.agent.advantages))
                scores.update(found, first, errors)
                one._score_levels(rollout)
                np.testing.assert_array_equal(levels.scores, scores.scores)
                one.session.step, current = update + 1, found[-1]
            assert levels.seen.sum() > 8 and levels.scores[levels.seen].min() > 0
            states.append(levels.get_state() | one.weights())
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[-1][name], array, err_msg=name)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        pytest.param("ppo", ["--lag", 2], marks=[pytest.mark.long, pytest.mark.promise]),
        pytest.param("daac", ["--order-coef", 0.001, "--value-epochs", 2], marks=pytest.mark.long),
        pytest.param("drac", ["--memory", "gru", "--memory-size", 16], marks=pytest.mark.long),
        pytest.param("ppg", ["--policy-updates", 2, "--aux-minibatches", 2], marks=pytest.mark.long),
    ],
)
def test_a_restored_run_continues_with_the_same_levels(tmp_path, algorithm, more):
    more = [*more, "--logdir", tmp_path]
    with learner(algorithm, *more) as whole:
        updated_of(whole, 2)
        state, step = copy.deepcopy(whole.get_state()), whole.session.step
        expected = updated_of(whole, 2)
        scores = whole._levels.get_state()
    with learner(algorithm, *more) as other:
        other.set_state(state)
        other.session.step = step
        assert_same(updated_of(other, 2), expected)
        for name, array in scores.items():
            np.testing.assert_array_equal(other._levels.get_state()[name], array, err_msg=name)


def updated_of(learner, updates):
    """`updated`, also where an update has parts."""
    history = []
    while len(history) < updates:
        metrics = learner.update()
        if metrics is not None:
            history.append({k: v for k, v in metrics.items() if not k.startswith("time/")})
    return history, {name: weight.copy() for name, weight in learner.weights().items()}


def test_a_run_writes_the_scores_of_its_levels(tmp_path):
    config = parsed("ppo", "--logdir", tmp_path, "--eval-episodes", 2, "--total-steps", 1024)
    assert train(config) == 0
    with (config.run_dir / "levels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["level"]) for row in rows] == list(range(5, 35))
    assert sum(float(row["probability"]) for row in rows) == pytest.approx(1)
    with (config.run_dir / "progress.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    assert sum(row["seen"] == "1" for row in rows) == float(last["levels/seen"]) > 0
    assert sum(int(row["episodes"]) for row in rows) == float(last["rollout/episodes"])
    assert 1 <= float(last["levels/effective"]) <= 30


# Envs of one's own

MAZE = "--env own_levels:Maze --level-replay --num-levels 40 --start-level 100 --num-envs 8 --num-steps 32"
MAZE += " --num-minibatches 2 --epochs 1 --total-steps 100_000 --hidden 16"


@pytest.fixture
def maze(monkeypatch):
    """Reads settings of runs on the levels of the example."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield lambda *more: reader("ppo").parse([*MAZE.split(), *map(str, more)])
    sys.modules.pop("own_levels", None)


@pytest.mark.parametrize("counts", [(2,), pytest.param((0, 2), marks=pytest.mark.long)])
def test_own_envs_play_the_chosen_levels(maze, counts):
    """Also in processes of their own; observations are those of the levels that the rollout names."""
    found = []
    for processes in counts:
        config = maze("--env-processes", processes)
        with contextlib.closing(make(config)) as one:
            env, updates = callables.find(config.env)(), []
            for _ in range(3):
                rollout = one.collect()
                one.learn(rollout)
                one._score_levels(rollout)
                updates.append((rollout.levels.copy(), rollout.observations.copy()))
            found.append([*updates, one._levels.get_state()])
    for levels, observations in found[0][:3]:
        for place in np.ndindex(levels.shape):
            begun, _ = env.reset(options={"level": int(levels[place])})
            np.testing.assert_array_equal(observations[place][:50], begun[:50])  # walls and goal
        assert levels.min() >= 100 and levels.max() < 140
    np.testing.assert_equal(found[-1], found[0])


@pytest.mark.long
def test_own_envs_continue_with_their_levels(maze):
    config = maze()
    with contextlib.closing(make(config)) as whole, contextlib.closing(make(config)) as other:
        updated(whole, 2)
        other.set_state(copy.deepcopy(whole.get_state()))
        other.session.step = 2
        assert_same(updated(other, 2), updated(whole, 2))


def refused(env):
    """What a training with level replay says of an env that ignores the level."""
    flags = ["--env", env, "--level-replay", "--num-levels", "9"]
    return refusal(of_algorithm("ppo").check, reader("ppo").parse(flags))


def test_an_env_that_ignores_the_level_is_refused():
    assert refused("CartPole-v1").startswith("CartPole-v1 begins equal episodes for different levels")


def test_an_env_that_ignores_level_and_seed_is_refused():
    class Unseeded(CartPoleEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset()

    assert "begins one level with one seed in two ways" in refused(callables.give(Unseeded))


OWN_LEVELS = """
from gymnasium.envs.classic_control import CartPoleEnv

class Levels(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=(options or {}).get("level", seed))
"""


def test_a_policy_of_levels_plays_without_them(tmp_path, monkeypatch):
    (tmp_path / "own_levels_module.py").write_text(OWN_LEVELS)
    flags = ["--env", "own_levels_module:Levels", "--level-replay", "--num-levels", "9", "--num-envs", "4"]
    flags += ["--num-steps", "16", "--num-minibatches", "2", "--total-steps", "128", "--eval-episodes", "2"]
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        config = reader("ppo").parse([*flags, "--max-episode-steps", "50", "--logdir", str(tmp_path)])
        assert train(config) == 0
    del sys.modules["own_levels_module"]
    policy = tfrl.load(config.run_dir)
    assert tfrl.evaluate(policy, env="CartPole-v1", episodes=2).returns.shape == (2,)


def test_scores_are_written_with_checkpoints(tmp_path):
    sampler = LevelSampler.of(parsed("ppo"))
    run = SimpleNamespace(updates=1, is_chief=True, folder=tmp_path)
    written = LevelScores(sampler, every=2)
    written.on_update(run, {})
    assert not (tmp_path / "levels.csv").exists()
    run.updates = 2
    written.on_update(run, {})
    assert (tmp_path / "levels.csv").read_text() == sampler.table()


def test_the_error_of_a_reset_names_the_level():
    class Ten(CartPoleEnv):
        def reset(self, *, seed=None, options=None):
            if (level := (options or {}).get("level", 0)) > 9:
                raise IndexError("no such level")
            return super().reset(seed=seed)[0], {"level": level}

    spec = EnvSpec(callables.give(Ten), 1, seed=1, num_levels=1, start_level=12, level_replay=True)
    with pytest.raises(EnvError, match=r'such level, in reset\(seed=\d+, options=\{"level": 12\}\) \('):
        registry.make(spec)


class Rooms(gymnasium.Env):
    """Levels that differ only inside an image; info["level"] has several numbers if it `tells`."""

    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, tells=False):
        self.tells = tells

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.image = np.zeros((64, 64, 3), np.uint8)
        self.image[30:34, 30:34] = (options or {}).get("level", 7)
        return self.image, {"level": np.zeros(3)} if self.tells else {}

    def step(self, action):
        return self.image, 0.0, True, False, {}


@pytest.mark.parametrize("kwargs", ["{}", '{"tells": true}'])
def test_levels_that_differ_only_inside_an_image_are_different(kwargs):
    given = ["--env", "tests.training.test_level_replay:Rooms", "--env-kwargs", kwargs, "--torso", "linear"]
    reader("ppo").parse([*given, "--level-replay", "--num-levels", "9"])


def test_random_steps_for_the_scaling_play_the_training_levels(maze):
    config = maze()
    env = callables.find(config.env)()
    levels = {env.reset(options={"level": level})[0][:50].tobytes() for level in range(100, 140)}
    shown = {image[0, :50].tobytes() for image in random_observations(config, 400)}
    assert shown <= levels and len(shown) > 8  # an episode has at most 30 steps


def test_an_offline_run_takes_a_set_from_a_run_with_replayed_levels(maze, tmp_path):
    config = maze("--run-name", "r")
    policy = UniformPolicy(*registry.specs(config))
    record(lambda: policy, config, {"policy": "uniform"}, tmp_path / "set", episodes=4)
    read = reader("bc").parse(["--dataset", str(tmp_path / "set")])
    assert (read.env, read.num_levels, read.start_level) == (config.env, 200, 0)
