"""What was published of procgen's games: against figures worked by hand."""

import numpy as np
import pytest

from tfrl.envs import published
from tfrl.envs.registry import games


def test_figures_are_of_procgens_games():
    assert tuple(published._scores()) == games()
    assert {game for game, _ in published._curves()} == {*games()}


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
    got = published.normalized_return(env, mode, episode_return)
    assert got == (None if expected is None else pytest.approx(expected))


def test_published_means_at_the_end():
    for split, expected in (("train", 0.599), ("test", 0.355)):
        scores = [
            published.normalized_return(
                game, "easy", published.published_returns(game)[f"easy200_25M_{split}"]
            )
            for game in games()
        ]
        assert np.mean(scores) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("game", games())
def test_published_curves(game, split):
    env_steps, returns = published.published_curve(game, split)
    assert env_steps.shape == (returns.shape[1],)
    assert returns.shape[0] == 3
    assert (np.diff(env_steps) > 0).all() and env_steps[-1] > 24e6
    assert np.isfinite(returns).all()


def test_runs_of_a_curve_share_their_env_steps():
    for curve in published._curves().values():
        assert (curve[:, :, 0] == curve[0, :, 0]).all()


def test_fruitbot_curve_is_the_published_one():
    env_steps, returns = published.published_curve("fruitbot", "train")
    assert returns[:, list(env_steps).index(491_520)].tolist() == [1.09, 0.48, 0.97]


@pytest.mark.parametrize("game", games())
def test_training_curves_have_every_update_of_the_first_million(game):
    env_steps, _ = published.published_curve(game, "train")
    assert env_steps[:62].tolist() == [16_384 * update for update in range(1, 63)]
