"""The losses of BC, IQL, TD3+BC and CQL against NumPy, written from the papers' equations."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from packed_envs import packed
from recordings import write

from tfrl.algorithms import registry as settings
from tfrl.envs.observations import MASK
from tfrl.ops.graph import is_for_xla
from tfrl.workers import strategy
from tfrl.workers.data_parallel import TARGET, GradientStep

ROWS = 8


@functools.cache
def make_agent(folder, algorithm, env, *flags):
    write(folder / env, env, [4, 5])
    more = ["--dataset", str(folder / env), "--hidden", "6", "--batch-size", str(ROWS)]
    config = settings.reader(algorithm).parse([*more, *flags])
    module = __import__(f"tfrl.algorithms.{algorithm}", fromlist=["x"])
    kind = "".join(word.upper() for word in algorithm.split("_")) + "Agent"
    return config, getattr(module, kind)(config, strategy.make(config, None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


def rows_of(agent, seed=0):
    generator, network = np.random.default_rng(seed), agent.network
    spec, action = network.entrance.spec, network.distribution.action_spec
    normal = lambda *shape: generator.normal(size=(ROWS, *shape)).astype(np.float32)  # noqa: E731
    return {
        "observation": normal(*spec.shape),
        "next_observation": normal(*spec.shape),
        "action": 0.8 * action.uniform(generator, ROWS)
        if action.dtype == "float32"
        else action.uniform(generator, ROWS),
        "reward": normal(),
        "discount": generator.choice([0.0, 0.9], ROWS).astype(np.float32),
        "weight": np.ones(ROWS, np.float32),
        "noise": normal(agent.update_noise),
    }


def weights_of(agent, seed=1):
    """Weights that differ between networks and their targets, as after some training."""
    generator = np.random.default_rng(seed)
    return {
        name: tf.constant(vector.numpy() + 0.3 * generator.normal(size=vector.shape), tf.float32)
        for name, vector in agent.learning.weights().items()
    }


def loss_of(agent, step, rows, weights):
    tensors = {name: tf.constant(array) for name, array in rows.items()}
    return agent.steps[step].loss(weights, tensors, ())


def log_density(parameters, actions):
    """log pi of tanh-normal actions."""
    mean, x = np.split(np.asarray(parameters, np.float64), 2, axis=1)
    std = np.logaddexp(0, x + math.log(math.expm1(0.99))) + 0.01
    z = np.arctanh(np.asarray(actions, np.float64))
    normal = -0.5 * ((z - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return (normal - np.log(1 - np.tanh(z) ** 2)).sum(axis=1)


def test_cloning_makes_the_recorded_actions_likely(folder):
    for env in ("Pendulum-v1", "CartPole-v1"):
        _, agent = make_agent(folder, "bc", env, "--entropy-coef", "0.1")
        rows, weights = rows_of(agent), weights_of(agent)
        if env == "Pendulum-v1":
            rows["action"][0] = 1.0  # at the bound it counts as 0.999
        found = loss_of(agent, "policy", rows, weights)
        parameters = agent.network.outputs(weights, tf.constant(rows["observation"]))[0].numpy()
        if env == "Pendulum-v1":
            wanted = -log_density(parameters, np.clip(rows["action"], -0.999, 0.999))
            error = np.abs(np.tanh(parameters[:, :1]) - rows["action"]).mean(axis=1)
            np.testing.assert_allclose(found.metrics["action_error"], error, atol=1e-5)
        else:
            logits = parameters - np.log(np.exp(parameters).sum(axis=1, keepdims=True))
            wanted = -logits[np.arange(ROWS), rows["action"]]
            same = parameters.argmax(axis=1) == rows["action"]
            np.testing.assert_array_equal(found.metrics["accuracy"], same)
        np.testing.assert_allclose(found.metrics["policy_loss"], wanted, rtol=1e-4)
        np.testing.assert_allclose(found.losses, wanted - 0.1 * found.metrics["entropy"].numpy(), rtol=1e-4)


@pytest.mark.parametrize("env", ["Pendulum-v1", "CartPole-v1"])
def test_iql_follows_its_equations(folder, env):
    _, agent = make_agent(folder, "iql", env, "--expectile", "0.8", "--temperature", "2")
    rows, weights = rows_of(agent), weights_of(agent)
    shown, following = (tf.constant(rows[name]) for name in ("observation", "next_observation"))
    value = agent._value(weights["value"], shown)[:, 0].numpy()
    after = agent._value(weights["value"], following)[:, 0].numpy()
    if env == "Pendulum-v1":
        q = lambda prefix: agent.network.qs(weights, prefix, shown, tf.constant(rows["action"])).numpy()  # noqa: E731
        parameters = agent.network.outputs(weights, shown)[0]
        log_prob = log_density(parameters, rows["action"])
    else:
        of_all = lambda prefix: agent.network.qs(weights, prefix, shown).numpy()  # noqa: E731
        q = lambda prefix: of_all(prefix)[:, np.arange(ROWS), rows["action"]]  # noqa: E731
        log_prob = np.log(tf.nn.softmax(agent.network.outputs(weights, shown)[0]).numpy())
        log_prob = log_prob[np.arange(ROWS), rows["action"]]
    u = q(TARGET).min(axis=0) - value
    np.testing.assert_allclose(
        loss_of(agent, "value", rows, weights).losses, np.where(u < 0, 0.2, 0.8) * u**2, rtol=1e-4
    )
    wanted = -np.minimum(np.exp(2 * u), 100) * log_prob
    np.testing.assert_allclose(loss_of(agent, "actor", rows, weights).losses, wanted, rtol=1e-3, atol=1e-5)
    target = rows["reward"] + rows["discount"] * after
    wanted = 0.5 * ((q("") - target) ** 2).sum(axis=0)
    np.testing.assert_allclose(loss_of(agent, "critics", rows, weights).losses, wanted, rtol=1e-4)


def test_td3_bc_clones_and_climbs(folder):
    _, agent = make_agent(folder, "td3_bc", "Pendulum-v1", "--bc-alpha", "1.5")
    rows, weights = rows_of(agent), weights_of(agent)
    shown = tf.constant(rows["observation"])
    actions = agent.actions(weights, "", shown)
    q = agent.network.qs(weights, "", shown, actions)[0].numpy()
    wanted = ((actions.numpy() - rows["action"]) ** 2).mean(axis=1) - 1.5 * q / np.abs(q).mean()
    np.testing.assert_allclose(loss_of(agent, "actor", rows, weights).losses, wanted, rtol=1e-4, atol=1e-6)


def test_cql_pushes_values_of_other_actions_down(folder):
    config, agent = make_agent(folder, "cql", "CartPole-v1", "--conservative-weight", "2")
    assert config.preset == "discrete"
    rows, weights = rows_of(agent), weights_of(agent)
    q_of = lambda name, of: agent.network.functions["q"](weights[name], tf.constant(rows[of])).numpy()  # noqa: E731
    q, best = q_of("q", "observation"), q_of("q", "next_observation").argmax(axis=1)
    target = rows["reward"] + rows["discount"] * q_of(TARGET + "q", "next_observation")[np.arange(ROWS), best]
    taken = q[np.arange(ROWS), rows["action"]]
    wanted = 0.5 * (taken - target) ** 2 + 2 * (np.log(np.exp(q).sum(axis=1)) - taken)
    np.testing.assert_allclose(loss_of(agent, "q", rows, weights).losses, wanted, rtol=1e-4)


def test_discrete_cql_takes_no_forbidden_action_as_a_maximum_or_an_alternative(folder):
    """A recorded action that its mask forbids, as other programs may record it, keeps its own value."""
    _, agent = make_agent(folder, "cql", packed("Masked"), "--conservative-weight", "2")
    rows, weights, generator = rows_of(agent), weights_of(agent), np.random.default_rng(3)
    places, masks = agent.network.entrance.spec.kind_places[MASK], {}
    for name in ("observation", "next_observation"):
        masks[name] = generator.random((ROWS, 5)) < 0.5
        masks[name][np.arange(ROWS), generator.integers(5, size=ROWS)] = True
        rows[name][:, places] = masks[name]
    forbids = ~masks["observation"]
    rows["action"] = np.where(forbids.any(axis=1), forbids.argmax(axis=1), 0).astype(rows["action"].dtype)
    assert forbids[np.arange(ROWS), rows["action"]].sum() > ROWS / 2
    q_of = lambda name, of: agent.network.functions["q"](weights[name], tf.constant(rows[of])).numpy()  # noqa: E731
    q = q_of("q", "observation").astype(np.float64)
    allowed = np.where(masks["next_observation"], q_of("q", "next_observation"), -np.inf)
    assert (allowed.argmax(axis=1) != q_of("q", "next_observation").argmax(axis=1)).any()
    after = q_of(TARGET + "q", "next_observation")[np.arange(ROWS), allowed.argmax(axis=1)]
    taken = q[np.arange(ROWS), rows["action"]]
    gap = np.log((np.exp(q) * masks["observation"]).sum(axis=1)) - taken
    found = loss_of(agent, "q", rows, weights)
    np.testing.assert_allclose(found.metrics["conservative_loss"], gap, rtol=1e-4, atol=1e-5)
    wanted = 0.5 * (taken - rows["reward"] - rows["discount"] * after) ** 2 + 2 * gap
    np.testing.assert_allclose(found.losses, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("algorithm", "compiled"), [("bc", True), ("iql", False), ("cql", False)])
def test_xla_compiles_no_parts_that_are_computed_side_by_side(folder, monkeypatch, algorithm, compiled):
    """XLA would compute one after the other, because operations have one thread each."""
    _, agent = make_agent(folder, algorithm, "Pendulum-v1")
    (step, *_) = agent.learning.steps.values()
    seen, check = [], GradientStep.check
    monkeypatch.setattr(GradientStep, "check", lambda *a: seen.append(is_for_xla()) or check(*a))
    rows = {name: tf.constant(array) for name, array in rows_of(agent).items()}
    step.part_gradients(weights_of(agent), rows, ())
    assert seen == [compiled]


@pytest.mark.parametrize(("soft", "critics"), [(False, "min"), (True, "auto"), (False, "mean")])
def test_cql_weighs_sampled_actions_by_their_density(folder, soft, critics):
    count, flags = 3, ("--action-samples", "3", "--conservative-weight", "2", "--critics", critics)
    _, agent = make_agent(folder, "cql", "Pendulum-v1", *flags, *(["--soft-target"] if soft else []))
    rows, weights = rows_of(agent), weights_of(agent)
    network, noise = agent.network, rows["noise"][:, 2:].reshape(ROWS, 3, count)
    values = np.zeros((2, ROWS, 3, count))
    for i in range(ROWS):
        for kind in range(3):
            for k in range(count):
                if kind == 0:
                    action = np.float32([[math.erf(noise[i, 0, k] / math.sqrt(2))]])
                    density = math.log(0.5)
                else:
                    of = "observation" if kind == 1 else "next_observation"
                    outputs = network.outputs(weights, tf.constant(rows[of][i : i + 1]))[0]
                    action = network.distribution(outputs).sample(
                        tf.constant(noise[i : i + 1, kind, k : k + 1])
                    )
                    density = float(network.distribution(outputs).log_prob(action)[0])
                q = network.qs(weights, "", tf.constant(rows["observation"][i : i + 1]), tf.constant(action))
                values[:, i, kind, k] = q.numpy()[:, 0] - density
    taken = network.qs(weights, "", tf.constant(rows["observation"]), tf.constant(rows["action"])).numpy()
    gap = np.log(np.exp(values.reshape(2, ROWS, -1)).mean(axis=2)) - taken
    found = loss_of(agent, "critics", rows, weights)
    np.testing.assert_allclose(found.metrics["conservative_loss"], gap.mean(axis=0), rtol=1e-3, atol=1e-4)
    following = tf.constant(rows["next_observation"])
    parameters = network.outputs(weights, following)[0].numpy().astype(np.float64)
    std = np.logaddexp(0, parameters[:, 1:] + math.log(math.expm1(0.99))) + 0.01
    action = np.tanh(parameters[:, :1] + std * rows["noise"][:, :1])
    after = network.qs(weights, TARGET, following, tf.constant(action, tf.float32)).numpy()
    after = after.mean(axis=0) if critics == "mean" else after.min(axis=0)
    if soft:
        after -= math.exp(weights["log_alpha"]) * log_density(parameters, action)
    bellman = 0.5 * ((taken - rows["reward"] - rows["discount"] * after) ** 2).sum(axis=0)
    np.testing.assert_allclose(found.losses, bellman + 2 * gap.sum(axis=0), rtol=1e-3, atol=1e-4)
