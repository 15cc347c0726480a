"""What is known of the games: checked against procgen's own lists and figures worked by hand."""

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tfrl.envs import games


def procgen_constant(name: str):
    """A constant of procgen/env.py, read without importing it."""
    package = Path(importlib.util.find_spec("procgen").origin).parent
    for node in ast.parse((package / "env.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def test_the_games_are_procgens():
    assert list(games.games()) == procgen_constant("ENV_NAMES")
    assert games.env_names() == (*games.games(), "catch")


def test_exploration_is_where_procgen_has_it():
    having = {game for game in games.games() if "exploration" in games.distribution_modes(game)}
    assert having == set(procgen_constant("EXPLORATION_LEVEL_SEEDS"))


@pytest.mark.parametrize("env", games.env_names())
def test_modes_are_procgens_and_begin_with_easy_and_hard(env):
    modes = games.distribution_modes(env)
    assert modes[:2] == ("easy", "hard")
    assert set(modes) <= set(procgen_constant("DISTRIBUTION_MODE_DICT"))


@pytest.mark.parametrize(
    ("env", "mode", "episode_return", "expected"),
    [
        ("coinrun", "easy", 5.0, 0.0),
        ("coinrun", "easy", 10.0, 1.0),
        ("coinrun", "easy", 2.5, -0.5),
        ("starpilot", "easy", 33.25, 0.5),
        ("starpilot", "hard", 18.25, 0.5),
        ("coinrun", "exploration", 7.0, None),
        ("dodgeball", "extreme", 7.0, None),
        ("catch", "easy", 1.0, None),
    ],
)
def test_normalized_return(env, mode, episode_return, expected):
    got = games.normalized_return(env, mode, episode_return)
    assert got == (None if expected is None else pytest.approx(expected))


def test_published_means_at_the_end():
    for split, expected in (("train", 0.599), ("test", 0.355)):
        scores = [
            games.normalized_return(game, "easy", games.published_scores(game)[f"easy200_25M_{split}"])
            for game in games.games()
        ]
        assert np.mean(scores) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("game", games.games())
def test_published_curves(game, split):
    env_steps, returns = games.published_curve(game, split)
    assert env_steps.shape == (returns.shape[1],)
    assert returns.shape[0] == 3
    assert (np.diff(env_steps) > 0).all() and env_steps[-1] > 24e6
    assert np.isfinite(returns).all()


def test_runs_of_a_curve_share_their_env_steps():
    for curve in games._curves().values():
        assert (curve[:, :, 0] == curve[0, :, 0]).all()


def test_fruitbot_curve_is_the_published_one():
    env_steps, returns = games.published_curve("fruitbot", "train")
    assert returns[:, list(env_steps).index(491_520)].tolist() == [1.09, 0.48, 0.97]


@pytest.mark.parametrize("game", games.games())
def test_training_curves_have_every_update_of_the_first_million(game):
    env_steps, _ = games.published_curve(game, "train")
    assert env_steps[:62].tolist() == [16_384 * update for update in range(1, 63)]
