"""Small networks: compiled by XLA and acted by in NumPy, they are the same run on any topology."""

import learners
import numpy as np
import pytest
import tensorflow as tf

from tfrl.algorithms.registry import reader
from tfrl.envs.spec import ArraySpec
from tfrl.experience.rollout import Rollout
from tfrl.run import rng

SHORT = [
    *("--num-envs", "4", "--num-steps", "32", "--num-minibatches", "2", "--epochs", "2"),
    *("--hidden", "16,16", "--lr", "1e-2", "--seed", "3"),
]


def make(tmp_path, *flags):
    """A learner without its trainer."""
    return learners.make(reader("ppo").parse([*flags, "--logdir", str(tmp_path), "--run-name", "run"]))


def said(agent, observations, noise):
    """Actions of observations [B, D], and what an update is told of them, as of a rollout of one step."""
    rollout = Rollout.empty(
        *(1, 1, len(observations)),
        observation=ArraySpec(observations.shape[1:], "float32"),
        action=agent.network.distribution.action_spec,
    )
    rollout.observations[:, 0] = observations
    rollout.actions[:, 0], extras = agent.acting.sample(observations[None], noise[None])
    for name, values in extras.items():
        rollout.extras[name] = values[:, None]
    agent.acting.complete(rollout)
    return rollout.actions[0, 0], {name: array[0, 0] for name, array in rollout.extras.items()}


def run(learner, updates=3):
    """Metrics of each update, and the weights at the end."""
    metrics = [learner.update() for _ in range(updates)]
    return metrics, {name: value.copy() for name, value in learner.weights().items()}


def moved_by(agent, generator):
    """Changes of all weights that training changes."""
    names = [name for name in agent.get_weights() if not name.startswith("observations/")]
    return {n: lambda w: w + 0.1 * generator.normal(size=w.shape).astype(np.float32) for n in names}


ENVS = [
    ("CartPole-v1", "--optimizer", "nadam"),
    ("Pendulum-v1", "--renew-advantages", "--value-loss", "huber", "--reward-scale", "0.1"),
]


@pytest.mark.long
@pytest.mark.parametrize("flags", ENVS, ids=lambda flags: flags[0])
def test_1_2_and_4_replicas_give_equal_results(tmp_path, flags):
    """XLA compiles the gradients of each part and the optimizer, but not the sums between them."""
    runs = [run(make(tmp_path, "--env", *flags, *SHORT, "--replicas", str(n))) for n in (1, 2, 4)]
    metrics, expected = runs[0]
    assert max(m["train/first_ratio_error"] for m in metrics) < 1e-5
    assert metrics[-1]["train/approx_kl"] > 0
    for _, found in runs[1:]:
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("env", "share", "activation"),
    [
        ("CartPole-v1", "--share-torso", "tanh"),
        ("CartPole-v1", "--no-share-torso", "relu,elu"),
        ("CartPole-v1", "--share-torso", "silu,tanh"),
        ("CartPole-v1", "--no-share-torso", "sigmoid,leaky_relu"),
        ("Pendulum-v1", "--share-torso", "selu,softplus"),
        ("Pendulum-v1", "--no-share-torso", "softsign,relu6"),
        ("Pendulum-v1", "--no-share-torso", "gelu,mish"),
    ],
)
def test_numpy_acts_as_tensorflow_does(tmp_path, env, activation, share):
    agent = make(tmp_path, "--env", env, *SHORT, "--activation", activation, share).agent
    network, generator = agent.network, np.random.default_rng(0)
    learners.change(agent, moved_by(agent, generator))
    size = {"CartPole-v1": 4, "Pendulum-v1": 3}[env]
    observations = generator.normal(size=(40, size)).astype(np.float32)
    agent.set_observation_scaling(*(np.full(observations.shape[1], x, np.float32) for x in (0.3, 8.0)))
    noise = network.draw_noise(generator, 40)
    parameters, values = learners.Present(agent)(observations)
    drawn = tf.constant(noise)
    policy = network.distribution(parameters)
    actions, extras = said(agent, observations, noise)
    np.testing.assert_allclose(actions, policy.sample(drawn), atol=1e-5)
    log_probs = policy.log_prob(tf.constant(actions))
    np.testing.assert_allclose(extras["log_prob"], log_probs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(extras["value"], values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(agent.acting.act(observations, noise), actions)
    np.testing.assert_allclose(agent.acting.act(observations), policy.mode(), atol=1e-5)
    assert actions.dtype == policy.sample(drawn).dtype.as_numpy_dtype


def passes(agent):
    """Both ways of a forward pass, of observations [B, D]."""
    forward = tf.function(agent.network.forward_pass(on_gpu=False, at_once=2))
    yield lambda x: [y.numpy() for y in forward(agent.learning.weights(), tf.constant(x))]
    vectors = agent.learning.vectors()
    policy = agent.acting.numpy_policy
    parameters, values = policy.outputs(vectors), policy.values(vectors)
    yield lambda x: [parameters(x), values(x)]


@pytest.mark.parametrize("hidden", ["64,64", "256,256,256", "13"])
def test_actions_of_an_env_do_not_depend_on_other_envs(tmp_path, hidden):
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


def test_the_deviation_of_the_policy_is_a_metric(tmp_path):
    """Computed from the network's parameters: softplus, and 1 for a parameter of 0."""
    learner = make(tmp_path, "--env", "Pendulum-v1", *SHORT)
    generator = np.random.default_rng(0)
    learners.change(learner.agent, moved_by(learner.agent, generator))
    observations = generator.normal(size=(4, 3)).astype(np.float32)
    found = learner.deviation_metric(observations)
    parameters, _ = learners.Present(learner.agent)(observations)
    free = np.asarray(parameters)[:, 1]
    expected = np.log1p(np.exp(free + np.log(np.expm1(0.99)))).mean() + 0.01
    assert found == {"train/action_std": pytest.approx(expected, rel=1e-5)}
    assert "train/action_std" in learner.columns
    assert "train/action_std" not in make(tmp_path, "--env", "CartPole-v1", *SHORT).columns


def test_numpy_acts_with_the_newest_weights(tmp_path):
    learner = make(tmp_path, "--env", "CartPole-v1", *SHORT)
    agent, shown = learner.agent, (np.ones((4, 4), np.float32), np.zeros((4, 1), np.float32))
    before, state = said(agent, *shown)[1], agent.get_state()
    learner.update()
    after = said(agent, *shown)[1]
    assert all((after[name] != before[name]).all() for name in before)
    agent.set_state(state)
    again = said(agent, *shown)[1]
    agent.set_observation_scaling(np.ones(4, np.float32), np.ones(4, np.float32))
    scaled = said(agent, *shown)[1]
    for name, value in before.items():
        np.testing.assert_array_equal(again[name], value)
        assert (scaled[name] != value).all()


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_extras_of_a_whole_rollout_equal_those_of_single_steps(tmp_path, env):
    """Log-probabilities and values are computed at the rollout's end, and equal those of single env steps."""
    learner = make(tmp_path, "--env", env, *SHORT, "--replicas", "2")
    learners.change(learner.agent, moved_by(learner.agent, np.random.default_rng(0)))
    rollout, agent = learner.collect(), learner.agent
    noise = rng.action_noise(3, learner._session.step, range(4), 32, agent.network.draw_noise)
    noise = rollout.by_replica(noise)
    for at in np.ndindex(rollout.rewards.shape):
        actions, extras = said(agent, rollout.observations[at][None], noise[at][None])
        np.testing.assert_array_equal(actions[0], rollout.actions[at])
        assert {*extras} == {"parameters", "log_prob", "value"}
        for name, value in extras.items():
            np.testing.assert_array_equal(rollout.extras[name][at], value[0], err_msg=name)
