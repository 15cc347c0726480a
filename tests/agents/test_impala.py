"""IMPALA's update against an independent float64 computation, and lockstep against a loop by hand."""

import time

import learners
import numpy as np
import pytest
import tensorflow as tf
from launching import until
from learners import Present, prefer
from slow_returns import vtrace

from tfrl.algorithms.impala import Config
from tfrl.algorithms.policies import RolloutActor
from tfrl.cli.errors import TrainingError
from tfrl.experience.collector import Collector
from tfrl.training.learner import env_spec
from tfrl.training.on_policy import OnPolicyLearner

FIELDS = ("observations", "actions", "rewards", "first", "truncated")


def small(**changes):
    defaults = {"env": "catch", "run_name": "small", "torso": "cookbook", "precision": "float32"}
    sizes = {"num_levels": 0, "num_envs": 8, "num_steps": 12, "num_minibatches": 2, "total_steps": 10_000}
    return Config(**{**defaults, **sizes, "gamma": 0.97, "lag": 1, "env_threads": 1, **changes})


@pytest.fixture
def learner():
    """Makes a learner without its loop."""
    made = []

    def make(config):
        made.append(learners.make(config, OnPolicyLearner))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(learner, updates):
    """Of each update: the rollout in env order, the metrics, and the weights before it."""
    history = []
    for _ in range(updates):
        before = learner.weights()
        rollout = learner.collect()
        arrays = {name: rollout.by_env(getattr(rollout, name)).copy() for name in FIELDS}
        arrays["log_prob"] = rollout.by_env(rollout.extras["log_prob"]).copy()
        metrics = learner.learn(rollout)
        learner.session.step += 1
        history.append((arrays, metrics, before))
    return history


# One update


def oracle(agent, config, rollout, final):
    """Gradients, float64, and metrics of a rollout that is one stretch."""
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
        targets, advantages = vtrace(config, config.vtrace_lambda, log_ratios, *fields, values.numpy())
        policy_loss = tf.reduce_mean(-taken * advantages)
        value_loss = tf.reduce_mean(0.5 * (values[:-1] - targets) ** 2)
        entropy = tf.reduce_mean(-tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1))
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    metrics = {
        "policy_loss": float(policy_loss),
        "value_loss": float(value_loss),
        "entropy": float(entropy),
        "approx_kl": np.mean(np.exp(log_ratios) - 1 - log_ratios),
        "vtrace_rho": np.mean(np.minimum(np.exp(log_ratios), config.rho_bar)),
        "explained_variance": 1 - np.var(targets - values.numpy()[:-1]) / np.var(targets),
    }
    return network.gradients(tape, loss), metrics


def off_policy(learner):
    """A rollout of another policy, with rewards that vary and two episodes that were cut off."""
    prefer(learner.agent)
    rollout = learner.collect()
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.5, rollout.rewards.shape).astype(np.float32)
    rollout.extras["log_prob"] += noise
    rollout.rewards[:] = generator.normal(size=rollout.rewards.shape)
    for t, b in ((3, 1), (11, 4)):
        rollout.truncated[0, t, b] = rollout.first[0, t, b] = True
        rollout.final_observations[0, t, b] = generator.integers(256, size=(10, 5, 1)).astype(np.uint8)
    return rollout


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": 100.0, "vtrace_lambda": 1.0},
        {"max_grad_norm": 0.05, "rho_bar": 1.2, "c_bar": 0.8, "lr_schedule": "linear", "num_steps": 10},
        *(
            pytest.param({"optimizer": name, "max_grad_norm": 100.0, **more}, marks=pytest.mark.long)
            for name, more in (("rmsprop", {"adam_epsilon": 1e-3}), ("sgd", {}))
        ),
    ],
)
def test_one_step_equals_a_float64_computation(learner, changes):
    config = small(**{"num_minibatches": 1, "num_steps": 12, "lr": 0.01, "entropy_coef": 0.1, **changes})
    one = learner(config)
    if config.num_steps == 12:
        rollout = off_policy(one)
    else:
        rollout = one.collect()
        rollout.extras["log_prob"] += np.random.default_rng(0).normal(0, 0.5, (1, 10, 8)).astype(np.float32)
    final = np.zeros(rollout.rewards.shape[1:])
    for (_, t, b), last in rollout.final_observations.items():
        final[t, b] = Present(one.agent)(last[None])[1].numpy()[0]
    grads, expected = oracle(one.agent, config, rollout, final)
    before = {name: value.copy() for name, value in one.weights().items()}
    one.session.step = 6
    metrics = one.learn(rollout)
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert sorted(metrics) == sorted(one.agent.metric_names)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    rate = 0.01 * (1 - 6 / config.num_updates) if config.lr_schedule == "linear" else 0.01
    assert metrics["train/learning_rate"] == pytest.approx(rate)
    for name, grad in grads.items():
        grad = grad * min(1.0, config.max_grad_norm / norm)
        if config.optimizer == "adam":
            step = rate * grad / (np.abs(grad) + config.adam_epsilon / np.sqrt(0.001))
        elif config.optimizer == "rmsprop":
            step = rate * grad / np.sqrt(0.01 * grad**2 + config.adam_epsilon)
        else:
            step = rate * grad
        np.testing.assert_allclose(one.weights()[name], before[name] - step, rtol=0, atol=rate * 5e-3)


def every_second_env(rollout, first):
    """A rollout of half of the envs."""

    def half(array):
        return np.ascontiguousarray(array[:, :, first::2])

    extras = {name: half(array) for name, array in rollout.extras.items()}
    return type(rollout)(extras=extras, **{name: half(getattr(rollout, name)) for name in FIELDS})


def test_a_minibatch_is_the_whole_rollouts_of_every_nth_env(learner):
    """Of two gradient steps, the first learns from the even envs and the second from the odd ones."""
    whole = learner(small(lag=0, lr=1e-3))
    halves = learner(small(lag=0, lr=1e-3, num_minibatches=1, num_envs=4))
    rollout = whole.collect()
    whole.learn(rollout)
    for first in (0, 1):
        halves.agent.update(every_second_env(rollout, first), number=0)
    for name, found in halves.weights().items():
        np.testing.assert_allclose(found, whole.weights()[name], rtol=0, atol=1e-6, err_msg=name)


def test_a_nan_ends_the_run(learner):
    one = learner(small(lag=0, replicas=2))
    rollout = one.collect()
    rollout.rewards[1, 8, 1] = np.nan  # of the second minibatch, on the second replica
    with pytest.raises(TrainingError, match="policy_loss is not a finite number .gradient step 2"):
        one.learn(rollout)


# Lockstep


@pytest.mark.parametrize("lag", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 3))])
def test_each_rollout_is_collected_with_weights_that_are_lag_updates_old(learner, lag):
    config = small(lag=lag, lr=1e-2)
    one = learner(config)
    history = run(one, 6)
    collector = Collector(config, env_spec(config), range(8), replicas=1)
    actor = RolloutActor(config, collector, "float32", at_once=1)
    for update, (found, metrics, _) in enumerate(history):
        actor.set_weights(history[max(0, update - lag)][2])
        noise = actor.acting.draw(update, range(8))
        expected = collector.collect(actor.acting, noise, lambda t: None)
        for name in ("observations", "actions", "first"):
            np.testing.assert_array_equal(found[name], getattr(expected, name)[0], err_msg=name)
        np.testing.assert_array_equal(found["log_prob"], expected.extras["log_prob"][0])
        if lag and update:
            assert metrics["train/approx_kl"] > 1e-7
            assert metrics["train/vtrace_rho"] < 1
    collector.close()


@pytest.mark.long
def test_without_lag_the_first_ratio_is_1(learner):
    one = learner(small(lag=0, num_minibatches=1, lr=1e-2))
    for _, metrics, _ in run(one, 3):
        assert metrics["train/approx_kl"] < 1e-10
        assert metrics["train/vtrace_rho"] == pytest.approx(1, abs=1e-6)


@pytest.mark.promise
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_replicas_gives_equal_results(learner, replicas):
    one, many = (learner(small(replicas=r, lr=1e-2)) for r in (1, replicas))
    for (found, metrics, _), (expected, same, _) in zip(run(many, 3), run(one, 3), strict=True):
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert metrics == pytest.approx(same, rel=1e-6, nan_ok=True)
    for name, array in one.weights().items():
        np.testing.assert_array_equal(many.weights()[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("lag", "at"),
    [
        pytest.param(1, 3, marks=[pytest.mark.long, pytest.mark.promise]),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((0, 2), (1, 0), (3, 2))),
    ],
)
def test_a_restored_learner_continues_bit_for_bit(learner, lag, at):
    """The state is also taken before the first update, and restored on another number of replicas."""
    config = small(lag=lag, lr=1e-2)
    whole, before = learner(config), learner(config)
    expected = run(whole, 5)[at:]
    run(before, at)
    state = before.get_state()
    after = learner(small(lag=lag, lr=1e-2, replicas=2))
    after.session.step = at
    after.set_state(state)
    for (found, _, _), (same, _, _) in zip(run(after, 5 - at), expected, strict=True):
        for name, array in same.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    for name, array in whole.weights().items():
        np.testing.assert_array_equal(after.weights()[name], array, err_msg=name)
    assert len({key.split("/")[1] for key in state.learner if key.startswith("acting/")}) == min(lag, at)


@pytest.mark.long
def test_a_slow_learner_does_not_increase_the_lag(learner):
    one = learner(small(lag=2, num_envs=8))
    run(one, 2)
    rollout = one.collect()  # update 2: rollouts up to 4 are begun
    kept = {name: getattr(rollout, name).copy() for name in FIELDS}
    begun = one.envs._begun
    until(lambda: all(ahead.done() for ahead in begun), 60)
    time.sleep(0.5)
    assert len(begun) == 2
    for name, array in kept.items():
        np.testing.assert_array_equal(getattr(rollout, name), array, err_msg=name)


def test_an_error_of_the_envs_ends_the_learner(learner):
    one = learner(small())
    run(one, 1)

    def broken(*_):
        raise ValueError("the env broke")

    one.envs._actor.collector._groups[0].env.act = broken
    with pytest.raises(ValueError, match="the env broke"):
        run(one, 3)


def test_closing_interrupts_a_rollout(learner):
    one = learner(small(num_steps=1200, num_minibatches=1, total_steps=10_000_000))
    env = one.envs._actor.collector._groups[0].env
    act = env.act
    env.act = lambda actions: (time.sleep(0.05), act(actions))
    one._prefetch.begin_rollouts(0, one.weights())
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 5
