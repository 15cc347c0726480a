"""The command line of supervised training: settings, their file, and one sentence for a bad one."""

import csv
import json
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from processes import ROOT, Answer, assert_refused
from refusals import refusal

from resnet import __main__ as zoo
from resnet import evaluate
from resnet.config import READER, from_yaml, parse
from resnet.train import main
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.cli.settings import to_yaml


def test_the_settings_survive_their_file(tmp_path):
    config = parse(["--preset", "he-cifar10", "--model", "resnet56", "--run-name", "x"])
    assert config.max_steps == READER.changes_of("he-cifar10")["max_steps"]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "flags,sentence",
    [
        (["--model", "resnet2"], "did you mean resnet"),
        (["--model", "mlp"], "takes no images"),
        (["--dataset", "cifar11"], "did you mean cifar10"),
        (["--dataset", "procgen_frames/game"], "procgen_frames/games"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--batch-size", "33", "--replicas", "2"], "got 33"),
        (["--micro-batch", "4"], "batch normalization"),
        (["--model", "impala", "--normalization", "group"], "no normalization to choose"),
        (["--model", "impala", "--weight-decay", "0"], "--model impala has no weight decay"),
        (["--width", "2"], "--model resnet-mini has no width to choose, so it cannot be 2"),
        (["--epochs", "1" + "0" * 400], "--epochs must be at least 1"),
        (["--freeze"], "no flag --freeze"),
    ],
)
def test_bad_settings_get_a_sentence(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(flags)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("batch_size: 0", "--batch-size must be at least 1"),
        ("dataset: cifar11", "did you mean cifar10"),
        ("image_size: -3", "--image-size must be at least"),
    ],
)
def test_a_bad_setting_in_the_file_of_a_run_is_no_test_of_it(tmp_path, text, sentence):
    file = tmp_path / "config.yaml"
    file.write_text(re.sub(f"(?m)^{text.split()[0]}.*", text, to_yaml(parse([]))))
    assert text in file.read_text()
    said = refusal(evaluate.main, [str(tmp_path)])
    assert said.startswith(f"{file}: ") and sentence in said


def test_a_bad_setting_ends_before_tensorflow():
    code = "import sys; from resnet.train import main\n"
    code += "try: main(['--lr', '0'])\nexcept Exception as e: print(e)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('tensorflow' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "--lr must be above 0 and at most 1e+38; got 0.0.\nFalse\n"


def test_an_evaluator_in_tf_config_is_refused(tmp_path, monkeypatch):
    cluster = {"worker": ["localhost:1"], "evaluator": ["localhost:2"]}
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    sentence = refusal(main, ["--logdir", str(tmp_path)])
    assert "and has no evaluator" in sentence and not list(tmp_path.iterdir())


def test_the_table_of_the_zoo_takes_no_flags():
    assert_refused(Answer("--typo", module="resnet"), "there is no flag --typo")


def test_the_table_of_the_zoo_is_all_that_is_shown_and_needs_no_tensorflow():
    answer = Answer(module="resnet")
    assert (answer.code, answer.stderr) == (0, "") and answer.cpu_seconds < 2
    assert "impala-pooled" in answer.stdout and answer.stdout.endswith("TensorFlow imported: False\n")


def test_the_published_recipe_decays_weights_as_the_paper_does():
    """The penalty is half of 1e-4 times the sum of squares, so its gradient is 1e-4 w for each kernel w."""
    import tensorflow as tf

    from resnet.learner import build

    config = parse(["--preset", "he-cifar10", "--model", "resnet-mini"])
    model = build(config, "float32", image_shape=(32, 32, 3), classes=10)
    kernels = [v for v in model.trainable_variables if v.path.endswith("kernel")]
    assert len(kernels) == 8  # 7 convolutions and the head; shortcuts have none
    with tf.GradientTape() as tape:
        penalty = tf.add_n(model.losses)
    assert float(penalty) == pytest.approx(0.5 * 1e-4 * sum(np.square(k.numpy()).sum() for k in kernels))
    for kernel, pull in zip(kernels, tape.gradient(penalty, [k.value for k in kernels]), strict=True):
        np.testing.assert_allclose(pull, 1e-4 * kernel.numpy(), rtol=1e-5)
    assert not build(parse(["--weight-decay", "0"]), "float32", image_shape=(8, 8, 3), classes=2).losses


@pytest.mark.long
def test_the_published_recipe_trains(tmp_path):
    """Trains `--preset he-cifar10` with a shorter length and depth on fake images of CIFAR-10's shape."""
    flags = ["--preset", "he-cifar10", "--logdir", str(tmp_path), "--run-name", "he"]
    assert (parse(flags).model, parse(flags).batch_size, parse(flags).augment) == (
        "resnet20",
        128,
        "crop-flip",
    )
    flags += ["--model", "resnet-mini", "--max-steps", "4", "--log-every", "1", "--precision", "float32"]
    with tfds.testing.mock_data(num_examples=200):
        assert main(flags) == 0
    found = json.loads((tmp_path / "he" / "results.json").read_text())
    assert (found["dataset"], found["steps"], found["images"]) == ("cifar10", 4, 400)
    assert found["test"]["images"] == 200
    with (tmp_path / "he" / "progress.csv").open() as file:
        rates = {row["images"]: float(row["train/learning_rate"]) for row in csv.DictReader(file)}
    assert [rates[n] for n in ("128", "200", "328", "400")] == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_the_layers_of_a_network_are_a_table(capsys):
    for words in (["resnet14", "--layers"], ["resnet14"]):
        assert zoo.main(words) == 0
        said = capsys.readouterr().out
        assert "Trainable params" in said and "features" in said
    for words in (["resnet15", "--layers"], ["--layers"]):
        with pytest.raises(UserError):
            zoo.main(words)


RUNS = {
    "ppo": (["--env", "CartPole-v1", "--no-share-torso", "--hidden", "8"], ["actor", "critic"]),
    "ppo-lstm": (
        ["--env", "CartPole-v1", "--memory", "lstm", "--memory-size", "16", "--memory-inputs"],
        ["core (Core)", "core_inputs", "actor (Actor)", "critic (Head)"],
    ),
    "ppo-scaled": (["--env", "catch", "--torso", "linear"], ["actor_and_critic", "critic (Head)"]),
    "ppo-normalized": (
        ["--env", "Pendulum-v1", "--normalize-observations", "--torso", "mlp"],
        ["observations", "actor (Actor)"],
    ),
    "sac": (["--env", "Pendulum-v1", "--hidden", "8"], ["actor", "critic1", "critic2"]),
    "daac": (
        ["--env", "CartPole-v1", "--memory", "gru", "--memory-size", "16"],
        ["action (InputLayer) (None, 2)", "advantage (Head)", "critic (Head)"],
    ),
    "daac-idaac": (
        ["--env", "CartPole-v1", "--order-coef", "0.001", "--hidden", "8"],
        ["action (InputLayer)", "other_features (None, 8)", "order (Functional) (None, 2)"],
    ),
    "dqn": (["--env", "CartPole-v1", "--dueling"], ["dueling (Dueling)"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_networks_of_a_run_are_tables(name, tmp_path, capsys):
    """Of a run that has only its settings yet."""
    flags, shown = RUNS[name]
    config = reader(name.partition("-")[0]).parse(flags)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert zoo.main([str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for words in shown:
        assert words in said, words


def test_the_network_of_a_supervised_run_is_a_table(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(to_yaml(parse(["--model", "cookbook", "--dataset", "cifar10"])))
    assert zoo.main([str(tmp_path), "--layers"]) == 0
    said = capsys.readouterr().out
    assert "(None, 32, 32, 3)" in said and "probabilities" in said and "(None, 10)" in said


def size_of(path):
    """Width and height of a PNG file, in pixels."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_networks_are_drawn(tmp_path, capsys):
    assert zoo.main(["resnet-mini", "--draw", str(tmp_path / "zoo.png")]) == 0
    assert str(tmp_path / "zoo.png") in capsys.readouterr().out
    width, height = size_of(tmp_path / "zoo.png")
    assert height > width > 200  # a chain of some forty boxes
    (tmp_path / "config.yaml").write_text(to_yaml(reader("ppo").parse(RUNS["ppo"][0])))
    assert zoo.main([str(tmp_path), "--draw", str(tmp_path / "run.svg")]) == 0
    drawn = (tmp_path / "run.svg").read_text()
    for shown in ("actor", "critic", "dense1", "(None, 4)", "(None, 1)"):
        assert f">{shown}<" in drawn, shown


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    assert "--draw must be a file that ends in .png" in refusal(zoo.main, ["mlp", "--draw", "x.txt"])
    assert "there is no folder" in refusal(zoo.main, ["mlp", "--draw", str(tmp_path / "none" / "x.png")])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install graphviz" in refusal(zoo.main, ["mlp", "--draw", str(tmp_path / "x.png")])
    assert not list(tmp_path.iterdir())
