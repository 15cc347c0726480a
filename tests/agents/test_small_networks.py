"""Small networks: compiled by XLA and acted by in NumPy, they are the same run on any topology."""

import learners
import numpy as np
import pytest
import tensorflow as tf

from tfrl.config import ppo
from tfrl.networks import array_policy

SHORT = [
    *("--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--epochs", "2"),
    *("--hidden", "16,16", "--lr", "1e-2", "--seed", "3"),
]


def make(tmp_path, *flags):
    """A learner without its trainer."""
    return learners.make(ppo.READER.parse([*flags, "--logdir", str(tmp_path), "--run-name", "run"]))


def run(learner, updates=3):
    """Metrics of each update, and the weights at the end."""
    metrics = [learner.update().metrics for _ in range(updates)]
    return metrics, {name: value.copy() for name, value in learner.weights().items()}


ENVS = [("CartPole-v1",), ("Pendulum-v1", "--renew-advantages", "--value-loss", "huber")]


@pytest.mark.parametrize("flags", ENVS, ids=lambda flags: flags[0])
def test_1_2_and_4_replicas_are_one_run_to_the_bit(tmp_path, flags):
    """XLA compiles the gradients of a part and the step; what is summed in between is not its business."""
    runs = [run(make(tmp_path, "--env", *flags, *SHORT, "--replicas", str(n))) for n in (1, 2, 4)]
    metrics, expected = runs[0]
    assert max(m["train/first_ratio_error"] for m in metrics) < 1e-5
    assert metrics[-1]["train/approx_kl"] > 0
    for _, found in runs[1:]:
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("share", ["--share-torso", "--no-share-torso"])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_numpy_acts_as_tensorflow_does(tmp_path, env, activation, share):
    agent = make(tmp_path, "--env", env, *SHORT, "--activation", activation, share).agent
    network, generator = agent.network, np.random.default_rng(0)
    for variable in network.trained_variables:
        variable.assign_add(0.1 * generator.normal(size=variable.shape))
    observations = generator.normal(size=(40, *network.actor.torso.input_shape[1:])).astype(np.float32)
    agent.set_observation_scaling(*(np.full(observations.shape[1], x, np.float32) for x in (0.3, 8.0)))
    noise = network.draw_noise(generator, 40)
    parameters, values = network(tf.constant(observations))
    drawn = tf.constant(noise)
    policy = network.distribution(parameters)
    actions, extras = agent.act(observations[None], noise[None])
    np.testing.assert_allclose(actions[0], policy.sample(drawn), atol=1e-5)
    log_probs = policy.log_prob(tf.constant(actions[0]))
    np.testing.assert_allclose(extras["log_prob"][0], log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(extras["value"][0], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(agent.sample(observations, noise), actions[0])
    np.testing.assert_allclose(agent.greedy(observations), policy.mode(), atol=1e-5)
    assert actions.dtype == policy.sample(drawn).dtype.as_numpy_dtype


def passes(agent):
    """Both ways of a forward pass, of observations [B, D]."""
    forward = tf.function(agent.network.forward_pass(on_gpu=False, at_once=2))
    yield lambda x: [y.numpy() for y in forward(tf.constant(x))]
    yield array_policy.ArrayPolicy(agent.network)


@pytest.mark.parametrize("hidden", ["64,64", "256,256,256", "13"])
def test_an_env_is_computed_alike_in_any_company(tmp_path, hidden):
    agent = make(tmp_path, "--env", "Pendulum-v1", *SHORT, "--hidden", hidden).agent
    observations = np.random.default_rng(0).normal(size=(75, 3)).astype(np.float32)
    for forward in passes(agent):
        everyone = forward(observations)
        for rows in (
            slice(0, 1),
            slice(5, 7),
            slice(3, 11),
            slice(1, 17),
            slice(40, None),
            slice(None, None, -1),
        ):
            for expected, found in zip(everyone, forward(observations[rows]), strict=True):
                np.testing.assert_array_equal(found, expected[rows])


def test_numpy_acts_by_the_weights_of_now(tmp_path):
    learner = make(tmp_path, "--env", "CartPole-v1", *SHORT)
    agent, observations, noise = (
        learner.agent,
        np.ones((1, 4, 4), np.float32),
        np.zeros((1, 4, 1), np.float32),
    )
    before, state = agent.act(observations, noise)[1]["value"], agent.get_state()
    learner.update()
    after = agent.act(observations, noise)[1]["value"]
    assert (after != before).all()
    agent.set_state(state)
    np.testing.assert_array_equal(agent.act(observations, noise)[1]["value"], before)
    agent.set_observation_scaling(np.ones(4, np.float32), np.ones(4, np.float32))
    assert (agent.act(observations, noise)[1]["value"] != before).all()


def test_the_compiled_step_is_that_of_keras():
    from tfrl.workers.optimizers import SummedAdam

    generator, runs = np.random.default_rng(0), []
    gradients = [[generator.normal(size=s).astype(np.float32) for s in ((3, 5), (5,))] for _ in range(4)]
    for compiled in (True, False):
        variables = [tf.keras.Variable(np.ones(s, np.float32)) for s in ((3, 5), (5,))]
        optimizer = SummedAdam(0.01, epsilon=1e-5)
        optimizer.build(variables)
        optimizer.scale_rate(variables[:1], 0.5)
        for step in gradients:
            if compiled:
                norm = tf.distribute.get_strategy().run(optimizer.compiled_step, args=(step, 1.0))
                np.testing.assert_allclose(norm, tf.linalg.global_norm(step), rtol=1e-6)
            else:
                optimizer.apply(tf.clip_by_global_norm(step, 1.0)[0])
        runs.append(optimizer.get_state() | {str(i): v.numpy() for i, v in enumerate(variables)})
    for name, value in runs[0].items():
        np.testing.assert_allclose(value, runs[1][name], rtol=1e-5, atol=1e-7, err_msg=name)
