"""Pictures of final scores: what is drawn where some of it is missing."""

import numpy as np

from tfrl.config import drac, ppo
from tfrl.reporting import comparison, intervals, score_plots
from tfrl.reporting.plot_style import GREY


def test_no_gap_is_drawn_where_no_levels_are_unseen(make):
    every = [make(env="coinrun", total_steps=40_000, num_levels=0), make(env="maze", total_steps=40_000)]
    figure = score_plots.level_gap(comparison.group(every))
    assert [label.get_text().split()[0] for label in figure.axes[0].get_yticklabels()] == ["maze"]
    assert score_plots.level_gap(comparison.group(every[:1])) is None


def test_a_published_profile_has_the_runs_of_every_game_once(make):
    """However many variants stand beside it; it is left out where a game has none."""
    made = [make(kind=kind, env="bigfish") for kind in (ppo.Config, drac.Config)]
    groups = comparison.group(made)
    (published,) = comparison.published_of_games(groups, "test")
    np.testing.assert_array_equal(published, comparison.published_scores(groups[0])["test"])
    axes = score_plots.performance_profiles(groups).axes[1]
    shares = {line.get_color(): line.get_ydata() for line in axes.lines}
    expected = intervals.performance_profile([published], axes.lines[0].get_xdata())
    np.testing.assert_array_equal(shares[GREY], expected)
    assert len(published) == 3 and len(groups) == 2
    every = [*made, make(kind=ppo.Config, env="coinrun", num_levels=500)]
    assert not comparison.published_of_games(comparison.group(every), "test")
