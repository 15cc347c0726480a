"""Pictures of final scores: what is drawn where some of it is missing."""

from tfrl.reporting import comparison, score_plots


def test_no_gap_is_drawn_where_no_levels_are_unseen(make):
    every = [make(env="coinrun", total_steps=40_000, num_levels=0), make(env="maze", total_steps=40_000)]
    figure = score_plots.level_gap(comparison.group(every))
    assert [label.get_text().split()[0] for label in figure.axes[0].get_yticklabels()] == ["maze"]
    assert score_plots.level_gap(comparison.group(every[:1])) is None
