"""Envs that save their own state go on by it, where it is exact, and are replayed where it is not."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from tfrl.envs import registry
from tfrl.envs.facts import find_facts
from tfrl.envs.spec import EnvSpec


class Saved(gymnasium.Env):
    """A walk that no seed repeats in another process: it also counts all steps that it has ever taken."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(2)
        return self.show(), {}

    def step(self, action):
        self.place = self.place + self.np_random.normal(size=2) + action
        self.taken += 1
        return self.show(), float(self.taken), False, False, {}

    def show(self):
        return np.append(self.place, self.taken)

    def get_state(self):
        return {"place": self.place, "taken": self.taken, "random": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.place, self.taken = state["place"], state["taken"]
        self.np_random.bit_generator.state = state["random"]


class Forgetful(Saved):
    """Leaves its random numbers out."""

    taken = property(lambda self: 0, lambda self, value: None)

    def get_state(self):
        return {"place": self.place, "taken": 0}

    def set_state(self, state):
        self.place = state["place"]


class Aimed(Saved):
    """Also draws a goal at a reset, which it does not save, and which counts from the 20th step on."""

    def reset(self, *, seed=None, options=None):
        shown = super().reset(seed=seed)
        self.goal, self.taken = self.np_random.normal(), 0
        return shown

    def step(self, action):
        shown, _, *rest = super().step(action)
        return shown, self.goal if self.taken > 20 else 0.0, *rest


class Keyed(Saved):
    """Shows a dict."""

    observation_space = gymnasium.spaces.Dict(
        place=gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64), even=gymnasium.spaces.Discrete(2)
    )

    def show(self):
        return {"place": self.place, "even": self.taken % 2}


class Refusing(Saved):
    """Has action masks, saves no state, and refuses all actions from some moment on."""

    get_state = set_state = None
    refuses = False
    mask = np.ones(2, np.int8)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": self.mask}

    def step(self, action):
        if self.refuses:
            raise ValueError("forbidden action")
        return *super().step(action)[:4], {"action_mask": self.mask}


def limited():
    return TimeLimit(Saved(), 40)


def vector(env, frame_skip=None):
    return registry.make(EnvSpec(registry.name_of(env), num_envs=3, seed=2, frame_skip=frame_skip))


def play(env, steps, seed):
    generator, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        env.act(env.action_spec.uniform(generator, env.num_envs))
        seen.append(np.concatenate([x.reshape(3, -1).astype(float) for x in env.observe()[:4]], axis=1))
    return np.array(seen)


@pytest.mark.parametrize(("steps", "skip"), [(25, None), (25, 3), (70, None)])
def test_a_fresh_vector_continues_from_saved_states_bit_for_bit(steps, skip):
    """Time limits continue to count steps."""
    assert find_facts(registry.name_of(limited)).saves_state
    one = vector(limited, skip)
    play(one, steps, 0)
    states = one.get_state()
    assert max(map(len, states)) < 3000, "no actions"
    other = vector(limited, skip)
    play(other, 7, 3)
    other.set_state(states)
    assert other.exact_state
    np.testing.assert_array_equal(other.observe().observation, one.observe().observation)
    np.testing.assert_array_equal(play(one, 60, 1), play(other, 60, 1))


def test_an_incomplete_own_state_is_not_used():
    assert not find_facts(registry.name_of(Forgetful)).saves_state
    one, other = vector(Forgetful), vector(Forgetful)
    play(one, 30, 0)
    other.set_state(one.get_state())
    assert other.exact_state, "by replaying"
    np.testing.assert_array_equal(play(one, 20, 1), play(other, 20, 1))


@pytest.mark.parametrize("env", [Aimed, Keyed], ids=["random numbers of a reset", "dict observations"])
def test_an_own_state_is_recognised_and_continues_exactly(env):
    assert find_facts(registry.name_of(env)).saves_state
    one, other = vector(env), vector(env)
    play(one, 15, 0)
    other.set_state(one.get_state())
    np.testing.assert_array_equal(play(one, 20, 1), play(other, 20, 1))


def test_an_env_with_masks_that_refuses_an_action_when_it_is_replayed_begins_a_new_episode(monkeypatch):
    one, other = vector(Refusing), vector(Refusing)
    assert one.observation_spec.num_actions == 2
    for _ in range(3):
        one.act(np.ones(3, np.int32))
    monkeypatch.setattr(Refusing, "refuses", True)
    other.set_state(one.get_state())
    assert not other.exact_state and other.observe().first.all()
