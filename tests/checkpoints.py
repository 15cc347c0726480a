"""Checkpoints with made-up arrays, for the tests of the store."""

import numpy as np

from tfrl.run.checkpoint import State


def learner_arrays(update):
    rng = np.random.default_rng(update)
    return {
        "actor/torso/kernel": rng.standard_normal((64, 32)).astype(np.float32),
        "file": np.float64(np.pi * update),  # the names np.savez itself could not take
        "self": np.array([np.nan, -0.0, np.inf], np.float32),
        "fortran": np.asfortranarray(rng.standard_normal((3, 5))),
        "empty": np.zeros((0, 4), np.int64),
        "names": np.array(["coinrun", "bigfish"]),
        "first": rng.random(7) < 0.5,
    }


def part_arrays(update, worker):
    return {"observation": np.random.default_rng([update, worker]).integers(0, 256, (4, 8, 8, 3), np.uint8)}


def save(store, update, worker=0):
    state = State(learner_arrays(update), [part_arrays(update, worker)])
    store.save(update, state, env_steps=1000 * update)


def assert_same_arrays(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        expected_array = np.asarray(array)
        assert actual[name].dtype == expected_array.dtype and actual[name].shape == expected_array.shape
        assert actual[name].tobytes() == expected_array.tobytes(), name


def assert_checkpoint(checkpoint, update, num_workers=1):
    assert (checkpoint.update, checkpoint.env_steps) == (update, 1000 * update)
    assert_same_arrays(checkpoint.learner, learner_arrays(update))
    assert len(checkpoint.parts) == num_workers
    for worker, part in enumerate(checkpoint.parts):
        assert_same_arrays(part, part_arrays(update, worker))


def fail_on_skip(sentence):
    raise AssertionError(sentence)


def folder_names(directory):
    return sorted(path.name for path in directory.iterdir())
