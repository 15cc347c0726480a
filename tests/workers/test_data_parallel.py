"""The gradient step: sum, then clip, then one step of Adam, the same on 1, 2 and 4 replicas."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops.optimizers import SGD, Adam
from tfrl.workers import strategy
from tfrl.workers.data_parallel import TARGET, DataParallel, GradientStep, Losses

RATE, EPSILON, CLIP, ROWS, STEPS = 0.01, 0.1, 1.0, 8, 5  # an epsilon that makes a gradient's size count


def initial():
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=size).astype(np.float32) for name, size in (("one", 6), ("two", 2))}


def batch(step):
    """A gradient of `one` and of `two` for each row, float32 [ROWS, 8]."""
    return np.random.default_rng([1, step]).normal(size=(ROWS, 8)).astype(np.float32) * 3.0 ** (step % 3)


def loss(weights, rows, shared):
    """Losses whose gradients are the rows themselves."""
    losses = tf.reduce_sum(rows * tf.concat([weights["one"], weights["two"]], axis=0), axis=1) * shared
    return Losses(losses, {"first": rows[:, 0]}, tf.abs(rows[:, 1]))


def numpy_adam(*, clips_each=False):
    """Kingma and Ba 2015, algorithm 1, on the mean gradient; weights, and the norms before clipping."""
    weights = np.concatenate([*initial().values()]).astype(np.float64)
    mean, square, norms = np.zeros(8), np.zeros(8), []
    rates = np.repeat([RATE, 0.3 * RATE], [6, 2])
    for step in range(STEPS):
        gradient = batch(step).astype(np.float64).mean(axis=0)
        norms.append(np.linalg.norm(gradient))
        parts = np.split(gradient, [6]) if clips_each else [gradient]
        gradient = np.concatenate([p * min(1.0, CLIP / np.linalg.norm(p)) for p in parts])
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        t = step + 1
        weights -= rates * (mean / (1 - 0.9**t)) / (np.sqrt(square / (1 - 0.999**t)) + EPSILON)
    return weights, norms


def make(small, replicas, *, optimizer=None, tau=0.25, compiled=False, **changes):
    runtime = strategy.make(small(replicas=replicas), None)
    options = {"max_norm": CLIP, "part_rows": 2, "errors": "largest", **changes}
    step = GradientStep(
        learned=("one", "two"),
        rates=(RATE, 0.3 * RATE),
        loss=loss,
        metrics=("first",),
        norm="norm",
        optimizer=optimizer or Adam(EPSILON),
        batch_size=ROWS,
        **options,
    )
    steps = {"update": step}
    return runtime, DataParallel(runtime, initial(), steps, targets=("two",), tau=tau, compiled=compiled)


def train(runtime, learning, steps=range(STEPS)):
    """What each step gives, of the first replica."""

    @tf.function
    def take(rows):
        def on_replica(own):
            outcome = learning.steps["update"].step(own, tf.constant(1.0), tf.constant(1.0))
            learning.move_targets()
            return outcome.metrics["first"], outcome.metrics["norm"], outcome.errors

        return runtime.strategy.run(on_replica, args=(rows,))

    outcomes = []
    for step in steps:
        shares = np.split(batch(step), runtime.replicas)
        outcomes.append([runtime.first(x).numpy() for x in take(runtime.per_replica(shares))])
    return outcomes


@pytest.mark.parametrize(
    ("replicas", "clips_each", "compiled"),
    [
        (2, True, True),
        (4, True, False),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((1, False, True), (2, False, False))),
    ],
)
def test_any_number_of_replicas_takes_the_step_of_numpys_adam(small, replicas, clips_each, compiled):
    runtime, learning = make(small, replicas, clips_each=clips_each, compiled=compiled)
    outcomes = train(runtime, learning)
    expected, norms = numpy_adam(clips_each=clips_each)
    found = np.concatenate([*learning.vectors().values()])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for step, (first, norm, largest) in enumerate(outcomes):
        np.testing.assert_allclose(first, batch(step)[:, 0].mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(norm, norms[step], rtol=1e-5)
        np.testing.assert_allclose(largest, np.abs(batch(step)[:, 1]).max())


def test_replicas_have_the_same_bits(small):
    states = []
    for replicas in (1, 2, 4):
        runtime, learning = make(small, replicas)
        train(runtime, learning)
        states.append(learning.get_state())
        for variable in learning.variables.values():
            first, *others = map(np.asarray, runtime.local_results(variable))
            assert len(others) == replicas - 1 and all((first == other).all() for other in others)
    for name, value in states[0].items():
        for other in states[1:]:
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def test_target_networks_follow_slowly_and_a_tau_of_1_copies(small):
    for tau in (0.25, 1.0):
        runtime, learning = make(small, 2, tau=tau)
        expected = initial()["two"].astype(np.float64)
        for step in range(2):
            train(runtime, learning, [step])
            expected = (1 - tau) * expected + tau * learning.vectors()["two"]
        np.testing.assert_allclose(learning.get_state()[TARGET + "two"], expected, rtol=1e-6)


def test_a_restored_state_continues_bit_for_bit(small):
    runtime, whole = make(small, 1)
    train(runtime, whole)
    runtime, begun = make(small, 2)
    train(runtime, begun, range(2))
    runtime, rest = make(small, 4)
    rest.set_state(begun.get_state())
    train(runtime, rest, range(2, STEPS))
    for name, value in whole.get_state().items():
        np.testing.assert_array_equal(rest.get_state()[name], value, err_msg=name)


def test_a_vector_that_no_step_learns_stays(small):
    runtime, learning = make(small, 1, optimizer=SGD())
    step = learning.steps["update"].description
    only = DataParallel(
        runtime, initial(), {"update": GradientStep(**{**vars(step), "learned": ("one",), "rates": (RATE,)})}
    )
    before = initial()
    train(runtime, only, [0])
    np.testing.assert_array_equal(only.vectors()["two"], before["two"])
    assert (only.vectors()["one"] != before["one"]).all()


def test_errors_are_kept_by_row(small):
    runtime, learning = make(small, 2, errors="rows")
    ((_, _, errors),) = train(runtime, learning, [3])
    np.testing.assert_array_equal(errors, np.abs(batch(3)[: ROWS // 2, 1]))
