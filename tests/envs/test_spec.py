"""Action spaces: random actions have the type and the range of the space, and all of it."""

import numpy as np
import pytest

from tfrl.envs.spec import Box, Discrete


@pytest.mark.parametrize("spec", [Discrete(1), Discrete(15), Box((-1.0, 0.0), (1.0, 3.0))])
def test_random_actions_are_of_the_space(spec):
    generator = np.random.default_rng(0)
    numbers = generator.random((5000, *(spec.shape or (1,))), np.float32)
    numbers[0], numbers[1] = 0, np.nextafter(np.float32(1), np.float32(0))
    low, high = (0, spec.n - 1) if isinstance(spec, Discrete) else (-1, 1)
    for actions in (spec.uniform(generator, 5000), spec.from_uniform(numbers)):
        assert actions.shape == (5000, *spec.shape) and actions.dtype == spec.dtype
        assert low <= actions.min() < low + 0.01 and high - 0.01 < actions.max() <= high
        np.testing.assert_allclose(actions.mean(axis=0), (low + high) / 2, atol=0.05 * max(1, high))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_env_gets_actions_of_its_own_type(dtype):
    taken = Box((-1.0, 0.5), (1.0, 3.0), dtype).as_env_takes(np.float32([[-1, -1], [1, 1], [0, 0]]))
    assert taken.dtype == dtype
    assert taken.tolist() == [[-1, 0.5], [1, 3], [0, 1.75]]
