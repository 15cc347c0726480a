"""Envs: a slice of the global vector is the same envs, states go round, all games run, nothing is printed."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfrl.envs.registry import FAMILIES, distribution_modes, games, make
from tfrl.envs.spec import Discrete, EnvSpec

ROOT = Path(__file__).parents[2]
OF_FAMILIES = [family.names[0] for family in FAMILIES.values() if family.names]


def play(env, actions):
    """The results of `shown`, [T, B, ...] each, after each of actions [T, B]."""
    steps = []
    for action in actions:
        env.act(action)
        steps.append(shown(env))
    return [np.stack(x) for x in zip(*steps, strict=True)]


def shown(env):
    """Rewards [B], observations [B, *shape], first [B], truncated [B], and final observations, 0 for none."""
    step, finals = env.observe(), np.zeros_like(env.observe().observation)
    assert step.truncated.dtype == bool and (step.final_observation is not None) == step.truncated.any()
    if step.truncated.any():
        finals[step.truncated] = step.final_observation
    return [x.copy() for x in (*step[:4], finals)]


def drawn_actions(steps, env, seed=0):
    generator = np.random.default_rng(seed)
    return env.action_spec.uniform(generator, steps * env.num_envs).reshape(steps, env.num_envs)


def assert_same(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["coinrun", *OF_FAMILIES])
def test_a_state_round_trip_repeats_100_steps(name):
    env = make(EnvSpec(name, num_envs=4, seed=3))
    play(env, drawn_actions(45, env))  # catch has just ended its fifth episode
    states, before = env.get_state(), shown(env)
    actions = drawn_actions(100, env, seed=1)
    expected = play(env, actions)
    env.set_state(states)
    assert_same(shown(env), before)  # with the reward and `first` of the step before
    assert_same(play(env, actions), expected)
    other = make(EnvSpec(name, num_envs=4, seed=99))
    other.set_state(states)
    assert_same(play(other, actions), expected)
    assert expected[2].any() or name != "catch"


@pytest.mark.parametrize(
    ("name", "mode"), [(game, mode) for game in games() for mode in distribution_modes(game)]
)
def test_a_state_of_any_game_goes_into_other_envs(name, mode):
    here, there = (
        make(EnvSpec(name, num_envs=2, seed=seed, distribution_mode=mode, num_threads=1)) for seed in (7, 99)
    )
    play(here, drawn_actions(60, here))
    there.set_state(here.get_state())
    actions = drawn_actions(60, here, seed=1)
    assert_same(play(there, actions), play(here, actions))


@pytest.mark.parametrize("name", ["coinrun", "starpilot", *OF_FAMILIES])
@pytest.mark.parametrize("indices", [[0, 1, 2], [3, 4, 5], [5, 0], [2]])
def test_a_slice_of_the_global_vector_is_the_same_envs(name, indices):
    spec = EnvSpec(name, num_envs=6, seed=5, num_levels=0)
    whole, part = make(spec), make(spec, indices)
    assert part.num_envs == len(indices)
    assert_same(shown(part), [x[indices] for x in shown(whole)])
    actions = drawn_actions(60, whole)
    expected = [x[:, indices] for x in play(whole, actions)]
    assert_same(play(part, actions[:, indices]), expected)


@pytest.mark.parametrize("name", ["coinrun", *OF_FAMILIES])
def test_results_depend_on_the_seed_and_not_on_threads(name):
    def trajectory(**changes):
        env = make(EnvSpec(**{"env": name, "num_envs": 4, "seed": 1, "num_levels": 0, **changes}))
        return play(env, drawn_actions(50, env))

    assert_same(trajectory(), trajectory(num_threads=1))
    assert any((a != b).any() for a, b in zip(trajectory(), trajectory(seed=2), strict=True))


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_a_time_limit_truncates_and_disturbs_no_other_env(name):
    """Envs have different ages, so one is truncated while the others continue."""
    limit = 7  # shorter than an episode
    spec, free = EnvSpec(name, num_envs=3, seed=5, max_episode_steps=limit), EnvSpec(name, num_envs=3, seed=5)
    env, ahead = make(spec), make(spec)
    for _ in range(3):
        ahead.act(np.array([1, 1, 1]))
        ahead.observe()
    env.set_state([ahead.get_state()[0], *env.get_state()[1:]])
    actions, cuts = drawn_actions(30, env), []
    lone, plain = make(spec, [2]), make(free)
    plain.act(actions[0])
    plain.observe()
    for t, action in enumerate(actions):
        states = env.get_state()
        env.act(action)
        lone.act(action[2:])
        step, alone = env.observe(), lone.observe()
        cuts.append(step.truncated.tolist())
        assert_same(alone[:4], [x[2:] for x in step[:4]])
        if step.truncated[2]:
            np.testing.assert_array_equal(alone.final_observation[0], step.final_observation[-1])
        other = make(EnvSpec(name, num_envs=3, seed=9, max_episode_steps=limit))
        other.set_state(states)
        other.act(action)
        again = other.observe()
        assert_same(again[:4], step[:4])
        assert (again.final_observation is None) == (not step.truncated.any())
        if step.truncated.any():
            np.testing.assert_array_equal(again.final_observation, step.final_observation)
        other.set_state(env.get_state())
        assert_same(other.observe()[:4], step[:4])
        if 0 < t < limit - 1:
            plain.act(action)
            np.testing.assert_array_equal(plain.observe().observation[1:], step.observation[1:])
    assert cuts[3][0] and not cuts[3][1] and cuts[6][1:] == [True, True] and cuts[13][1]
    env.close()


@pytest.mark.parametrize("name", games())
def test_every_game_makes_and_steps(name):
    env = make(EnvSpec(name, num_envs=2, seed=1))
    assert (env.num_envs, env.action_spec, env.exact_state) == (2, Discrete(15), True)
    assert (env.observation_spec.shape, env.observation_spec.dtype) == ((64, 64, 3), "uint8")
    rewards, observations, first, *_ = play(env, drawn_actions(20, env))
    assert rewards.shape == (20, 2) and rewards.dtype == np.float32
    assert observations.shape == (20, 2, 64, 64, 3) and observations.dtype == np.uint8
    assert first.shape == (20, 2) and first.dtype == bool
    assert np.unique(observations).size > 10
    env.close()


def test_envs_play_only_the_chosen_levels():
    env = make(EnvSpec("coinrun", num_envs=16, seed=1, num_levels=3, start_level=50))
    play(env, drawn_actions(1, env))
    assert {info["level_seed"] for info in env.info()} <= {50, 51, 52}


def test_procgen_starts_at_a_level_only_among_a_number_of_them():
    """So --start-level without --num-levels is refused."""

    def first_frames(**levels):
        env = make(EnvSpec("coinrun", num_envs=4, seed=1, **levels))
        frames = env.observe().observation.copy()
        env.close()
        return frames

    unlimited, later = (first_frames(num_levels=0, start_level=start) for start in (0, 500))
    np.testing.assert_array_equal(unlimited, later)
    assert (first_frames(num_levels=1) != first_frames(num_levels=1, start_level=500)).any()
    exploration = first_frames(distribution_mode="exploration")
    assert (exploration == exploration[0]).all()


def test_closed_procgen_vectors_leave_no_copies_of_the_library_in_memory():
    def opened():
        gc.collect()
        return sum(type(each).__name__.startswith("FFILibrary") for each in gc.get_objects())

    first, kept = make(EnvSpec("coinrun", num_envs=1, seed=1)), make(EnvSpec("coinrun", num_envs=1, seed=2))
    first.close()
    before = opened()
    assert before >= 1
    for seed in range(5):
        make(EnvSpec("coinrun", num_envs=1, seed=seed)).close()
    assert opened() == before
    assert play(kept, drawn_actions(1, kept))
    kept.close()


def test_a_missing_system_library_is_one_sentence_that_tells_how_to_install_it(tmp_path):
    (tmp_path / "libGL.so.1").touch()  # found before the machine's, and empty
    broken = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tfrl.env", "coinrun"]
    done = subprocess.run(command, env=broken, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: procgen needs a library of the system") and "Traceback" not in done.stderr
    assert "libGL.so.1: file too short)" in said and "apt-get install libgl1 libglib2.0-0" in said


def test_making_and_stepping_prints_nothing():
    program = """
from tfrl.envs.registry import make
from tfrl.envs.spec import EnvSpec
env = make(EnvSpec("coinrun", num_envs=2, seed=1), [1])
env.act(env.observe().first.astype("int32"))
env.observe()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Catch


def test_catch_pays_1_for_a_caught_ball_and_minus_1_for_a_lost_one():
    env = make(EnvSpec("catch", num_envs=8, seed=1, num_levels=0))
    for step in range(27):
        board = env.observe().observation[..., 0]
        ball = board[:, :9].max(axis=1).argmax(axis=1)
        paddle = board[:, 9].argmax(axis=1)
        towards = np.sign(ball - paddle) + 1
        away = np.where(ball == 4, 0, 2)
        env.act(np.where(np.arange(8) < 4, towards, away).astype(np.int32))
        rewards, _, first, *_ = shown(env)
        assert first.all() == ((step + 1) % 9 == 0) and first.any() == first.all()
        expected = [1.0] * 4 + [-1.0] * 4 if first.all() else [0.0] * 8
        assert rewards.tolist() == expected


def test_catch_shows_one_ball_and_one_paddle():
    env = make(EnvSpec("catch", num_envs=3, seed=1))
    reward, board, first, *_ = shown(env)
    assert board.shape == (3, 10, 5, 1) and board.dtype == np.uint8
    assert (board == 255).sum(axis=(1, 2, 3)).tolist() == [2, 2, 2]
    assert first.all() and (reward == 0).all()


def test_a_level_of_catch_is_where_the_ball_appears():
    env = make(EnvSpec("catch", num_envs=40, seed=1, num_levels=1, start_level=7))
    assert np.unique(env.observe().observation[:, 0].argmax(axis=1)).size == 1
    env = make(EnvSpec("catch", num_envs=40, seed=1, num_levels=0))
    assert np.unique(env.observe().observation[:, 0].argmax(axis=1)).size == 5
