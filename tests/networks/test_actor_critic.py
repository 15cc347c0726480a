"""Actor and Critic: how they start, and what is computed in which precision."""

import numpy as np
import pytest

from tfrl.envs.spec import ArraySpec, Discrete
from tfrl.networks import actor_critic


def build(**changes):
    settings = {"torso": "cookbook", "share_torso": True, "precision": "float32", "seed": 1, **changes}
    specs = {"observation_spec": ArraySpec((10, 5, 1), "uint8"), "action_spec": Discrete(3)}
    return actor_critic.build(torso_options={}, **specs, **settings)


@pytest.mark.parametrize("share_torso", [True, False])
def test_heads_start_orthogonal_the_actors_near_zero(share_torso):
    network = build(share_torso=share_torso)
    for head, gain in ((network.actor.head, 0.01), (network.critic.head, 1.0)):
        kernel, bias = head.get_weights()
        products = kernel.T @ kernel
        np.testing.assert_allclose(products, gain**2 * np.eye(len(products)), rtol=1e-5, atol=1e-6 * gain**2)
        assert not bias.any()


def test_another_seed_is_another_network():
    one, other = build().get_weights(), build(seed=2).get_weights()
    assert set(one) == set(other)
    for name, weight in one.items():
        assert name.endswith("bias") or (weight != other[name]).any(), name


def test_a_bfloat16_torso_has_float32_heads():
    network = build(precision="bfloat16")
    assert network.actor.torso.get_layer("conv1").compute_dtype == "bfloat16"
    heads = network.actor.head, network.critic.head
    assert [head.compute_dtype for head in heads] == ["float32", "float32"]
    observations = np.random.default_rng(0).integers(0, 256, (4, 10, 5, 1), np.uint8)
    assert [output.dtype for output in network(observations)] == ["float32", "float32"]
    full = build()
    full.set_weights(network.get_weights())
    for found, expected in zip(network(observations), full(observations), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())


def test_shared_features_are_what_either_model_computes_alone():
    network = build()
    observations = np.random.default_rng(0).integers(0, 256, (4, 10, 5, 1), np.uint8)
    logits, values = network(observations)
    np.testing.assert_array_equal(logits, network.actor(observations))
    np.testing.assert_array_equal(values, network.critic(observations))
    assert logits.shape == (4, 3) and values.shape == (4,)
