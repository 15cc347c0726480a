"""Every augmentation against a slow one, image by image, with random numbers of an independent generator."""

import colorsys

import numpy as np
import pytest
import tensorflow as tf

from tfrl.ops.augment import AUGMENTATIONS
from tfrl.ops.graph import graph

SIDE, IMAGES = 64, 24
COMPILED = {name: graph(augment, jit_compile=True) for name, augment in AUGMENTATIONS.items()}


def slow_uniforms(seed, count):
    """Threefry-2x32 in Python's whole numbers, for one seed."""
    mask, keys = 2**32 - 1, [int(x) & (2**32 - 1) for x in seed]
    keys.append(keys[0] ^ keys[1] ^ 0x1BD11BDA)
    numbers = []
    for counter in range(count):
        a, b = counter + keys[0] & mask, keys[1]
        for turn in range(5):
            for bits in [(13, 15, 26, 6), (17, 29, 16, 24)][turn % 2]:
                a = a + b & mask
                b = ((b << bits | b >> 32 - bits) & mask) ^ a
            a, b = a + keys[(turn + 1) % 3] & mask, b + keys[(turn + 2) % 3] + turn + 1 & mask
        numbers.append((a >> 8) / 2**24)
    return numbers


def slow_crop(image, seed):
    height, width, _ = image.shape
    top, left = (int(u * (2 * (n * 12 // 64) + 1)) for u, n in zip(slow_uniforms(seed, 2), image.shape))  # noqa: B905
    pads = [(n * 12 // 64,) * 2 for n in (height, width)]
    return np.pad(image, (*pads, (0, 0)), mode="edge")[top : top + height, left : left + width]


def slow_grayscale(image, seed):
    grey = np.floor(image @ np.array([0.299, 0.587, 0.114]) + 0.5 + 1e-9)
    return np.repeat(grey[..., None], 3, axis=-1)


def slow_cutout(image, seed, color=0):
    height, width = (7 + int(15 * u) for u in slow_uniforms(seed, 2))
    result = image.copy()
    result[12 + height : 12 + 2 * height, 24 + width : 24 + 2 * width] = color
    return result


def slow_cutout_color(image, seed):
    return slow_cutout(image, seed, [int(256 * u) for u in slow_uniforms(seed, 5)[2:]])


def slow_flip(image, seed):
    return np.fliplr(image) if slow_uniforms(seed, 1)[0] < 0.5 else image


def slow_rotate(image, seed):
    return np.rot90(image, int(4 * slow_uniforms(seed, 1)[0]))


def slow_random_convolution(image, seed):
    height, width, channels = image.shape
    count = 9 * channels**2
    pairs = np.reshape(slow_uniforms(seed, 2 * count), (count, 2))
    weights = np.sqrt(-2 * np.log1p(-pairs[:, 0])) * np.cos(2 * np.pi * pairs[:, 1])
    weights = weights.reshape(3, 3, channels, channels)
    padded = np.zeros((height + 2, width + 2, channels))
    padded[1:-1, 1:-1] = image
    result = np.zeros(image.shape)
    for y in range(height):
        for x in range(width):
            result[y, x] = np.einsum("ijk,ijkl->l", padded[y : y + 3, x : x + 3], weights)
    return 255 * (result - result.min()) / (result.max() - result.min())


def slow_contrast(image, factor):
    means = image.reshape(-1, 3).mean(axis=0)
    return np.round(np.clip((image - means) * factor + means, 0, 255))


def slow_color_jitter(image, seed):
    brightness, saturation, contrast, turn, coin = slow_uniforms(seed, 5)
    brightness, saturation, contrast = (0.6 + 0.8 * u for u in (brightness, saturation, contrast))
    turn = (2 * turn - 1) * 0.5 * 255 / 360
    if coin < 0.5:
        image = slow_contrast(image, contrast)
    result = np.zeros(image.shape)
    for y, x in np.ndindex(image.shape[:2]):
        hue, chroma, value = colorsys.rgb_to_hsv(*image[y, x] / 255)
        chroma, value = min(chroma * saturation, 1.0), min(value * brightness, 1.0)
        result[y, x] = colorsys.hsv_to_rgb((hue + turn) % 1.0, chroma, value)
    result = np.round(255 * result)
    return result if coin < 0.5 else slow_contrast(result, contrast)


SLOW = {
    "crop": slow_crop,
    "random-conv": slow_random_convolution,
    "grayscale": slow_grayscale,
    "flip": slow_flip,
    "rotate": slow_rotate,
    "cutout": slow_cutout,
    "cutout-color": slow_cutout_color,
    "color-jitter": slow_color_jitter,
}
WITH_FRACTIONS = ("random-conv", "color-jitter")  # rounded to whole numbers in the end


@pytest.fixture(scope="module")
def images():
    """Blurred noise, as smooth as frames are, with flat parts, black, white and grey."""
    rng = np.random.default_rng(0)
    noise = rng.random((IMAGES, SIDE // 4, SIDE // 4, 3)).repeat(4, axis=1).repeat(4, axis=2)
    noise = np.uint8(256 * (0.9 * noise + 0.1 * rng.random((IMAGES, SIDE, SIDE, 3))))
    noise[:, :20, :12], noise[:, :8, 12:24], noise[:, 8:16, 12:24], noise[1] = 0, 255, 99, 7
    return noise


@pytest.fixture(scope="module")
def seeds():
    return np.random.default_rng(1).integers(-(2**31), 2**31, (IMAGES, 2)).astype(np.int32)


def test_every_augmentation_has_a_slow_reference():
    assert list(AUGMENTATIONS) == list(SLOW)


@pytest.mark.parametrize("name", SLOW)
def test_augmentations_equal_their_slow_references(name, images, seeds):
    found = COMPILED[name](images, seeds)
    assert found.dtype == tf.uint8
    rows = range(6) if name in WITH_FRACTIONS else range(IMAGES)
    for i in rows:
        if name == "random-conv" and i == 1:
            continue  # a flat image: below
        expected = SLOW[name](images[i], seeds[i])
        difference = np.abs(found[i].numpy().astype(float) - expected)
        if name in WITH_FRACTIONS:
            # Rounded in the end, and in the jitter's middle, whence a contrast of 1.4 makes 1 level of it 2.
            assert difference.max() <= 2.0
            assert np.mean(difference > 0.51) < 0.01
        else:
            assert difference.max() == 0.0


@pytest.mark.parametrize("name", SLOW)
def test_an_image_does_not_depend_on_the_others(name, images, seeds):
    """To the bit, in batches of any size and at any place, also where replicas compute them."""
    whole = COMPILED[name](images, seeds).numpy()
    for rows in (slice(0, 5), slice(8, 13)):
        np.testing.assert_array_equal(COMPILED[name](images[rows], seeds[rows]), whole[rows])
    back = slice(None, None, -1)
    np.testing.assert_array_equal(COMPILED[name](images[back], seeds[back]), whole[back])
    assert (whole != images).any()


@pytest.mark.parametrize("name", ["crop"])
def test_on_replicas_and_in_batches_of_unknown_size(name, images, seeds):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    half = IMAGES // 2

    @tf.function(
        input_signature=[tf.TensorSpec([None, SIDE, SIDE, 3], tf.uint8), tf.TensorSpec([None, 2], tf.int32)]
    )
    def on_replicas(images, seeds):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = replica * half + tf.range(half)
            return COMPILED[name](tf.gather(images, rows), tf.gather(seeds, rows))

        return strategy.experimental_local_results(strategy.run(on_replica))

    found = np.concatenate([x.numpy() for x in on_replicas(images, seeds)])
    np.testing.assert_array_equal(found, COMPILED[name](images, seeds))


def test_all_crops_flips_and_turns_occur(images):
    seeds = np.stack([np.arange(2000), np.zeros(2000)], axis=1).astype(np.int32)
    image = np.arange(SIDE * SIDE, dtype=np.int32).reshape(SIDE, SIDE, 1)
    places = np.concatenate([image % 256, image // 256], axis=-1).astype(
        np.uint8
    )  # tells each pixel's origin
    batch = np.broadcast_to(places, (2000, SIDE, SIDE, 2))
    middle = COMPILED["crop"](batch, seeds).numpy()[:, 32, 32].astype(int) @ [1, 256]
    rows, columns = middle // SIDE, middle % SIDE
    assert set(rows) == set(columns) == set(range(32 - 12, 32 + 13))
    assert len(set(zip(rows, columns, strict=True))) > 590  # of 625
    for name, kinds in (("flip", 2), ("rotate", 4)):
        corners = COMPILED[name](batch, seeds).numpy()[:, 0, 0].astype(int) @ [1, 256]
        numbers = np.unique(corners, return_counts=True)[1]
        assert len(numbers) == kinds
        assert (np.abs(numbers - 2000 / kinds) < 5 * np.sqrt(2000 / kinds)).all()


def test_a_flat_image_stays_finite(seeds):
    flat = np.full((IMAGES, SIDE, SIDE, 3), 7, np.uint8)
    assert COMPILED["random-conv"](flat, seeds).numpy().max() == 255  # its edges are not flat
    one = COMPILED["random-conv"](np.zeros((2, 8, 8, 3), np.uint8), seeds[:2])
    np.testing.assert_array_equal(one, np.zeros((2, 8, 8, 3)))


@pytest.mark.parametrize("name", ["crop", "flip", "cutout", "random-conv"])
def test_images_of_other_shapes_are_augmented(name, seeds):
    """Catch's boards are 10 x 5 with one channel."""
    boards = np.random.default_rng(2).integers(0, 256, (IMAGES, 10, 5, 1)).astype(np.uint8)
    found = COMPILED[name](boards, seeds).numpy()
    if name != "cutout":  # whose boxes have other sizes there
        for i in range(IMAGES):
            assert np.abs(found[i] - SLOW[name](boards[i], seeds[i])).max() <= (name == "random-conv")
    else:
        assert ((found == boards) | (found == 0)).all()
        assert (found != boards).any()
