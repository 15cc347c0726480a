"""Actor and Critic: how they start, and what is computed in which precision."""

import numpy as np
import pytest
import tensorflow as tf
from learners import build_actor_critic, initial_arrays

from tfrl.envs.spec import ArraySpec, Discrete


def build(**changes):
    specs = {"observation_spec": ArraySpec((10, 5, 1), "uint8"), "action_spec": Discrete(3)}
    return build_actor_critic(**specs, **changes)


@pytest.mark.parametrize("share_torso", [True, False])
def test_heads_start_orthogonal_the_actors_near_zero(share_torso):
    network = build(share_torso=share_torso)
    arrays = initial_arrays(network)
    for head, gain in (("actor", 0.01), ("critic", 1.0)):
        kernel, bias = arrays[f"{head}/head/kernel"], arrays[f"{head}/head/bias"]
        products = kernel.T @ kernel
        np.testing.assert_allclose(products, gain**2 * np.eye(len(products)), rtol=1e-5, atol=1e-6 * gain**2)
        assert not bias.any()


def test_another_seed_is_another_network():
    one, other = initial_arrays(build()), initial_arrays(build(seed=2))
    assert set(one) == set(other)
    for name, weight in one.items():
        assert name.endswith("bias") or (weight != other[name]).any(), name


def test_a_bfloat16_torso_has_float32_heads():
    network = build(precision="bfloat16")
    assert network.functions["torso"].layer.get_layer("conv1").compute_dtype == "bfloat16"
    heads = [network.functions["actor"].layer.head, network.functions["critic"].layer]
    assert [head.compute_dtype for head in heads] == ["float32", "float32"]
    observations = np.random.default_rng(0).integers(0, 256, (4, 10, 5, 1), np.uint8)
    weights = {name: tf.constant(vector) for name, vector in network.initial().items()}
    outputs = network.outputs(weights, tf.constant(observations))
    assert [output.dtype for output in outputs] == ["float32", "float32"]
    for found, expected in zip(outputs, build().outputs(weights, tf.constant(observations)), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("share_torso", [True, False])
def test_an_output_alone_is_that_of_the_whole_pass(share_torso):
    network, how = build(share_torso=share_torso), {"on_gpu": False, "at_once": 2}
    observations = tf.constant(np.random.default_rng(0).integers(0, 256, (4, 10, 5, 1), np.uint8))
    weights = {name: tf.constant(vector) for name, vector in network.initial().items()}
    logits, values = network.forward_pass(**how)(weights, observations)
    np.testing.assert_array_equal(network.output_pass(0, **how)(weights, observations), logits)
    np.testing.assert_array_equal(network.value_pass(**how)(weights, observations), values)
    assert logits.shape == (4, 3) and values.shape == (4,)


def test_a_torso_without_weights_is_a_vector_that_is_not_learned():
    """Sending an empty tensor to other workers would hang or crash them."""
    network = build(torso="linear")
    assert network.initial()["torso"].size > 0
    assert set(network.learned) == {"actor", "critic"}
    assert set(network.split(network.initial())) == {
        f"{part}/head/{name}" for part in ("actor", "critic") for name in ("kernel", "bias")
    }
