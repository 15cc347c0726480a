"""PPO's dropout: an env step drops the same features when it is acted and when it is learned from."""

import learners
import numpy as np
import pytest
import tensorflow as tf

from tfrl.algorithms import registry as settings
from tfrl.cli.errors import UserError

FLAGS = "--num-envs 8 --num-steps 16 --num-minibatches 2 --epochs 2 --precision float32 --eval-episodes 2"
ENVS = {
    "catch": "--env catch --torso cookbook --share-torso",
    "mlp": "--env CartPole-v1 --hidden 16 --no-share-torso",
    "drac": "--env catch --torso cookbook --share-torso",
}


def parse(tmp_path, name="catch", *flags):
    where = ["--logdir", str(tmp_path), "--run-name", "run"]
    algorithm = "drac" if name == "drac" else "ppo"
    return settings.reader(algorithm).parse([*FLAGS.split(), *ENVS[name].split(), *where, *flags])


@pytest.mark.parametrize(
    "name", ["catch", *(pytest.param(name, marks=pytest.mark.long) for name in ("mlp", "drac"))]
)
def test_the_first_ratio_is_1_and_1_and_2_replicas_are_equal(tmp_path, name):
    found = []
    for replicas in ("1", "2"):
        learner = learners.make(parse(tmp_path, name, "--dropout", "0.5", "--replicas", replicas))
        before = learner.weights()
        for _ in range(2):
            metrics = learner.update()
            assert metrics["train/first_ratio_error"] < (2e-6 if name == "mlp" else 1e-9)
        found.append(learner.weights())
        learner.close()
        assert any((found[-1][key] != before[key]).any() for key in before if "actor" in key)
    for key, weights in found[0].items():
        np.testing.assert_array_equal(found[1][key], weights, err_msg=key)


@pytest.mark.long
def test_other_features_in_learning_would_change_the_ratio(tmp_path, monkeypatch):
    learner = learners.make(parse(tmp_path, "catch", "--dropout", "0.5"))
    monkeypatch.setattr(learner.agent.network, "kept", lambda noise: noise[..., 1:] < 0.5)
    weights = learner.weights()
    head = np.random.default_rng(0).normal(size=weights["actor/head/kernel"].shape).astype(np.float32)
    state = learner.agent.get_state()
    learner.agent.set_state(state | {"weights/actor/head/kernel": head})
    assert learner.update()["train/first_ratio_error"] > 0.01
    learner.close()


def test_features_are_dropped_by_the_noise_of_env_and_step(tmp_path):
    config = parse(tmp_path, "mlp", "--dropout", "0.25")
    network = config.make_network("float32")
    assert network.dropped_size == 32  # 16 of the actor, 16 of the critic
    noise = network.draw_training_noise(np.random.default_rng(0), 1000)
    assert noise.shape == (1000, network.noise_size + 32)
    drawn, (factors,) = network.split_noise(tf.constant(noise))
    np.testing.assert_array_equal(drawn, noise[:, : network.noise_size])
    np.testing.assert_array_equal(network.factors(network.kept(noise)), factors)
    assert {*np.unique(factors)} == {0, np.float32(1 / 0.75)} and abs(np.mean(factors) - 1) < 0.02
    weights = {name: tf.constant(vector) for name, vector in network.initial().items()}
    observations = np.random.default_rng(1).normal(size=(1000, 4)).astype(np.float32)
    inputs = network.inputs(weights, tf.constant(observations))
    plain = network.features(weights, "critic", inputs)[0]
    dropped = network.features(weights, "critic", inputs, factors)[0]
    np.testing.assert_array_equal(dropped, plain * factors[:, 16:])
    np.testing.assert_array_equal(
        network.features(weights, "actor", inputs, factors)[0] == 0, factors[:, :16] == 0
    )


def test_evaluations_drop_nothing(tmp_path):
    learner = learners.make(parse(tmp_path, "catch", "--dropout", "0.5"))
    observations = np.random.default_rng(0).integers(0, 256, (6, 10, 5, 1), dtype=np.uint8)
    greedy = [learner.agent.acting.act(observations) for _ in range(2)]
    plain = learners.make(parse(tmp_path, "catch"))
    np.testing.assert_array_equal(greedy[0], plain.agent.acting.act(observations))
    np.testing.assert_array_equal(*greedy)
    for one in (learner, plain):
        one.close()


def test_dropout_where_it_cannot_work_is_refused(tmp_path):
    with pytest.raises(UserError, match="--dropout 0.1 is not for --memory lstm"):
        parse(tmp_path, "mlp", "--dropout", "0.1", "--memory", "lstm")
    with pytest.raises(UserError, match="--dropout has no effect in the auxiliary phase"):
        settings.reader("ppg").parse(["--env", "CartPole-v1", "--dropout", "0.1", "--logdir", str(tmp_path)])
