"""The agent against an independent float64 computation, and against itself on other topologies."""

import numpy as np
import pytest
import tensorflow as tf
from learners import Present, prefer

from tfrl.cli.errors import TrainingError
from tfrl.run import rng

UPDATES = 3


def train(learner, updates=UPDATES):
    """Rollouts in env order and metrics of some updates, but for their times."""
    history = []
    for _ in range(updates):
        metrics, rollout = learner.update(), learner.rollout
        metrics = {name: value for name, value in metrics.items() if not name.startswith("time/")}
        arrays = {name: getattr(rollout, name) for name in ("observations", "actions", "rewards", "first")}
        arrays |= rollout.extras
        history.append(({name: rollout.by_env(x).copy() for name, x in arrays.items()}, metrics))
    return history


def weights(learner):
    """A copy of them, by name."""
    return {name: value.copy() for name, value in learner.weights().items()}


def largest_difference(found, expected):
    """Relative to each array's largest weight."""
    assert set(found) == set(expected)
    return max(np.abs(found[k] - w).max() / max(np.abs(w).max(), 1e-3) for k, w in expected.items())


# The oracle: nothing of it uses tfrl's returns, losses, distributions or optimizer


def oracle_gae(network, rollout, gamma, lam):
    """Advantages and targets [T, B] of a rollout of one replica, none of whose episodes is truncated."""
    assert not rollout.truncated.any()
    rewards, values, first = (
        np.float64(x[0]) for x in (rollout.rewards, rollout.extras["value"], rollout.first)
    )
    advantages, running = np.zeros_like(rewards), np.zeros_like(rewards[0])
    following = np.float64(network(tf.constant(rollout.observations[0, -1]))[1])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * (1 - first[t]) * following - values[t]
        running = delta + gamma * lam * (1 - first[t]) * running
        advantages[t], following = running, values[t]
    return advantages, advantages + values


def oracle_minibatch(network, config, rollout, steps):
    """Loss, its means, and the largest |ratio - 1| of one minibatch, as float64 tensors, computed eagerly.

    steps: int [B, T / M].
    """
    advantages, targets = oracle_gae(network, rollout, config.gamma, config.gae_lambda)
    pairs = [(t, b) for b, times in enumerate(steps) for t in times]
    at = tuple(np.array(pairs).T)
    advantage = advantages[at]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    target, old_value, old_log_prob = (
        np.float64(x[at]) for x in (targets, rollout.extras["value"][0], rollout.extras["log_prob"][0])
    )

    logits, value = network(tf.constant(rollout.observations[0][at]))
    logits, value = tf.cast(logits, tf.float64), tf.cast(value, tf.float64)
    log_probs = logits - tf.math.log(tf.reduce_sum(tf.exp(logits), axis=1, keepdims=True))
    taken = tf.reduce_sum(log_probs * np.eye(logits.shape[1])[rollout.actions[0][at]], axis=1)
    log_ratio = taken - old_log_prob
    ratio = tf.exp(log_ratio)
    eps = config.clip_ratio
    policy_loss = -tf.minimum(ratio * advantage, tf.clip_by_value(ratio, 1 - eps, 1 + eps) * advantage)
    clipped = old_value + tf.clip_by_value(value - old_value, -eps, eps)
    value_loss = 0.5 * (value - target) ** 2
    if config.clip_value:
        value_loss = tf.maximum(value_loss, 0.5 * (clipped - target) ** 2)
    entropy = -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=1)
    means = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": ratio - 1 - log_ratio,
        "clip_fraction": tf.cast(tf.abs(ratio - 1) > eps, tf.float64),
    }
    means = {name: tf.reduce_mean(x) for name, x in means.items()}
    loss = means["policy_loss"] + config.value_coef * means["value_loss"]
    return loss - config.entropy_coef * means["entropy"], means, float(tf.reduce_max(tf.abs(ratio - 1)))


def off_policy_rollout(learner):
    """A rollout that seems to come from another policy and critic, so that both clips are at work.

    The policy is given preferences first: where it is uniform, as at the start, the entropy has no gradient.
    """
    prefer(learner.agent)
    rollout = learner.collect()
    rng = np.random.default_rng(0)
    for name, deviation in (("log_prob", 0.2), ("value", 0.3)):
        rollout.extras[name] += rng.normal(0, deviation, rollout.rewards.shape).astype(np.float32)
    rollout.rewards[:] = rng.normal(size=rollout.rewards.shape)
    return rollout


def test_metrics_equal_a_float64_computation(small, learner):
    config = small(lr=0.0, seed=3)  # the weights stay as they are
    agent = learner(config)
    agent.session.step = 5
    rollout = off_policy_rollout(agent)
    steps = rng.minibatch_sequences(3, 5, range(8), each=16, epochs=2, num_minibatches=4, size=4) % 16
    steps = steps.reshape(-1, 8, 4)  # [E * M, B, T / M]
    oracles = [oracle_minibatch(Present(agent.agent), config, rollout, s) for s in steps]
    metrics = agent.learn(rollout)
    assert sorted(metrics) == sorted(agent.agent.metric_names)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"):
        expected = np.mean([float(means[name]) for _, means, _ in oracles])
        assert metrics[f"train/{name}"] == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert 0.05 < metrics["train/clip_fraction"] < 0.95
    assert metrics["train/first_ratio_error"] == pytest.approx(oracles[0][2], rel=1e-5)
    _, targets = oracle_gae(Present(agent.agent), rollout, config.gamma, config.gae_lambda)
    explained = 1 - np.var(targets - rollout.extras["value"][0]) / np.var(targets)
    assert metrics["train/explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert metrics["train/learning_rate"] == 0.0


def test_explained_variance_of_constant_targets_is_1_only_for_equal_values(small, learner):
    agent = learner(small(gamma=0.0))
    for value, explained in ((None, 0.0), (0.5, 1.0)):
        rollout = agent.collect()
        rollout.rewards[:] = 0
        if value is not None:
            rollout.extras["value"][:] = value
        assert agent.learn(rollout)["train/explained_variance"] == explained


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"max_grad_norm": 0.05, "lr_schedule": "linear"}, 0.0025),  # it is the seventh update of eight
        pytest.param({"max_grad_norm": 100.0, "clip_value": False}, 0.01, marks=pytest.mark.long),
    ],
)
def test_one_step_equals_adam_on_the_oracles_clipped_gradient(small, learner, changes, rate):
    config = small(epochs=1, num_minibatches=1, lr=0.01, entropy_coef=0.1, **changes)
    agent = learner(config)
    agent.session.step = 6
    rollout = off_policy_rollout(agent)
    network, before = Present(agent.agent), weights(agent)
    with tf.GradientTape() as tape:
        network.watch(tape)
        everything = np.tile(np.arange(config.num_steps), (config.num_envs, 1))
        loss, _, _ = oracle_minibatch(network, config, rollout, everything)
    grads = network.gradients(tape, loss)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    metrics = agent.learn(rollout)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)  # before clipping
    assert 0.05 < norm < 100
    assert metrics["train/learning_rate"] == rate
    for name, grad in grads.items():
        grad = grad * min(1.0, config.max_grad_norm / norm)
        # Adam's first step: the bias corrections leave g / (|g| + epsilon), the latter scaled.
        scaled_epsilon = config.adam_epsilon / np.sqrt(0.001)
        step = rate * grad / (np.abs(grad) + scaled_epsilon)
        np.testing.assert_allclose(agent.weights()[name], before[name] - step, rtol=0, atol=rate * 2e-3)


@pytest.mark.parametrize(("precision", "updates"), [("float32", UPDATES), ("bfloat16", 1)])
def test_the_first_ratio_is_1(small, learner, precision, updates):
    agent = learner(small(lr=3e-3, precision=precision))
    assert agent.agent.network.functions["torso"].layer.get_layer("conv1").compute_dtype == precision
    for _, metrics in train(agent, updates):
        assert metrics["train/first_ratio_error"] < 1e-5
        assert metrics["train/approx_kl"] > 0  # though the policy does move after it


# Other topologies


@pytest.fixture(scope="module")
def one_replica(small, learner):
    """History and weights of the run that the others must equal."""
    alone = learner(small(lr=1e-3))
    return train(alone), weights(alone)


@pytest.mark.promise
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_replicas_gives_equal_results(small, learner, one_replica, replicas):
    agent, (history, expected_weights) = learner(small(replicas=replicas, lr=1e-3)), one_replica
    for (rollout, metrics), (expected, same) in zip(train(agent), history, strict=True):
        for name in ("observations", "actions", "rewards", "first"):
            np.testing.assert_array_equal(rollout[name], expected[name], err_msg=name)
        for name in ("log_prob", "value"):
            np.testing.assert_allclose(rollout[name], expected[name], rtol=1e-5, atol=1e-6)
        assert metrics == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)
    assert metrics["rollout/episodes"] > 0
    assert largest_difference(agent.weights(), expected_weights) < 1e-5
    for variable in agent.agent.learning.variables.values():
        first, *others = map(np.asarray, agent.session.runtime.local_results(variable))
        assert len(others) == replicas - 1
        assert all((first == other).all() for other in others)


@pytest.mark.promise
@pytest.mark.long
def test_the_default_network_gives_equal_rollouts_on_two_replicas(small, learner):
    runs = []
    for replicas in (1, 2):
        changes = {"env": "coinrun", "torso": "impala", "num_levels": 200, "num_steps": 8, "epochs": 1}
        agent = learner(small(**changes, num_minibatches=2, replicas=replicas))
        runs.append((train(agent, 2), weights(agent)))
    (expected, expected_weights), (found, found_weights) = runs
    for (rollout, _), (same, _) in zip(found, expected, strict=True):
        for name in ("observations", "actions", "rewards", "first"):
            np.testing.assert_array_equal(rollout[name], same[name], err_msg=name)
    assert largest_difference(found_weights, expected_weights) < 1e-5


@pytest.mark.parametrize("micro_batch", [1, pytest.param(8, marks=pytest.mark.long)])
def test_a_step_in_parts_equals_a_step_of_the_whole_minibatch(small, learner, micro_batch):
    runs = []
    for size in (32, micro_batch):
        agent = learner(small(micro_batch=size, lr=1e-3))
        runs.append((train(agent, 1)[0][1], weights(agent)))
    (expected, whole), (metrics, found) = runs
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    assert largest_difference(found, whole) < 1e-5


@pytest.mark.parametrize("steps", [[1, 3, 2, 2], pytest.param([4, 4], marks=pytest.mark.long)])
def test_metrics_do_not_depend_on_the_number_of_steps_in_a_call(small, learner, steps):
    found = []
    for steps_a_call in ([1] * 8, steps):
        agent = learner(small(lr=1e-3, epochs=1, num_minibatches=8))
        calls = iter(steps_a_call)
        agent.agent._minibatches_a_call = lambda calls=calls: next(calls)
        found.append(agent.learn(agent.collect()))
        assert next(calls, None) is None
    assert found[0] == found[1]


# Options


def steps_taken(agent):
    return int(agent.agent.get_state()["agent/actor/step"])


def test_the_kl_stop_ends_the_update_early(small, learner):
    agent = learner(small(target_kl=1e-9, lr=1e-2))
    metrics = agent.learn(agent.collect())
    assert steps_taken(agent) == 2  # the first minibatch's divergence is 0, the second's is not
    assert metrics["train/approx_kl"] > 1e-9 / 2
    agent = learner(small(target_kl=1e9, lr=1e-2))
    agent.learn(agent.collect())
    assert steps_taken(agent) == 8


def test_the_kl_stop_and_the_ratio_error_include_all_replicas(small, learner):
    """Only one of two replicas sees another policy, so the mean is half of its divergence."""
    agent = learner(small(replicas=2, lr=0.0, target_kl=0.004))
    # Divergences of 0.005 and 0.021: its own would end the first update, and the other's never the second.
    for moved, log_ratio, steps in ((0, 0.1, 8), (1, 0.2, 8 + 1)):
        rollout = agent.collect()
        rollout.extras["log_prob"][moved] -= log_ratio
        metrics = agent.learn(rollout)
        assert steps_taken(agent) == steps
        divergence = np.exp(log_ratio) - 1 - log_ratio
        assert metrics["train/approx_kl"] == pytest.approx(divergence / 2, rel=1e-3)  # of the steps taken
        assert metrics["train/first_ratio_error"] == pytest.approx(np.exp(log_ratio) - 1, rel=1e-4)


def test_separate_torsos_learn_at_their_own_rates(small, learner):
    agent = learner(small(share_torso=False, lr=1e-3, critic_lr=1e-9))
    before = weights(agent)
    assert {name.split("/")[0] for name in before} == {"actor_torso", "critic_torso", "actor", "critic"}
    assert (before["actor_torso/conv1/kernel"] != before["critic_torso/conv1/kernel"]).any()
    rollout = agent.collect()
    rollout.rewards[:] = np.random.default_rng(0).normal(size=rollout.rewards.shape)
    metrics = agent.learn(rollout)
    assert metrics["train/learning_rate"] == 1e-3
    for name, found in agent.weights().items():
        moved = np.abs(found - before[name]).max()
        assert moved < 1e-7 if name.startswith("critic") else moved > 1e-4, name


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_nan_reward_ends_the_run_and_names_the_loss(small, learner, replicas):
    agent = learner(small(replicas=replicas))
    rollout = agent.collect()
    rollout.rewards[-1, :, 0] = np.nan  # one env of the last replica
    with pytest.raises(TrainingError, match="policy_loss is not a finite number .minibatch 1 of the update"):
        agent.learn(rollout)
    assert steps_taken(agent) == 1  # all replicas stopped there


def test_a_state_gives_the_same_next_update_on_another_number_of_replicas(small, learner):
    before = learner(small(lr=1e-3))
    train(before, 1)
    state = before.get_state()
    after = learner(small(lr=1e-3, replicas=2))
    after.set_state(state)
    after.session.step = 1
    ((expected, metrics),), ((actual, same),) = train(before, 1), train(after, 1)
    for name in ("actions", "rewards"):
        np.testing.assert_array_equal(actual[name], expected[name])
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)
    assert largest_difference(after.weights(), before.weights()) < 1e-5


@pytest.mark.long
def test_weights_of_another_network_are_refused(small, learner):
    agent = learner(small())
    wrong = weights(agent)
    wrong["actor/head/kernel"] = wrong["actor/head/kernel"][:, :2]
    with pytest.raises(ValueError, match="actor/head/kernel has shape"):
        agent.agent.network.join(wrong)
    del wrong["actor/head/kernel"]
    with pytest.raises(ValueError, match="actor/head/kernel is in only one of the two"):
        agent.agent.network.join(wrong)


def test_the_torso_is_as_wide_as_asked_for(small, learner):
    for width in (1, 2):
        weights = learner(small(torso="impala", torso_width=width)).weights()
        assert weights["torso/stage3_conv/kernel"].shape == (3, 3, 32 * width, 32 * width)


def test_sampled_actions_follow_the_policy(small, learner):
    agent = learner(small())
    observations = agent.collect().observations[0, 0]
    logits, expected_values = (x.numpy() for x in Present(agent.agent)(observations))
    noise = np.full((8, 1), 0.7, np.float32)
    (actions,), extras = agent.agent.acting.sample(observations[None], noise[None])
    np.testing.assert_array_equal(agent.agent.acting.act(observations, noise), actions)
    log_probs = logits[range(8), actions] - np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(extras["log_prob"][0], log_probs, 1e-4)
    np.testing.assert_allclose(extras["value"][0], expected_values, rtol=1e-5, atol=1e-6)


def test_autograph_rewrites_the_loop_over_gradient_steps_and_little_else(small, learner, converted):
    """AutoGraph would take longer than all other work of TensorFlow in a process's first call."""
    learner(small()).update()
    assert "PPOAgent._take_minibatches" in converted and "PPOAgent._take_minibatch" not in converted
    assert len({*converted}) < 8, converted
