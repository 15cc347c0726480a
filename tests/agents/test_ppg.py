"""PPG's agent: an auxiliary step against a float64 computation, what a phase learns from, learning."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from learners import Present
from small_phases import assert_same, finish, make, settings

from tfrl.algorithms.ppg import AUXILIARY


@pytest.fixture
def small(tmp_path):
    return functools.partial(settings, tmp_path)


def log_softmax(logits):
    logits = tf.cast(logits, tf.float64)
    return logits - tf.math.log(tf.reduce_sum(tf.exp(logits), axis=1, keepdims=True))


@pytest.mark.parametrize("share", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_auxiliary_step_equals_adam_on_the_oracles_gradient(small, share):
    config = small(share_torso=share, beta_clone=2.0)
    agent = make(config).agent
    generator, network = np.random.default_rng(0), Present(agent)
    images = generator.integers(0, 256, (32, 10, 5, 1)).astype(np.uint8)
    targets = generator.normal(size=32).astype(np.float32)
    old = generator.normal(size=(32, 3)).astype(np.float32)
    before = {k: v.copy() for k, v in agent.get_weights().items()}

    def head(name, x):
        kernel, bias = agent.network.functions[name].arrays(network.weights[name])
        return x @ kernel + bias

    def torso(name):
        return agent.network.functions[name](network.weights[name], tf.constant(images))

    with tf.GradientTape() as tape:
        network.watch(tape)
        features = torso("torso" if share else "actor_torso")
        others = tf.stop_gradient(features) if share else torso("critic_torso")
        value, auxiliary = (
            tf.cast(head(name, x), tf.float64)[:, 0]
            for x, name in ((others, "critic"), (features, "auxiliary"))
        )
        now = log_softmax(head("actor", features))
        then = log_softmax(old)
        kl = tf.reduce_mean(tf.reduce_sum(tf.exp(then) * (then - now), axis=1))
        of_auxiliary, of_critic = (tf.reduce_mean(0.5 * (v - targets) ** 2) for v in (auxiliary, value))
        loss = of_auxiliary + 2.0 * kl + of_critic
    grads = network.gradients(tape, loss)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    metrics = agent.auxiliary_step(images[None], targets[None], old[None])
    np.testing.assert_allclose([*metrics.values()], [of_auxiliary, kl, of_critic, norm], rtol=1e-4)
    for key, grad in grads.items():
        weight = before[key]
        step = config.aux_lr * grad / (np.abs(grad) + config.adam_epsilon / np.sqrt(0.001))
        tolerance = config.aux_lr * 5e-3
        np.testing.assert_allclose(
            agent.get_weights()[key], weight - step, rtol=0, atol=tolerance, err_msg=key
        )


def test_only_the_auxiliary_phase_trains_a_shared_torso_on_values(small):
    weights = []
    for coefficient in (0.0, 1.0):
        learner = make(
            small(share_torso=True, value_coef=coefficient, logdir=small().logdir + str(coefficient))
        )
        finish(learner, 1)
        weights.append(learner.weights())
    assert (weights[0]["critic/head/kernel"] != weights[1]["critic/head/kernel"]).any()
    for name in weights[0]:
        if not name.startswith("critic"):
            np.testing.assert_array_equal(weights[0][name], weights[1][name], err_msg=name)


def test_an_auxiliary_pass_takes_every_sample_once_and_clones_the_old_policy(small):
    learner = make(small())
    agent, taken, rollouts, wanted = learner.agent, [], [], []
    collect, step = learner.collect, agent.auxiliary_step

    def collected():
        rollouts.append(collect())
        return rollouts[-1]

    def stepped(observations, targets, logits):
        taken.append((observations[0].copy(), targets[0].copy(), logits[0].copy()))
        return step(observations, targets, logits)

    learner.collect, agent.auxiliary_step = collected, stepped
    for _ in range(2):
        learner.update()
        wanted.append((rollouts[-1].observations[0, :-1].copy(), agent.targets[0].copy()))
    old = [Present(agent)(o.reshape(-1, 10, 5, 1))[0].numpy() for o, _ in wanted]
    before = learner.weights()["actor/head/kernel"].copy()
    while learner.update() is None:
        pass
    assert (learner.weights()["actor/head/kernel"] != before).any()
    assert len(taken) == 2 * 2 * 4  # passes, updates, minibatches
    expected = sorted(
        (target, *image.reshape(-1), *np.round(logits, 4))
        for (images, targets), of_policy in zip(wanted, old, strict=True)
        for target, image, logits in zip(
            targets.reshape(-1), images.reshape(-1, 10, 5, 1), of_policy, strict=True
        )
    )
    for epoch in (taken[:8], taken[8:]):
        found = sorted(
            (target, *image.reshape(-1), *np.round(logits, 4))
            for images, targets, of_policy in epoch
            for target, image, logits in zip(targets, images, of_policy, strict=True)
        )
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert any((a[1] != b[1]).any() for a, b in zip(taken[:8], taken[8:], strict=True))


RECURRENT = {"memory": "lstm", "memory_size": 16, "memory_inputs": True, "sequence_length": 8}


@pytest.mark.long
@pytest.mark.parametrize("memory", [{}, RECURRENT], ids=["without memory", "recurrent"])
def test_two_replicas_give_the_results_of_one(small, tmp_path, memory):
    runs = [finish(make(small(replicas=r, logdir=str(tmp_path / str(r)), **memory)), 3) for r in (1, 2)]
    (history, weights), (others, found) = runs
    assert [("train/aux_policy_kl" in m) for m in history] == [False, True, False]
    assert history[1]["train/aux_policy_kl"] > 0
    for metrics, other in zip(history, others, strict=True):
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)
    assert_same(found, weights)


@pytest.mark.long
def test_the_auxiliary_phase_begins_with_the_old_recurrent_policy(small):
    """This holds if each sequence begins with the stored recurrent state."""
    learner = make(small(**RECURRENT))
    agent, divergences = learner.agent, []
    weights = agent.get_weights()
    weights["actor/head/kernel"] = weights["actor/head/kernel"] * 100
    agent.learning.assign("actor", agent.network.join(weights)["actor"])

    def looked_at(*rows):
        """Both divergences, with the memory and with none, and no step."""
        for factor in (1, 0):
            rows[-1][..., :-1] *= factor
            batch = [tf.constant(array[0]) for array in rows]
            found = agent._auxiliary_loss(agent.learning.weights(), batch, ()).metrics
            divergences.append(float(tf.reduce_mean(found["aux_policy_kl"])))
        return dict.fromkeys(AUXILIARY, 0.0)

    agent.auxiliary_step = looked_at
    finish(learner, 2)
    assert learner._config.auxiliary_sequence == 4
    assert max(divergences[::2]) < 1e-6 and min(divergences[1::2]) > 1e-4


@pytest.mark.long  # PPO's loop learns catch in every `make test`
def test_a_learner_learns_catch(small):
    config = small(num_envs=32, num_steps=32, num_minibatches=8, policy_updates=8, aux_epochs=3, lr=3e-3)
    learner = make(dataclasses.replace(config, total_steps=10**6))
    for _ in range(12):
        history, _ = finish(learner, 8)
        if history[-1]["rollout/episode_return"] > 0.8:
            return
    pytest.fail(f"a mean return of {history[-1]['rollout/episode_return']}")
