"""Statistics over runs, against slow references and hand-worked cases."""

import numpy as np
import pytest

from tfrl.reporting import scores as statistics


def slow_iqm(scores):
    ordered = sorted(scores)
    cut = int(0.25 * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 48])
def test_iqm_is_the_trimmed_mean_of_the_paper(count):
    scores = np.random.default_rng(count).normal(size=count)
    assert statistics.iqm(scores) == pytest.approx(slow_iqm(scores))


def test_iqm_ignores_outliers():
    assert statistics.iqm(np.array([-1e9, 1.0, 2.0, 1e9])) == 1.5


def test_iqm_works_on_the_last_dimension():
    scores = np.random.default_rng(0).normal(size=(5, 12))
    np.testing.assert_allclose(statistics.iqm(scores), [slow_iqm(row) for row in scores])


def test_the_standard_error_is_that_of_the_mean():
    assert statistics.standard_error(np.array([1.0, 2.0, 3.0])) == pytest.approx(1 / np.sqrt(3))
    assert np.isnan(statistics.standard_error(np.array([1.0])))


def slow_bootstrap(scores, statistic, resamples, seed):
    """One resample after another, run by run."""
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(resamples):
        sample = []
        for game in scores:
            sample += [game[draw.integers(len(game))] for _ in game]
        values.append(statistic(np.array(sample)))
    return np.quantile(values, (0.025, 0.975))


@pytest.mark.parametrize("statistic", [statistics.mean, statistics.median, statistics.iqm])
def test_bootstrap_intervals_agree_with_a_slow_reference(statistic):
    draw = np.random.default_rng(3)
    scores = [draw.normal(0.1 * g, 0.3, size=3 + g % 2) for g in range(6)]
    fast = statistics.stratified_bootstrap(scores, statistic, resamples=20_000)
    slow = slow_bootstrap(scores, statistic, 4_000, seed=9)
    np.testing.assert_allclose(fast, slow, atol=0.03)


@pytest.mark.parametrize(("confidence", "deviations"), [(0.95, 1.96), (0.5, 0.674)])
def test_bootstrap_of_a_mean_matches_theory(confidence, deviations):
    draw = np.random.default_rng(0)
    scores = [draw.normal(size=50) for _ in range(4)]
    low, high = statistics.stratified_bootstrap(
        scores, statistics.mean, confidence=confidence, resamples=20_000
    )
    # Strata of equal size: the variance of the mean is the mean of the strata's, over all samples.
    spread = np.sqrt(np.mean([np.var(s) for s in scores]) / 200)
    centre = np.mean(scores)
    expected = centre - deviations * spread, centre + deviations * spread
    np.testing.assert_allclose((low, high), expected, atol=0.01)


def test_bootstrap_draws_within_games_only():
    """Scores differ between games and not within them; drawing over all runs would give a wide interval."""
    low, high = statistics.stratified_bootstrap([np.zeros(3), np.ones(3)], statistics.mean)
    assert (low, high) == (0.5, 0.5)


def test_bootstrap_is_the_same_twice_and_nothing_for_one_run():
    scores = [np.array([1.0, 2.0, 4.0])]
    assert statistics.stratified_bootstrap(scores, statistics.mean) == statistics.stratified_bootstrap(
        scores, statistics.mean
    )
    assert np.isnan(statistics.stratified_bootstrap([np.array([1.0])], statistics.mean)).all()


def test_there_are_no_intervals_where_a_game_has_one_run():
    """A single run would count as no spread, so the interval would be too narrow."""
    uneven = [np.array([1.0, 2.0]), np.array([3.0])]
    assert np.isnan(statistics.stratified_bootstrap(uneven, statistics.mean)).all()


def test_curves_are_compared_up_to_the_shortest_seed():
    """Outside the common env steps, the mean would be over other seeds."""
    long = np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 2.0])
    short = np.array([0.0, 10.0]), np.array([2.0, 3.0])
    steps, mean, low, high = statistics.over_seeds([long, short])
    np.testing.assert_array_equal(steps, [0.0, 10.0])
    np.testing.assert_array_equal([mean, low, high], [[1.0, 2.0], [0.0, 1.0], [2.0, 3.0]])
    late = np.array([5.0, 20.0]), np.array([4.0, 4.0])
    steps, mean, *_ = statistics.over_seeds([long, late], points=4)  # at other steps: interpolated
    np.testing.assert_array_equal(steps, [5.0, 10.0, 15.0, 20.0])
    np.testing.assert_allclose(mean, (4.0 + steps / 10) / 2)
    assert not statistics.over_seeds([short, (np.array([12.0]), np.array([4.0]))])[0].size
    assert not statistics.over_seeds([short, (np.zeros(0), np.zeros(0))])[0].size


def test_points_are_at_steps_that_all_runs_reached():
    first = np.array([1.0, 2.0, 4.0, 8.0]), np.array([10.0, 20.0, 40.0, 80.0])
    second = np.array([2.0, 3.0, 8.0]), np.array([-2.0, -3.0, -8.0])
    steps, values = statistics.at_shared_steps([first, second])
    np.testing.assert_array_equal(steps, [2.0, 8.0])
    np.testing.assert_array_equal(values, [[20.0, 80.0], [-2.0, -8.0]])
    steps, values = statistics.at_shared_steps([first, (np.zeros(0), np.zeros(0))])
    assert steps.shape == (0,) and values.shape == (2, 0)


def test_equal_steps_are_kept_as_they_are():
    steps = np.array([1.0, 5.0, 6.0])
    found, mean, *_ = statistics.over_seeds([(steps, np.ones(3)), (steps, np.zeros(3))])
    np.testing.assert_array_equal(found, steps)
    np.testing.assert_array_equal(mean, np.full(3, 0.5))


def test_no_curves_give_no_mean():
    assert all(part.size == 0 for part in statistics.over_seeds([(np.zeros(0), np.zeros(0))]))


def test_performance_profile_counts_runs_above_a_threshold():
    scores = [np.array([0.0, 0.5]), np.array([1.0])]
    profile = statistics.performance_profile(scores, np.array([-1.0, 0.0, 0.5, 1.0]))
    np.testing.assert_allclose(profile, [1, 2 / 3, 1 / 3, 0])


def test_profile_band_agrees_with_a_slow_reference_and_holds_the_profile():
    draw = np.random.default_rng(4)
    scores = [draw.normal(0.1 * g, 0.3, size=3) for g in range(5)]
    thresholds = np.linspace(-0.5, 1.0, 7)
    band = statistics.profile_band(scores, thresholds, resamples=20_000)
    for i, threshold in enumerate(thresholds):
        slow = slow_bootstrap(scores, lambda sample, at=threshold: np.mean(sample > at), 1_000, seed=i)
        # Shares of 15 runs: an end may fall on either side of a step.
        np.testing.assert_allclose([end[i] for end in band], slow, atol=1 / 15 + 1e-9)
    low, high = statistics.profile_band(scores, thresholds)
    profile = statistics.performance_profile(scores, thresholds)
    assert (low <= profile + 1e-9).all() and (profile <= high + 1e-9).all()
    assert np.isnan(statistics.profile_band([np.ones(2), np.ones(1)], thresholds)).all()


def slow_improvement(pairs):
    shares = []
    for ours, theirs in pairs:
        wins = [1.0 if x > y else 0.5 if x == y else 0.0 for x in ours for y in theirs]
        shares.append(sum(wins) / len(wins))
    return sum(shares) / len(shares)


def test_probability_of_improvement_counts_pairs_of_runs():
    pairs = [(np.array([1.0, 3.0]), np.array([2.0])), (np.array([5.0]), np.array([5.0, 4.0, 9.0]))]
    assert statistics.probability_of_improvement(pairs) == pytest.approx((1 / 2 + 1.5 / 3) / 2)
    generator = np.random.default_rng(0)
    pairs = [(generator.integers(0, 5, n), generator.integers(1, 6, m)) for n, m in ((3, 4), (1, 2), (5, 5))]
    assert statistics.probability_of_improvement(pairs) == pytest.approx(slow_improvement(pairs))
    other_way = [(theirs, ours) for ours, theirs in pairs]
    both = statistics.probability_of_improvement(pairs) + statistics.probability_of_improvement(other_way)
    assert both == pytest.approx(1.0), "ties are halves"


def test_the_interval_of_an_improvement_agrees_with_a_slow_reference():
    generator = np.random.default_rng(1)
    pairs = [(generator.normal(0.4, 1, n), generator.normal(0, 1, m)) for n, m in ((3, 4), (2, 2))]
    drawing, values = np.random.default_rng(5), np.zeros(300)
    for ours, theirs in pairs:
        mine = ours[drawing.integers(len(ours), size=(300, len(ours)))]
        other = theirs[drawing.integers(len(theirs), size=(300, len(theirs)))]
        values += [slow_improvement([pair]) / 2 for pair in zip(mine, other, strict=True)]
    found = statistics.improvement_interval(pairs, resamples=300, seed=5)
    assert found == pytest.approx(tuple(np.quantile(values, (0.025, 0.975))))
    assert found[0] <= statistics.probability_of_improvement(pairs) <= found[1]
    two_and_one = [(np.array([1.0, 2.0]), np.array([3.0])), (np.array([1.0]), np.array([3.0]))]
    assert all(map(np.isnan, statistics.improvement_interval(two_and_one))), "one run has no spread"


def test_two_runs_get_no_interval_and_two_games_of_two_runs_get_one():
    two = np.array([0.1, 0.3])
    assert np.isnan(statistics.interval_of_runs([two], statistics.mean)).all()
    assert np.isfinite(statistics.interval_of_runs([two, two], statistics.mean)).all()
    assert np.isfinite(statistics.interval_of_runs([np.array([0.1, 0.2, 0.3])], statistics.mean)).all()
