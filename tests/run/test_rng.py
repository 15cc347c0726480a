"""Random numbers depend on (seed, use, update, epoch, env) alone, and never change silently."""

import numpy as np
import pytest

from tfrl.envs.spec import Discrete
from tfrl.networks.distributions import distribution_for
from tfrl.run import rng


def uniforms_of(envs, seed=1, update=0, num_steps=16):
    """Of a categorical policy, [T, B]: one number an action."""
    draw = distribution_for(Discrete(15)).draw_noise
    noise = rng.action_noise(seed, update, envs, num_steps, draw)
    assert noise.shape[2:] == (1,)
    return noise[..., 0]


def steps_of(envs, seed=1, update=0, num_steps=24, epochs=3, num_minibatches=4):
    """The steps of each env in each minibatch, [E, M, B, T / M]: sequences of one step."""
    sizes = {"num_minibatches": num_minibatches, "size": num_steps // num_minibatches}
    found = rng.minibatch_sequences(seed, update, envs, each=num_steps, epochs=epochs, **sizes)
    found = found.reshape(epochs, num_minibatches, len(envs), -1)
    assert (found // num_steps == np.arange(len(envs))[:, None]).all()
    return found % num_steps


def test_minibatches_take_each_step_of_each_env_once_an_epoch():
    steps = steps_of(range(5))
    assert steps.shape == (3, 4, 5, 6) and steps.dtype == np.int32
    for epoch in range(3):
        for env in range(5):
            assert sorted(steps[epoch, :, env].ravel().tolist()) == list(range(24))


def test_every_env_epoch_update_and_seed_has_its_own_order():
    orders = [steps_of([env], seed, update) for seed in (1, 2) for update in (0, 1) for env in (0, 1)]
    by_epoch = [order[epoch].tobytes() for order in orders for epoch in range(3)]
    assert len(set(by_epoch)) == len(by_epoch)


def test_every_pass_of_an_auxiliary_phase_has_its_own_order():
    seeds, phases, epochs = (1, 2), (0, 1), (0, 1, 2)
    keys = [(seed, phase, epoch) for seed in seeds for phase in phases for epoch in epochs]
    orders = [order for key in keys for order in rng.auxiliary_orders(*key, [3, 5], 24)]
    assert all(sorted(order.tolist()) == list(range(24)) for order in orders)
    assert len({order.tobytes() for order in orders}) == len(orders)
    np.testing.assert_array_equal(rng.auxiliary_orders(1, 0, 1, [5], 24)[0], orders[3])


@pytest.mark.parametrize("envs", [[0], [3], [6, 7], [7, 6], [1, 4, 5]])
def test_an_env_has_the_same_numbers_whichever_others_are_asked_for(envs):
    all_uniforms, all_steps = uniforms_of(range(8), update=5), steps_of(range(8))
    np.testing.assert_array_equal(uniforms_of(envs, update=5), all_uniforms[:, envs])
    np.testing.assert_array_equal(steps_of(envs), all_steps[:, :, envs])


def test_actions_draw_uniform_numbers_below_1():
    uniforms = uniforms_of(range(64), seed=3, num_steps=1000)
    assert uniforms.shape == (1000, 64) and uniforms.dtype == np.float32
    assert uniforms.min() >= 0 and uniforms.max() < 1
    counts = np.histogram(uniforms, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 3200).max() < 6 * np.sqrt(3200)
    correlations = np.corrcoef(uniforms, rowvar=False) - np.eye(64)
    assert np.abs(correlations).max() < 0.2


def test_a_longer_rollout_starts_with_the_same_numbers():
    short, long = (uniforms_of(range(4), num_steps=steps) for steps in (8, 32))
    np.testing.assert_array_equal(long[:8], short)


def test_uses_are_independent_of_each_other():
    drawn = [rng.generator(1, use, 0, 0).random(4).tobytes() for use in rng.Use]
    assert len(set(drawn)) == len(rng.Use)


# A run's identity: if one of these fails, checkpoints no longer continue and published runs no longer repeat.


def test_uniforms_keep_their_recorded_values():
    golden = [[0.7553071, 0.07173783, 0.24733901], [0.0059551, 0.29120976, 0.13251907]]
    golden += [[0.56664705, 0.6445665, 0.848357]]
    np.testing.assert_allclose(uniforms_of([0, 1, 63], num_steps=3), golden, rtol=0, atol=1e-7)
    golden = [[0.78258336], [0.74112284], [0.68613636]]
    np.testing.assert_allclose(uniforms_of([5], seed=7, update=12, num_steps=3), golden, rtol=0, atol=1e-7)


def test_minibatches_keep_their_recorded_values():
    golden = [
        [[[0, 3, 7, 2], [1, 4, 0, 7]], [[1, 5, 6, 4], [3, 2, 5, 6]]],
        [[[2, 6, 3, 5], [2, 0, 5, 3]], [[4, 7, 1, 0], [4, 7, 6, 1]]],
    ]
    assert steps_of([0, 3], num_steps=8, epochs=2, num_minibatches=2).tolist() == golden


def test_evaluation_numbers_keep_their_recorded_values():
    golden = [0.3123022893188686, 0.4789281537767549, 0.4660769539178289]
    assert rng.generator(1, rng.Use.EVALUATION, 4).random(3).tolist() == golden


def test_seeds_of_evaluation_envs_keep_their_recorded_values():
    uses = (rng.Use.EVALUATION, rng.Use.RECORDING)
    seeds = [[rng.env_seed(seed, use, k) for use in uses for k in (0, 1)] for seed in (0, 2**31 - 1)]
    golden = [[1724569079, 1459322505, 195691591, 537817099]]
    golden += [[1112478541, 527249143, 340739201, 956806818]]
    assert seeds == golden
