"""The evaluator beside a run whose checkpoints it cannot use."""

import dataclasses
import json
import signal

import made_runs
import pytest
from refusals import refusal

from tfrl.algorithms.registry import reader
from tfrl.algorithms.runs import of_run
from tfrl.cli.settings import to_yaml
from tfrl.run.checkpoint import CheckpointStore, State

parse = reader("ppo_procgen").parse


@pytest.mark.parametrize(
    ("settings", "learner", "taken", "sentences"),
    [
        ("nothing: 1", None, 1, ["has an unknown setting 'nothing'"]),
        (None, b"damaged", 1, ["update-00000001 is skipped: learner.npz has", "no valid checkpoint of"]),
        # Within PPG's auxiliary phase: the second update's env steps are taken, but it is not done.
        (None, b"damaged", 2, []),
    ],
)
def test_an_evaluator_reports_a_failure_once(
    tmp_path, capsys, monkeypatch, settings, learner, taken, sentences
):
    from tfrl.training import callbacks as evaluator  # TensorFlow

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would keep SIGTERM for itself
    config = parse(["--env", "catch", "--logdir", str(tmp_path), "--run-name", "run"])
    store = CheckpointStore(config.run_dir / "checkpoints", keep=2)
    store.save(1, State({}, [{}]), env_steps=taken * config.steps_per_update)
    (config.run_dir / "config.yaml").write_text(settings or to_yaml(config))
    if learner is not None:
        (config.run_dir / "checkpoints" / "update-00000001" / "learner.npz").write_bytes(learner)
    looks = []

    def wait(_):
        looks.append(None)
        if len(looks) == 3:
            store.save(config.num_updates, State({}, [{}]), env_steps=config.total_steps)

    assert evaluator.follow(config, sleep=wait) == 0
    output = capsys.readouterr()
    warnings = [line for line in output.out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(sentences) and output.err == ""
    for warning, sentence in zip(warnings, sentences, strict=True):
        assert sentence in warning


def test_an_evaluator_refuses_a_device_that_is_not_there(tmp_path):
    """This process sees no GPU."""
    from tfrl.training import callbacks as evaluator  # TensorFlow

    config = parse(["--env", "catch", "--logdir", str(tmp_path), "--run-name", "run", "--device", "gpu"])
    told = refusal(evaluator.follow, config, lambda _: pytest.fail("it follows the run"))
    assert told.startswith("--device gpu needs a GPU that is not here")


@pytest.mark.parametrize("has_callbacks", [True, False])
def test_an_evaluator_ends_with_a_run_that_a_callback_stopped(tmp_path, has_callbacks):
    from tfrl.training import callbacks as evaluator  # TensorFlow

    run = made_runs.make_run(tmp_path, total_steps=40_000)
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(results | {"stopped": "enough"}))
    config = dataclasses.replace(of_run(run), total_steps=80_000)
    assert evaluator._is_complete(config, [1], has_callbacks) == has_callbacks


def test_an_evaluator_follows_reinforce_to_its_last_env_step(tmp_path):
    """Its updates have as many env steps as their episodes, so their number tells nothing."""
    from tfrl.training import callbacks as evaluator  # TensorFlow

    config = reader("reinforce").parse(["--logdir", str(tmp_path), "--run-name", "run"])
    assert not evaluator._is_complete(config, [config.num_updates], False)
