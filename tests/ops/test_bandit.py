"""The bandit against a slow one that keeps everything, and what it settles on."""

import math

import numpy as np
import pytest

from tfrl.ops.augment import SlidingWindowUCB


def slow_choice(history, choices, exploration, window):
    """`history`: (choice, return) pairs from the first on."""
    scores = []
    for f in range(choices):
        returns = [r for choice, r in history if choice == f]
        if not returns:
            return f
        recent = returns[-window:]
        bonus = exploration * math.sqrt(math.log(len(history)) / len(returns))
        scores.append(sum(recent) / len(recent) + bonus)
    return scores.index(max(scores))


@pytest.mark.parametrize(("choices", "exploration", "window"), [(8, 0.1, 10), (3, 1.0, 2), (2, 0.5, 1)])
def test_choices_follow_the_equations_of_ucb(choices, exploration, window):
    rng, history = np.random.default_rng(0), []
    bandit = SlidingWindowUCB(choices, exploration=exploration, window=window)
    for _ in range(300):
        choice = bandit.choose()
        assert choice == slow_choice(history, choices, exploration, window)
        assert bandit.choose() == choice  # asking changes nothing
        mean_return = float(rng.normal(choice, 0.5))
        history.append((choice, mean_return))
        bandit.record(choice, mean_return)
    assert bandit.counts().sum() == 300


@pytest.mark.parametrize("late", [1, 3, 9])
def test_choices_whose_returns_are_late_count_already(late):
    """Otherwise, with a lag of K updates, each augmentation would be tried K + 1 times in a row."""
    rng, bandit, choices = np.random.default_rng(0), SlidingWindowUCB(8, exploration=0.1, window=10), []
    for t in range(300):
        if t > late:
            bandit.record(choices[t - late - 1], rng.normal(choices[t - late - 1], 0.5))
        pending = choices[max(0, t - late) :]
        choices.append(bandit.choose(pending))
        known = bandit.counts() > 0
        if t >= max(8, late + 1):
            total = bandit.counts() + np.bincount(pending, minlength=8)
            scores = bandit.mean_returns() + 0.1 * np.sqrt(np.log(t) / total)
            assert total.sum() == t and choices[-1] == np.flatnonzero(known)[np.argmax(scores[known])]
    assert choices[:8] == [*range(8)]


def test_the_bandit_settles_on_the_best_and_follows_a_change():
    """All returns are positive: a bandit that begins with Q = 0 would never leave its first choice."""
    rng, bandit = np.random.default_rng(1), SlidingWindowUCB(4, exploration=0.5, window=10)
    for means in ([5.0, 5.5, 7.0, 6.0], [5.0, 5.5, 4.0, 6.0]):
        before = bandit.counts()
        for _ in range(200):
            choice = bandit.choose()
            bandit.record(choice, rng.normal(means[choice], 0.1))
        assert np.argmax(bandit.counts() - before) == np.argmax(means)


def test_ties_choose_the_first_augmentation():
    bandit = SlidingWindowUCB(3, exploration=0.0)
    for choice in (0, 1, 2):
        assert bandit.choose() == choice
        bandit.record(choice, 1.0)
    assert bandit.choose() == 0


@pytest.mark.parametrize("steps", [0, 2, 37])
def test_a_restored_bandit_makes_the_same_choices(steps):
    def play(bandit, rng, number):
        played = []
        for _ in range(number):
            played.append(bandit.choose())
            bandit.record(played[-1], rng.random())
        return played

    bandit, rng = SlidingWindowUCB(4, window=3), np.random.default_rng(2)
    play(bandit, rng, steps)
    other = SlidingWindowUCB(4, window=3)
    other.set_state(bandit.get_state())
    again = np.random.default_rng(3)
    assert play(other, np.random.default_rng(3), 50) == play(bandit, again, 50)
    state = bandit.get_state()
    bandit.record(0, 1e9)  # states are copies
    other.set_state(state)
    other.record(1, 1e9)
    assert state["returns"].max() < 1e9
