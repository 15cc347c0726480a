"""What was published of procgen's games: against figures worked by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from tfrl.envs import published
from tfrl.envs.registry import games

# Copied by hand from Cobbe et al. 2020 (arXiv:1912.01588), appendix C: (min, max) of easy, then of hard.
PAPER_RANGES = {
    "coinrun": ((5, 10), (5, 10)),
    "starpilot": ((2.5, 64), (1.5, 35)),
    "caveflyer": ((3.5, 12), (2, 13.4)),
    "dodgeball": ((1.5, 19), (1.5, 19)),
    "fruitbot": ((-1.5, 32.4), (-0.5, 27.2)),
    "chaser": ((0.5, 13), (0.5, 14.2)),
    "miner": ((1.5, 13), (1.5, 20)),
    "jumper": ((3, 10), (1, 10)),
    "leaper": ((3, 10), (1.5, 10)),
    "maze": ((5, 10), (4, 10)),
    "bigfish": ((1, 40), (0, 40)),
    "heist": ((3.5, 10), (2, 10)),
    "climber": ((2, 12.6), (1, 12.6)),
    "plunder": ((4.5, 30), (3, 30)),
    "ninja": ((3.5, 10), (2, 10)),
    "bossfight": ((0.5, 13), (0.5, 13)),
}


def test_published_figures_are_of_procgens_games():
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
def test_normalized_returns_are_0_and_1_at_the_ends_of_the_range(env, mode, episode_return, expected):
    got = published.normalized_return(env, mode, episode_return)
    assert got == (None if expected is None else pytest.approx(expected))


def test_the_ranges_of_rliable_differ_for_two_games():
    """The means of the published PPO at 25 M, easy, 200 levels, by both ranges (training, unseen)."""
    means = {}
    for ranges in published.RANGES:
        found = {"train": [], "test": []}
        for game in games():
            _, returns = published.published_returns(game)
            for level_set, value in returns.items():
                found[level_set].append(published.normalized_return(game, "easy", value, ranges))
        means[ranges] = [round(float(np.mean(found[s])), 3) for s in ("train", "test")]
    assert means == {"paper": [0.59, 0.34], "rliable": [0.599, 0.355]}
    differ = {
        g for g in games() if published.score_range(g, "easy") != published.score_range(g, "easy", "rliable")
    }
    assert differ == {"jumper", "leaper"}
    assert all(
        published.score_range(g, "hard") == published.score_range(g, "hard", "rliable") for g in games()
    )


def paper_score(game, mode, episode_return):
    low, high = PAPER_RANGES[game][mode == "hard"]
    return (episode_return - low) / (high - low)


def test_the_ranges_are_the_papers():
    assert PAPER_RANGES.keys() == {*games()}
    for game, mode in itertools.product(games(), ("easy", "hard")):
        for episode_return in (0.0, 7.5):
            expected = paper_score(game, mode, episode_return)
            assert published.normalized_return(game, mode, episode_return) == pytest.approx(expected), game


@pytest.mark.parametrize(("split", "expected"), [("train", 0.590), ("test", 0.340)])
def test_published_means_at_the_end(split, expected):
    ends = {game: published.published_returns(game)[1][split] for game in games()}
    # By the paper's ranges as they stand above, not by those of the project's own copy.
    by_hand = [paper_score(game, "easy", end) for game, end in ends.items()]
    assert np.mean(by_hand) == pytest.approx(expected, abs=5e-4)
    scores = [published.normalized_return(game, "easy", end) for game, end in ends.items()]
    assert np.mean(scores) == pytest.approx(expected, abs=5e-4)
    # The curves are another file: their last points, means of 3 x 100 episodes, are near the final returns.
    last = {game: published.published_curve(game, split)[1][:, -1].mean() for game in games()}
    assert all(abs(paper_score(g, "easy", last[g]) - paper_score(g, "easy", ends[g])) < 0.15 for g in games())


def test_every_published_figure_is_read():
    """A wrong figure that nothing reads would stay unnoticed."""
    ranges = {f"{mode}_{end}" for mode in ("easy", "hard") for end in ("min", "max")}
    read = {column for _, columns in published._FINAL.values() for column in columns.values()}
    assert all(row.keys() == ranges | read for row in published._scores().values())
    tasks = [{"distribution_mode": m, "num_levels": n} for m in ("easy", "hard") for n in (0, 200, 500)]
    found = {
        row
        for game in games()
        for algorithm in ("ppo", "ppg", "drac")
        for task in tasks
        for row in published.returns_elsewhere(game, algorithm, **task)
    }
    assert found == {row for row in published._returns() if row.env.startswith("procgen-")}


def test_published_returns_are_filed_under_their_levels():
    """PPG's authors and CleanRL give procgen no number of levels, which means all; auto-drac gives 200."""
    levels = {
        "CleanRL docs": "easy0",
        "phasic-policy-gradient run by CleanRL": "easy0",
        "phasic-policy-gradient results": "hard0",
        "auto-drac figure read off (test levels)": "easy200",
    }
    for row in published._returns():
        if row.env.startswith("procgen-"):
            assert row.env.split()[1] == levels[row.source], row


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


def test_published_ppg_returns_in_the_docs_equal_the_data():
    text = (Path(__file__).parents[2] / "docs" / "notebook" / "ppg-and-drac.md").read_text()
    for game in ("starpilot", "bigfish", "fruitbot"):
        (row,) = (
            line for line in text.splitlines() if line.startswith(f"| {game} | ") and line.count("…") == 4
        )
        for algorithm, cell in zip(("ppo", "ppg"), row.split("|")[-3:-1], strict=True):
            found = published.returns_elsewhere(game, algorithm, distribution_mode="hard", num_levels=0)
            (at_25_m,) = (row.mean for row in found if row.env_steps == 25_000_000)
            assert float(cell) == pytest.approx(at_25_m, abs=0.051)
