"""Torsos of the user's own: the same weights in every process, the same run on any topology, refusals."""

import keras
import learners
import numpy as np
import pytest
import tensorflow as tf
from packed_envs import packed

import tfrl
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import UserError
from tfrl.networks.numpy_policy import policy_in_numpy
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner

PPO = [
    "--num-envs",
    "8",
    "--num-steps",
    "16",
    "--num-minibatches",
    "2",
    "--epochs",
    "2",
    "--env",
    "CartPole-v1",
]
SAC = [
    *("--env", "Pendulum-v1", "--num-envs", "4", "--learning-starts", "64", "--iteration-steps", "128"),
    *("--batch-size", "32", "--train-every", "16", "--updates-per-step", "0.25"),
]


def chain(inputs):
    return keras.layers.Dense(16, activation="tanh")(keras.layers.Dense(16, activation="relu")(inputs))


def shortcut(inputs):
    x = keras.layers.Dense(24, activation="silu")(inputs)
    return x + keras.layers.Dense(24)(keras.layers.LayerNormalization()(x))


def of_several(inputs):
    assert inputs.keys() == {"picture", "noise", "inverted"}
    assert inputs["picture"].shape == (None, 6, 8, 1) and inputs["inverted"].shape == (None, 2)
    x = keras.layers.Conv2D(4, 3, activation="relu")(inputs["picture"])
    x = keras.layers.Concatenate()([keras.layers.Flatten()(x), inputs["noise"], inputs["inverted"]])
    return keras.layers.Dense(8, activation="relu")(x)


def with_batch_norm(inputs):
    return keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(4)(inputs))


def with_dropout(inputs):
    return keras.layers.Dropout(0.5, name="drop")(keras.layers.Dense(4)(inputs))


def twice(inputs):
    layer = keras.layers.Dense(4, activation="relu")
    return layer(layer(inputs))


def model_twice(inputs):
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh")])
    return model(model(inputs))


class Doubled(keras.layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs)


def of_own_layer(inputs):
    return Doubled(8)(inputs)


def of_layer_as_activation(inputs):
    return keras.layers.Dense(8, activation=keras.layers.LeakyReLU(0.1))(inputs)


def tanh(x):
    return 0.5 * keras.ops.tanh(x)


def of_own_tanh(inputs):
    return keras.layers.Dense(8, activation=tanh)(inputs)


def of_no_rank(inputs):
    return keras.layers.Reshape((2, 2))(inputs)


def failing(inputs):
    raise RuntimeError("no such layer")


def heads(inputs, parameters):
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    logits = keras.layers.Dense(parameters, kernel_initializer=keras.initializers.Zeros())(x)
    return logits, keras.layers.Dense(1)(keras.layers.Concatenate()([x, logits]))


def one_output(inputs, parameters):
    return keras.layers.Dense(parameters)(inputs)


def named(function):
    return f"test_own_networks:{function.__name__}"


def parse(algorithm, tmp_path, *flags):
    where = ["--logdir", str(tmp_path), "--run-name", "run"]
    return settings.reader(algorithm).parse([*flags, *where])


def test_weights_and_their_names_do_not_depend_on_what_was_built_before(tmp_path):
    config = parse("ppo", tmp_path, *PPO, "--torso", named(shortcut), "--no-share-torso")
    one = learners.initial_arrays(config.make_network("float32"))
    keras.layers.Dense(3)(keras.Input((2,)))
    other = learners.initial_arrays(config.make_network("float32"))
    names = {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"}
    names |= {"layer_normalization/gamma", "layer_normalization/beta"}
    for torso in ("actor_torso", "critic_torso"):
        assert {name.partition("/")[2] for name in one if name.startswith(torso)} == names
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array, err_msg=name)
    assert (one["actor_torso/dense/kernel"] != one["critic_torso/dense/kernel"]).all()


OTHERS = [shortcut, twice, model_twice, of_own_layer, of_layer_as_activation, of_own_tanh]


@pytest.mark.parametrize("function", [chain, *OTHERS])
def test_numpy_acts_as_tensorflow_does_where_the_network_is_a_chain(tmp_path, function):
    config = parse("ppo", tmp_path, *PPO, "--torso", named(function))
    network = config.make_network("float32")
    policy = policy_in_numpy(network)
    assert (policy is not None) == (function is chain)
    observations = np.random.default_rng(0).normal(size=(21, 4)).astype(np.float32)
    weights = {name: tf.constant(vector) for name, vector in network.initial().items()}
    forward = network.forward_pass(on_gpu=False, at_once=2)
    parameters, values = forward(weights, tf.constant(observations))
    if function is chain:
        found = policy.outputs(network.initial())(observations)
        np.testing.assert_allclose(found, parameters, rtol=1e-5, atol=1e-6)
    for rows in (slice(0, 1), slice(3, 12), slice(None, None, -1)):
        some = forward(weights, tf.constant(observations[rows]))
        np.testing.assert_array_equal(some[0], parameters.numpy()[rows])
        np.testing.assert_array_equal(some[1], values.numpy()[rows])


RUNS = {
    "one": ("ppo", OnPolicyLearner, [*PPO, "--torso", named(chain)]),
    "apart": ("ppo", OnPolicyLearner, [*PPO, "--torso", named(shortcut), "--critic-torso", "mlp"]),
    "several": ("ppo", OnPolicyLearner, [*PPO, "--env", packed("Signs"), "--torso", named(of_several)]),
    "heads": ("ppo", OnPolicyLearner, [*PPO, "--torso", named(heads)]),
    "impala-heads": (
        *("impala", OnPolicyLearner),
        ["--env", "Pendulum-v1", "--num-envs", "8", "--num-steps", "16", "--torso", named(heads)],
    ),
    "sac": ("sac", OffPolicyLearner, [*SAC, "--torso", named(chain), "--critic-torso", named(shortcut)]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("heads", marks=[pytest.mark.long, pytest.mark.promise]),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("apart", "sac", "one", "several", "impala-heads")
        ),
    ],
)
def test_1_and_2_replicas_give_equal_results(name, tmp_path):
    algorithm, kind, flags = RUNS[name]
    found = []
    for replicas in ("1", "2"):
        learner = learners.make(parse(algorithm, tmp_path, *flags, "--replicas", replicas), kind)
        before = learner.weights()
        found.append(learners.updated(learner, 2)[1])
        changed = [key for key, array in found[-1].items() if (array != before[key]).any()]
        assert any("torso" in key or key.startswith("actor/dense") for key in changed)
    for key, weights in found[0].items():
        np.testing.assert_array_equal(found[1][key], weights, err_msg=key)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (with_batch_norm, "norm has state besides its trained weights, like batch normalization"),
        (with_dropout, "drop has state besides its trained weights, like batch normalization or dropout"),
        (of_no_rank, "it must return features [B, F], a Keras tensor, but returns [None, 2, 2]"),
        (failing, "it raised RuntimeError: no such layer"),
        (
            one_output,
            "it must return the policy's parameters [B, 2] and the value [B, 1], two Keras tensors, but "
            "returns [None, 2]",
        ),
    ],
)
def test_a_network_that_cannot_serve_is_refused_with_one_sentence(tmp_path, function, sentence):
    with pytest.raises(UserError) as error:
        learners.make(parse("ppo", tmp_path, *PPO, "--torso", named(function)))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--torso", "no_such_module:net"],
            "--torso: no_such_module:net cannot be imported here (ModuleNotFoundError: No module named "
            "'no_such_module'); start the command in the module's folder",
        ),
        (["--torso", "test_own_networks:nothing"], "the module test_own_networks has no nothing"),
        (["--critic-torso", "nature"], "--critic-torso nature takes no vectors"),
        (["--torso", named(chain), "--torso-width", "2"], "--torso-width has no effect"),
    ],
)
def test_faults_that_the_settings_show_are_refused_at_once(tmp_path, flags, sentence):
    with pytest.raises(UserError) as error:
        parse("ppo", tmp_path, *PPO, *flags)
    assert sentence in str(error.value)


def test_the_library_refuses_a_network_that_is_not_callable():
    for network, sentence in (
        ({"critic": chain}, 'network takes "actor" and "critic"'),
        (3, "network must be a function of Keras inputs; got a int"),
    ):
        with pytest.raises(tfrl.SettingsError, match=sentence):
            tfrl.train("ppo", env="CartPole-v1", network=network)


def test_the_critics_torso_is_as_wide_as_asked_for(tmp_path):
    flags = ["--env", "coinrun", "--torso", "impala", "--critic-torso", "impala", "--torso-width", "2"]
    arrays = learners.initial_arrays(parse("ppo", tmp_path, *flags).make_network("float32"))
    shapes = {arrays[f"{torso}/stage1_conv/kernel"].shape for torso in ("actor_torso", "critic_torso")}
    assert shapes == {(3, 3, 3, 32)}
    parse("ppo", tmp_path, *flags[:4], "--critic-torso", "nature", "--torso-width", "2")


def test_own_heads_are_the_policy_and_the_value(tmp_path):
    config = parse("ppo", tmp_path, *PPO, "--torso", named(heads), "--no-normalize-observations")
    network = config.make_network("float32")
    names = {name for name in learners.initial_arrays(network)}
    assert names == {f"torso/dense{n}/{w}" for n in ("", "_1", "_2") for w in ("kernel", "bias")}
    assert network.learned == ("torso",)
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.normal(size=a.shape).astype(np.float32) for n, a in learners.initial_arrays(network).items()
    }
    weights = {name: tf.constant(vector) for name, vector in network.join(arrays).items()}
    observations = rng.normal(size=(5, 4)).astype(np.float32)
    parameters, values = network.outputs(weights, tf.constant(observations))
    one, two, three = (
        {w: arrays[f"torso/dense{n}/{w}"] for w in ("kernel", "bias")} for n in ("", "_1", "_2")
    )
    x = np.tanh(observations @ one["kernel"] + one["bias"])
    logits = x @ two["kernel"] + two["bias"]
    np.testing.assert_allclose(parameters, logits, rtol=1e-4, atol=1e-5)
    both = np.concatenate([x, logits], axis=1)
    np.testing.assert_allclose(values, (both @ three["kernel"] + three["bias"])[:, 0], rtol=1e-4, atol=1e-5)


def test_a_run_with_own_heads_acts_learns_and_exports(tmp_path):
    settings_ = {"total_steps": 256, "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "epochs": 1}
    run = tfrl.train(
        *("ppo",),
        env="Pendulum-v1",
        network=heads,
        eval_episodes=2,
        logdir=str(tmp_path),
        run_name="heads",
        **settings_,
    )
    assert run.progress["train/first_ratio_error"].max() < 1e-5
    observation = np.array([1, 0, 0], np.float32)
    loaded = tf.saved_model.load(str(run.folder / "export" / "policy"))
    saved = loaded.policy(observation[None])
    assert saved["parameters"].shape == (1, 2) and saved["value"].shape == (1,)
    np.testing.assert_allclose(tfrl.load(run.folder)(observation), saved["action"][0], rtol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "flags", "sentence"),
    [
        (
            "sac",
            ["--env", "Pendulum-v1"],
            "which is not for sac: let it take one argument and return features",
        ),
        ("ppg", ["--env", "CartPole-v1"], "which is not for ppg"),
        ("daac", ["--env", "CartPole-v1"], "which is not for daac"),
        ("ppo", [*PPO, "--memory", "lstm"], "leave --memory lstm out"),
        ("ppo", [*PPO, "--critic-torso", "mlp"], "leave --critic-torso mlp out"),
        ("ppo", [*PPO, "--dropout", "0.1"], "leave --dropout 0.1 out"),
    ],
)
def test_what_own_heads_exclude_is_refused(tmp_path, algorithm, flags, sentence):
    with pytest.raises(UserError) as error:
        parse(algorithm, tmp_path, *flags, "--torso", named(heads))
    assert sentence in str(error.value)
