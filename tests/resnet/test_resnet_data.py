"""Data sets by name, and which images a replica sees when."""

import dataclasses
import itertools
import socket
import time
import types
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from resnet import data
from resnet.data import Pass, Share, Split
from resnet.procgen_frames import LEVELS, FramesConfig, ProcgenFrames
from tfrl.cli.errors import UserError

TINY = {"games": ("coinrun", "maze"), "train": 40, "test": 20}


def make(folder, **settings):
    """A small procgen_frames as arrays: {split: {feature: array}}."""
    config = FramesConfig(name="tiny", **{**TINY, **settings})
    builder = ProcgenFrames(config=config, data_dir=folder)
    builder.download_and_prepare()
    sets = {s: list(tfds.as_numpy(builder.as_dataset(split=s))) for s in ("train", "test")}
    return {s: {k: np.stack([e[k] for e in examples]) for k in examples[0]} for s, examples in sets.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tfds"))


def test_the_sets_have_the_promised_images(made):
    for split in ("train", "test"):
        count = TINY[split]
        assert made[split]["image"].shape == (count, 64, 64, 3)
        assert made[split]["image"].dtype == np.uint8
        assert len({image.tobytes() for image in made[split]["image"]}) > 0.9 * count


def test_each_game_has_the_same_share_of_the_images(made):
    for split in ("train", "test"):
        classes, counts = np.unique(made[split]["label"], return_counts=True)
        assert classes.tolist() == [0, 1] and counts.tolist() == [TINY[split] // 2] * 2


def test_training_and_test_levels_are_disjoint(made):
    assert made["train"]["level"].min() >= 0
    assert made["train"]["level"].max() < LEVELS
    assert made["test"]["level"].min() >= LEVELS
    assert made["test"]["level"].max() < 2 * LEVELS
    assert len(set(made["train"]["level"])) > 10


def test_the_seed_decides_everything(made, tmp_path):
    again = make(tmp_path / "again")
    for split in ("train", "test"):
        for feature in ("image", "label", "level"):
            assert np.array_equal(made[split][feature], again[split][feature])
    other = make(tmp_path / "other", seed=2)
    assert not np.array_equal(made["train"]["image"], other["train"]["image"])


def numbered(count, size=8):
    """A split whose image i is filled with i."""
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, size, size, 3), np.uint8)
    return Split(images, np.arange(count, dtype=np.int32))


@pytest.mark.parametrize("workers,replicas", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("count", [3, 16, 21])
def test_every_topology_sees_each_image_once_and_in_the_same_batches(workers, replicas, count):
    split, order = numbered(count), data.training_pass("none", 1, 0, count).order
    shares = [Share(8, w, workers, replicas).batches(split, [Pass(order)]) for w in range(workers)]
    seen = []
    for parts in zip(*shares, strict=True):
        labels = np.concatenate([p.labels.ravel() for p in parts])
        weights = np.concatenate([p.weights.ravel() for p in parts])
        assert all(p.images.shape == (replicas, 8 // workers // replicas, 8, 8, 3) for p in parts)
        assert all((p.images[..., 0, 0, 0] == p.labels).all() for p in parts)
        assert {p.count for p in parts} == {int(weights.sum())}
        seen.append(labels[weights > 0])
    assert np.array_equal(np.concatenate(seen), order)


def test_a_resumed_epoch_goes_on_with_the_same_batches():
    split, order = numbered(21), data.training_pass("none", 1, 3, 21).order
    whole = list(Share(8).batches(split, [Pass(order)]))
    rest = list(Share(8).batches(split, [Pass(order)], 1))
    assert len(rest) == len(whole) - 1
    assert all(np.array_equal(a.labels, b.labels) for a, b in zip(whole[1:], rest, strict=True))


def test_the_order_follows_from_seed_and_epoch():
    orders = [data.training_pass("none", seed, epoch, 50).order for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert np.array_equal(orders[0], data.training_pass("none", 1, 0, 50).order)


def test_a_crop_is_a_window_of_the_padded_image():
    images = np.random.default_rng(0).integers(1, 255, (3, 8, 8, 3), dtype=np.uint8)
    same, corner, shifted = data.augmented(images, np.array([[4, 4], [0, 0], [6, 3]]), None).numpy()
    assert np.array_equal(same, images[0])
    assert np.array_equal(corner[4:, 4:], images[1, :4, :4])
    assert not corner[:4].any()
    assert np.array_equal(shifted[:6, 1:], images[2, 2:, :7])


def test_augmentation_belongs_to_the_image_not_to_its_place():
    split = Split(np.random.default_rng(0).integers(0, 255, (8, 8, 8, 3), dtype=np.uint8), np.arange(8))
    one = data.training_pass("crop-flip", 1, 0, 8)
    other = dataclasses.replace(one, order=one.order[::-1])
    there, back = (next(Share(8).batches(split, [each])).images[0] for each in (one, other))
    assert np.array_equal(there, back[::-1])
    assert not np.array_equal(there, split.images[one.order])


def test_kinds_of_augmentation():
    plain = data.training_pass("none", 1, 0, 4)
    assert plain.shifts is None and plain.flips is None
    crop = data.training_pass("crop", 1, 0, 1000)
    assert crop.flips is None
    assert (crop.shifts.min(), crop.shifts.max()) == (0, 2 * data.MARGIN)
    assert 400 < data.training_pass("crop-flip", 1, 0, 1000).flips.sum() < 600


def test_a_flip_mirrors_what_was_cropped():
    images = np.random.default_rng(0).integers(1, 255, (2, 8, 6, 3), dtype=np.uint8)
    shifts = np.array([[4, 4], [6, 3]])
    plain = data.augmented(images, shifts, None).numpy()
    flipped = data.augmented(images, shifts, np.array([False, True])).numpy()
    assert np.array_equal(flipped[0], plain[0])
    assert np.array_equal(flipped[1], plain[1, :, ::-1])


def test_epochs_are_trained_in_order():
    """Entered in the middle of the second, as after a resume."""
    split = numbered(21)
    passes = [data.training_pass("none", 1, epoch, 21) for epoch in (1, 2)]
    seen = [b.labels[b.weights > 0] for b in itertools.islice(Share(8).batches(split, passes, 1), 5)]
    assert np.array_equal(np.concatenate(seen), np.concatenate([passes[0].order[8:], passes[1].order]))


def test_an_error_while_batches_are_made_is_raised():
    def passes():
        yield Pass(np.arange(8))
        raise OSError("lost")

    with pytest.raises(Exception, match="lost"):
        list(Share(8).batches(numbered(8), passes()))


@pytest.mark.parametrize("name,shape,classes", [("cifar10", (32, 32, 3), 10), ("dmlab", (64, 64, 3), 6)])
def test_other_sets_load_by_name(name, shape, classes):
    with tfds.testing.mock_data(num_examples=5):
        found = data.load(name, 0 if name == "cifar10" else 64)
    assert found.image_shape == shape
    assert len(found.classes) == classes
    assert (len(found.train), len(found.test)) == (5, 5)
    assert found.train.labels.max() < classes


def test_images_of_different_sizes_need_a_size():
    with tfds.testing.mock_data(num_examples=3), pytest.raises(UserError, match="--image-size"):
        data.load("oxford_iiit_pet")


def test_a_set_without_labels_is_refused():
    with pytest.raises(UserError, match="classification"):
        data.prepare("celeb_a")


def test_preparing_a_data_set_is_reported(monkeypatch, tmp_path):
    config = FramesConfig(name="tiny", **TINY)
    monkeypatch.setattr(data, "_builder", lambda name: ProcgenFrames(config=config, data_dir=tmp_path))
    said = []
    for _ in range(2):
        data.prepare("procgen_frames/tiny", said.append)
    assert len(said) == 1 and said[0].startswith(f"Preparing procgen_frames/tiny in {tmp_path}/")


def test_workers_with_different_images_do_not_train_together(monkeypatch, tmp_path):
    """The other worker's data set has as many images, or fewer."""
    folders, numbers = {}, []
    for count in (40, 20):
        config = FramesConfig(name=f"tiny{count}", **{**TINY, "train": count})
        folders[count] = ProcgenFrames(config=config, data_dir=tmp_path)

    def load(count, others):
        monkeypatch.setattr(data, "_builder", lambda name: folders[count])

        def gather(mine):
            numbers.append(mine)
            return np.concatenate([mine, *others])

        runtime = SimpleNamespace(is_chief=True, all_agree=lambda ok: ok, gather_envs=gather)
        return data.load_on_all("procgen_frames/tiny", 0, runtime, print)

    load(20, [])
    with pytest.raises(UserError, match="workers have different images of procgen_frames/tiny"):
        load(40, numbers[:1])
    assert len(load(40, numbers[1:]).train) == 40


@pytest.fixture
def silent_proxy(monkeypatch):
    """A network that swallows everything: its proxy takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield


def test_a_silent_network_is_reported_in_seconds(silent_proxy, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path), raising=True)
    began = time.monotonic()
    with pytest.raises(
        UserError, match="cifar10 is not in .*toronto.edu cannot be reached.*procgen_frames"
    ) as error:
        data.prepare("cifar10")
    assert time.monotonic() - began < 10
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", ["titanic", "imagenet2012_real", "speech_commands"])
def test_a_set_without_one_class_for_each_image_is_refused_before_its_download(name):
    with pytest.raises(UserError, match="has no images with a class each"):
        data.prepare(name)


@pytest.mark.parametrize("size", [0, 8])
def test_images_of_other_types_than_bytes_are_refused_at_any_size(size):
    with tfds.testing.mock_data(num_examples=2), pytest.raises(UserError, match="only images with 8 bits"):
        data.load("eurosat/all", size)


@pytest.fixture
def splits(monkeypatch):
    """Loads a made-up set of two classes, with these labels of its splits."""

    def load(**labels):
        keys, features = ("image", "label"), {"label": types.SimpleNamespace(names=["one", "two"])}
        info = types.SimpleNamespace(splits=labels, supervised_keys=keys, features=features)
        monkeypatch.setattr(data, "_builder", lambda name: types.SimpleNamespace(info=info))
        read = lambda builder, part, *_, **held: data.Split(np.zeros((1, 2, 2, 3), np.uint8), labels[part])  # noqa: E731
        monkeypatch.setattr(data, "_read", read)
        return data.load("made-up")

    return load


def test_a_split_without_labels_does_not_count(splits):
    known, none = np.array([1]), np.array([-1])
    assert splits(train=known, test=none, validation=known).test.labels == known
    with pytest.raises(UserError, match="the split test of the data set made-up has images without a label"):
        splits(train=known, test=none)
    with pytest.raises(UserError, match="has no split train, only test"):
        splits(test=known)


def test_no_thread_of_tf_data_holds_up_the_end_of_batches_that_nobody_reads_any_more(monkeypatch):
    """With the thread that tunes the number of threads, the end took 20 to 60 s in three of eight cases."""
    tuned, read = [], tf.data.Dataset.as_numpy_iterator

    def noted(dataset):
        tuned.append(dataset.options().autotune.enabled)
        return read(dataset)

    monkeypatch.setattr(tf.data.Dataset, "as_numpy_iterator", noted)
    split = Split(np.zeros((20, 8, 8, 3), np.uint8), np.zeros(20, np.int32))
    assert len(list(Share(10).batches(split, [Pass(np.arange(20))]))) == 2
    assert tuned == [False]
