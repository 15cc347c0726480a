"""DrAC: one update against a float64 computation, the bandit, other topologies, exact resume, learning."""

import copy
import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from learners import Present, prefer
from processes import results, rows
from refusals import refusal

from tfrl.algorithms import drac
from tfrl.algorithms.registry import reader
from tfrl.ops import augment
from tfrl.ops.graph import graph
from tfrl.run import rng

SMALL = drac.Config(
    env="catch",
    run_name="small",
    torso="cookbook",
    precision="float32",
    num_levels=0,
    num_envs=8,
    num_steps=16,
    num_minibatches=2,
    epochs=2,
    total_steps=1024,
    gamma=0.99,
    env_threads=1,
    normalize_advantages="batch",
)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


@pytest.fixture(scope="module")
def make():
    from learners import make

    return make


def off_policy_rollout(learner):
    """A rollout with rewards everywhere, of a policy that has preferences."""
    prefer(learner.agent)
    rollout = learner.collect()
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.2, rollout.extras["log_prob"].shape)
    rollout.extras["log_prob"] += noise.astype(np.float32)
    rollout.rewards[:] = generator.normal(size=rollout.rewards.shape)
    return rollout


def oracle_targets(config, learner, rollout):
    """Advantages and targets, float64 [T, B], by the recursion of the paper of GAE."""
    values, rewards, first = (
        np.float64(x[0]) for x in (rollout.extras["value"], rollout.rewards, rollout.first)
    )
    following = np.float64(Present(learner.agent)(rollout.observations[0, -1])[1])
    advantages, running = np.zeros_like(rewards), 0.0
    for t in reversed(range(config.num_steps)):
        delta = rewards[t] + config.gamma * (1 - first[t]) * following - values[t]
        running = delta + config.gamma * config.gae_lambda * (1 - first[t]) * running
        advantages[t], following = running, values[t]
    return advantages, advantages + values


def log_softmax(logits):
    logits = tf.cast(logits, tf.float64)
    return logits - tf.math.log(tf.reduce_sum(tf.exp(logits), axis=1, keepdims=True))


def oracle_loss(config, learner, rollout, network, *, epoch=0):
    """The loss of the whole rollout as one minibatch, and its two regularisers, float64, computed eagerly."""

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    advantages, targets = map(flat, oracle_targets(config, learner, rollout))
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    images = flat(rollout.observations[0, :-1])
    seeds = flat(rng.augmentation_seeds(config.seed, 5, range(8), config.num_steps)).copy()
    seeds[:, 1] += epoch
    augmented_by = graph(augment.AUGMENTATIONS[config.augment], jit_compile=True)
    augmented = np.concatenate(  # one by one
        [augmented_by(images[i : i + 1], seeds[i : i + 1]) for i in range(len(images))]
    )
    assert (augmented != images).any()
    logits, values = network(images)
    log_probs, values = log_softmax(logits), tf.cast(values, tf.float64)
    actions = flat(rollout.actions[0])
    ratio = tf.exp(
        tf.gather(log_probs, actions, batch_dims=1) - np.float64(flat(rollout.extras["log_prob"][0]))
    )
    clipped = tf.clip_by_value(ratio, 1 - config.clip_ratio, 1 + config.clip_ratio)
    loss = -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages))
    old = np.float64(flat(rollout.extras["value"][0]))
    near = old + tf.clip_by_value(values - old, -config.clip_ratio, config.clip_ratio)
    loss += (
        config.value_coef * 0.5 * tf.reduce_mean(tf.maximum((values - targets) ** 2, (near - targets) ** 2))
    )
    loss += config.entropy_coef * tf.reduce_mean(tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=1))
    other_logits, other_values = network(augmented)
    p = tf.stop_gradient(log_probs)
    of_policy = tf.reduce_mean(tf.reduce_sum(tf.exp(p) * (p - log_softmax(other_logits)), axis=1))
    difference = tf.cast(other_values, tf.float64) - tf.stop_gradient(values)
    of_value = tf.reduce_mean(0.5 * difference**2)
    return loss + config.augment_coef * (of_policy + of_value), of_policy, of_value


@pytest.mark.parametrize("name", ["crop", pytest.param("cutout", marks=pytest.mark.long)])
def test_one_step_equals_adam_on_the_oracles_gradient(make, name):
    config = small(
        augment=name,
        augment_coef=3.0,
        epochs=1,
        num_minibatches=1,
        lr=0.01,
        max_grad_norm=1e3,
    )
    learner = make(config)
    learner.session.step = 5
    rollout = off_policy_rollout(learner)
    network = Present(learner.agent)
    before = {k: v.copy() for k, v in learner.weights().items()}
    with tf.GradientTape() as tape:
        network.watch(tape)
        loss, of_policy, of_value = oracle_loss(config, learner, rollout, network)
    grads = network.gradients(tape, loss)
    metrics = learner.learn(rollout)
    assert sorted(metrics) == sorted(learner.agent.metric_names)
    expected = {"train/policy_regularizer": float(of_policy), "train/value_regularizer": float(of_value)}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    epsilon = config.adam_epsilon / np.sqrt(0.001)  # of Adam's first step, with its bias corrections
    for key, grad in grads.items():
        weight = before[key]
        step = config.lr * grad / (np.abs(grad) + epsilon)
        np.testing.assert_allclose(learner.weights()[key], weight - step, rtol=0, atol=config.lr * 2e-3)


@pytest.mark.long
def test_each_pass_augments_differently(make):
    """The weights do not change, so the regularisers are means over two passes of the oracle."""
    config = small(lr=1e-30, num_minibatches=1, epochs=2)
    learner = make(config)
    learner.session.step = 5
    rollout = off_policy_rollout(learner)
    first, second = (
        float(oracle_loss(config, learner, rollout, Present(learner.agent), epoch=e)[2]) for e in (0, 1)
    )
    assert first != second
    found = learner.learn(rollout)["train/value_regularizer"]
    assert found == pytest.approx((first + second) / 2, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("augmentation", ["crop", "ucb"])
def test_two_replicas_give_the_results_of_one(make, augmentation):
    from learners import updated

    runs = [updated(make(small(augment=augmentation, replicas=r, lr=1e-3)), 3) for r in (1, 2)]
    (history, weights), (others, found) = runs
    assert {m["train/augmentation"] for m in history} == (
        {0.0} if augmentation == "crop" else {0.0, 1.0, 3.0}
    )
    for metrics, other in zip(history, others, strict=True):
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("lag", [0, 1])
def test_a_restored_agent_continues_bit_for_bit(make, lag):
    """By then the bandit has tried all augmentations that fit catch, and chooses by their returns."""
    from learners import updated

    from tfrl.training.command import learner_class

    config = small(augment="ucb", lr=1e-3, lag=lag, total_steps=2048)
    whole = make(config, learner_class(config))
    updated(whole, 7)
    state = copy.deepcopy(whole.get_state())
    expected, weights = updated(whole, 2)
    other = make(config, learner_class(config))
    other.set_state(state)
    other.session.step = 7
    history, found = updated(other, 2)
    assert str(history) == str(expected)  # NaN is equal here
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    assert state.learner["bandit/counts"].sum() == 6 - lag and state.learner["bandit/last_choice"].shape == (
        1 + lag,
    )
    assert lag or state.learner["bandit/counts"].min() > 0
    for learner in (whole, other):
        learner.close()


@pytest.fixture(scope="module")
def five_updates(make):
    """Learners of UCB-DrAC after five updates, by their lag, with what their bandits were told meanwhile."""
    from tfrl.training.command import learner_class

    @functools.cache
    def learned(lag):
        config = small(augment="ucb", lr=1e-3, lag=lag)
        learner = make(config, learner_class(config))
        told, chosen, expected, bandit = [], [], [], learner.agent._bandit
        record, bandit.record = (
            bandit.record,
            lambda choice, mean: (told.append((choice, mean)), record(choice, mean)),
        )
        for update in range(5):
            rollout = learner.collect()
            assert lag == 0 or rollout.version == max(0, update - lag)
            expected.append(oracle_targets(learner.agent._config, learner, rollout)[1].mean())
            learner.learn(rollout)
            chosen.append(int(learner.agent._choice))
            learner.session.step += 1
        learner.close()
        return SimpleNamespace(learner=learner, told=told, chosen=chosen, expected=expected)

    return learned


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_bandit_gets_the_mean_target_after_its_choice(five_updates, lag):
    """Targets of the rollout that the weights after the choice collected, `lag` updates later."""
    found = five_updates(lag)
    assert [choice for choice, _ in found.told] == found.chosen[: 4 - lag] and len(set(found.chosen)) > 2
    means = [mean for _, mean in found.told]
    np.testing.assert_allclose(means, found.expected[1 + lag :], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_the_results_count_the_updates_of_each_augmentation(tmp_path):
    from learners import train

    from tfrl.training.command import learner_class

    config = small(augment="ucb", lag=1, logdir=str(tmp_path), eval_episodes=2)
    assert train(config, learner_class(config)) == 0
    names = list(augment.AUGMENTATIONS)
    chosen = [names[int(float(row["train/augmentation"]))] for row in rows(config.run_dir)]
    expected = {name: chosen.count(name) for name in ("crop", "random-conv", "flip", "cutout")}
    assert results(config.run_dir)["augmentations"] == expected and sum(expected.values()) == 8


@pytest.mark.long
def test_start_from_takes_the_weights_and_not_the_bandit(make, five_updates):
    learner, fresh = five_updates(0).learner, make(small(augment="ucb", lr=1e-3))
    weights = learner.weights()
    expected = fresh.get_state().learner
    fresh.agent.begin_with(learner.get_state().learner)
    found = fresh.get_state().learner
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[f"weights/{name}"], weight, err_msg=name)
    for name in expected:
        if name.startswith("bandit/"):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert learner.get_state().learner["bandit/counts"].sum() > 0 == expected["bandit/counts"].sum()


@pytest.mark.long  # PPO's loop learns catch in every `make test`
def test_a_learner_learns_catch(make):
    config = small(
        num_envs=32, num_steps=32, num_minibatches=4, epochs=4, lr=3e-3, total_steps=10**6, augment="cutout"
    )
    learner = make(config)
    for _ in range(60):
        if learner.update()["rollout/episode_return"] > 0.9:
            return
    pytest.fail(f"a mean return of {learner.episode_metrics()['rollout/episode_return']} after 60 updates")


def test_grey_and_long_images_have_fewer_augmentations():
    assert drac.fitting([(64, 64, 3)]) == tuple(augment.AUGMENTATIONS)
    assert drac.fitting([(10, 5, 1)]) == ("crop", "random-conv", "flip", "cutout")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--env", "catch", "--augment", "rotate"],
            "does not suit the images of catch, 10 x 5 with 1 channel",
        ),
        (["--env", "CartPole-v1"], "CartPole-v1 has vector observations; use ppo"),
        (["--augment", "crops"], "crop"),
        (["--augment-coef", "-1"], "--augment-coef must be at least 0"),
        (["--augment", "ucb", "--free-running"], "must know which weights collected a rollout"),
    ],
)
def test_what_cannot_be_augmented_is_refused(flags, words):
    assert words in refusal(reader("drac").parse, flags)
