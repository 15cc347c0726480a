"""Threefry against its authors' test vectors, a slow version, and what random numbers must be."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops import augment

# Key, counter and result, from the known-answer tests of Random123 (Salmon et al. 2011).
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


def random_seeds(rows, seed=0):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, 2)).astype(np.int32)


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_threefry_gives_the_published_answers(key, counter, expected, xla):
    key, counter = (tuple(tf.constant(v, tf.uint32) for v in pair) for pair in (key, counter))
    cipher = tf.function(augment.threefry_2x32, jit_compile=True) if xla else augment.threefry_2x32
    assert tuple(int(x) for x in cipher(key, counter)) == expected


def test_uniforms_are_uniform_and_independent():
    numbers = augment.uniforms(random_seeds(4000), 25).numpy().astype(np.float64)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert 50 < chi_squared < 160  # 99 degrees of freedom: mean 99, standard deviation 14
    correlations = np.corrcoef(numbers.T) - np.eye(25)
    assert np.abs(correlations).max() < 6 / np.sqrt(4000)
    assert len(np.unique(numbers)) > 0.99 * numbers.size


def test_neighbouring_seeds_give_independent_numbers():
    i = np.arange(2000, dtype=np.int32)
    for seeds in (np.stack([i, 0 * i], 1), np.stack([0 * i, i], 1), np.stack([i, i], 1)):
        numbers = augment.uniforms(seeds, 2).numpy()
        assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.1
        assert abs(numbers.mean() - 0.5) < 0.03


@pytest.mark.parametrize("draw", [augment.uniforms, augment.normals])
@pytest.mark.parametrize("xla", [False, True])
def test_a_row_does_not_depend_on_the_others_nor_on_the_count(draw, xla):
    seeds = random_seeds(37)
    compiled = tf.function(draw, jit_compile=True) if xla else draw
    whole = compiled(seeds, 27).numpy()
    for rows in (slice(0, 1), slice(36, 37)):
        np.testing.assert_array_equal(compiled(seeds[rows], 27), whole[rows])
    np.testing.assert_array_equal(compiled(seeds, 5), whole[:, :5])


def test_normals_are_normal():
    numbers = augment.normals(random_seeds(4000, seed=1), 25).numpy().astype(np.float64)
    moments = [np.mean(numbers**k) for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.06)
    share = np.mean(np.abs(numbers) < 1)
    np.testing.assert_allclose(share, 0.6827, atol=0.006)
    assert np.isfinite(numbers).all()
