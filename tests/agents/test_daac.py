"""DAAC and IDAAC: one update against a float64 computation, pairs, other topologies, exact resume."""

import copy
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from learners import Present, make, prefer, updated
from refusals import refusal

from tfrl.algorithms import daac
from tfrl.algorithms.registry import reader
from tfrl.run import rng

SMALL = daac.Config(
    **reader("daac").changes_of("openai-easy"),
    env="catch",
    run_name="small",
    torso="cookbook",
    precision="float32",
    num_levels=0,
    num_envs=8,
    num_steps=16,
    num_minibatches=2,
    value_epochs=2,
    order_coef=0.5,
    total_steps=1024,
    gamma=0.99,
    env_threads=1,
)


def small(**changes):
    return dataclasses.replace(SMALL, **changes)


def off_policy_rollout(learner):
    """A rollout of another policy with preferences, and another critic, so that both clips are at work."""
    prefer(learner.agent)
    rollout = learner.collect()
    generator = np.random.default_rng(0)
    for name, deviation in (("log_prob", 0.2), ("value", 0.3)):
        noise = generator.normal(0, deviation, rollout.rewards.shape)
        rollout.extras[name] += noise.astype(np.float32)
    rollout.rewards[:] = generator.normal(size=rollout.rewards.shape)
    return rollout


def oracle_estimates(config, rollout, last_value):
    """Normalised advantages and targets, float64 [T * B], by the recursion of GAE's paper."""
    values, rewards, first = (
        np.float64(x[0]) for x in (rollout.extras["value"], rollout.rewards, rollout.first)
    )
    advantages, running, following = np.zeros_like(rewards), 0.0, np.float64(last_value)
    for t in reversed(range(config.num_steps)):
        delta = rewards[t] + config.gamma * (1 - first[t]) * following - values[t]
        running = delta + config.gamma * config.gae_lambda * (1 - first[t]) * running
        advantages[t], following = running, values[t]
    targets = advantages + values
    normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return normal.reshape(-1), targets.reshape(-1)


def oracle_pairs(config, rollout, number):
    """Place of the pair in [T * B] and y, by loops over the episodes of each env."""
    numbers = rng.order_numbers(config.seed, number, range(config.num_envs), config.num_steps)
    place, earlier = (np.zeros((config.num_steps, config.num_envs), int) for _ in range(2))
    for b in range(config.num_envs):
        episode = np.cumsum([0, *rollout.first[0, :-1, b]])
        for t in range(config.num_steps):
            others = [u for u in range(config.num_steps) if episode[u] == episode[t] and u != t] or [t]
            u = others[int(numbers[t, b] * len(others))]
            place[t, b], earlier[t, b] = u * config.num_envs + b, u < t
    return place.reshape(-1), earlier.reshape(-1)


class Oracle:
    """The three losses of the paper, float64, for a rollout as one minibatch."""

    def __init__(self, config, learner, rollout, number):
        def flat(x):
            return x.reshape(-1, *x.shape[2:])

        self.config, self.network = config, Present(learner.agent)
        last_value = self.network(rollout.observations[0, -1])[1]
        self.advantages, self.targets = oracle_estimates(config, rollout, last_value)
        self.images, self.actions = flat(rollout.observations[0, :-1]), flat(rollout.actions[0])
        self.log_probs, self.values = (np.float64(flat(rollout.extras[n][0])) for n in ("log_prob", "value"))
        self.pairs, self.earlier = oracle_pairs(config, rollout, number)

    def head(self, name, x, layer="head"):
        arrays = self.network.network.functions[name]
        found = dict(zip(arrays.names, arrays.arrays(self.network.weights[name]), strict=True))
        kernel, bias = (tf.cast(found[f"{layer}/{part}"], tf.float64) for part in ("kernel", "bias"))
        return x @ kernel + bias

    def torso(self, name, images):
        function = self.network.network.functions[name]
        return tf.cast(function(self.network.weights[name], tf.constant(images)), tf.float64)

    def order(self):
        """D of the pairs: the probability that the second observation came first."""
        features = self.torso("actor_torso", self.images)
        both = tf.concat([features, tf.gather(features, self.pairs)], axis=1)
        logits = self.head("order", tf.nn.relu(self.head("order", both, "hidden")))
        return 1 / (1 + tf.exp(logits[:, 1] - logits[:, 0]))

    def classifier(self):
        d, y = self.order(), np.float64(self.earlier)
        return tf.reduce_mean(-y * tf.math.log(d) - (1 - y) * tf.math.log(1 - d))

    def policy(self):
        """The loss of the policy, and its parts by name."""
        config, features = self.config, self.torso("actor_torso", self.images)
        logits = self.head("actor", features)
        log_probs = logits - tf.math.log(tf.reduce_sum(tf.exp(logits), axis=1, keepdims=True))
        taken = np.eye(logits.shape[1])[self.actions]
        ratio = tf.exp(tf.reduce_sum(log_probs * taken, axis=1) - self.log_probs)
        near = tf.clip_by_value(ratio, 1 - config.clip_ratio, 1 + config.clip_ratio)
        predicted = self.head("advantage", tf.concat([features, taken], axis=1))[:, 0]
        d = self.order()
        parts = {
            "policy_loss": -tf.minimum(ratio * self.advantages, near * self.advantages),
            "advantage_loss": (predicted - self.advantages) ** 2,
            "entropy": -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=1),
            "order_loss": -0.5 * tf.math.log(d) - 0.5 * tf.math.log(1 - d),
        }
        parts = {name: tf.reduce_mean(x) for name, x in parts.items()}
        loss = parts["policy_loss"] + config.advantage_coef * parts["advantage_loss"]
        loss += config.order_coef * parts["order_loss"] - config.entropy_coef * parts["entropy"]
        return loss, parts

    def value(self):
        values = self.head("critic", self.torso("critic_torso", self.images))[:, 0]
        clip = self.config.clip_ratio
        near = self.values + tf.clip_by_value(values - self.values, -clip, clip)
        return 0.5 * tf.reduce_mean(tf.maximum((values - self.targets) ** 2, (near - self.targets) ** 2))


def test_one_update_equals_adam_on_the_oracles_gradients():
    """The classifier learns first, then the policy with the new classifier, then the value."""
    config = small(num_minibatches=1, value_epochs=1, lr=0.01, critic_lr=0.003, max_grad_norm=0.02)
    learner = make(config)
    learner.session.step = 5
    rollout = off_policy_rollout(learner)
    oracle = Oracle(config, learner, rollout, 5)
    state = copy.deepcopy(learner.agent.get_state())
    metrics = learner.learn(rollout)
    assert sorted(metrics) == sorted(learner.agent.metric_names)
    after = {name: w.copy() for name, w in learner.weights().items()}
    learner.agent.set_state(state)

    def check(compute, networks, rate):
        """Compares a step with the oracle's, and takes it; the oracle's result and the gradient's norm."""
        before = {name: w.copy() for name, w in learner.weights().items()}
        oracle.network = Present(learner.agent)
        with tf.GradientTape() as tape:
            oracle.network.watch(tape)
            found = compute()
            loss = found[0] if isinstance(found, tuple) else found
        gradients = oracle.network.gradients(tape, loss)
        gradients = {name: g for name, g in gradients.items() if name.split("/")[0] in networks}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            gradient = gradient * min(1.0, config.max_grad_norm / norm)
            step = rate * gradient / (np.abs(gradient) + config.adam_epsilon)
            expected = before[name] - step
            np.testing.assert_allclose(after[name], expected, rtol=0, atol=rate * 5e-3, err_msg=name)
        present = learner.agent.get_state()
        learner.agent.set_state(present | {f"weights/{name}": after[name] for name in gradients})
        return found, norm

    loss, _ = check(oracle.classifier, {"order"}, 0.01)
    assert metrics["train/classifier_loss"] == pytest.approx(float(loss), rel=1e-4)
    (_, parts), norm = check(oracle.policy, {"actor_torso", "actor", "advantage"}, 0.01)
    assert norm > config.max_grad_norm
    for name, part in [*parts.items(), ("grad_norm", norm)]:
        assert metrics[f"train/{name}"] == pytest.approx(float(part), rel=1e-4), name
    loss, norm = check(oracle.value, {"critic_torso", "critic"}, 0.003)
    assert metrics["train/value_loss"] == pytest.approx(float(loss), rel=1e-4)
    assert metrics["train/value_grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, weight in learner.weights().items():
        np.testing.assert_array_equal(weight, after[name], err_msg=name)  # no step is missing


def test_pairs_are_other_steps_of_the_same_episode():
    generator = np.random.default_rng(0)
    first = generator.random((2, 12, 3)) < 0.3
    counts = np.zeros((2, 12, 3, 12), int)
    for _ in range(3000):
        steps, earlier = daac.pairs(first, generator.random(first.shape))
        np.testing.assert_array_equal(earlier, steps < np.arange(12)[:, None])
        np.put_along_axis(counts, steps[..., None], np.take_along_axis(counts, steps[..., None], -1) + 1, -1)
    for r, t, b in np.ndindex(first.shape):
        episode = np.cumsum([0, *first[r, :-1, b]])
        others = [u for u in range(12) if episode[u] == episode[t] and u != t] or [t]
        expected = np.zeros(12)
        expected[others] = 3000 / len(others)
        np.testing.assert_allclose(counts[r, t, b], expected, atol=6 * np.sqrt(3000))


def test_the_value_learns_every_few_updates_and_in_more_passes():
    config = small(value_every=2, value_epochs=3, order_coef=0.0)
    learner = make(config)
    history, weights = updated(learner, 3)
    assert [("train/value_loss" in metrics) for metrics in history] == [True, False, True]
    state = learner.agent.get_state()
    assert int(state["agent/actor/step"]) == 3 * 2 and int(state["agent/critic/step"]) == 2 * 3 * 2
    assert not any(name.startswith("order") for name in weights)
    assert history[-1]["train/first_ratio_error"] < 1e-5


@pytest.mark.promise
@pytest.mark.long
def test_two_replicas_give_the_bits_of_one():
    runs = [updated(make(small(replicas=r, lr=1e-3)), 3) for r in (1, 2)]
    (history, weights), (others, found) = runs
    for metrics, other in zip(history, others, strict=True):
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"lag": 1}, {"memory": "gru", "memory_size": 16, "order_coef": 0.0}])
def test_a_restored_agent_continues_bit_for_bit(changes):
    from tfrl.training.command import learner_class

    config = small(lr=1e-3, value_every=2, **changes)
    whole = make(config, learner_class(config))
    updated(whole, 3)
    state = copy.deepcopy(whole.get_state())
    expected, weights = updated(whole, 2)
    other = make(config, learner_class(config))
    other.set_state(state)
    other.session.step = 3
    history, found = updated(other, 2)
    assert str(history) == str(expected)  # NaN is equal here
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    for learner in (whole, other):
        learner.close()


@pytest.mark.long
def test_a_learner_learns_catch():
    config = small(num_envs=32, num_steps=32, num_minibatches=4, value_epochs=4, lr=3e-3, total_steps=10**6)
    learner = make(dataclasses.replace(config, order_coef=0.001))
    for _ in range(100):
        if learner.update()["rollout/episode_return"] > 0.8:
            return
    pytest.fail(f"a mean return of {learner.episode_metrics()['rollout/episode_return']} after 100 updates")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--share-torso"], "a network each for policy and value: leave --share-torso out, or use ppo"),
        (["--order-coef", "0.1", "--memory", "gru"], "--order-coef compares single observations"),
        (["--order-hidden", "8"], "--order-hidden has no effect without --order-coef"),
        (["--value-coef", "1"], "--value-coef has no effect here: the value's network has its own optimizer"),
        (["--value-epochs", "0"], "--value-epochs must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(flags, words):
    assert words in refusal(reader("daac").parse, flags)


def test_the_defaults_are_the_settings_of_the_authors():
    config = reader("daac").parse([])
    assert (config.epochs, config.value_epochs, config.value_every) == (1, 9, 1)
    assert (config.advantage_coef, config.order_coef, config.entropy_coef) == (0.25, 0.0, 0.01)
    assert (config.lr, config.adam_epsilon, config.gamma, config.gae_lambda) == (5e-4, 1e-5, 0.999, 0.95)
    assert (config.num_envs, config.num_steps, config.num_minibatches) == (64, 256, 8)
    assert config.normalize_advantages == "batch" and not config.share_torso and config.max_grad_norm == 0.5
