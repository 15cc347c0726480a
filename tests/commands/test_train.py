"""python -m tfrl.ppo_procgen end to end: a run that learns, its folder, and how bad runs end."""

import importlib
import shutil

import numpy as np
import pytest
import yaml
from learners import build_actor_critic
from made_runs import COLUMNS
from processes import Answer, assert_refused, results, rows, train, train_here

from tfrl.algorithms.registry import reader
from tfrl.cli.errors import TrainingError
from tfrl.envs.registry import make
from tfrl.envs.spec import EnvSpec
from tfrl.run.folder import weights_sha256

from_yaml = reader("ppo_procgen").from_yaml

CATCH = "--env catch --torso cookbook --precision float32 --num-levels 0 --num-envs 32 --num-steps 18"
CATCH += " --num-minibatches 2 --epochs 6 --lr 4e-3 --anneal-lr --gamma 0.9"
CATCH = CATCH.split()
TOTAL = 576 * 32
ENDING = ["--total-steps", TOTAL, "--eval-every", 20, "--eval-episodes", 128]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run to its end, and what it said."""
    folder = tmp_path_factory.mktemp("logs") / "finished"
    code, stdout, stderr = train(folder, *CATCH, *ENDING)
    assert code == 0, stdout + stderr
    return folder, stdout, stderr


@pytest.fixture(scope="module")
def run(finished):
    """The folder of the run that ended."""
    return finished[0]


# A run that learns


def test_catch_is_learned(run):
    scores = results(run)
    assert scores["eval"]["train"]["return"] >= 0.9
    assert scores["eval"]["test"]["return"] >= 0.9
    assert scores["episode_return"] >= 0.9
    assert scores["seconds"] < 60
    assert float(rows(run)[0]["rollout/episode_return"]) < 0


def test_the_terminal_shows_a_summary_progress_and_results(finished):
    folder, stdout, _ = finished
    for part in ("catch, easy, all levels", "float32", "32 x 18 steps", "cookbook", str(folder)):
        assert part in stdout
    assert f"100.0% | {TOTAL:,} / {TOTAL:,} env steps" in stdout
    assert "preset       openai-easy" in stdout
    assert "Solved after" not in stdout and results(folder)["solved"] is False
    following = stdout.partition("Next:")[2]
    for command in ("tfrl.report", "tfrl.record", "tfrl.evaluate"):
        assert f"python -m {command} {folder} " in following
    assert f"tensorboard --logdir {folder.parent} " in following


def test_the_policy_is_loaded_by_the_line_that_the_terminal_shows(finished):
    _, stdout, _ = finished
    (line,) = [line for line in stdout.splitlines() if "tfrl.load" in line]
    names = {"tfrl": importlib.import_module("tfrl"), "observations": np.zeros((5, 10, 5, 1), np.uint8)}
    exec(line.strip(), names)
    assert eval("policy(observations)", names).shape == (5,)


def test_tensorflow_prints_nothing(finished):
    _, stdout, stderr = finished
    assert stderr == ""
    assert not any(word in stdout for word in ("WARNING", "cuda", "oneDNN", "retracing", "gym", "Keras"))


# Its folder


def test_the_folder_has_the_promised_files(run):
    names = {path.name for path in run.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert len(events) == 1
    assert names - events >= {"config.yaml", "progress.csv", "checkpoints", "results.json", "export"}
    assert not any(name.endswith((".tmp", "stop")) for name in names)
    assert {path.name for path in (run / "export").iterdir()} >= {"weights.npz", "policy"}
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("update-*"))
    assert checkpoints == ["update-00000020", "update-00000030", "update-00000032"]


def test_config_yaml_holds_every_setting_and_is_taken_back(run):
    config = from_yaml(run / "config.yaml")
    assert (config.env, config.torso, config.lr, config.anneal_lr) == ("catch", "cookbook", 4e-3, True)
    text = (run / "config.yaml").read_text()
    assert text.startswith("algorithm: ppo\n")
    assert set(yaml.safe_load(text)) == {"algorithm", *vars(config)}


def test_progress_csv_has_a_row_for_each_update(run):
    table = rows(run)
    assert list(table[0]) == ["env_steps", *COLUMNS]
    assert [int(row["env_steps"]) for row in table] == list(range(576, TOTAL + 1, 576))
    for number, row in enumerate(table, start=1):
        assert float(row["train/first_ratio_error"]) < 1e-5
        assert float(row["train/learning_rate"]) == pytest.approx(4e-3 * (1 - (number - 1) / 32))
        assert float(row["rollout/episodes"]) == number * 64  # episodes take 9 steps
        assert float(row["rollout/episode_length"]) == 9
        assert 0 <= float(row["time/env_wait_fraction"]) <= 1
        assert bool(row["eval_test/return"]) == (number in (20, 32))


def test_results_json_has_the_promised_keys(run):
    found = results(run)
    promised = "env seed env_steps updates seconds env_steps_per_second episode_return normalized_return eval"
    assert set(found) == {
        *promised.split(),
        "algorithm",
        "episodes",
        "missing",
        "solved",
        "solved_at",
        "started_from",
        "actors",
        "lag",
        "learners",
        "workers",
        "replicas",
        "precision",
        "weights_sha256",
        "resumed_at",
    }
    assert (found["env"], found["seed"], found["env_steps"], found["updates"]) == ("catch", 1, TOTAL, 32)
    assert (found["workers"], found["replicas"], found["precision"]) == (1, 1, "float32")
    assert (found["started_from"], found["actors"], found["learners"], found["lag"]) == (None, 0, 1, 0)
    assert found["resumed_at"] == found["missing"] == [] and found["normalized_return"] is None
    assert found["env_steps_per_second"] == pytest.approx(TOTAL / found["seconds"])
    assert set(found["eval"]) == {"train", "test", "generalization_gap"}
    for level_set in ("train", "test"):
        assert found["eval"][level_set]["episodes"] == 128
        assert found["eval"][level_set]["return"] == pytest.approx(
            float(rows(run)[-1][f"eval_{level_set}/return"])
        )


def test_tensorboard_has_the_values_of_progress_csv(run):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
    tags = set(events.Tags()["tensors"])
    table = rows(run)
    for name in COLUMNS:
        written = [(int(row["env_steps"]), float(row[name])) for row in table if row[name]]
        if not written:  # catch has no published range, all levels have no gap
            assert "normalized" in name or name == "eval/generalization_gap"
            assert name not in tags
            continue
        read = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(name)]
        assert [step for step, _ in read] == [step for step, _ in written]
        np.testing.assert_allclose([v for _, v in read], [v for _, v in written], rtol=1e-6)
    for tag, part in (("settings", "anneal_lr: true"), ("command", "--env catch")):
        assert part in make_ndarray(events.Tensors(tag)[0].tensor_proto).item().decode()


# What it leaves for others


def test_weights_and_savedmodel_are_the_same_policy_and_it_catches_the_ball(run):
    import tensorflow as tf

    with np.load(run / "export" / "weights.npz", allow_pickle=False) as file:
        weights = dict(file)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert weights_sha256(weights) == results(run)["weights_sha256"]
    env = make(EnvSpec("catch", num_envs=20, seed=1234, num_levels=0))
    network = build_actor_critic(
        torso="cookbook",
        observation_spec=env.observation_spec,
        action_spec=env.action_spec,
        share_torso=True,
        precision="float32",
        seed=99,
    )
    vectors = {name: tf.constant(vector) for name, vector in network.join(weights).items()}
    policy = tf.saved_model.load(str(run / "export" / "policy")).signatures["serving_default"]
    earned = 0.0
    for _ in range(9):
        observations = tf.constant(env.observe().observation)
        outputs = policy(observations)
        logits, value = network.outputs(vectors, observations)
        assert {k: (v.dtype.name, v.shape) for k, v in outputs.items()} == {
            "action": ("int32", (20,)),
            "logits": ("float32", (20, 3)),
            "value": ("float32", (20,)),
        }
        np.testing.assert_allclose(outputs["logits"], logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(outputs["value"], value, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(outputs["action"], np.argmax(outputs["logits"], axis=1))
        env.act(outputs["action"].numpy())
        earned += env.observe().reward.sum()
    assert earned / 20 >= 0.9


# How bad runs end


def test_a_nan_loss_ends_the_run_and_keeps_the_checkpoint(tmp_path):
    folder = tmp_path / "diverging"
    settings = "--env catch --torso cookbook --precision float32 --num-envs 8 --num-steps 16 --epochs 1"
    settings = [*settings.split(), "--num-minibatches", 1, "--checkpoint-every", 1, "--total-steps", 1280]
    with pytest.raises(TrainingError) as caught:
        train_here(folder, *settings, "--lr", "1e30")
    sentence = str(caught.value)
    assert sentence.startswith("update 2: ") and "\n" not in sentence
    assert "_loss is not a finite number (minibatch 1" in sentence
    assert "the checkpoint of update 1 is kept" in sentence
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["update-00000001"]
    assert [row["env_steps"] for row in rows(folder)] == ["128"]
    assert not (folder / "results.json").exists()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--env", "coinrum"], ["'coinrum'", "did you mean", "coinrun"]),
        (["--learning-rat", "1"], ["--learning-rat"]),
        (["--num-envs", "6", "--replicas", "4"], ["--num-envs", "replicas", "6"]),
        (["--num-steps", "100", "--num-minibatches", "8"], ["--num-steps", "--num-minibatches", "100"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--gamma", "-0.5"], ["--gamma", "-0.5"]),
        (["--total-steps", "1" + "0" * 400], ["--total-steps", "1e+15"]),
        (["--num-steps", "1e7", "--total-steps", "1e10"], ["--num-steps 10000000 need 7.9 TB", "lower"]),
        (["--torso", "impalla"], ["impalla", "impala"]),
        (["--env", "catch", "--torso", "nature"], ["--torso nature", "catch", "36 x 36", "not 10 x 5"]),
        (["--resume", "must"], ["--resume must", "no checkpoint"]),
        (["--strategy", "multi-worker"], ["--strategy multi-worker needs TF_CONFIG"]),
        (["--logdir", "/proc/nowhere"], ["/proc", "--logdir"]),
    ],
)
def test_bad_settings_are_refused_at_once(tmp_path, flags, parts):
    where = [] if "--logdir" in flags else ["--logdir", tmp_path]
    assert_refused(Answer(*where, *flags), *parts)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_touched_by_other_settings_or_resume_never(run):
    def content():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = content()
    same = ["--logdir", run.parent, "--run-name", run.name, *CATCH, *ENDING]
    assert_refused(
        Answer(*same, "--lr", "1e-3", "--seed", 5), "--lr 0.004 there, 0.001 here", "--seed 1 there"
    )
    assert_refused(Answer(*same, "--resume", "never"), "--resume never", str(run))
    assert content() == before


def test_a_run_whose_checkpoints_were_removed_is_not_overwritten(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    answer = Answer("--logdir", tmp_path, "--run-name", "run", *CATCH, *ENDING)
    assert_refused(answer, "without checkpoints", f"results.json, export, {TOTAL:,} steps", "--run-name")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_help_is_answered_without_tensorflow():
    answer = Answer("--help")
    assert answer.code == 0 and answer.stderr == ""
    assert "--total-steps" in answer.stdout
    assert answer.stdout.endswith("TensorFlow imported: False\n")
    assert answer.cpu_seconds < 2
