"""Gymnasium envs that show images, give masks and take actions in the forms that users' own envs have.

`formed_envs:make_stack` and others are callables for `--env`.
"""

import random

import gymnasium
import numpy as np
from gymnasium import spaces
from made_envs import Spaced
from packed_envs import Masked


def byte_box(*shape, high=255):
    return spaces.Box(0, high, shape, np.uint8)


class Shown(gymnasium.Env):
    """Shows drawn elements of a space. An episode has 9 steps."""

    def __init__(self, space, taken=None):
        self.observation_space, self.action_space = space, taken or spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._show(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        right = np.ravel(self.shown)[0] > self.observation_space.high.flat[0] / 2
        reward = float(np.mean(np.ravel(action)) == right)
        self.time += 1
        return self._show(), reward, False, self.time == 9, {}

    def _show(self):
        space = self.observation_space
        parts = self.np_random.integers(256, size=space.shape)
        self.shown = (parts * (float(space.high.flat[0]) / 255)).astype(space.dtype)
        return self.shown


def make_stack():
    """Four frames of colour."""
    return Shown(byte_box(4, 20, 24, 3))


def make_float_stack():
    """Two frames of colour, channels first, from 0 to 1."""
    return Shown(spaces.Box(0, 1, (2, 3, 20, 24), np.float32))


class MaskInside(Masked):
    """Shows its mask beside its observation, as envs of PettingZoo and RLlib do."""

    def __init__(self, choices=(5,)):
        super().__init__(choices)
        flags = spaces.Box(0, 1, (sum(choices),), np.int8)
        self.observation_space = spaces.Dict(observation=self.observation_space, action_mask=flags)

    def _next(self):
        shown, info = super()._next()
        mask = info["action_mask"]
        flags = np.concatenate(mask) if isinstance(mask, tuple) else mask
        return {"observation": shown, "action_mask": flags}, info

    def reset(self, **options):
        return super().reset(**options)[0], {}

    def step(self, action):
        shown, *rest, _ = super().step(action)
        return shown, *rest, {}


class MaskMethod(Masked):
    """Gives its mask by the method that sb3-contrib calls."""

    def action_masks(self):
        return np.concatenate(self.masks)

    def reset(self, **options):
        return super().reset(**options)[0], {}

    def step(self, action):
        shown, *rest, _ = super().step(action)
        return shown, *rest, {}


class Wrapped(gymnasium.Wrapper):
    """A wrapper that its env does not know."""


def make_masked_below():
    """A mask by a method below a wrapper and a time limit."""
    return gymnasium.wrappers.TimeLimit(Wrapped(MaskMethod()), 7)


def make_many_inside():
    """A mask of two choices in the observation."""
    return MaskInside((3, 4))


class ZeroPart(Masked):
    """Forbids all values of the second choice after some steps."""

    def __init__(self):
        super().__init__((3, 4))

    def _next(self):
        shown, info = super()._next()
        if self.time == 3:
            info["action_mask"][1][:] = 0
        return shown, info


class NoMask(Masked):
    """Gives None as a mask."""

    def reset(self, **options):
        return super().reset(**options)[0], {"action_mask": None}


class Ends(Shown):
    """Says the end of an episode in other words."""

    def __init__(self, terminated, at=0):
        super().__init__(spaces.Box(-1, 1, (2,), np.float32))
        self.terminated, self.at = terminated, at

    def step(self, action):
        shown, reward, *_ = super().step(action)
        said = self.terminated if self.time > self.at else False
        return shown, reward, said, False, {}


class Global(Shown):
    """Draws from a generator of the whole process; what it draws is not shown."""

    def __init__(self, generator="np.random", once=False):
        super().__init__(spaces.Box(-1, 1, (2,), np.float32))
        self.draw = {"np.random": np.random.rand, "random": random.random}[generator]
        self.once, self.drawn = once, False

    def step(self, action):
        shown, _, *rest = super().step(action)
        draws = not (self.once and self.drawn)
        self.drawn = True
        return shown, float(self.draw() > 2) if draws else 0.0, *rest


def make_global():
    return Global()


def make_switches():
    """Takes six switches at once, and has a wrapper of statistics."""
    made = Shown(spaces.Box(0, 1, (2,), np.float32), spaces.MultiBinary((2, 3)))
    return gymnasium.wrappers.NormalizeReward(made)


def make_table():
    """Takes a table of choices that begin at other numbers than 0."""
    table = spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 0], [0, -1]]))
    return Shown(spaces.Box(0, 1, (2,), np.float32), table)


def make_arms():
    """Takes real numbers of two axes."""
    return Shown(spaces.Box(0, 1, (2,), np.float32), spaces.Box(-2, 3, (2, 3), np.float64))


def make_knob():
    """Takes a single real number, without axes."""
    return Shown(spaces.Box(0, 1, (2,), np.float32), spaces.Box(-2, 3, (), np.float32))


def make_wide():
    return Spaced(spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1e4, 1e4, (1,), np.float32))


def make_flat():
    return Shown(spaces.Box(-1, 1, (32, 32, 32), np.float32))


def make_normalized():
    made = Shown(spaces.Box(-1, 1, (2,), np.float32))
    return gymnasium.wrappers.NormalizeReward(gymnasium.wrappers.NormalizeObservation(made))
