"""Schedules at their ends and in between, and with the bits that earlier versions gave."""

import math

import numpy as np
import pytest

from tfrl.algorithms.dqn import epsilon
from tfrl.ops.optimizers import learning_rate


@pytest.mark.parametrize(
    "kind,step,rate",
    [
        ("constant", 0, 1.0),
        ("constant", 99, 1.0),
        ("linear", 0, 1.0),
        ("linear", 25, 0.75),
        ("linear", 100, 0.0),
        ("cosine", 0, 1.0),
        ("cosine", 25, 0.5 + math.sqrt(0.125)),
        ("cosine", 50, 0.5),
        ("cosine", 100, 0.0),
        ("step", 0, 1.0),
        ("step", 49, 1.0),
        ("step", 50, 0.1),
        ("step", 74, 0.1),
        ("step", 75, 0.01),
    ],
)
def test_rates_equal_the_formula(kind, step, rate):
    assert learning_rate(kind, 1.0, step, 100) == pytest.approx(rate, abs=1e-15)
    assert learning_rate(kind, 3e-4, step, 100) == pytest.approx(3e-4 * rate, abs=1e-18)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_rates_fall_from_1_to_0_and_are_half_in_the_middle(kind, steps):
    values = [learning_rate(kind, 1.0, step, steps) for step in range(steps + 1)]
    assert values[0] == 1.0 and values[-1] == 0.0 and (np.diff(values) < 0).all()
    np.testing.assert_allclose(np.add(values, values[::-1]), 1.0, rtol=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "step"])
def test_a_warmup_grows_to_the_schedule(kind):
    rates = [learning_rate(kind, 2.0, step, 100, warmup=10) for step in range(100)]
    plain = [learning_rate(kind, 2.0, step, 100) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10 * plain[:10])
    assert rates[9:] == plain[9:]


def earlier_rate(kind, highest, step, steps, warmup):
    """The supervised trainer's schedules from its first version on."""
    growth = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if kind == "step":
        return highest * growth * (1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01)
    if kind == "cosine":
        return highest * growth * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return highest * growth


@pytest.mark.parametrize("steps", [1, 10, 333, 1763])
def test_rates_equal_those_of_earlier_versions(steps):
    for step in range(steps):
        for kind in ("constant", "step", "cosine"):
            for highest, warmup in ((0.1, 0), (1e-3, 7), (0.05, 400)):
                expected = earlier_rate(kind, highest, step, steps, warmup)
                assert learning_rate(kind, highest, step, steps, warmup) == expected
        assert learning_rate("linear", 5e-4, step, steps) == 5e-4 * (1.0 - step / steps)  # PPO's


def test_exploration_falls_in_a_line_and_stays():
    assert [epsilon("linear", 1.0, 0.1, step, 4) for step in range(5)] == pytest.approx(
        [1, 0.775, 0.55, 0.325, 0.1]
    )
    assert epsilon("linear", 1.0, 0.1, 4, 4) == epsilon("linear", 1.0, 0.1, 10**9, 4) == 0.1
    assert epsilon("linear", 1.0, 0.05, 0, 0) == 0.05
    assert epsilon("linear", 0.3, 0.3, 17, 50) == 0.3
    assert epsilon("linear", 0.0, 0.5, 1, 2) == 0.25  # it may rise, too


def test_exponential_exploration_has_a_time_constant():
    """end + (start - end) exp(-t / tau), as in JoyRL."""
    shares = [epsilon("exponential", 0.95, 0.01, step, 500) for step in (0, 1, 500, 5000)]
    expected = [0.01 + 0.94 * math.exp(-t / 500) for t in (0, 1, 500, 5000)]
    assert shares == pytest.approx(expected, rel=1e-12)
    assert epsilon("exponential", 1.0, 0.0, 500, 500) == pytest.approx(math.exp(-1))
    assert epsilon("exponential", 1.0, 0.05, 0, 0) == 0.05
