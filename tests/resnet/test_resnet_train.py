"""Supervised training: the same on any topology, exact resume, exports, and torsos for PPO."""

import csv
import dataclasses
import io
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from learners import build_actor_critic, initial_arrays
from refusals import refusal

import resnet
from resnet import evaluate, learner
from resnet.config import Config, from_yaml, parse
from resnet.data import Dataset, Pass, Share, Split, training_pass
from resnet.learner import Classifier, ImageLearner
from tfrl.algorithms.registry import reader
from tfrl.cli.endings import StopRequest
from tfrl.cli.errors import TrainingError, UserError
from tfrl.cli.settings import to_yaml
from tfrl.envs.spec import ArraySpec, Discrete
from tfrl.networks import weights
from tfrl.networks.entrance import variable_name
from tfrl.run import loop
from tfrl.run.console import Console
from tfrl.run.folder import check_run, weights_sha256
from tfrl.run.session import Session
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog

SMALL = Config(model="cookbook", precision="float32", batch_size=16, lr=0.02, warmup=0)
RESIDUAL = {"model": "resnet-mini", "normalization": "group"}  # takes long to trace
SIZE, CLASSES = 12, 3


def made_up(count, seed=0):
    """Images whose class is their brightest channel."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count).astype(np.int32)
    images = random.integers(0, 100, (count, SIZE, SIZE, 3), dtype=np.uint8)
    images[np.arange(count), :, :, labels] += 60
    return Split(images, labels)


DATA = Dataset(made_up(72), made_up(21, seed=1), ("red", "green", "blue"))


def make_learner(replicas=1, **changes):
    config = dataclasses.replace(SMALL, replicas=replicas, **changes)
    runtime = strategy.make(config, None)
    return Classifier(config, runtime, image_shape=DATA.image_shape, classes=CLASSES)


def steps(made, count, replicas=1, size=16):
    """Trains; the sums of each step."""
    share, done = Share(size, replicas=replicas), []
    for epoch in range(count):
        for batch in share.batches(DATA.train, [training_pass("none", 1, epoch, len(DATA.train))]):
            done.append(made.step(batch, 0.05).numpy())
            if len(done) == count:
                return done
    raise AssertionError


class StopAt(StopRequest):
    """Is told to stop by a given look, or never, and listens to no signals."""

    def __init__(self, folder, at=None, exit_code=130):
        super().__init__(folder / "stop")
        self._at, self._looks, self._code = at, 0, exit_code

    def votes(self):
        self._looks += 1
        if self._looks == self._at and self._code:
            self.exit_code = self._code
        elif self._looks == self._at:
            self._stop_file.touch()
        return super().votes()


def run(folder, name, *, stop_at=None, exit_code=130, console=None, **changes):
    """Trains on DATA to the end or to a stop; the exit code and results.json."""
    changes = {"checkpoint_every": 3, "epochs": 2, "log_every": 2} | changes
    config = dataclasses.replace(SMALL, logdir=str(folder), run_name=name, **changes)
    runtime = strategy.make(config, None)
    watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
    console = console or Console(enabled=False)
    parts = (config, runtime, console, StopAt(folder, stop_at, exit_code), watchdog)
    session = Session(*parts)
    code = loop.TrainingRun(config, session, ImageLearner(config, session, DATA), followed=False).run()
    path = config.run_dir / "results.json"
    return code, json.loads(path.read_text()) if path.exists() else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def finished(folder):
    """A finished run's folder and results."""
    code, results = run(folder, "whole")
    assert code == 0
    return folder / "whole", results


# Gradient steps


def test_one_and_two_replicas_take_the_same_steps():
    made = {replicas: make_learner(replicas, **RESIDUAL) for replicas in (1, 2)}
    for replicas, one in made.items():
        steps(one, 8, replicas)  # the fifth batch of an epoch is half empty
    ours, theirs = (m.weights() for m in made.values())
    assert weights_sha256(ours) == weights_sha256(theirs)


def test_a_step_is_that_of_keras_on_the_whole_batch():
    """Without our parts, sums and masks: the mean loss of the batch's real images plus the penalty."""
    import keras
    import tensorflow as tf

    made = make_learner(**RESIDUAL)
    config = dataclasses.replace(SMALL, **RESIDUAL)
    reference = learner.build(config, "float32", image_shape=DATA.image_shape, classes=CLASSES)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    batches = Share(16).batches(DATA.train, [Pass(np.arange(24))])
    for batch in batches:
        real = slice(batch.count)
        images, labels = batch.images[0][real], batch.labels[0][real]
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(labels, reference(images, training=True))
            total = tf.reduce_mean(loss) + tf.add_n(reference.losses)
        gradients = tape.gradient(total, [v.value for v in reference.trainable_variables])
        optimizer.apply(gradients, reference.trainable_variables)
        sums = made.step(batch, 0.05).numpy()
        assert sums[0] == pytest.approx(float(tf.reduce_mean(loss)), rel=1e-5)
    for variable in reference.variables:
        ours = made.weights()[variable_name(variable)]
        assert ours == pytest.approx(variable.numpy(), rel=1e-4, abs=1e-6), variable.path


def test_batch_normalization_keeps_the_same_statistics_on_all_replicas():
    made = make_learner(2, model="resnet-mini")
    steps(made, 2, replicas=2)
    moving = [array for name, array in made.weights().items() if "moving" in name]
    assert len(moving) == 2 * 7
    one, other = (part.numpy() for part in made._learning.variables["statistics"].values)
    assert np.array_equal(one, other)
    assert any(np.abs(array).max() > 1e-3 for array in moving)
    state = made.get_state()
    losses = [sums[0] for sums in steps(made, 3, replicas=2)]
    made.set_state(state)
    assert [sums[0] for sums in steps(made, 3, replicas=2)] == losses


def test_hits_and_loss_are_summed_over_replicas():
    made = make_learner(2)
    batch = next(Share(16, replicas=2).batches(DATA.train, [Pass(np.arange(72))]))
    sums = made.step(batch, 0.0, np.array([0, 1, 0], np.float32)).numpy()
    assert sums[2:5].tolist() == [0, 1, 0]
    images = batch.images.reshape(16, *DATA.image_shape)  # of both replicas
    right = made.model(images).numpy().argmax(1) == batch.labels.reshape(16)
    assert sums[1] == right.mean() and sums[0] == pytest.approx(np.log(CLASSES), rel=0.5)


@pytest.mark.parametrize(("replicas", "size"), [(1, 4), (2, 16), (2, 64)])
def test_every_test_image_counts_once(replicas, size):
    made = make_learner(replicas)
    order = np.arange(len(DATA.test))
    loss, hits = made.test(Share(size, replicas=replicas).batches(DATA.test, [Pass(order)]))
    probabilities = made.model(DATA.test.images).numpy()
    right = probabilities[order, DATA.test.labels]
    assert hits == (probabilities.argmax(1) == DATA.test.labels).sum()
    assert loss == pytest.approx(-np.log(right).mean(), rel=1e-5)


# Runs


def test_a_run_learns_and_leaves_its_folder(finished):
    path, results = finished
    assert results["test"]["accuracy"] > 0.6
    assert results["test"]["images"] == len(DATA.test)
    assert (results["steps"], results["images"], results["epochs"]) == (10, 144, 2.0)
    rows = (path / "progress.csv").read_text().splitlines()
    assert rows[0].startswith("images,epoch,train/loss")
    assert [int(row.split(",")[0]) for row in rows[1:]] == [32, 48, 64, 72, 88, 120, 136, 144]
    assert from_yaml(path / "config.yaml").model == "cookbook"
    assert list(path.glob("events.out.tfevents*"))


@pytest.mark.parametrize(
    "stop_at,exit_code",
    [(5, 143), *(pytest.param(*more, marks=pytest.mark.long) for more in ((2, 0), (6, 143), (7, 130)))],
)
def test_a_stopped_run_goes_on_exactly(folder, finished, stop_at, exit_code):
    name = f"stopped-{stop_at}"
    assert run(folder, name, stop_at=stop_at, exit_code=exit_code) == (exit_code, None)
    code, results = run(folder, name)
    assert code == 0
    assert results["weights_sha256"] == finished[1]["weights_sha256"]
    assert results["test"] == finished[1]["test"]
    assert len(results["resumed_at"]) == 1
    rows = [line.split(",")[0] for line in (folder / name / "progress.csv").read_text().splitlines()]
    assert rows == [line.split(",")[0] for line in (finished[0] / "progress.csv").read_text().splitlines()]


def test_the_speed_counts_no_images_that_fill_up_the_last_batch(folder, monkeypatch):
    ticks = itertools.count()  # two in each step
    monkeypatch.setattr(learner, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    run(folder, "ticks", epochs=1)
    rows = list(csv.DictReader((folder / "ticks" / "progress.csv").read_text().splitlines()))
    assert [row["images"] for row in rows] == ["32", "48", "64", "72"]
    assert [float(row["time/images_per_second"]) for row in rows] == [8, 8, 8, 4]


def test_a_complete_run_does_nothing(finished):
    path, results = finished
    before = (path / "progress.csv").read_bytes()
    assert run(path.parent, path.name) == (0, results)
    assert (path / "progress.csv").read_bytes() == before


def test_a_run_without_its_checkpoints_is_left_alone(finished, tmp_path):
    path, _ = finished
    shutil.copytree(path, tmp_path / path.name, ignore=shutil.ignore_patterns("checkpoints", "results.json"))
    config = dataclasses.replace(from_yaml(path / "config.yaml"), logdir=str(tmp_path))
    with pytest.raises(UserError, match="without checkpoints.* with export, 144 steps in its progress"):
        check_run(config, from_yaml)


def test_a_nan_ends_the_run_with_a_sentence(folder):
    with pytest.raises(TrainingError, match="not a finite number.*--lr"):
        run(folder, "nan", lr=1e30)


# Exports


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        ("keras", 2),
        ("saved_model", 0),
        *(pytest.param(*more, marks=pytest.mark.long) for more in (("keras", 0), ("saved_model", 2))),
    ],
)
def test_the_export_scores_the_same_with_and_without_a_strategy(finished, kind, replicas):
    import keras
    import tensorflow as tf

    path, results = finished
    devices = [f"/cpu:{index}" for index in range(replicas)]
    place = tf.distribute.MirroredStrategy(devices) if replicas else tf.distribute.get_strategy()
    with place.scope():
        if kind == "keras":
            model = keras.models.load_model(path / "export" / "model.keras")
        else:
            saved = tf.saved_model.load(str(path / "export" / "saved_model"))
            model = saved.serve
    found = place.run(tf.function(model), args=(tf.constant(DATA.test.images),))
    for probabilities in place.experimental_local_results(found):
        assert np.sum(np.argmax(probabilities, axis=1) == DATA.test.labels) == results["test"]["hits"]
        of_label = probabilities.numpy()[np.arange(21), DATA.test.labels]
        assert -np.log(of_label).mean() == pytest.approx(results["test"]["loss"], rel=1e-5)


# Into the agents


def test_a_run_is_tested_by_its_newest_checkpoint_before_it_ends(finished, tmp_path, monkeypatch, capsys):
    path, results = finished
    monkeypatch.setattr("resnet.data.prepare", lambda *_: None)
    monkeypatch.setattr("resnet.data.load", lambda name, size: DATA)
    unfinished = tmp_path / "run"
    shutil.copytree(path, unfinished, ignore=shutil.ignore_patterns("export", "results.json"))
    assert evaluate.main([str(unfinished)]) == 0
    hits = f"({results['test']['hits']} of {results['test']['images']} test images)"
    assert hits in capsys.readouterr().out
    settings = (path / "config.yaml").read_text()
    (unfinished / "config.yaml").write_text(settings.replace("model: cookbook", "model: linear"))
    assert "has a checkpoint of other settings" in refusal(evaluate.main, [str(unfinished)])
    shutil.rmtree(unfinished / "checkpoints")
    assert "no checkpoint, and no export" in refusal(evaluate.main, [str(unfinished)])


def test_images_are_standardised_as_tensorflow_does_it():
    images = np.stack([np.full((6, 5, 3), 7, np.uint8), *made_up(3).images[:, :6, :5]])
    plain = resnet.build("linear", (6, 5, 3), standardize=True)
    wanted = tf.image.per_image_standardization(images)
    np.testing.assert_allclose(plain(images), tf.reshape(wanted, (4, -1)), atol=1e-4)


def test_a_run_on_standardised_images_gives_no_torso(folder):
    code, _ = run(folder, "standardised", per_image_standardization=True)
    settings = reader("ppo").parse(
        ["--env", "coinrun", "--torso", "cookbook", "--torso-weights", str(folder / "standardised")]
    )
    with pytest.raises(UserError, match="was trained on standardised images"):
        weights.check_torso(settings)
    assert code == 0


def agent(torso="cookbook", share=True, torso_options=None):
    return build_actor_critic(
        torso=torso,
        torso_options=torso_options or {},
        observation_spec=ArraySpec((SIZE, SIZE, 3), "uint8"),
        action_spec=Discrete(4),
        share_torso=share,
        precision="float32",
        seed=1,
    )


@pytest.mark.parametrize("share", [True, False])
def test_actor_and_critic_start_from_a_trained_torso(finished, share):
    network = agent(share=share)
    vectors = weights.torso_vectors(network, str(finished[0]))
    assert set(vectors) == ({"torso"} if share else {"actor_torso", "critic_torso"})
    with np.load(finished[0] / "export" / "weights.npz") as trained:
        for torso, vector in vectors.items():
            for name, array in network.functions[torso].split(vector).items():
                assert np.array_equal(array, trained[f"torso/{name}"])


def test_weights_of_another_network_are_refused(folder, finished, tmp_path):
    with pytest.raises(UserError, match="another network"):
        weights.torso_vectors(agent("impala"), str(finished[0]))
    with pytest.raises(UserError, match="no finished run"):
        weights.read_torso(str(tmp_path))
    export = tmp_path / "batch" / "export"
    export.mkdir(parents=True)
    np.savez(export / "weights.npz", **{"torso/stem_norm/moving_mean": np.zeros(3)})
    with pytest.raises(UserError, match="batch normalization.*--normalization group"):
        weights.read_torso(str(tmp_path / "batch"))


def test_the_network_is_as_wide_as_asked_for():
    wide = dataclasses.replace(SMALL, model="impala", width=2)
    model = learner.build(wide, "float32", image_shape=DATA.image_shape, classes=CLASSES)
    assert model.get_layer("stage1_conv").kernel.shape == (3, 3, 3, 32)


def test_weights_of_another_width_are_refused_before_tensorflow_and_by_their_shapes(tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    wide = initial_arrays(agent("impala", torso_options={"width": 2}))
    np.savez(export / "weights.npz", **{k: v for k, v in wide.items() if k.startswith("torso/")})
    with pytest.raises(UserError, match=r"kernel has shape \(3, 3, 3, 32\).*--torso-width"):
        weights.torso_vectors(agent("impala"), str(tmp_path))
    flags = ["--torso-weights", str(tmp_path)]
    settings = reader("ppo_procgen").parse(flags)
    weights.check_torso(settings)  # there is nothing but the weights
    (tmp_path / "config.yaml").write_text(to_yaml(parse(["--model", "impala", "--width", "2"])))
    with pytest.raises(UserError, match=r"give --torso impala --torso-width 2, .* of impala and 1\.$"):
        weights.check_torso(settings)
    flags = [*flags, "--torso-width", "2"]
    weights.check_torso(reader("ppo_procgen").parse(flags))
    with pytest.raises(UserError, match="leave --critic-torso nature out"):
        weights.check_torso(reader("ppo_procgen").parse([*flags, "--critic-torso", "nature"]))
    plain = ["--model", "resnet-mini", "--normalization", "none"]
    (tmp_path / "config.yaml").write_text(to_yaml(parse(plain)))
    with pytest.raises(UserError, match="was trained with --normalization none, but agents have group"):
        weights.check_torso(reader("ppo_procgen").parse([*flags[:2], "--torso", "resnet-mini"]))


def test_the_time_left_is_shown_before_the_first_metrics(folder):
    shown = io.StringIO()
    console = Console(stream=shown, interval=0.002)
    assert run(folder, "told", epochs=1, batch_size=2, log_every=100, console=console)[0] == 0
    line = r"\| ([\d,]+) / 72 images \| ETA (.*?) \| training"  # without metrics
    before = [int(images) for images, left in re.findall(line, shown.getvalue()) if left != "--"]
    assert before == sorted(before) and 4 <= before[0] < 36
