"""The supervised trainer as an algorithm: tfrl.train, callbacks of tfrl and Keras, and where a run starts."""

import csv
import dataclasses
import json
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from refusals import refusal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resnet_train import CLASSES, DATA, SIZE, SMALL, StopAt, make_learner

import tfrl
from resnet import evaluate, train
from resnet.callbacks import KerasCallback
from resnet.config import parse
from resnet.data import Dataset, Pass, Share, prepare
from resnet.learner import ImageLearner, assign, build
from tfrl import report, tune
from tfrl.run import loop
from tfrl.run.console import Console
from tfrl.run.session import Session
from tfrl.workers import strategy
from tfrl.workers.watchdog import Watchdog

SETTINGS = {
    "model": "cookbook",
    "dataset": "procgen_frames/games-mini",
    "precision": "float32",
    "batch_size": 16,
    "lr": 0.02,
    "warmup": 0,
    "epochs": 2,
    "log_every": 2,
    "checkpoint_every": 3,
}


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """All commands of this file load DATA under any name."""
    monkeypatch.setattr("resnet.data.load_on_all", lambda *_: DATA)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def trained(logs):
    """A finished run, made by the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("resnet.data.load_on_all", lambda *_: DATA)
        return tfrl.train("resnet", logdir=str(logs), run_name="library", **SETTINGS)


def flags_of(settings):
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def rows_of(folder):
    return list(csv.DictReader((folder / "progress.csv").read_text().splitlines()))


def run(folder, name, *callbacks, stop_at=None, **changes):
    """Trains on DATA with callbacks to the end or to a stop; the exit code and results.json."""
    changes = {"checkpoint_every": 3, "epochs": 3, "log_every": 2, "schedule": "constant"} | changes
    config = dataclasses.replace(SMALL, logdir=str(folder), run_name=name, **changes)
    watchdog = Watchdog(config.run_dir / "heartbeats", ("here",), 0, stall_timeout=0.0)
    stop = StopAt(folder, stop_at)
    session = Session(config, strategy.make(config, None), Console(enabled=False), stop, watchdog)
    made = [train.main.as_callback(callback) for callback in callbacks]
    code = loop.TrainingRun(config, session, ImageLearner(config, session, DATA), made, followed=False).run()
    path = config.run_dir / "results.json"
    return code, json.loads(path.read_text()) if path.exists() else None


# One of the algorithms


def test_the_library_trains_what_the_command_trains(trained, logs):
    assert train.main([*flags_of(SETTINGS), "--logdir", str(logs), "--run-name", "command"]) == 0
    found = json.loads((logs / "command" / "results.json").read_text())
    assert found["algorithm"] == "resnet"
    assert trained.results["weights_sha256"] == found["weights_sha256"]
    assert trained.results["test"] == found["test"] and found["test"]["accuracy"] > 0.6
    assert trained.progress["images"][-1] == 144 and np.isfinite(trained.progress["train/loss"]).all()


@pytest.mark.long
def test_a_loop_of_ones_own_takes_the_same_steps(trained, logs):
    rows = 0
    with tfrl.trainer("resnet", logdir=str(logs), run_name="own-loop", **SETTINGS) as trainer:
        while not trainer.done:
            rows += "train/loss" in trainer.update()
    assert rows == len(trained.progress["images"]) and trainer.env_steps == 144
    assert trainer.run.results["weights_sha256"] == trained.results["weights_sha256"]


def test_wrong_settings_of_the_library_are_refused_in_its_words(logs):
    with pytest.raises(tfrl.SettingsError, match=r"resnet.train has no setting epoch \(did you mean epochs"):
        tfrl.train("resnet", logdir=str(logs), epoch=3)
    with pytest.raises(tfrl.SettingsError, match="no data set 'cifar11'"):
        tfrl.train("resnet", logdir=str(logs), dataset="cifar11")
    with pytest.raises(tfrl.SettingsError, match="resnet.train has no setting env"):
        tfrl.train("resnet", env="CartPole-v1", logdir=str(logs))


# Callbacks


class Counting(tfrl.Callback):
    """Adds a column, and stops the run after the first test."""

    def on_update(self, run, metrics):
        metrics["mine/updates"] = run.updates

    def on_evaluation(self, run, evaluation):
        assert 0 <= evaluation["test/accuracy"] <= 1
        run.stop("one test is enough")


class Noting(keras.callbacks.Callback):
    """Notes its calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append(["train begins", self.params["epochs"], self.params["steps"]])

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(["begins", epoch])

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(["batch", batch, *logs])

    def on_epoch_end(self, epoch, logs=None):
        images = DATA.test.images
        hits = int((self.model(images).numpy().argmax(1) == DATA.test.labels).sum())
        self.calls.append(["ends", epoch, *logs, hits == round(logs["val_accuracy"] * len(images))])

    def on_train_end(self, logs=None):
        self.calls.append(["train ends"])


def test_callbacks_by_name_add_columns_and_stop_the_run(logs):
    name = f"{__name__}:Counting"
    flags = [*flags_of(SETTINGS), "--logdir", str(logs), "--run-name", "counting", "--callbacks", name]
    assert train.main(flags) == 0
    found = json.loads((logs / "counting" / "results.json").read_text())
    assert (found["images"], found["stopped"]) == (72, "one test is enough")
    assert [row["mine/updates"] for row in rows_of(logs / "counting")] == ["2", "3", "4", "5"]
    said = refusal(train.main, [*flags[:-1], f"{__name__}:SETTINGS", "--run-name", "new"])
    assert "--callbacks" in said
    with pytest.raises(tfrl.SettingsError, match="must be objects of classes that extend tfrl.Callback"):
        tfrl.train("resnet", logdir=str(logs), run_name="new", callbacks=[object()])


def test_a_callback_that_plays_in_envs_is_refused(logs):
    settings = SETTINGS | {"logdir": str(logs), "run_name": "plays"}
    evaluate_ = tfrl.callbacks.Evaluate("CartPole-v1", steps=100, name="other")
    with pytest.raises(tfrl.SettingsError, match="the callback Evaluate is for runs in envs"):
        tfrl.train("resnet", callbacks=[evaluate_], **settings)


def test_a_keras_callback_is_called_as_fit_calls_it(logs):
    noting = Noting()
    settings = SETTINGS | {"log_every": 1, "logdir": str(logs), "run_name": "keras"}
    tfrl.train("resnet", callbacks=[noting], **settings)
    batches = [["batch", k, "loss", "accuracy"] for k in range(5)]
    ends = [*("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"), True]
    assert noting.calls == [
        ["train begins", 2, 5],
        *(["begins", 0], *batches, ["ends", 0, *ends]),
        *(["begins", 1], *batches, ["ends", 1, *ends]),
        ["train ends"],
    ]


def test_an_epochs_loss_is_the_mean_of_its_steps(logs):
    found = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(logs["loss"]))
    run(logs, "mean", note, epochs=1)
    rows = rows_of(logs / "mean")  # of 2, 1, 1 and 1 steps
    wanted = np.average([float(row["train/loss"]) for row in rows], weights=[2, 1, 1, 1])
    assert found == pytest.approx([wanted], rel=1e-6)


def test_a_callback_that_is_added_at_a_resume_weighs_the_steps_that_it_has_seen(logs):
    assert run(logs, "added", epochs=1, stop_at=2) == (130, None)
    found = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(logs["loss"]))
    run(logs, "added", note, epochs=1)
    losses = [float(row["train/loss"]) for row in rows_of(logs / "added")]  # of 2, 1, 1 and 1 steps
    assert len(losses) == 4 and found == pytest.approx([np.mean(losses[1:])], rel=1e-6)


@pytest.mark.long
def test_keras_callbacks_change_the_learning_rate_and_stop_exactly_as_if_never_stopped(logs):
    """Reduces the rate after every epoch, which never improves by 9, and stops after the fourth."""

    def callbacks():
        reduce = keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=9.0)
        return reduce, keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=9.0)

    code, whole = run(logs, "reduced", *callbacks(), epochs=9)
    assert code == 0 and whole["stopped"] == "EarlyStopping asked for it" and whole["images"] == 4 * 72
    rates = [float(row["train/learning_rate"]) for row in rows_of(logs / "reduced") if row["test/loss"]]
    assert rates == pytest.approx([0.02, 0.02, 0.01, 0.005])
    assert run(logs, "again", *callbacks(), epochs=9, stop_at=13) == (130, None)
    code, found = run(logs, "again", *callbacks(), epochs=9)
    assert (code, found["weights_sha256"]) == (0, whole["weights_sha256"])
    assert (found["stopped"], found["images"]) == (whole["stopped"], whole["images"])


def test_a_callback_that_would_change_the_weights_is_refused():
    said = refusal(KerasCallback, keras.callbacks.EarlyStopping(restore_best_weights=True))
    assert "takes no weights from a callback" in said


# Optimizers and preprocessing


@pytest.mark.parametrize(
    "name", ["nadam", *(pytest.param(name, marks=pytest.mark.long) for name in ("adam", "rmsprop", "sgd"))]
)
def test_optimizers_step_as_those_of_keras(name):
    made = make_learner(optimizer=name)
    reference = build(
        dataclasses.replace(SMALL, optimizer=name), "float32", image_shape=(SIZE, SIZE, 3), classes=CLASSES
    )
    kinds = {"adam": "Adam", "nadam": "Nadam", "rmsprop": "RMSprop", "sgd": "SGD"}
    optimizer = getattr(keras.optimizers, kinds[name])(1e-3, **({"momentum": 0.9} if name == "sgd" else {}))
    for batch in Share(16).batches(DATA.train, [Pass(np.arange(48))]):
        with tf.GradientTape() as tape:
            scores = reference(batch.images[0], training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(batch.labels[0], scores))
        gradients = tape.gradient(loss, [v.value for v in reference.trainable_variables])
        optimizer.apply(gradients, reference.trainable_variables)
        made.step(batch, 1e-3)
    ours = made.weights()
    start = build(SMALL, "float32", image_shape=(SIZE, SIZE, 3), classes=CLASSES)
    begun = {v.path: v.numpy() for v in start.variables}
    for variable, array in zip(reference.variables, ours.values(), strict=True):
        moved = np.abs(variable.numpy() - begun[variable.path]).max()
        assert np.abs(array - variable.numpy()).max() < 0.02 * moved, variable.path


def halved(images):
    """Half of the pixels, each way, from -1 to 1, by functions of TensorFlow."""
    return tf.image.resize(tf.cast(images, tf.float32), (SIZE // 2, SIZE // 2)) / 127.5 - 1.0


@pytest.mark.long
def test_own_preprocessing_is_part_of_the_network_and_its_exports(logs):
    for name, given in (("by-name", f"{__name__}:halved"), ("by-function", halved)):
        settings = SETTINGS | {"logdir": str(logs), "run_name": name, "preprocess": given}
        found = tfrl.train("resnet", **settings)
    assert f"preprocess: {__name__}:halved" in (logs / "by-name" / "config.yaml").read_text()
    hashes = {tfrl.library.Run(logs / n).results["weights_sha256"] for n in ("by-name", "by-function")}
    assert len(hashes) == 1
    saved = tf.saved_model.load(str(logs / "by-name" / "export" / "saved_model"))
    scores = saved.serve(DATA.test.images).numpy()
    assert (scores.argmax(1) == DATA.test.labels).sum() == found.results["test"]["hits"]
    with np.load(logs / "by-name" / "export" / "weights.npz") as weights:
        plain = build(SMALL, "float32", image_shape=(SIZE // 2, SIZE // 2, 3), classes=CLASSES)
        assign(keras.Model(plain.layers[1].output, plain.output), weights)
        by_hand = keras.Model(plain.layers[1].output, plain.output)(halved(DATA.test.images))
    np.testing.assert_allclose(by_hand, scores, rtol=1e-4, atol=1e-6)


def test_preprocessing_that_cannot_work_gives_a_sentence(logs):
    assert "has no nothing" in refusal(parse, ["--preprocess", f"{__name__}:nothing"])
    settings = SETTINGS | {"logdir": str(logs), "run_name": "wrong"}
    with pytest.raises(
        tfrl.SettingsError, match=r"must return images, uint8 or float, not float32 \(None, 3\)"
    ):
        tfrl.train("resnet", **settings, preprocess=lambda x: tf.reduce_mean(tf.cast(x, tf.float32), (1, 2)))
    for wrong in (3.0, [tf.zeros([1, 8, 8, 3])], tf.zeros([2, 8, 8, 3]), tf.zeros([1, 8, 8, 3], tf.int32)):
        with pytest.raises(tfrl.SettingsError, match="must return images, uint8 or float, not "):
            tfrl.train("resnet", **settings, preprocess=lambda x, wrong=wrong: wrong)
    with pytest.raises(tfrl.SettingsError, match="preprocessing raised AttributeError: .*no_such_method"):
        tfrl.train("resnet", **settings, preprocess=lambda x: x.no_such_method())


# Checkpoints


@pytest.mark.long
def test_every_checkpoint_and_the_export_score_the_same_with_and_without_a_strategy(trained, logs, capsys):
    folder, results = trained.folder, trained.results

    def accuracy(run, *flags):
        assert evaluate.main([str(run), *flags]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("accuracy"))
        return float(line.split()[1])

    assert accuracy(folder) == results["test"]["accuracy"]
    for flags in (["--format", "saved-model"], ["--checkpoint", "10"], ["--checkpoint", "last"]):
        assert accuracy(folder, *flags, "--strategy", "one-device") == results["test"]["accuracy"]
        assert (
            accuracy(folder, *flags, "--strategy", "mirrored", "--replicas", "2")
            == results["test"]["accuracy"]
        )
    tested = [float(row["test/accuracy"]) for row in rows_of(folder) if row["test/accuracy"]]
    assert accuracy(folder, "--checkpoint", "best", "--replicas", "2") == pytest.approx(max(tested), abs=1e-8)
    other = shutil.copytree(folder, logs / "of-another-machine")
    text = (other / "config.yaml").read_text()
    for name, value in (("device", "gpu"), ("micro_batch", "4")):  # of the training alone
        text = re.sub(rf"^{name}: .*$", f"{name}: {value}", text, flags=re.MULTILINE)
    (other / "config.yaml").write_text(text)
    for replicas in ("2", "3"):
        wanted = pytest.approx(results["test"]["accuracy"], abs=1e-8)
        assert accuracy(other, "--replicas", replicas) == wanted
    assert evaluate.main([str(folder / "checkpoints" / "update-00000009")]) == 0
    assert "checkpoint 9" in capsys.readouterr().out
    assert "leave --checkpoint best out" in refusal(
        evaluate.main, [str(folder), "--format", "saved-model", "--checkpoint", "best"]
    )
    assert "--checkpoint must be last, best or" in refusal(evaluate.main, [str(folder), "--checkpoint", "x"])
    assert "no checkpoint of update 4" in refusal(evaluate.main, [str(folder), "--checkpoint", "4"])
    assert not (folder / "evaluation").exists()


@pytest.mark.long
def test_a_run_starts_from_any_checkpoint_of_another(trained, logs):
    folder = trained.folder
    settings = SETTINGS | {"logdir": str(logs), "epochs": 1}
    first = tfrl.train("resnet", run_name="more", start_from=str(folder), **settings).results
    assert first["started_from"] == {"run": str(folder), "env_steps": 144, "update": 10}
    path = folder / "checkpoints" / "update-00000010"
    same = tfrl.train("resnet", run_name="more-10", start_from=str(path), **settings).results
    assert same["weights_sha256"] == first["weights_sha256"] != trained.results["weights_sha256"]
    best = tfrl.train("resnet", run_name="of-best", start_from=str(folder), checkpoint="best", **settings)
    assert best.results["started_from"]["update"] is None
    earlier = tfrl.train("resnet", run_name="of-9", start_from=str(folder), checkpoint="9", **settings)
    assert earlier.results["weights_sha256"] != first["weights_sha256"]

    def refused(**changes):
        with pytest.raises(tfrl.SettingsError) as raised:
            tfrl.train("resnet", **(settings | {"run_name": "refused", "start_from": str(folder)} | changes))
        return str(raised.value)

    assert "model cookbook there, linear here" in refused(model="linear")
    assert "has no checkpoint 4; it has 9, 10" in refused(checkpoint="4") or "it has" in refused(
        checkpoint="4"
    )
    assert "checkpoint has no effect without start_from" in refused(start_from=None, checkpoint="best")
    assert not (logs / "refused").exists()


def test_a_run_of_other_classes_cannot_be_started_from(trained, logs, monkeypatch):
    other = Dataset(DATA.train, DATA.test, (*DATA.classes, "more"))
    monkeypatch.setattr("resnet.data.load_on_all", lambda *_: other)
    settings = SETTINGS | {"logdir": str(logs), "run_name": "others", "start_from": str(trained.folder)}
    with pytest.raises(tfrl.SettingsError, match="has another network.*head/logits.*as many classes"):
        tfrl.train("resnet", **settings)


# TensorBoard, reports and sweeps


def test_a_run_shows_its_weights_and_its_graph_in_tensorboard(logs):
    run(logs, "shown", histograms_every=4, tensorboard_graph=True, epochs=1)
    events = EventAccumulator(str(logs / "shown"), size_guidance={"histograms": 0, "tensors": 0})
    events.Reload()
    for name in ("torso/conv1/kernel", "head/logits/bias"):
        steps = [event.step for event in events.Tensors(f"weights/{name}")]
        assert steps == [0, 64], name
    assert "kernels/torso/conv1/kernel" in events.Tags()["tensors"]
    assert any("conv1" in node.name for node in events.Graph().node)


def test_a_report_of_supervised_runs(trained, logs, tmp_path, capsys):
    assert report.main([str(trained.folder)]) == 0
    written = trained.folder / "report.html"
    assert capsys.readouterr().out == f"{written}\n"
    page, test = written.read_text(), trained.results["test"]
    assert f"{test['accuracy']:.2%}" in page and "cookbook on procgen_frames/games-mini" in page
    assert trained.results["weights_sha256"][:12] in page and page.count("data:image/png;base64,") == 1
    with Image.open(trained.folder / "plots" / "training.png") as picture:
        assert min(picture.size) > 500
    other = logs / "two" / "other"
    shutil.copytree(trained.folder, logs / "two" / "first")
    shutil.copytree(trained.folder, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(
        text.replace("\nlr: 0.02", "\nlr: 0.01").replace("\nseed: 1", "\nseed: 2")
    )
    assert report.main([str(logs / "two"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<td>lr 0.02</td>" in page and "<td>lr 0.01</td>" in page and "<td>--lr</td>" in page
    (other / "progress.csv").write_text("images,epoch\n")
    assert "has no row in its progress.csv yet" in refusal(report.main, [str(other)])


def test_a_sweep_over_the_supervised_trainer_is_planned(tmp_path):
    flags = flags_of(SETTINGS | {"model": "linear"})
    options, sweep = tune._read(["--grid", "lr=0.1,0.01", "--", "resnet", *flags])
    assert (sweep.metric, sweep.program, len(sweep.trials)) == ("test/accuracy", ["-m", "tfrl.resnet"], 2)
    assert sweep.config(sweep.trials[1]).lr == 0.01
    words = ["--grid", "lr=0.1,0.01", "--metric", "test/acc", "--logdir", str(tmp_path), "--", "resnet"]
    assert "test/acc is not a column of progress.csv (did you mean test/accuracy?)" in refusal(
        tune.main, words
    )
    words = ["--sample", "lr=uniform:0.1,0.2", "--scheduler", "pbt", "--", "resnet"]
    assert "pbt is not for resnet" in refusal(tune.main, words)
    words = ["--grid", "epochs=1,2", "--scheduler", "asha", "--", "resnet"]
    assert "these have 1 to 2 epochs" in refusal(tune.main, words)


@pytest.mark.long
def test_a_sweep_over_the_supervised_trainer_runs_on_ray(tmp_path, monkeypatch, capsys):
    """Its trials are processes of their own, which make the data set once before."""
    pytest.importorskip("ray")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    prepare("procgen_frames/games-mini")
    flags = ["--model", "cookbook", "--dataset", "procgen_frames/games-mini", "--precision", "float32"]
    flags += ["--epochs", "2", "--max-steps", "60", "--warmup", "0", "--log-every", "50"]
    words = [
        "--grid",
        "lr=1e-6,0.02",
        "--scheduler",
        "asha",
        "--logdir",
        str(tmp_path / "sweep"),
        "--",
        "resnet",
    ]
    assert tune.main([*words, *flags]) == 0
    said = capsys.readouterr().out
    assert "best: python -m tfrl.resnet" in said and "--lr=0.02" in said
    rows = rows_of(tmp_path / "sweep" / "trial-001")
    assert int(rows[-1]["images"]) > 1600 and rows[-1]["test/accuracy"]
