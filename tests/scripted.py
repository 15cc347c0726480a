"""Envs and policies whose episodes are known before, for the tests of what is played and counted."""

import numpy as np

from tfrl.envs import registry
from tfrl.envs.spec import ArraySpec, Discrete, EnvSpec, Step


class Scripted:
    """Env i shows i. Its episodes take `lengths[i]` steps and return `returns[i]`, half of it at each end."""

    observation_spec, action_spec = ArraySpec((1, 1, 1), "uint8"), Discrete(2)

    def __init__(self, lengths, returns):
        self.num_envs = len(lengths)
        self._lengths, self._returns = np.array(lengths), np.array(returns, np.float32)
        self._step = np.zeros(self.num_envs, int)
        self._first = np.ones(self.num_envs, bool)
        self._reward = np.zeros(self.num_envs, np.float32)

    def observe(self):
        shown = np.arange(self.num_envs, dtype=np.uint8).reshape(-1, 1, 1, 1)
        return Step(self._reward, shown, self._first, np.zeros(self.num_envs, bool), None)

    def act(self, actions):
        begins = self._first
        self._step += 1
        self._first = self._step % self._lengths == 0
        self._reward = self._returns * (begins * np.float32(0.5) + self._first * np.float32(0.5))

    def take_info(self):
        return {}

    def solved(self):
        return self._returns > 0

    def close(self):
        pass


class Acting:
    """A policy whose actions are those of a function of observations and noise, one uniform an action."""

    def __init__(self, act):
        self.act = act

    def draw_noise(self, generator, steps):
        return generator.random((steps, 1), np.float32)

    def memory(self, envs):
        return None


def still(observations, noise):
    return np.zeros(len(observations), np.int32)


def scripted(monkeypatch, lengths, returns):
    monkeypatch.setattr(registry, "make", lambda spec, indices: Scripted(lengths, returns))
    return EnvSpec(env="catch", num_envs=len(lengths), seed=0)
