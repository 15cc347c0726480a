"""What a run's folder tells of it."""

import numpy as np
import pytest

from tfrl import report
from tfrl.algorithms import ppg


def test_speed_counts_the_whole_time_of_a_run(make):
    """A mean of the updates' speeds would be wrong: PPG has one slow update after many fast ones."""
    run = make(kind=ppg.Config, env="bigfish", total_steps=65_536, policy_updates=4)
    run.progress["time/env_steps_per_second"][:] = 400.0, 400.0, 400.0, 10.0
    seconds = 3 * 16_384 / 400 + 16_384 / 10
    assert run.speed == pytest.approx(65_536 / seconds)
    assert f"<td>{65_536 / seconds:.0f}</td>" in report.render([run], [], {})


def test_updates_of_different_lengths_count_by_their_env_steps(make):
    run = make(env="bigfish", total_steps=49_152)
    run.progress["env_steps"][:] = 100, 1100, 1200
    run.progress["time/env_steps_per_second"][:] = 100, np.nan, 10
    assert run.speed == pytest.approx(200 / 11)  # of the rows with a speed
    assert make(env="maze", updates=0).speed is None
