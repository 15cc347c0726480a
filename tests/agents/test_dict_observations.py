"""Observations of several arrays, from the env to learned policies, exports and data sets."""

import functools
import signal

import learners
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from made_envs import vector
from packed_envs import Alone, Signs, named, packed
from processes import Training, learned, results

import tfrl
from tfrl.algorithms import registry as settings
from tfrl.envs import callables
from tfrl.networks.weights import export
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner

PPO = {
    "env": packed("Signs"),
    "torso": "cookbook",
    "hidden": "32",
    "activation": "relu",
    "num_envs": 16,
    "num_steps": 32,
    "num_minibatches": 4,
    "epochs": 4,
    "gamma": 0.5,
    "lr": 3e-3,
    "normalize_observations": True,
    "share_torso": True,
    "eval_greedy": True,
    "eval_episodes": 32,
}
DQN = {
    **{
        name: PPO[name]
        for name in ("env", "torso", "hidden", "activation", "eval_episodes", "eval_greedy", "num_envs")
    },
    "gamma": 0.5,
    "lr": 3e-3,
    "learning_starts": 512,
    "iteration_steps": 1024,
    "train_every": 64,
    "updates_per_step": 0.25,
    "batch_size": 64,
    "exploration_steps": 2048,
    "replay_size": 8192,
    "target_every": 50,
}


LONG_DQN = pytest.param("dqn", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Gives runs of PPO and DQN on Signs, whose best return is 8 and whose random return is 4."""
    logs = str(tmp_path_factory.mktemp("logs"))

    @functools.cache
    def run(name):
        own, steps = {"ppo": (PPO, 512 * 16), "dqn": (DQN, 1024 * 5)}[name]
        return tfrl.train(name, **own, total_steps=steps, logdir=logs, run_name=name, seed=2)

    return run


@pytest.mark.parametrize("name", ["ppo", LONG_DQN])
def test_a_task_that_needs_all_arrays_is_learned(runs, name):
    assert runs(name).results["eval"]["test"]["return"] > 7.5


@pytest.mark.parametrize("name", ["ppo", LONG_DQN])
def test_a_loaded_policy_and_an_export_take_what_the_env_shows(runs, name):
    policy, env = tfrl.load(runs(name).folder), Signs()
    saved = tf.saved_model.load(str(runs(name).folder / "export" / "policy")).signatures["serving_default"]
    shown, right = [env.reset(seed=1)[0]], []
    for _ in range(7):
        action = policy(shown[-1])
        shown_next, reward, *_ = env.step(action)
        shown.append(shown_next)
        right.append(reward)
    assert sum(right) >= 6
    batch = {key: np.stack([one[key] for one in shown]) for key in shown[0]}
    exported = saved(**{key: tf.constant(array) for key, array in batch.items()})["action"].numpy()
    np.testing.assert_array_equal(policy(batch), exported)
    assert [policy(one) for one in shown] == exported.tolist()
    with pytest.raises(tfrl.SettingsError, match="nothing where its observation_space has an array"):
        policy({"noise": shown[0]["noise"]})
    assert tfrl.evaluate(policy, episodes=4, seed=5).mean > 7


def test_an_export_takes_arrays_whose_keys_cannot_name_inputs(tmp_path):
    space = spaces.Dict({key: spaces.Box(-9, 9, (2,)) for key in ("self", "Q", "q", "_x", "höhe", "class")})
    name = callables.give(lambda: Alone(space))
    config = settings.reader("ppo").parse(["--env", name, "--hidden", "8"])
    network, generator = config.make_network("float32"), np.random.default_rng(0)
    arrays = {
        key: generator.normal(size=array.shape).astype(np.float32)
        for key, array in learners.initial_arrays(network).items()
    }
    export(tmp_path, config, arrays, precision="float32", env_steps=1)
    env = vector(name, range(30))
    rows = env.observe().observation
    inputs = {key: tf.constant(array) for key, array in named(env.observation_spec, rows).items()}
    saved = tf.saved_model.load(str(tmp_path / "policy")).signatures["serving_default"]
    vectors = {key: tf.constant(one) for key, one in network.join(arrays).items()}
    greedy = network.greedy(network.outputs(vectors, tf.constant(rows))).numpy()
    np.testing.assert_array_equal(saved(**inputs)["action"], greedy)
    assert len(inputs) == 6 and set(greedy.tolist()) == {0, 1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "own", "kind"), [("ppo", PPO, OnPolicyLearner), ("dqn", DQN, OffPolicyLearner)]
)
def test_1_and_2_replicas_give_equal_results(algorithm, own, kind, tmp_path):
    found = []
    for replicas in (1, 2):
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in own.items() if value is not True]
        where = ["--logdir", str(tmp_path), "--run-name", "run", f"--replicas={replicas}"]
        config = settings.reader(algorithm).parse([*flags, *where])
        found.append(learners.updated(learners.make(config, kind), 2)[1])
    for name, weights in found[0].items():
        np.testing.assert_array_equal(found[1][name], weights, err_msg=name)


class Command(Training):
    """python -m tfrl.dqn"""

    module = "tfrl.dqn"


@pytest.mark.long
def test_a_killed_run_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "tests")
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in DQN.items() if value is not True]
    flags += ["--total-steps", 1024 * 5, "--checkpoint-every", 1]
    training = Command(tmp_path / "killed", *flags)
    training.wait_until(1024 * 2)
    training.process.send_signal(signal.SIGKILL)
    training.end()
    for name in ("killed", "whole"):
        assert Command(tmp_path / name, *flags).end()[0] == 0
    killed, whole = (results(tmp_path / name) for name in ("killed", "whole"))
    assert killed["weights_sha256"] == whole["weights_sha256"] and killed["resumed_at"]
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")
