"""A state carried by hand, through the library and through the export, beside the trainer's own."""

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import tfrl

SMALL = {"total_steps": 512, "num_envs": 8, "num_steps": 64, "epochs": 2, "eval_episodes": 4, "lr": 3e-3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    memory = {"memory": "lstm", "memory_size": 16, "memory_inputs": True, "share_torso": True}
    return tfrl.train("ppo", env="CartPole-v1", logdir=tmp_path_factory.mktemp("logs"), **memory, **SMALL)


def test_a_state_carried_by_hand_gives_the_runs_evaluation(run):
    policy = tfrl.load(run.folder)
    evaluation = tfrl.evaluate(policy, episodes=4)
    assert evaluation.mean == run.results["eval"]["test"]["return"]
    saved = tf.saved_model.load(str(run.folder / "export" / "policy"))
    env, actions = gymnasium.make("CartPole-v1"), []
    shown, _ = env.reset(seed=5)
    state, reward, other = policy.initial_state(), 0.0, np.zeros((1, 16 * 2 + 3), np.float32)
    assert state.shape == (35,)
    for _ in range(20):
        other[0, -1] = reward
        found = saved.policy(tf.constant(shown[None]), tf.constant(other))
        action, state = policy(shown, state, reward=reward)
        assert action == int(found["action"][0])
        other = found["state"].numpy()
        np.testing.assert_allclose(other[0, :-1], state[:-1], atol=1e-5)
        assert state[32:34].tolist() == [float(action == 0), float(action == 1)]
        actions.append(action)
        shown, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    assert np.abs(state).max() > 0.01


def test_rows_of_a_batch_have_separate_states(run):
    policy, generator = tfrl.load(run.folder), np.random.default_rng(0)
    shown = generator.normal(size=(3, 2, 4)).astype(np.float32)
    whole, single = policy.initial_state(2), policy.initial_state()
    for observations in shown:
        actions, whole = policy(observations, whole, reward=[0.5, -3.0])
        action, single = policy(observations[1], single, reward=-1.0)  # clipped to it
        assert actions[1] == action and actions.shape == (2,)
        np.testing.assert_array_equal(whole[1], single)
    drawn = [policy.sample(shown[0], whole, seed=1)[0] for _ in range(2)]
    np.testing.assert_array_equal(*drawn)
    actions, state = policy(shown[0, :0], policy.initial_state(0))
    assert actions.shape == (0,) and state.shape == (0, 35)
    with pytest.raises(tfrl.SettingsError, match="reward must be a number, or an array of 2 numbers; got "):
        policy(shown[0], whole, reward=[1.0, 2.0, 3.0])


class Parts(gymnasium.Env):
    """Shows an image and numbers, takes two choices at once, and forbids one of the values of each."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (12, 12, 3), np.uint8), numbers=spaces.Box(-9, 9, (2,), np.float32)
    )
    action_space = spaces.MultiDiscrete([2, 3])
    mask = np.int8([1, 1, 1, 0, 1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observation_space.sample(), {"action_mask": self.mask}

    def step(self, action):
        assert self.mask[action[0]] and self.mask[2 + action[1]]
        self.time += 1
        return self.observation_space.sample(), 1.0, self.time == 7, False, {"action_mask": self.mask}


@pytest.mark.long
def test_several_arrays_masks_and_choices_at_once_go_with_memory(tmp_path):
    memory = {"memory": "gru", "memory_size": 16, "memory_inputs": True, "sequence_length": 8}
    sizes = {"total_steps": 256, "num_envs": 4, "num_steps": 32, "num_minibatches": 2, "epochs": 1}
    run = tfrl.train("ppo", env=Parts, logdir=tmp_path, **memory, **sizes, eval_episodes=2)
    assert max(run.progress["train/first_ratio_error"]) < 1e-5
    policy, saved = tfrl.load(run.folder), tf.saved_model.load(str(run.folder / "export" / "policy"))
    state = policy.initial_state()
    size = 16 * (1 if policy.config.share_torso else 2)
    assert state.shape == (size + 5 + 1,)
    for _ in range(3):
        shown = Parts.observation_space.sample()
        inputs = {name: tf.constant(array[None]) for name, array in shown.items()}
        inputs |= {"action_mask": tf.constant(Parts.mask[None])}
        found = saved.signatures["serving_default"](**inputs, state=tf.constant(state[None]))
        action, state = policy(shown, state, action_mask=Parts.mask)
        np.testing.assert_array_equal(action, found["action"][0])
        np.testing.assert_allclose(state, found["state"][0], atol=1e-4)
    with pytest.raises(tfrl.SettingsError, match=r"action_mask needs 5 numbers; got \[2\]"):
        policy(shown, state, action_mask=[0, 1])


def test_a_missing_state_gives_a_one_sentence_error(run, tmp_path):
    policy = tfrl.load(run.folder)
    for state in (None, np.zeros(3)):
        with pytest.raises(tfrl.SettingsError, match=r"needs a state of \[35\]"):
            policy(np.zeros(4, np.float32), state)
    settings = {"total_steps": 64, "num_envs": 2, "num_steps": 32, "num_minibatches": 1, "epochs": 1}
    settings |= {"hidden": (8,), "eval_episodes": 1, "eager": True}
    plain = tfrl.load(tfrl.train("ppo", env="CartPole-v1", logdir=tmp_path, **settings).folder)
    with pytest.raises(tfrl.SettingsError, match="not recurrent"):
        plain(np.zeros(4, np.float32), np.zeros(35))
