"""Sums of the numbers in infos."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfrl.envs.spec import InfoSums, added, joined
from tfrl.training.learner import EnvLearner


def test_numbers_are_summed_by_env_and_other_values_are_ignored():
    sums = InfoSums(("b", "c"), 2)
    sums.add(0, {"metrics": {"a": 1.5, "word": "x", "list": [1]}, "b": np.float32(2.0), "d": 1.0})
    sums.add(1, {"metrics": None, "b": True, "c": np.array(3)})
    sums.add(1, {"b": float("inf"), "c": 1 + 2j})
    taken = sums.take()
    assert {name: array.tolist() for name, array in taken.items()} == {
        "a": [[1.5, 0.0], [1.0, 0.0]],
        "b": [[2.0, 1.0], [1.0, 1.0]],
        "c": [[0.0, 3.0], [0.0, 1.0]],
    }
    assert sums.take() == {}


def test_sums_are_joined_over_envs_and_added_over_time():
    one, two = {"a": np.ones((2, 1))}, {"a": np.full((2, 2), 2.0), "b": np.ones((2, 2))}
    whole = joined([(one, [1]), (two, [0, 2])], 3)
    assert whole["a"].tolist() == [[2, 1, 2]] * 2 and whole["b"].tolist() == [[1, 0, 1]] * 2
    both = added(whole, {"b": np.ones((2, 3)), "c": np.zeros((2, 3))})
    assert both["b"].tolist() == [[2, 1, 2]] * 2 and set(both) == {"a", "b", "c"}
    assert whole["b"].tolist() == [[1, 0, 1]] * 2


@pytest.mark.parametrize("names", [(["a", "b"], ["a", "b"]), (["a"], ["b", "\u00fc"]), ([], ["a"])])
def test_workers_with_different_names_agree_on_all_of_them(names):
    """Two threads are the workers; a collective waits for both and adds."""
    meeting, given = threading.Barrier(2, timeout=20), [None, None]

    def worker(number):
        def add(array):
            given[number] = array
            meeting.wait()
            total = given[0] + given[1]
            meeting.wait()
            return total

        def of_workers(value):
            array = np.zeros(2, np.int64)
            array[number] = value
            return add(array)

        runtime = types.SimpleNamespace(num_workers=2, worker=number, sum_over_workers=add)
        session = types.SimpleNamespace(of_workers=of_workers)
        learner = types.SimpleNamespace(_runtime=runtime, _session=session)
        return EnvLearner._names_on_all(learner, names[number])

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(worker, (0, 1))] == [sorted({*names[0], *names[1]})] * 2
