"""Prioritised drawing: frequencies, trees against sums by hand, equality whatever the order of changes."""

import numpy as np
import pytest

from tfrl.experience.replay import Priorities


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 1000])
def test_sums_and_the_least_follow_every_change(rows):
    generator, tree, slow = np.random.default_rng(rows), Priorities(rows), np.zeros(rows)
    for _ in range(20):
        at = generator.permutation(rows)[: generator.integers(1, rows + 1)]
        values = generator.random(at.size) * (generator.random(at.size) < 0.8)
        tree.set(at, values)
        slow[at] = values
        np.testing.assert_array_equal(tree[:rows], slow)
        assert tree.total == pytest.approx(slow.sum(), rel=1e-12)
        assert tree.least == (slow[slow > 0].min() if slow.any() else np.inf)


def test_rows_are_drawn_as_often_as_their_share():
    shares = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.5, 0.0])
    tree = Priorities(7)
    tree.set(np.arange(7), shares)
    count = 200_000
    drawn = np.bincount(tree.draw(np.random.default_rng(3).random(count)), minlength=7)
    expected = shares / shares.sum()
    assert (drawn[shares == 0] == 0).all()
    sigma = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(drawn / count - expected) <= 5 * sigma).all()


def test_drawing_is_not_biased():
    """Numbers at equal distances give each row its share to one draw; random ones pass a chi-squared test."""
    count, trees, rows = 1_000_000, 5, 32
    chi_squared = 0.0
    for seed in range(trees):
        generator, tree = np.random.default_rng(seed), Priorities(rows)
        priorities = generator.random(rows) ** 3
        tree.set(np.arange(rows), priorities)
        expected = priorities / priorities.sum() * count
        even = np.bincount(tree.draw((np.arange(count) + 0.5) / count), minlength=rows)
        assert np.abs(even - expected).max() <= 1
        drawn = np.bincount(tree.draw(generator.random(count)), minlength=rows)
        chi_squared += ((drawn - expected) ** 2 / expected).sum()
    freedom = trees * (rows - 1)
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_ends_of_the_unit_interval_draw_rows_that_can_be_drawn():
    tree = Priorities(6)
    tree.set(np.array([1, 4]), np.array([0.1, 0.2]))  # whose sum is not exact
    edges = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert tree.draw(edges).tolist() == [1, 4]


def test_trees_of_the_same_priorities_are_the_same_to_the_bit():
    values = np.random.default_rng(1).random(100)
    at_once, one_by_one = Priorities(100), Priorities(100)
    at_once.set(np.arange(100), values)
    for row in np.random.default_rng(2).permutation(100):
        one_by_one.set(np.array([row]), 7.0)
        one_by_one.set(np.array([row]), values[row])
    assert at_once.total == one_by_one.total
    uniforms = np.random.default_rng(4).random(1000)
    np.testing.assert_array_equal(at_once.draw(uniforms), one_by_one.draw(uniforms))
