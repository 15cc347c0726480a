"""The SavedModel of a run: what it gives is what the env takes."""

import json
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from learners import initial_arrays
from made_envs import made

from tfrl.algorithms import registry as settings
from tfrl.envs import registry
from tfrl.envs.spec import Box, EnvSpec
from tfrl.networks.distributions import distribution_for
from tfrl.networks.weights import export

LOPSIDED = "made_envs:made/Lopsided-v0"  # actions in [0, 0.5] x [-3, 1]; shows the one that it was given


def exported_action(folder, config, observations, as_seen=None):
    """Of the exported policy, and of the network, which may see the observations in another layout."""
    network = config.make_network("float32")
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(w.shape, np.float32) for name, w in initial_arrays(network).items()}
    vectors = {name: tf.constant(vector) for name, vector in network.join(weights).items()}
    export(folder, config, weights, precision="float32", env_steps=1)
    outputs = network.forward_pass(on_gpu=False, at_once=1)(
        vectors, tf.constant(observations if as_seen is None else as_seen)
    )
    saved = tf.saved_model.load(str(folder / "policy"))
    return saved.policy(tf.constant(observations))["action"].numpy(), network.greedy(outputs).numpy()


@pytest.mark.parametrize("algorithm", ["ppo", "ddpg", "td3", "sac"])
def test_an_exported_continuous_action_equals_the_env_action_of_training(algorithm, tmp_path):
    config = settings.reader(algorithm).parse(["--env", LOPSIDED, "--hidden", "8"])
    rng = np.random.default_rng(1)
    observations = rng.normal(size=(32, 2)).astype(np.float32)
    found, greedy = exported_action(tmp_path, config, observations)
    env = registry.make(EnvSpec(LOPSIDED, num_envs=32, seed=0), list(range(32)))
    env.act(greedy)
    np.testing.assert_allclose(found, env.observe().observation, atol=1e-6)
    assert np.abs(found - greedy).max() > 0.2
    assert (found >= [0, -3]).all() and (found <= [0.5, 1]).all() and found.dtype == np.float32


def test_an_action_is_never_outside_of_bounds_that_float32_rounds():
    """The float32 numbers nearest to -0.1, 0.7 and 0.1 are outside the bounds."""
    low, high = [-0.1, 0.7], [0.1, 0.9]
    space = gymnasium.spaces.Box(np.array(low), np.array(high), dtype=np.float64)
    for action in (-1.0, 1.0):
        found = distribution_for(Box(tuple(low), tuple(high))).as_env_takes(tf.fill([1, 2], action)).numpy()
        assert found.dtype == np.float32 and space.contains(found[0].astype(np.float64))
        np.testing.assert_allclose(found[0], low if action < 0 else high, rtol=1e-6)


def test_an_export_takes_the_envs_images_and_gives_its_actions(tmp_path):
    """Its actions begin with 5; its images have their channels first."""
    ints = settings.reader("ppo").parse(["--env", made("Ints"), "--hidden", "8"])
    observations = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)
    found, greedy = exported_action(tmp_path / "ints", ints, observations)
    np.testing.assert_array_equal(found, greedy + 5)
    frames = settings.reader("ppo").parse(["--env", made("Frames"), "--torso", "cookbook"])
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (32, 4, 20, 20), np.uint8) * (rng.random((32, 4, 20, 20)) < 0.01)
    images = images.astype(np.uint8)
    found, greedy = exported_action(tmp_path / "frames", frames, images, as_seen=np.moveaxis(images, 1, -1))
    np.testing.assert_array_equal(found, greedy)
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize(
    ("algorithm", "env", "others"),
    [
        ("ppo", "CartPole-v1", {"logits", "value"}),
        ("ppo", "Pendulum-v1", {"parameters", "value"}),
        ("dqn", "CartPole-v1", {"q"}),
        ("sac", "Pendulum-v1", {"parameters"}),
    ],
)
def test_the_request_of_the_page_on_tf_serving_is_answered(algorithm, env, others, tmp_path):
    """Names, dtypes and shapes are those of docs/serving.md; the tag and the signature are TF Serving's."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (inputs,) = (json.loads(text)["inputs"] for text in re.findall(r"-d '(.+)'", page))
    config = settings.reader(algorithm).parse(["--env", env, "--hidden", "8"])
    network = config.make_network("float32")
    export(tmp_path, config, initial_arrays(network), precision="float32", env_steps=1)
    saved = tf.saved_model.load(str(tmp_path / "policy"), tags=["serve"]).signatures["serving_default"]
    takes = saved.structured_input_signature[1]
    assert takes.keys() == inputs.keys() == {"observations"}
    assert takes["observations"].dtype == tf.float32
    batch = np.float32(inputs["observations"])[:, : takes["observations"].shape[1]]
    found = saved(observations=tf.constant(batch))
    assert found.keys() == {"action", *others}
    assert all(f"`{name}`" in page for name in found)
    action = found["action"]
    expected = (tf.int32, [2]) if env == "CartPole-v1" else (tf.float32, [2, 1])
    assert (action.dtype, action.shape.as_list()) == expected


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_a_discrete_action_stays_the_number_that_the_network_chose(algorithm, tmp_path):
    config = settings.reader(algorithm).parse(["--env", "CartPole-v1", "--hidden", "8"])
    observations = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
    found, greedy = exported_action(tmp_path, config, observations)
    np.testing.assert_array_equal(found, greedy)
    assert set(found.tolist()) == {0, 1} and found.dtype.kind == "i"
