"""Action masks: forbidden actions are never taken, have no gradient, and are no maximum.

The made envs fail where a forbidden action is taken, and a run fails with them.
"""

import signal

import learners
import numpy as np
import pytest
import tensorflow as tf
from packed_envs import named, packed
from processes import Training, learned, results

from tfrl.algorithms import registry as settings
from tfrl.cli.errors import EnvError, UserError
from tfrl.envs import registry
from tfrl.envs.observations import FORBIDDEN
from tfrl.envs.spec import Discrete, EnvSpec, MultiDiscrete
from tfrl.networks.distributions import distribution_for
from tfrl.networks.numpy_policy import actions_in_numpy
from tfrl.networks.weights import export
from tfrl.training.episodic import EpisodicLearner
from tfrl.training.off_policy import OffPolicyLearner
from tfrl.training.on_policy import OnPolicyLearner
from tfrl.training.phasic import PhasicLearner
from tfrl.workers.data_parallel import TARGET

ROLLOUT = ["--num-envs", "4", "--num-steps", "16", "--total-steps", "1024"]
REPLAY = [
    *("--num-envs", "4", "--hidden", "8", "--learning-starts", "32", "--batch-size", "16"),
    *("--iteration-steps", "64", "--total-steps", "256", "--train-every", "8", "--replay-size", "128"),
]
PPO = [*ROLLOUT, "--num-minibatches", "2", "--epochs", "2"]
SMALL = [*PPO, "--hidden", "8"]
IMAGE = ["--torso", "linear", "--share-torso"]
RUNS = {
    "ppo": ("Masked", OnPolicyLearner, SMALL),
    "ppo of several choices": ("MaskedMany", OnPolicyLearner, [*SMALL, "--lag", "1"]),
    "drac": ("MaskedImage", OnPolicyLearner, [*PPO, *IMAGE]),
    "ppg": ("Masked", PhasicLearner, [*SMALL, "--policy-updates", "2", "--aux-minibatches", "2"]),
    "impact": ("MaskedDict", OnPolicyLearner, [*ROLLOUT, *IMAGE, "--lag", "1"]),
    "impala": ("MaskedDict", OnPolicyLearner, [*ROLLOUT, *IMAGE, "--num-minibatches", "1"]),
    "dqn": ("Masked", OffPolicyLearner, [*REPLAY, "--dueling", "--exploration-steps", "100"]),
    "dqn with a lag": ("Masked", OffPolicyLearner, [*REPLAY, "--lag", "1"]),
    "sac": ("Masked", OffPolicyLearner, REPLAY),
    "reinforce": ("Masked", EpisodicLearner, ["--observers", "0", "--num-envs", "4", "--hidden", "8"]),
}

SHORT = ("ppo of several choices", "dqn")  # the others are repetitions


class Command(Training):
    """python -m tfrl.ppo"""

    module = "tfrl.ppo"


def parse(name, tmp_path, *flags):
    """The settings of one of RUNS, and its kind of learner."""
    env, kind, own = RUNS[name]
    reader = settings.reader(name.split()[0])
    where = ["--env", packed(env), "--logdir", str(tmp_path), "--run-name", "run"]
    return reader.parse([*where, *own, *flags]), kind


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in RUNS]
)
def test_no_forbidden_action_is_taken_in_training_and_evaluation(name, tmp_path):
    config, kind = parse(name, tmp_path)
    learner = learners.make(config, kind)
    learner.begin()
    for _ in range(3):
        while (metrics := learner.update()) is None:  # PPG pauses within its auxiliary phase
            pass
    losses = {k: v for k, v in metrics.items() if k.startswith("train/") and "aux" not in k}
    assert losses and np.isfinite(list(losses.values())).all()
    env = registry.make(EnvSpec.of(config, num_envs=6, seed=5))
    generators = [np.random.default_rng(i) for i in range(6)]
    noise = np.stack([learner.draw_noise(g, 40) for g in generators], axis=1)
    for t in range(40):
        shown = env.observe().observation
        env.act(learner.agent.acting.act(shown, None if t % 2 else noise[t]))
    learner.close()


@pytest.mark.parametrize("spec", [Discrete(4), MultiDiscrete((2, 3), (0, 0))], ids=lambda spec: spec.kind)
def test_a_forbidden_action_has_probability_0_and_no_gradient(spec):
    """The distribution is the one over the allowed actions alone."""
    generator, size = np.random.default_rng(0), spec.mask_size
    outputs = generator.normal(size=(64, size)).astype(np.float32)
    allowed = np.ones((64, size), bool)
    allowed[:32, [0, size - 1]] = False
    logits, policy = tf.Variable(outputs), distribution_for(spec)
    noise = tf.constant(np.linspace(0, 1, 64, endpoint=False, dtype=np.float32))
    noise = tf.repeat(noise[:, None], policy.noise_size, axis=1)
    noise = tf.tensor_scatter_nd_update(
        noise, [[1]], [[np.nextafter(np.float32(1), np.float32(0))] * policy.noise_size]
    )
    with tf.GradientTape() as tape:
        masked = tf.where(allowed, logits, FORBIDDEN)
        drawn = policy(masked)
        actions = drawn.sample(noise)
        loss = tf.reduce_sum(drawn.log_prob(actions) * 3.0 - drawn.entropy())
    gradient = tape.gradient(loss, logits).numpy()
    assert (gradient[~allowed] == 0).all() and (gradient[allowed] != 0).any()
    begins, found = 0, np.zeros(64)
    for k, count in enumerate(spec.mask_counts):
        own = slice(begins, begins + count)
        chosen = actions.numpy() if spec.shape == () else actions.numpy()[:, k]
        assert allowed[:, own][np.arange(64), chosen].all()
        weights = np.exp(np.float64(outputs[:, own])) * allowed[:, own]
        p = weights / weights.sum(axis=1, keepdims=True)
        found -= (p * np.log(p, where=p > 0, out=np.zeros_like(p))).sum(axis=1)
        begins += count
    np.testing.assert_allclose(drawn.entropy().numpy(), found, rtol=1e-5)
    in_numpy = actions_in_numpy(policy.action_spec)
    np.testing.assert_array_equal(in_numpy.act(masked.numpy(), noise.numpy()), actions)
    np.testing.assert_array_equal(in_numpy.act_greedily(masked.numpy()), drawn.mode())
    np.testing.assert_allclose(
        in_numpy.log_probs(masked.numpy(), actions.numpy()), drawn.log_prob(actions), rtol=1e-5
    )


@pytest.mark.parametrize("double", ["--double", "--no-double"])
def test_dqns_targets_ignore_forbidden_actions(double, tmp_path):
    config, kind = parse("dqn", tmp_path, double, "--no-dueling")
    agent = learners.make(config, kind).agent
    generator = np.random.default_rng(0)
    shown = np.concatenate([generator.normal(size=(16, 2)), np.tile([1, 0, 1, 0, 0], (16, 1))], axis=1)
    rows = {
        "observation": tf.constant(shown, tf.float32),
        "next_observation": tf.constant(shown[::-1].copy(), tf.float32),
        "action": tf.zeros(16, tf.int32),
        **{name: tf.ones(16) for name in ("reward", "discount", "weight")},
    }
    vectors = agent.network.initial()
    vectors[TARGET + "q"] = vectors["q"] + 0.1 * generator.normal(size=vectors["q"].shape).astype(np.float32)
    errors = agent._loss({name: tf.constant(v) for name, v in vectors.items()}, rows).errors.numpy()
    q, of_target = (
        agent.network.functions["q"](tf.constant(vectors[name]), rows["next_observation"]).numpy()[:, [0, 2]]
        for name in ("q", TARGET + "q")
    )
    best = of_target[np.arange(16), (q if double == "--double" else of_target).argmax(axis=1)]
    taken = agent.network.functions["q"](tf.constant(vectors["q"]), rows["observation"]).numpy()[:, 0]
    np.testing.assert_allclose(errors, 1 + best - taken, rtol=1e-5, atol=1e-6)


def test_random_actions_are_uniform_among_those_allowed():
    allowed = np.array([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0]], bool).repeat(3000, axis=0)
    numbers = np.linspace(0, 1, 3000, endpoint=False, dtype=np.float32)
    numbers = np.concatenate([numbers, numbers])[:, None]
    found = Discrete(5).from_uniform(numbers, allowed)
    assert np.bincount(found[:3000]).tolist() == [0, 1000, 0, 1000, 1000] and not found[3000:].any()
    both = MultiDiscrete((2, 3), (0, 0)).from_uniform(numbers.repeat(2, axis=1), allowed)
    assert (both[:3000, 0] == 1).all() and set(both[:3000, 1]) == {1, 2} and not both[3000:].any()


def test_masks_are_used_where_the_settings_say_so(tmp_path):
    with_mask, without = (parse("ppo", tmp_path, "--action-masks", how)[0] for how in ("must", "never"))
    assert registry.specs(with_mask)[0].num_actions == 5 and not registry.specs(without)[0].num_actions
    assert "action_mask: int8 [5]" in str(registry.specs(with_mask)[0])
    assert "action_mask" not in str(registry.specs(without)[0])
    learner = learners.make(without)
    with pytest.raises(EnvError, match="is forbidden"):
        learner.update()
    with pytest.raises(UserError, match='needs info\\["action_mask"\\], which CartPole-v1 does not give'):
        settings.reader("ppo").parse(["--env", "CartPole-v1", "--action-masks", "must"])


@pytest.mark.parametrize("name", ["ppo of several choices", "impala", "dqn"])
def test_an_export_takes_the_mask_and_obeys_it(name, tmp_path):
    config, _ = parse(name, tmp_path)
    network, generator = config.make_network("float32"), np.random.default_rng(0)
    arrays = {
        n: generator.normal(size=a.shape).astype(np.float32)
        for n, a in learners.initial_arrays(network).items()
    }
    export(tmp_path / "export", config, arrays, precision="float32", env_steps=1)
    env = registry.make(EnvSpec.of(config, num_envs=40, seed=5))
    spec, rows = env.observation_spec, env.observe().observation
    saved = tf.saved_model.load(str(tmp_path / "export" / "policy"))
    inputs = {key: tf.constant(array) for key, array in named(spec, rows).items()}
    found = saved.signatures["serving_default"](**inputs)
    again = saved.policy(*inputs.values())
    vectors = {n: tf.constant(vector) for n, vector in network.join(arrays).items()}
    greedy = network.greedy(network.outputs(vectors, tf.constant(rows))).numpy()
    start = 0 if name == "ppo of several choices" else 2  # Discrete(5, start=2)
    np.testing.assert_array_equal(found["action"], greedy + start)
    np.testing.assert_array_equal(again["action"], found["action"])
    output = found.get("logits", found.get("parameters", found.get("q"))).numpy()
    np.testing.assert_array_equal(output == FORBIDDEN, ~spec.allowed(rows))
    env.act(greedy)  # fails where one is forbidden


@pytest.mark.promise
@pytest.mark.long
def test_1_and_2_replicas_give_equal_results(tmp_path):
    found = []
    for replicas in ("1", "2"):
        config, kind = parse("ppo", tmp_path, "--replicas", replicas)
        found.append(learners.updated(learners.make(config, kind), 2)[1])
    for name, weights in found[0].items():
        np.testing.assert_array_equal(found[1][name], weights, err_msg=name)


@pytest.mark.promise
@pytest.mark.long
def test_a_killed_run_with_masks_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "tests")
    flags = ["--env", packed("Masked"), *SMALL, "--total-steps", 64 * 40, "--checkpoint-every", 3]
    training = Command(tmp_path / "killed", *flags)
    training.wait_until(64 * 8)
    training.process.send_signal(signal.SIGKILL)
    training.end()
    for name in ("killed", "whole"):
        assert Command(tmp_path / name, *flags).end()[0] == 0
    killed, whole = (results(tmp_path / name) for name in ("killed", "whole"))
    assert killed["weights_sha256"] == whole["weights_sha256"] and killed["resumed_at"]
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")
