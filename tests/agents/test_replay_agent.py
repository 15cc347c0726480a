"""Gradient steps of DQN, DDPG, TD3 and SAC against float64 NumPy with numerical gradients, written apart."""

import functools
import math

import numpy as np
import pytest
from processes import train_here

from tfrl.algorithms import registry as settings
from tfrl.experience.replay import Batch
from tfrl.workers import strategy

K, ENVS, EACH = 3, 2, 4
ROWS = ENVS * EACH
COMMON = [
    "--hidden",
    "5,4",
    "--activation",
    "tanh",
    "--num-envs",
    "2",
    "--batch-size",
    "8",
    "--lr",
    "0.01",
]
STD_SHIFT = math.log(math.expm1(0.99))


@functools.cache
def make_agent(algorithm, *flags):
    epsilon = [] if "sgd" in flags else ["--adam-epsilon", "1e-3"]
    config = settings.reader(algorithm).parse([*COMMON, *epsilon, *flags])
    module = __import__(f"tfrl.algorithms.{algorithm}", fromlist=["x"])
    return config, getattr(module, f"{algorithm.upper()}Agent")(config, strategy.make(config, None))


def make_batch(agent, generator, observation_size, actions):
    shape = (K, ENVS, EACH)
    normal = lambda *more: generator.normal(size=(*shape, *more)).astype(np.float32)  # noqa: E731
    if actions:
        action = generator.integers(actions, size=shape).astype(np.int32)
    else:
        action = generator.uniform(-1, 1, (*shape, 1)).astype(np.float32)
    batch = Batch(
        observation=normal(observation_size),
        action=action,
        reward=normal(),
        discount=generator.choice([0.0, 0.98], shape).astype(np.float32),
        next_observation=normal(observation_size),
        weight=generator.uniform(0.2, 1, shape).astype(np.float32),
        rows=np.zeros(shape, np.int64),
    )
    return batch, normal(agent.update_noise)


def step_of(optimizer, gradients):
    """The last step of an optimizer, for a rate of 1, by the formulas of the papers."""
    t, g = len(gradients), gradients[-1]
    past = np.arange(t)[::-1].reshape(-1, *[1] * g.ndim)  # steps since each gradient
    mean_square = lambda decay: ((1 - decay) * decay**past * np.square(gradients)).sum(axis=0)  # noqa: E731
    if optimizer == "sgd":
        return g
    if optimizer == "rmsprop":
        return g / np.sqrt(mean_square(0.99) + 1e-3)
    mean = (0.1 * 0.9**past * np.array(gradients)).sum(axis=0)
    if optimizer == "nadam":
        mu = 0.9 * (1 - 0.5 * 0.96 ** np.arange(1, t + 2))
        mean = mu[t] * mean / (1 - mu.prod()) + (1 - mu[t - 1]) * g / (1 - mu[:t].prod())
    else:
        mean = mean / (1 - 0.9**t)
    return mean / (np.sqrt(mean_square(0.999) / (1 - 0.999**t)) + 1e-3)


class Slow:
    """Weights by name in float64, with slow copies `target_NAME`, Adam and numerical gradients."""

    def __init__(self, agent, generator, optimizer="adam"):
        """From the agent's own, moved so that slow copies differ from what is learned and heads are not 0."""
        state = agent.get_state()
        for name in state:
            if name.startswith("weights/") or "target_" in name or name.endswith("log_alpha"):
                state[name] = (state[name] + 0.3 * generator.normal(size=state[name].shape)).astype(
                    np.float32
                )
            elif name.startswith("agent/"):  # nadam's product is 1 at first
                state[name] = np.full_like(state[name], name.endswith("/product"))
        agent.set_state(state)
        names = agent.network.functions
        self.w = {n.removeprefix("weights/"): v for n, v in state.items() if n.startswith("weights/")}
        for network in agent.target_networks:
            flat = state[f"agent/target_{network}"]
            self.w |= {f"target_{network}/{n}": v for n, v in names[network].split(flat).items()}
        if "agent/log_alpha" in state:
            self.w["log_alpha"] = state["agent/log_alpha"].reshape(1)
        self.w = {name: value.astype(np.float64) for name, value in self.w.items()}
        self.gradients, self.optimizer = {}, optimizer

    def net(self, network, x):
        for layer in ("dense1", "dense2"):
            kernel = self.w[f"{network}/{layer}/kernel"]
            x = np.tanh(x @ kernel.reshape(kernel.shape[-2:]) + self.w[f"{network}/{layer}/bias"])
        out = x @ self.w[f"{network}/head/kernel"] + self.w[f"{network}/head/bias"]
        if f"{network}/value/kernel" in self.w:
            value = x @ self.w[f"{network}/value/kernel"] + self.w[f"{network}/value/bias"]
            out = value + out - out.mean(-1, keepdims=True)
        return out

    def of(self, network):
        return [name for name in self.w if name == network or name.startswith(f"{network}/")]

    def gradient(self, loss, network):
        """Central differences."""
        gradients = {}
        for name in self.of(network):
            value, g = self.w[name], np.zeros_like(self.w[name])
            for at in np.ndindex(value.shape):
                kept = value[at]
                value[at] = kept + 1e-5
                high = loss()
                value[at] = kept - 1e-5
                g[at] = (high - loss()) / 2e-5
                value[at] = kept
            gradients[name] = g
        return gradients

    def learn(self, loss, networks, rate, max_norm=None):
        """All gradients first, then the optimizer's step, of all gradients since the beginning."""
        for found in [self.gradient(loss, network) for network in networks]:
            norm = math.sqrt(sum((g**2).sum() for g in found.values()))
            scale = min(1.0, max_norm / norm) if max_norm else 1.0
            for name, g in found.items():
                history = self.gradients.setdefault(name, [])
                history.append(g * scale)
                self.w[name] = np.asarray(self.w[name] - rate * step_of(self.optimizer, history))

    def move(self, networks, tau):
        for network in networks:
            for name in self.of(network):
                self.w[f"target_{name}"] = (1 - tau) * self.w[f"target_{name}"] + tau * self.w[name]

    def assert_like(self, agent):
        state = agent.get_state()
        for name, value in self.w.items():
            if name == "log_alpha":
                np.testing.assert_allclose(state["agent/log_alpha"], value[0], atol=2e-6)
            elif not name.startswith("target_"):
                np.testing.assert_allclose(state[f"weights/{name}"], value, atol=3e-6, err_msg=name)
        for network in agent.target_networks:
            flat = state[f"agent/target_{network}"]
            for name, value in agent.network.functions[network].split(flat).items():
                np.testing.assert_allclose(value, self.w[f"target_{network}/{name}"], atol=3e-6, err_msg=name)


def rows_of(batch, noise, k):
    """The k-th batch as rows, float64."""
    names = ("observation", "action", "reward", "discount", "next_observation", "weight")
    fields = {name: getattr(batch, name)[k].reshape(ROWS, *getattr(batch, name).shape[3:]) for name in names}
    fields["noise"] = noise[k].reshape(ROWS, -1)
    return tuple(v if v.dtype == np.int32 else v.astype(np.float64) for v in fields.values())


def run(algorithm, flags, observation_size, actions, step):
    """Three gradient steps of both; `step(slow, config, rows, number)` takes one and gives the errors."""
    generator = np.random.default_rng(11)
    config, agent = make_agent(algorithm, *flags)
    slow = Slow(agent, generator, config.optimizer)
    batch, noise = make_batch(agent, generator, observation_size, actions)
    # In two calls: what is due every so many steps does not hang on how many a call takes.
    first, _, once = agent.begin_gradient_steps(batch, noise, steps_done=0, count=1, iteration=0).wait()
    later = Batch(*(np.roll(x, -1, axis=0) for x in batch))
    noise_of_later = np.roll(noise, -1, axis=0)
    pending = agent.begin_gradient_steps(later, noise_of_later, steps_done=1, count=K - 1, iteration=0)
    more, _, rest = pending.wait()
    errors = np.concatenate([once, rest])
    found = [step(slow, config, rows_of(batch, noise, k), k + 1) for k in range(K)]
    np.testing.assert_allclose(errors.reshape(K, ROWS), found, rtol=1e-4, atol=2e-5)
    slow.assert_like(agent)
    assert np.isfinite([*first.values(), *more.values()]).all()


DOUBLE_DUELING = [
    *("--env", "CartPole-v1", "--preset", "default"),
    *("--target-every", "2", "--tau", "0.4", "--dueling"),
]


def test_double_dueling_dqn_equals_a_slow_reference():
    def step(slow, config, rows, number):
        o, a, r, d, o2, weight, _ = rows
        each = np.arange(ROWS)
        y = r + d * slow.net("target_q", o2)[each, slow.net("q", o2).argmax(1)]
        error = y - slow.net("q", o)[each, a]
        slow.learn(lambda: (weight * 0.5 * (y - slow.net("q", o)[each, a]) ** 2).sum() / ROWS, ["q"], 0.01)
        if number % 2 == 0:
            slow.move(["q"], 0.4)
        return error

    run("dqn", DOUBLE_DUELING, 4, 2, step)


def test_unused_batches_change_nothing():
    """A call with 2 used batches of K equals a call with 2 batches."""
    _, agent = make_agent("dqn", *DOUBLE_DUELING)
    _, of_two = make_agent.__wrapped__("dqn", *DOUBLE_DUELING)  # a run's calls have equally many batches
    batch, noise = make_batch(agent, np.random.default_rng(5), 4, 2)
    before, found = agent.get_state(), []
    for one, size in ((agent, K), (of_two, 2), (agent, K)):
        one.set_state(before)
        some = Batch(*(x[:size] for x in batch))
        pending = one.begin_gradient_steps(some, noise[:size], steps_done=0, count=2, iteration=0)
        errors = pending.wait().errors
        assert errors.shape == (2, ENVS, EACH)
        found.append(one.get_state() | {"errors": errors})
    for name, value in found[0].items():
        for other in found[1:]:
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def test_dqn_with_huber_clipping_and_a_copied_target_equals_a_slow_reference():
    flags = [
        "--env",
        "CartPole-v1",
        "--preset",
        "default",
        "--no-double",
        "--target-every",
        "3",
        "--huber-delta",
        "0.5",
        "--max-grad-norm",
        "0.05",
    ]

    def step(slow, config, rows, number):
        o, a, r, d, o2, weight, _ = rows
        each = np.arange(ROWS)
        y = r + d * slow.net("target_q", o2).max(1)

        def loss():
            e = np.abs(y - slow.net("q", o)[each, a])
            return (weight * np.where(e < 0.5, 0.5 * e**2, 0.5 * (e - 0.25))).sum() / ROWS

        error = y - slow.net("q", o)[each, a]
        slow.learn(loss, ["q"], 0.01, max_norm=0.05)
        if number == 3:
            slow.move(["q"], 1.0)
        return error

    run("dqn", flags, 4, 2, step)


def halved_square(error, delta=None):
    """Half the squared error, or beyond `delta` Huber's."""
    size = np.abs(error)
    return (
        0.5 * error**2 if delta is None else np.where(size < delta, 0.5 * size**2, delta * (size - delta / 2))
    )


def deterministic(critics, delay, smoothed, target_every=None, delta=None):
    def step(slow, config, rows, number):
        o, a, r, d, o2, weight, noise = rows
        a2 = np.tanh(slow.net("target_actor", o2))
        if smoothed:
            a2 = np.clip(a2 + np.clip(0.2 * noise, -0.5, 0.5), -1, 1)
        q = lambda n, o, a: slow.net(n, np.concatenate([o, a], 1))[:, 0]  # noqa: E731
        y = r + d * np.min([q(f"target_{c}", o2, a2) for c in critics], axis=0)
        error = y - q("critic1", o, a)
        slow.learn(
            lambda: sum((weight * halved_square(y - q(c, o, a), delta)).sum() for c in critics) / ROWS,
            critics,
            0.02,
        )
        if number % delay == 0:
            slow.learn(lambda: -q("critic1", o, np.tanh(slow.net("actor", o))).sum() / ROWS, ["actor"], 0.01)
        if number % (target_every or delay) == 0:
            slow.move(["actor", *critics], 0.1)
        return error

    return step


DETERMINISTIC = ["--env", "Pendulum-v1", "--critic-lr", "0.02", "--tau", "0.1"]


@pytest.mark.parametrize(
    "optimizer",
    ["adam", *(pytest.param(name, marks=pytest.mark.long) for name in ("nadam", "rmsprop", "sgd"))],
)
def test_ddpg_with_each_optimizer_equals_a_slow_reference(optimizer):
    flags = [*DETERMINISTIC, "--optimizer", optimizer]
    run("ddpg", flags, 3, 0, deterministic(["critic1"], 1, False))


@pytest.mark.long
def test_td3_with_huber_loss_equals_a_slow_reference():
    step = deterministic(["critic1", "critic2"], 2, True, delta=0.5)
    run("td3", [*DETERMINISTIC, "--huber-delta", "0.5"], 3, 0, step)


@pytest.mark.parametrize(
    "target_every", [None, *(pytest.param(every, marks=pytest.mark.long) for every in (1, 3))]
)
def test_td3_equals_a_slow_reference(target_every):
    flags = [*DETERMINISTIC, *(["--target-every", str(target_every)] if target_every else [])]
    run("td3", flags, 3, 0, deterministic(["critic1", "critic2"], 2, True, target_every))


def tanh_normal(parameters, noise):
    """Actions and log-probabilities, by the density of a changed variable."""
    mean, x = np.split(parameters, 2, axis=1)
    std = np.log1p(np.exp(x + STD_SHIFT)) + 0.01
    z = mean + std * noise
    log_prob = -0.5 * noise**2 - np.log(std * np.sqrt(2 * np.pi)) - np.log(1 - np.tanh(z) ** 2)
    return np.tanh(z), log_prob.sum(1)


@pytest.mark.parametrize(
    ("alpha", "target_every", "delta"), [(None, 1, None), pytest.param(0.3, 2, 0.5, marks=pytest.mark.long)]
)
def test_sac_equals_a_slow_reference(alpha, target_every, delta):
    critics = ["critic1", "critic2"]

    def step(slow, config, rows, number):
        o, a, r, d, o2, weight, noise = rows
        if alpha is not None:
            assert number > 1 or slow.w["log_alpha"] != math.log(alpha)  # moved by this test
        temperature = np.exp(slow.w["log_alpha"])
        q = lambda n, o, a: slow.net(n, np.concatenate([o, a], 1))[:, 0]  # noqa: E731
        a2, log_prob = tanh_normal(slow.net("actor", o2), noise[:, :1])
        y = r + d * (np.min([q(f"target_{c}", o2, a2) for c in critics], axis=0) - temperature * log_prob)
        error = y - q("critic1", o, a)
        slow.learn(
            lambda: sum((weight * halved_square(y - q(c, o, a), delta)).sum() for c in critics) / ROWS,
            critics,
            0.02,
        )

        def actor_loss():
            actions, log_prob = tanh_normal(slow.net("actor", o), noise[:, 1:])
            return (temperature * log_prob - np.min([q(c, o, actions) for c in critics], axis=0)).sum() / ROWS

        entropy = -tanh_normal(slow.net("actor", o), noise[:, 1:])[1]
        slow.learn(actor_loss, ["actor"], 0.01)
        if alpha is None:
            slow.learn(
                lambda: (np.exp(slow.w["log_alpha"]) * (entropy + 1.0)).sum() / ROWS, ["log_alpha"], 0.01
            )
        if number % target_every == 0:
            slow.move(critics, 0.1)
        return error

    flags = [*DETERMINISTIC, *(["--alpha", str(alpha), "--target-every", "2"] if alpha else [])]
    flags += ["--huber-delta", str(delta)] if delta else []
    run("sac", flags, 3, 0, step)


PAPER = ["--backup-entropy", "--critics", "min", "--entropy-target", "0.679", "--alpha-start", "1"]


@pytest.mark.parametrize("flags", [[], pytest.param(PAPER, marks=pytest.mark.long)], ids=["default", "paper"])
def test_discrete_sac_equals_a_slow_reference(flags):
    critics = ["critic1", "critic2"]
    target = 0.679 if flags else 0.5 * math.log(2)
    combined, counted = (np.min, 1.0) if flags else (np.mean, 0.0)

    def step(slow, config, rows, number):
        o, a, r, d, o2, weight, _ = rows
        each, temperature = np.arange(ROWS), np.exp(slow.w["log_alpha"])

        def policy(o):
            logits = slow.net("actor", o)
            return logits - np.log(np.exp(logits).sum(1, keepdims=True))

        log_p = policy(o2)
        qs = combined([slow.net(f"target_{c}", o2) for c in critics], axis=0)
        y = r + d * (np.exp(log_p) * (qs - counted * temperature * log_p)).sum(1)
        error = y - slow.net("critic1", o)[each, a]
        slow.learn(
            lambda: sum((weight * 0.5 * (y - slow.net(c, o)[each, a]) ** 2).sum() for c in critics) / ROWS,
            critics,
            0.02,
        )
        qs = combined([slow.net(c, o) for c in critics], axis=0)
        entropy = -(np.exp(policy(o)) * policy(o)).sum(1)
        slow.learn(lambda: (np.exp(policy(o)) * (temperature * policy(o) - qs)).sum() / ROWS, ["actor"], 0.01)
        slow.learn(
            lambda: (np.exp(slow.w["log_alpha"]) * (entropy - target)).sum() / ROWS, ["log_alpha"], 0.01
        )
        slow.move(critics, 0.1)
        return error

    run("sac", ["--env", "CartPole-v1", "--critic-lr", "0.02", "--tau", "0.1", *flags], 4, 2, step)


def test_discrete_sac_says_when_its_temperature_has_grown_a_hundredfold_below_the_target():
    _, agent = make_agent.__wrapped__("sac", "--env", "CartPole-v1")

    def concern(alpha, entropy):
        return agent.concern({"train/alpha": alpha, "train/entropy": entropy, "train/entropy_target": 0.35})

    assert agent.concern({}) is None  # before the first gradient step
    below = [concern(alpha, 0.3) for alpha in (0.2, 0.1, 1.0, 9.0)]
    assert below == [None] * 4
    assert concern(11.0, 0.36) is None, "it has reached the target, and may fall again"
    assert concern(0.2, 0.3) is None
    assert "has grown from 0.2 to 20.5" in concern(20.5, 0.3) and concern(21.0, 0.3) is None
    fixed = make_agent.__wrapped__("sac", "--env", "CartPole-v1", "--alpha", "0.1")[1]
    assert fixed.concern({"train/alpha": 0.1, "train/entropy": 0.3, "train/entropy_target": 0.35}) is None


@pytest.mark.long
def test_a_run_of_discrete_sac_warns_of_a_temperature_that_grows_without_end(tmp_path):
    """No policy of two actions has an entropy above log 2, 0.69."""
    flags = (
        "--env CartPole-v1 --total-steps 1500 --learning-starts 100 --iteration-steps 100 --train-every 10"
    )
    flags += " --hidden 16 --batch-size 16 --entropy-target 1 --alpha-lr 0.1 --eval-episodes 1"
    code, stdout, stderr = train_here(tmp_path / "run", *flags.split(), module="tfrl.sac")
    assert code == 0, stderr
    assert stdout.count("warning: the temperature train/alpha has grown from ") >= 1, stdout


@pytest.mark.parametrize(
    "algorithm, env",
    [
        ("dqn", "CartPole-v1"),
        pytest.param("td3", "Pendulum-v1", marks=pytest.mark.long),
        ("sac", "Pendulum-v1"),
    ],
)
def test_numpy_acts_as_tensorflow_does(algorithm, env):
    config, agent = make_agent(algorithm, "--env", env, "--preset", "default")
    generator = np.random.default_rng(2)
    Slow(agent, generator)  # moves the weights
    observations = generator.normal(size=(200, 4 if algorithm == "dqn" else 3)).astype(np.float32)
    noise, acting = agent.network.draw_noise(generator, 200), agent.acting
    rows = acting.draw(5000 // config.iteration_steps, range(200))[0]
    assert acting.numpy_policy is not None and not rows[0, -1]
    ways = [lambda: acting.explore(observations, rows), lambda: acting.act(observations, noise)]
    ways.append(lambda: acting.act(observations))
    fast = [way() for way in ways]
    policy = acting.numpy_policy
    acting.numpy_policy = acting.training_policy = None
    slow = [way() for way in ways]
    acting.numpy_policy = acting.training_policy = policy
    for mine, theirs in zip(fast, slow, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    alone = np.concatenate([acting.act(observations[i : i + 1]) for i in range(200)])
    np.testing.assert_array_equal(alone, fast[2])


def test_exploration_adds_noise_of_the_chosen_deviation():
    """In units of the action's range from -1 to 1, where it is cut off."""
    agent = make_agent("ddpg", "--env", "Pendulum-v1", "--exploration-noise", "0.3")[1]
    generator = np.random.default_rng(4)
    observations = generator.normal(size=(64, 3)).astype(np.float32)
    noise = np.linspace(-5, 5, 64, dtype=np.float32)[:, None]
    best = agent.acting.act(observations)
    found = agent.acting.act(observations, noise)
    np.testing.assert_allclose(found, np.clip(best + 0.3 * noise, -1, 1), atol=1e-6)
    assert (np.abs(found) < 1).sum() > 20 and (np.abs(found) == 1).sum() > 10


def test_numpy_does_not_act_for_a_network_of_bfloat16():
    """NumPy acts in float32, which would not be the policy that is exported and evaluated."""
    _, agent = make_agent.__wrapped__("sac", "--env", "Pendulum-v1", "--precision", "bfloat16")
    assert agent.acting.numpy_policy is None


def test_autograph_rewrites_the_loop_over_gradient_steps_and_little_else(converted):
    """AutoGraph would take longer than all other work of TensorFlow in a process's first call."""
    _, agent = make_agent.__wrapped__("sac", "--env", "Pendulum-v1")
    batch, noise = make_batch(agent, np.random.default_rng(3), 3, None)
    agent.begin_gradient_steps(batch, noise, steps_done=0, count=K, iteration=0).wait()
    assert "ReplayAgent._take_steps" in converted and "ReplayAgent._gradient_step" not in converted
    assert len({*converted}) < 8, converted
