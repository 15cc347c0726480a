"""Recurrent policies: what they act with is what they learn from, on any topology, and it serves them."""

import learners
import numpy as np
import pytest
import tensorflow as tf
from made_envs import made

from tfrl.algorithms import registry as settings
from tfrl.experience.episodes import level_spec, play
from tfrl.experience.memory import Memory

SHORT = [
    *("--num-envs", "8", "--num-steps", "24", "--num-minibatches", "2", "--lr", "1e-2"),
    *("--total-steps", "1000000", "--seed", "3"),
]
VECTORS = ("--env", made("Hidden"), "--hidden", "16", "--epochs", "2")
KINDS = [
    ("--memory", "lstm", "--memory-size", "16", "--memory-inputs"),
    ("--memory", "gru", "--memory-size", "16", "--share-torso", "--sequence-length", "6"),
]


def make(tmp_path, *flags, algorithm="ppo", kind=learners.OnPolicyLearner):
    """A learner without its trainer."""
    reader = settings.reader(algorithm)
    return learners.make(reader.parse([*SHORT, *flags, "--logdir", str(tmp_path), "--run-name", "run"]), kind)


def sharpened(learner):
    """The learner with larger weights of its heads and recurrent layers, so that what it remembers tells."""
    agent, generator = learner.agent, np.random.default_rng(0)
    arrays = agent.get_weights()
    for name, array in arrays.items():
        if not name.startswith("observations/"):
            arrays[name] = array + 0.3 * generator.normal(size=array.shape).astype(np.float32)
    for name, vector in agent.network.join(arrays).items():
        agent.learning.assign(name, vector)
    agent.acting.forget_weights()
    return learner


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "env", "flags", "replicas"),
    [
        ("ppo", VECTORS, KINDS[1], ("2", "1")),
        ("ppo", VECTORS, KINDS[0], ("4", "1")),
        ("impala", ("--env", "catch", "--precision", "float32"), KINDS[0], ("2", "1")),
        ("drac", ("--env", "catch", "--precision", "float32", "--epochs", "1"), KINDS[1], ("2", "1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_replicas_give_equal_results(tmp_path, algorithm, env, flags, replicas):
    """Tests images and vectors with PPO, DrAC and IMPALA."""
    runs = []
    for count in replicas:
        learner = make(tmp_path, *env, *flags, "--replicas", count, algorithm=algorithm)
        runs.append(learners.updated(sharpened(learner), 3))
    for history, weights in runs[1:]:
        np.testing.assert_equal(history, runs[0][0])
        for name, weight in runs[0][1].items():
            np.testing.assert_array_equal(weight, weights[name], err_msg=name)


@pytest.mark.parametrize("flags", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.long)])
def test_training_uses_the_recurrent_states_of_the_rollout(tmp_path, flags):
    """Log-probabilities and values equal a computation step by step, so the first ratio is 1."""
    learner = sharpened(make(tmp_path, *VECTORS, *flags, kind=learners.Stepwise))
    with_rewards = "--memory-inputs" in flags
    network = learner.agent.network
    acting = Memory(8, network.state_size, learner.envs.action_spec if with_rewards else None)
    for _ in range(4):  # 96 steps: episodes end by their limit of 60 steps, and others before
        weights = {name: tf.constant(v) for name, v in learner.agent.learning.vectors().items()}
        rewards = []
        normalise = learner._process_rewards

        def noted(rollout, normalise=normalise, rewards=rewards):
            rewards.append(rollout.rewards.copy())
            normalise(rollout)

        learner._process_rewards = noted
        error = learner.update()["train/first_ratio_error"]
        learner._process_rewards = normalise
        rollout = learner.rollout
        finals = learner.agent.final_values(rollout)
        for t in range(24):
            outputs = network.outputs(weights, tf.constant(rollout.observations[0, t]), acting.values)
            policy = network.distribution(outputs[0])
            log_probs = policy.log_prob(tf.constant(rollout.actions[0, t]))
            np.testing.assert_allclose(rollout.extras["log_prob"][0, t], log_probs, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(rollout.extras["value"][0, t], outputs[1], rtol=1e-5, atol=1e-5)
            acting.acted(outputs[-1].numpy(), rollout.actions[0, t])
            acting.rewarded(rewards[0][0, t])
            np.testing.assert_allclose(rollout.memory[0, t + 1], acting.values, rtol=1e-5, atol=1e-5)
            for (_, at, b), observation in rollout.final_observations.items():
                if at == t:  # the value of what would have come, remembering the episode
                    now = learner.agent.values(observation[None], (2,), acting.values[b : b + 1])
                    np.testing.assert_allclose(finals[0, t, b], now[0], rtol=1e-5, atol=1e-5)
                    forgetful = learner.agent.values(observation[None], (2,), 0 * acting.values[b : b + 1])
                    assert abs(forgetful[0] - now[0]) > 1e-3
            acting.begin(rollout.first[0, t])
        assert error < 1e-5
        rollout.memory[:, 12:] += 0.1
        worse = learner.agent.update(rollout, 0)["train/first_ratio_error"]
        assert worse > 1e-3
    assert rollout.first.any() and learner.agent.acting.numpy_policy is None


@pytest.mark.long
@pytest.mark.parametrize(
    "memory",
    [("lstm", "--memory-size", "16"), ("none",)],
    ids=lambda memory: memory[0],
)
def test_a_sign_is_remembered_for_ten_steps(tmp_path, memory):
    """Without memory, only luck gives a right answer."""
    flags = ("--num-envs", "32", "--num-steps", "33", "--epochs", "4", "--gamma", "0.99")
    flags += ("--num-minibatches", "4" if memory[0] == "lstm" else "3", "--lr-schedule", "constant")
    learner = make(
        tmp_path, "--env", made("Recall"), "--hidden", "16", "--memory", *memory, *flags, "--eval-greedy"
    )
    learners.updated(learner, 15)
    played = play(learner, level_spec(learner._config, "train", 64), range(64), episodes_each=2)
    right = played.returns.mean()
    assert right >= 0.95 if memory[0] == "lstm" else 0.3 < right < 0.7
    assert (played.lengths == 11).all()


@pytest.mark.promise
@pytest.mark.long
def test_a_resumed_run_keeps_the_memory_of_its_envs(tmp_path):
    flags = (*VECTORS, *KINDS[1])
    through = sharpened(make(tmp_path, *flags))
    learners.updated(through, 2)
    state = through.get_state()
    assert not state.parts[0]["first"].all()
    expected = learners.updated(through, 2)
    resumed = make(tmp_path, *flags)
    resumed.session.step = 2
    resumed.set_state(state)
    history, weights = learners.updated(resumed, 2)
    np.testing.assert_equal(history, expected[0])
    for name, weight in expected[1].items():
        np.testing.assert_array_equal(weight, weights[name], err_msg=name)
