"""Correlated noise: the same whatever the iterations are, begun anew with each episode, kept in states."""

import contextlib

import numpy as np
import pytest
from learners import make

from tfrl.algorithms import registry as settings
from tfrl.experience.memory import CorrelatedNoise
from tfrl.training.off_policy import OffPolicyLearner

SAC = "--env Pendulum-v1 --preset default --hidden 8 --num-envs 2 --batch-size 16 --noise-correlation 0.98"


def noise_of_a_run(*flags):
    """The noise of the actions of a SAC run that never learns, [T, B], and where episodes begin."""
    config = settings.reader("sac").parse([*SAC.split(), "--learning-starts", "2", *map(str, flags)])
    found, first = [], []
    with contextlib.closing(make(config, OffPolicyLearner)) as learner:

        def explore(observations, rows):
            found.append(rows[:, 0].copy())
            return np.zeros((2, 1), np.float32)

        acting = learner.agent.acting
        for iteration in range(1, 2000 // config.iteration_steps):
            first.append(learner.envs.get_state().first)
            for _, step in learner.envs.steps(explore, acting.draw(iteration, range(2))):
                first.append(step.first)
            del first[-1]
    return np.array(found), np.array(first)


@pytest.mark.parametrize("iteration_steps", [2, 4, 1000])
def test_noise_has_the_chosen_correlation_for_any_iteration_length(iteration_steps):
    noise, first = noise_of_a_run("--iteration-steps", iteration_steps)
    goes_on = ~first[1:]
    before, after = noise[:-1][goes_on], noise[1:][goes_on]
    rest = after - np.float32(0.98) * before  # innovations: what is drawn at each step
    assert abs(np.corrcoef(before, rest)[0, 1]) < 0.1
    assert rest.std() == pytest.approx((1 - 0.98**2) ** 0.5, rel=0.1)


def test_an_episode_begins_with_noise_of_its_own_and_unit_variance():
    drawn = np.random.default_rng(0).standard_normal((60, 5000, 2)).astype(np.float32)
    process, found, first = CorrelatedNoise(0.9, 5000, 2), [], np.zeros((60, 5000), bool)
    first[30] = True
    found = np.array([process.next(rows, begins) for rows, begins in zip(drawn, first, strict=True)])
    np.testing.assert_array_equal(found[30], drawn[30])  # and, where none was before it, the first:
    np.testing.assert_array_equal(found[0], drawn[0])
    np.testing.assert_allclose(found.std(axis=(1, 2)), 1, atol=0.03)
    for t, expected in ((20, 0.9), (30, 0.0), (31, 0.9)):
        assert np.corrcoef(found[t - 1].ravel(), found[t].ravel())[0, 1] == pytest.approx(expected, abs=0.03)


def test_noise_continues_with_the_states_of_its_envs():
    rows = (
        np.random.default_rng(1).standard_normal((3, 4, 5)).astype(np.float32)
    )  # two of noise, three others
    goes_on = np.zeros(4, bool)
    one = CorrelatedNoise(0.5, 4, 2)
    plain = [b"a", b"", b"\0noise", b"d" * 99]
    assert one.take_from(one.add_to(plain)) == plain  # before the first step
    one.next(rows[0], goes_on)
    states = one.add_to(plain)
    shares = [CorrelatedNoise(0.5, 3, 2), CorrelatedNoise(0.5, 1, 2)]
    assert [shares[0].take_from(states[:3]), shares[1].take_from(states[3:])] == [plain[:3], plain[3:]]
    parts = [shares[0].next(rows[1, :3], goes_on[:3]), shares[1].next(rows[1, 3:], goes_on[3:])]
    np.testing.assert_array_equal(np.concatenate(parts), one.next(rows[1], goes_on))
    assert one.take_from(CorrelatedNoise(0.5, 4, 2).add_to(plain)) == plain
    np.testing.assert_array_equal(one.next(rows[2], goes_on), rows[2])
