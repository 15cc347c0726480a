"""Settings of all algorithms: what holds for each."""

import pytest

from tfrl.cli.errors import UserError
from tfrl.config import ALGORITHMS, reader

ENVS = ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "MountainCarContinuous-v0", "catch", "coinrun")


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_env_gets_a_preset_that_the_algorithm_has_or_a_sentence(algorithm, env):
    """Also where readers are made of one another, as PPG's is of PPO's, whose presets it has not all."""
    try:
        found = reader(algorithm).parse(["--env", env])
    except UserError as error:
        assert env in str(error)
    else:
        assert found.env == env and found.preset in reader(algorithm).presets
