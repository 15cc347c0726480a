"""Networks in NumPy."""

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from tfrl.networks import array_policy


def threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_a_network_in_numpy_takes_one_thread_and_leaves_the_number_of_threads_as_it_was():
    used = []

    def activation(x):
        used.append(threads())
        return x

    kernel, bias = np.ones((3, 2), np.float32), np.full(2, 0.5, np.float32)
    with threadpool_limits(2, user_api="blas"):
        outputs = array_policy.outputs(np.ones((5, 3), np.float32), [(kernel, bias, activation)])
        after = threads()
    np.testing.assert_array_equal(outputs, np.full((5, 2), 3.5))
    assert used == [{1}]
    assert after == {2}
