"""A user's algorithm, and callbacks by name, with what every run promises: exact resume, the same bits."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated
from unittest import mock

import gymnasium
import numpy as np
import pytest
import tensorflow as tf  # at once: conftest.py then splits the CPU
from processes import ROOT

import tfrl
from tfrl.algorithms import dqn, ppo
from tfrl.algorithms.registry import reader_of
from tfrl.cli.flags import NOT_NEGATIVE
from tfrl.config.run import hyperparameters
from tfrl.envs.facts import FACTS_FILE
from tfrl.ops import q_learning
from tfrl.training.command import of_algorithm

sys.path.append(str(ROOT / "examples"))
from own_algorithm import A2C  # noqa: E402

SMALL = {"env": "CartPole-v1", "total_steps": 1024, "eval_episodes": 2, "seed": 2, "hidden": (16, 16)}


class Counter(tfrl.Callback):
    """Counts updates, also across a resume; ends the first process of a run after three."""

    def __init__(self):
        self.updates, self.array = 0, np.zeros(2)

    def on_update(self, run, metrics):
        self.updates += 1
        self.array += run.env_steps
        metrics["own/updates"] = self.updates
        if self.updates == 3 and os.environ.get("KILL_AT_3"):
            os.kill(os.getpid(), 9)

    def get_state(self):
        return {"updates": self.updates, "array": self.array}

    def set_state(self, state):
        self.updates, self.array = state["updates"], state["array"]


def train(logdir, name, **changes):
    return tfrl.train(A2C, logdir=logdir, run_name=name, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("logs")
    one = train(logdir, "one", callbacks=["test_extensions:Counter"])
    two = train(logdir, "two", replicas=2)
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in {**SMALL, "hidden": "16,16"}.items()]
    flags += ["--logdir", str(logdir), "--run-name", "killed", "--callbacks", "test_extensions:Counter"]
    flags += ["--checkpoint-every", "2"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "examples", ROOT / "tests", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "KILL_AT_3": "1"}
    command = [sys.executable, "-m", "tfrl", "own_algorithm:A2C", *flags]
    killed = subprocess.run(command, cwd=logdir, env=environment, stdout=subprocess.DEVNULL)
    assert killed.returncode == -9
    again = train(logdir, "killed", callbacks=["test_extensions:Counter"], checkpoint_every=2)
    return {"one": one, "two": two, "killed": again}


def test_a_users_algorithm_resumes_and_scales_exactly(runs):
    """Compares one replica, two replicas, and a killed run that Python resumes."""
    assert len({run.results["weights_sha256"] for run in runs.values()}) == 1
    assert runs["killed"].results["resumed_at"] == [256]
    assert (runs["one"].progress["train/first_ratio_error"] < 1e-6).all()
    assert np.isfinite(runs["one"].progress["train/policy_loss"]).all()
    assert "train/approx_kl" not in runs["one"].progress  # of PPO's `means`


def test_callbacks_by_name_resume_their_state(runs):
    for name in ("one", "killed"):
        assert runs[name].progress["own/updates"].tolist() == list(range(1, 9))


def test_its_settings_are_presets_defaults_and_its_own(runs):
    text = (runs["one"].folder / "config.yaml").read_text()
    assert text.startswith("algorithm: own_algorithm:A2C\n") and "optimizer: rmsprop" in text
    assert "callbacks: test_extensions:Counter" in text
    assert runs["one"].results["algorithm"] == "own_algorithm:A2C"
    assert of_algorithm(A2C).reader.of_values({}).run_name == "A2C-CartPole-v1-seed1"


def test_a_step_is_that_of_a_plain_policy_gradient(runs):
    """With one epoch and one minibatch the ratio is 1, where PPO's surrogate has the same gradient."""
    plain = tfrl.train(
        "ppo",
        logdir=runs["one"].folder.parent,
        run_name="ppo",
        **{**SMALL, **A2C.defaults},
        clip_value=False,
    )
    mine, theirs = (np.load(r.folder / "export/weights.npz") for r in (runs["one"], plain))
    for name in mine.files:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-3, atol=2e-5)


@dataclasses.dataclass(frozen=True)
class Sharp(ppo.Config):
    """PPO's settings and one more."""

    sharpness: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of my term."""


class SharpPPO(ppo.PPOAgent):
    settings = Sharp


def test_a_users_setting_has_its_help_and_tells_variants_apart(capsys):
    """Reports compare the hyperparameters."""
    of = of_algorithm(SharpPPO).reader
    with pytest.raises(SystemExit):
        of.parse(["--help-all"])
    shown = capsys.readouterr().out
    assert "SharpPPO options" in shown and "--sharpness FLOAT" in shown and "Weight of my term." in shown
    assert hyperparameters(of.parse(["--sharpness", "2"]))["sharpness"] == 2.0


def test_a_users_algorithm_without_a_kl_refuses_to_end_an_update_by_it(tmp_path):
    with pytest.raises(tfrl.SettingsError, match="target_kl needs approx_kl among the means of A2C"):
        train(tmp_path, "kl", target_kl=0.1)


class MeanPPO(ppo.PPOAgent):
    """Its loss is a mean, []."""

    def _losses(self, weights, samples, index):
        found = super()._losses(weights, samples, index)
        return found._replace(losses=tf.reduce_mean(found.losses))


class OldPPO(ppo.PPOAgent):
    """Its losses are in an earlier form, without names."""

    def _losses(self, weights, samples, index):
        found = super()._losses(weights, samples, index)
        policy = self.network.distribution(self.network.outputs(weights, samples.observations, None)[0])
        ratio = tf.exp(policy.log_prob(samples.actions) - samples.log_probs)
        return found.losses, [*found.metrics.values()], ratio


class FewPPO(ppo.PPOAgent):
    """Its losses return more metrics than it names."""

    means = ("policy_loss",)


class ShortPPO(ppo.PPOAgent):
    """Its losses, in the form of an earlier version, leave out a metric that it names."""

    def _losses(self, weights, samples, index):
        found = super()._losses(weights, samples, index)
        return found.losses, [*found.metrics.values()][1:], found.errors


class ColumnDQN(dqn.DQNAgent):
    """Its targets are a column, so that its losses are a square."""

    def td_losses(self, qs, target, rows):
        return super().td_losses(qs, target[:, None], rows)


class BareDQN(dqn.DQNAgent):
    """Its loss has no errors, from which priorities would come."""

    def _loss(self, weights, rows):
        return super()._loss(weights, rows)._replace(errors=None)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (MeanPPO, "the loss of .* has the shape (); give one number for each sample, [n], without a mean."),
        (
            ColumnDQN,
            "the loss of q has the shape (8, 8); give one number for each sample, [n], without a mean.",
        ),
        (
            FewPPO,
            "the loss of .* has the metrics policy_loss, value_loss, entropy, approx_kl, clip_fraction, and "
            "its step names policy_loss; give the same.",
        ),
        (ShortPPO, "ShortPPO has 5 `means`, and its `_losses` returns 4 metrics."),
        (BareDQN, "the Losses of q need `errors`, [n]."),
        (
            type("TextPPO", (ppo.PPOAgent,), {"defaults": {"epochs": "three"}}),
            "epochs in the defaults of TextPPO must be a whole number; got 'three'.",
        ),
        (
            type("TypoPPO", (ppo.PPOAgent,), {"defaults": {"epoch": 1}}),
            "TypoPPO has no setting epoch (did you mean epochs?).",
        ),
    ],
    ids=["mean", "column", "few", "short", "bare", "text", "typo"],
)
def test_faults_of_a_users_algorithm_give_one_sentence(algorithm, sentence, tmp_path):
    few = {"total_steps": 64, "num_envs": 1, "hidden": (8,)}
    if issubclass(algorithm, ppo.PPOAgent):
        few |= {"num_steps": 32, "num_minibatches": 1}
    else:
        few |= {"iteration_steps": 32, "learning_starts": 16, "batch_size": 8}
    with pytest.raises(tfrl.SettingsError) as error:
        tfrl.train(algorithm, env="CartPole-v1", logdir=tmp_path, run_name="r", **few)
    assert re.fullmatch(re.escape(sentence).replace(r"\.\*", ".*"), str(error.value))


@pytest.mark.long
def test_losses_in_the_form_of_an_earlier_version_give_the_same_weights(tmp_path):
    few = {"total_steps": 64, "num_envs": 1, "hidden": (8,), "num_steps": 32, "num_minibatches": 1}
    few |= {"eval_episodes": 1}
    made = [
        tfrl.train(algorithm, env="CartPole-v1", logdir=tmp_path, run_name=str(k), **few)
        for k, algorithm in enumerate((OldPPO, ppo.PPOAgent))
    ]
    assert made[0].results["weights_sha256"] == made[1].results["weights_sha256"]
    for name in ppo.PPOAgent.means:
        np.testing.assert_array_equal(*(run.progress[f"train/{name}"] for run in made))


@pytest.mark.long
def test_a_users_algorithm_takes_memory(tmp_path):
    run = train(tmp_path, "lstm", memory="lstm", memory_size=16, total_steps=256)
    assert np.isfinite(run.progress["train/policy_loss"]).all()


@dataclasses.dataclass(frozen=True)
class OfQuantiles(dqn.Config):
    """DQN's settings, for a network with five quantiles of the return of each action."""

    def make_network(self, precision):
        from tfrl.networks.actors import QNetwork

        class QuantileNetwork(QNetwork):
            def outputs(self, weights, observations):
                quantiles = self.functions["q"](weights["q"], observations)
                return [tf.reduce_mean(tf.reshape(quantiles, (-1, self.num_actions, 5)), axis=2)]

        return QuantileNetwork(self, precision, dueling=False, epsilon=0.0, each=5)


class MeanOfQuantiles(dqn.DQNAgent):
    settings = OfQuantiles

    def _loss(self, weights, rows):
        q = self.network.outputs(weights, rows["observation"])[0]
        target = rows["reward"] + rows["discount"] * q_learning.taken_q(q, rows["action"])
        return self.td_losses([q_learning.taken_q(q, rows["action"])], tf.stop_gradient(target), rows)


def test_a_users_network_chooses_its_actions_itself():
    """Its class may choose otherwise than the network of the same layers, which NumPy computes."""
    from tfrl.networks.actors import QNetwork
    from tfrl.networks.numpy_policy import policy_in_numpy

    class Worst(QNetwork):
        def greedy(self, outputs):
            return tf.argmin(outputs[0], axis=1, output_type=tf.int32)

    config = reader_of(dqn.DQNAgent).parse(["--env", "CartPole-v1"])
    assert policy_in_numpy(QNetwork(config, "float32", dueling=False, epsilon=0.0)) is not None
    assert policy_in_numpy(Worst(config, "float32", dueling=False, epsilon=0.0)) is None


def test_a_users_network_makes_values_from_more_outputs(tmp_path):
    """With one env, NumPy chooses DQN's actions; here it would take an output for an action."""
    few = {"total_steps": 60, "iteration_steps": 30, "learning_starts": 20, "batch_size": 8, "hidden": (8,)}
    few |= {"train_every": 8, "exploration_start": 0.0, "exploration_end": 0.0, "eval_episodes": 1}
    run = tfrl.train(MeanOfQuantiles, env="CartPole-v1", logdir=tmp_path, run_name="r", **few)
    assert np.load(run.folder / "export/weights.npz")["q/head/kernel"].shape == (8, 10)
    found = tf.saved_model.load(str(run.folder / "export/policy")).signatures["serving_default"](
        tf.zeros([3, 4])
    )
    assert found["q"].shape == (3, 2) and set(found["action"].numpy()) <= {0, 1}


@pytest.fixture
def munchausen(tmp_path, monkeypatch):
    """The module that docs/extending.md shows."""
    blocks = re.findall(r"```python\n([^`]*)```", (ROOT / "docs/extending.md").read_text())
    (code,) = (block for block in blocks if "Munchausen" in block)
    (tmp_path / "munchausen.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("munchausen")


def test_the_documented_algorithms_train(tmp_path):
    blocks = re.findall(r"```python\n([^`]*)```", (ROOT / "docs/extending.md").read_text())
    module = types.ModuleType("documented")
    settings = {"total_steps": 256, "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "hidden": (8,)}
    settings |= {"eval_episodes": 1, "logdir": tmp_path}
    with mock.patch.dict(sys.modules, {"documented": module}):
        for block in blocks:
            exec(compile(block, "docs/extending.md", "exec"), vars(module))
        plain = tfrl.train(module.MyAlgorithm, run_name="plain", eager=True, **settings)
        sharp = tfrl.train(module.MySharpAlgorithm, run_name="sharp", sharpness=0.5, epochs=1, **settings)
    texts = [(run.folder / "config.yaml").read_text() for run in (plain, sharp)]
    assert "\nepochs: 1\n" in texts[0] and "\nenv: Acrobot-v1\n" in texts[0]
    assert "\nsharpness: 0.5\n" in texts[1] and "algorithm: documented:MySharpAlgorithm\n" in texts[1]


def test_an_algorithm_of_the_package_is_declared_like_one_of_a_user():
    """It needs neither presets nor sections; its name is that of its file."""
    kind = type("MyAgent", (A2C,), {"__module__": "tfrl.algorithms.mine", "env": "Acrobot-v1"})
    reader = reader_of(kind)
    config = reader.parse([])
    assert (reader.command, config.algorithm, config.default_run_name[:7]) == (
        *("python -m tfrl.mine", "mine"),
        "mine-Ac",
    )
    assert (config.epochs, config.optimizer, config.env) == (1, "rmsprop", "Acrobot-v1")


def test_the_documented_variant_of_a_replay_algorithm_has_its_target(munchausen):
    """Compares the paper's equation in NumPy; Q and target Q of three actions are columns of the weights."""
    generator = np.random.default_rng(1)
    q, of_target, of_next = generator.normal(size=(3, 8, 3))
    rows = {"observation": 0, "next_observation": 1, "action": np.arange(8) % 3}
    rows |= {name: generator.random(8).astype(np.float32) for name in ("reward", "discount", "weight")}
    values = {("q", 0): q, ("target_q", 0): of_target, ("target_q", 1): of_next}
    q_of = lambda weights, observation: np.float32(values[weights, observation])  # noqa: E731
    agent = types.SimpleNamespace(network=types.SimpleNamespace(functions={"q": q_of}))
    agent._config = types.SimpleNamespace(huber_delta=None)
    agent.td_losses = types.MethodType(munchausen.MunchausenDQN.td_losses, agent)
    found = munchausen.MunchausenDQN._loss(agent, {"q": "q", "target_q": "target_q"}, rows)

    def log_policy(q):
        return q / 0.03 - np.log(np.exp(q / 0.03).sum(axis=1, keepdims=True))

    each = np.arange(8), rows["action"]
    following = (np.exp(log_policy(of_next)) * (of_next - 0.03 * log_policy(of_next))).sum(axis=1)
    reward = rows["reward"] + 0.9 * np.clip(0.03 * log_policy(of_target)[each], -1, 0)
    error = reward + rows["discount"] * following - q[each]
    np.testing.assert_allclose(found.errors, error, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.losses, rows["weight"] * error**2 / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_documented_variant_of_a_replay_algorithm_is_one_run_on_two_replicas(munchausen, tmp_path):
    settings = {"env": "CartPole-v1", "num_envs": 2, "hidden": (16, 16), "total_steps": 1000, "seed": 2}
    settings |= {"learning_starts": 200, "eval_episodes": 2, "logdir": tmp_path}
    one, two = (tfrl.train(munchausen.MunchausenDQN, run_name=f"{n}", replicas=n, **settings) for n in (1, 2))
    assert one.results["weights_sha256"] == two.results["weights_sha256"]
    assert one.results["algorithm"] == "munchausen:MunchausenDQN" and (one.progress["train/q_loss"] > 0).all()


def test_wrong_algorithms_and_callbacks_give_a_one_sentence_error():
    class Bare:
        pass

    with pytest.raises(tfrl.SettingsError, match="Bare must have `settings`, a dataclass such as"):
        tfrl.train(Bare)
    Bare.settings = tfrl.algorithms.ppo.Config
    for algorithm, sentence in (
        (Bare, "Bare must extend tfrl.algorithms.algorithm.Agent."),
        ("absent_module:Mine", "absent_module:Mine cannot be imported here"),
        ("test_extensions:Absent", "the module test_extensions has no Absent"),
        ({}, "an algorithm is a name, MODULE:CLASS or a class; got {}."),
    ):
        with pytest.raises(tfrl.SettingsError, match=sentence):
            tfrl.train(algorithm)
    for name, sentence in (
        ("test_extensions:train", "must be a class that extends tfrl.Callback"),
        ("test_extensions:Absent", "the module test_extensions has no Absent"),
        ("tfrl.callbacks:StopOnReturn", "cannot be made without arguments"),
    ):
        with pytest.raises(tfrl.SettingsError, match=sentence):
            tfrl.train("ppo", env="CartPole-v1", callbacks=[name])
    with pytest.raises(tfrl.SettingsError, match="learners 2 runs callbacks in other processes"):
        tfrl.train("ppo", env="CartPole-v1", callbacks=[Counter()], learners=2)


def test_a_policy_loads_where_its_env_cannot_be_made(runs, tmp_path):
    class Made(gymnasium.Wrapper):
        def __init__(self):
            super().__init__(gymnasium.make("Pendulum-v1"))

    settings = {"total_steps": 256, "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "epochs": 1}
    settings |= {"hidden": (16,), "eval_episodes": 1, "logdir": tmp_path, "run_name": "p", "eager": True}
    run = tfrl.train("ppo", env=Made, **settings)
    code = (
        "import sys, tfrl, numpy as np\n"
        "for folder in sys.argv[1:]:\n"
        "    action = tfrl.load(folder)(np.zeros(3, np.float32))\n"
        "    assert action.shape == (1,) and -2 <= action[0] <= 2, action\n"
        "    print(action)"
    )
    command = [sys.executable, "-c", code, str(run.folder), str(run.folder / "export")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr
    assert "pickle" not in (run.folder / FACTS_FILE).read_text()
