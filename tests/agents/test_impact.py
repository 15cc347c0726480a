"""IMPACT's update against an independent float64 computation, and on other topologies."""

import learners
import numpy as np
import pytest
import tensorflow as tf
from learners import Present, prefer
from refusals import refusal
from slow_returns import vtrace

from tfrl.algorithms import ppo
from tfrl.algorithms.impact import Config
from tfrl.algorithms.registry import reader


def small(kind=Config, **changes):
    defaults = {"env": "catch", "run_name": "small", "torso": "cookbook", "precision": "float32"}
    sizes = {"num_levels": 0, "num_envs": 8, "num_steps": 12, "num_minibatches": 2, "total_steps": 10_000}
    return kind(**{**defaults, **sizes, "gamma": 0.97, "lag": 1, "epochs": 2, "env_threads": 1, **changes})


@pytest.fixture
def learner():
    """Makes a learner without its loop."""
    made = []

    def make(config):
        made.append(learners.make(config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def gradients_and_metrics(agent, config, rollout, final):
    """Those of the first gradient step, from the whole rollout, in float64."""
    network = Present(agent)
    actions, acted = rollout.actions[0], np.float64(rollout.extras["log_prob"][0])
    steps, envs = actions.shape
    with tf.GradientTape() as tape:
        network.watch(tape)
        logits, values = network(tf.constant(rollout.observations[0].reshape(-1, 10, 5, 1)))
        logits = tf.reshape(tf.cast(logits, tf.float64), (steps + 1, envs, 3))[:-1]
        values = tf.reshape(tf.cast(values, tf.float64), (steps + 1, envs))
        log_probs = logits - tf.math.log(tf.reduce_sum(tf.exp(logits), axis=-1, keepdims=True))
        taken = tf.reduce_sum(log_probs * np.eye(3)[actions], axis=-1)
        log_ratios = taken.numpy() - acted
        fields = (np.float64(rollout.rewards[0]), rollout.first[0], rollout.truncated[0], final)
        targets, advantages = vtrace(config, config.gae_lambda, log_ratios, *fields, values.numpy())
        rho = np.minimum(np.exp(log_ratios), config.rho_bar)
        baseline = advantages.sum() / rho.sum()  # E_mu[rho grad log pi'] = 0, if rho has no bound
        advantages = (advantages - rho * baseline) / (advantages.std() + 1e-8)
        old = np.maximum(np.exp(taken.numpy()), np.exp(acted) / config.target_bound)
        ratio = tf.exp(taken) / old
        clipped = tf.clip_by_value(ratio, 1 - config.clip_ratio, 1 + config.clip_ratio)
        policy_loss = -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages))
        value_loss = tf.reduce_mean(0.5 * (values[:-1] - targets) ** 2)
        entropy = tf.reduce_mean(-tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1))
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    metrics = {
        "policy_loss": float(policy_loss),
        "value_loss": float(value_loss),
        "entropy": float(entropy),
        "approx_kl": 0.0,  # nothing has changed yet, whatever the bound does to the ratio
        "vtrace_rho": np.mean(np.minimum(np.exp(log_ratios), config.rho_bar)),
        "clip_fraction": np.mean(np.abs(ratio.numpy() - 1) > config.clip_ratio),
        "first_ratio_error": np.abs(ratio.numpy() - 1).max(),
        "explained_variance": 1 - np.var(targets - values.numpy()[:-1]) / np.var(targets),
    }
    return network.gradients(tape, loss), metrics


def off_policy(one):
    """A rollout of another policy, with rewards that vary and an episode that was cut off."""
    prefer(one.agent)
    rollout = one.collect()
    generator = np.random.default_rng(0)
    rollout.extras["log_prob"] += generator.normal(0, 0.7, rollout.rewards.shape).astype(np.float32)
    rollout.extras["value"] += 5.0  # those of the weights that acted are not used
    rollout.rewards[:] = generator.normal(size=rollout.rewards.shape)
    rollout.truncated[0, 3, 1] = rollout.first[0, 3, 1] = True
    rollout.final_observations[0, 3, 1] = generator.integers(256, size=(10, 5, 1)).astype(np.uint8)
    return rollout


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"rho_bar": 1.2, "c_bar": 0.8, "target_bound": 1.2}, marks=pytest.mark.long),
        pytest.param({"normalize_advantages": "batch"}, marks=pytest.mark.long),
    ],
)
def test_one_step_equals_a_float64_computation(learner, changes):
    sizes = {"num_minibatches": 1, "epochs": 1, "lr": 0.01, "entropy_coef": 0.1, "optimizer": "sgd"}
    config = small(**sizes, max_grad_norm=100.0, **changes)
    one = learner(config)
    rollout = off_policy(one)
    final = np.zeros(rollout.rewards.shape[1:])
    for (_, t, b), last in rollout.final_observations.items():
        final[t, b] = Present(one.agent)(last[None])[1].numpy()[0]
    grads, expected = gradients_and_metrics(one.agent, config, rollout, final)
    assert expected["clip_fraction"] > 0.02  # the bound of the target policy has an effect
    before = {name: value.copy() for name, value in one.weights().items()}
    metrics = one.learn(rollout)
    assert sorted(metrics) == sorted(one.agent.metric_names)
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, grad in grads.items():
        found = (before[name] - one.weights()[name]) / config.lr
        np.testing.assert_allclose(found, grad, rtol=0, atol=1e-4 * max(1.0, np.abs(grad).max()))


@pytest.mark.parametrize(
    "more",
    [{}, {"env": "Pendulum-v1", "torso": "mlp", "hidden": "16", "share_torso": False}],
)
def test_without_lag_an_update_is_ppos(learner, more):
    """V-trace is GAE where the policy has acted itself, and the target policy is the one that acted."""
    impact, of_ppo = learner(small(lag=0, **more)), learner(small(ppo.Config, lag=0, **more))
    for one in (impact, of_ppo):
        prefer(one.agent)
    (found, weights), (expected, same) = (learners.updated(one, 2) for one in (impact, of_ppo))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.pop("train/vtrace_rho") == pytest.approx(1.0)
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5, nan_ok=True)
    for name, weight in same.items():
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.promise
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_replicas_gives_equal_results(learner, replicas):
    one, many = (learner(small(replicas=r, lr=1e-2)) for r in (1, replicas))
    (expected, same), (found, weights) = (learners.updated(x, 3) for x in (one, many))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert found[-1]["train/vtrace_rho"] < 1  # the lag has an effect
    for name, array in same.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


@pytest.mark.promise
@pytest.mark.long
def test_a_restored_learner_continues_bit_for_bit(learner):
    config = small(lr=1e-2)
    whole, before, after = learner(config), learner(config), learner(small(lr=1e-2, replicas=2))
    learners.updated(whole, 3)
    learners.updated(before, 3)
    after.session.step = 3
    after.set_state(before.get_state())
    (expected, same), (found, weights) = (learners.updated(x, 2) for x in (whole, after))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    for name, array in same.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dropout", "0.1"], "--dropout 0.1 is not for impact"),
        (["--memory", "gru"], "--memory gru is not for impact"),
        (["--target-bound", "0.5"], "--target-bound must be"),
        (["--rho-bar", "0"], "--rho-bar must be"),
    ],
)
def test_settings_that_do_not_work(flags, words):
    assert words in refusal(reader("impact").parse, flags)


def test_the_defaults():
    config = reader("impact").parse(["--vtrace-lambda", "0.9"])
    assert (config.env, config.lag, config.gae_lambda) == ("coinrun", 1, 0.9)
    assert (config.num_steps, config.num_minibatches, config.epochs) == (64, 16, 1)
    assert reader("impact").parse(["--env", "CartPole-v1"]).preset == "gymnasium"
