"""Gymnasium envs of several arrays and of action masks, made for tests: `packed_envs:packed/Masked-v0`."""

import gymnasium
import numpy as np
from gymnasium import spaces

PLACES = {
    "pixels": spaces.Box(0, 255, (3, 12, 12), np.uint8),
    "arm": spaces.Dict(
        angles=spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
        grip=spaces.Discrete(3, start=-1),
        on=spaces.MultiBinary(3),
    ),
    "pair": spaces.Tuple([spaces.MultiDiscrete([2, 4]), spaces.Box(0, 9, (), np.int16)]),
    "order": spaces.Text(40),
}


class Masked(gymnasium.Env):
    """Allows some of its actions at each step, and fails at once where a forbidden one is taken.

    Args:
      choices: the numbers of values of the choices of an action: one of `Discrete`, more of `MultiDiscrete`.
      shows: "vector", "image" or "dict".
    """

    def __init__(self, choices=(5,), shows="vector"):
        one = len(choices) == 1
        self.choices, self.shows = choices, shows
        self.action_space = spaces.Discrete(choices[0], start=2) if one else spaces.MultiDiscrete(choices)
        self.observation_space = {
            "vector": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
            "dict": spaces.Dict(PLACES),
        }[shows]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._next()

    def step(self, action):
        taken = [action - 2] if len(self.choices) == 1 else action
        masks = zip(self.masks, taken, strict=True)
        assert all(mask[own] for mask, own in masks), f"{action} is forbidden"
        self.time += 1
        shown, info = self._next()
        ended = bool(self.np_random.random() < 0.1)
        if ended or self.time == 12:  # the mask of an end is of no use to anybody
            del info["action_mask"]
        return shown, float(taken[0] == self.lucky), ended, self.time == 12, info

    def _next(self):
        draw = self.np_random
        self.masks = [draw.random(n) < 0.5 for n in self.choices]
        for mask in self.masks:
            mask[draw.integers(len(mask))] = True
        self.lucky = int(draw.choice(np.flatnonzero(self.masks[0])))
        flags = [mask.astype(np.int8) for mask in self.masks]
        return self._show(), {"action_mask": flags[0] if len(flags) == 1 else tuple(flags)}

    def _show(self):
        if self.shows == "vector":
            return np.array([self.time, self.lucky], np.float32)
        if self.shows == "image":
            return np.full((12, 12, 3), 50 * self.lucky, np.uint8)
        return drawn(self.observation_space, self.np_random)


def drawn(space, generator):
    """A random element of a space; the numbers of boxes are small."""
    if isinstance(space, spaces.Dict):
        return {key: drawn(inner, generator) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(drawn(inner, generator) for inner in space.spaces)
    if isinstance(space, spaces.Text):
        return " ".join(generator.choice(["go", "to", "the", "red", "green", "door"], 3))
    if isinstance(space, spaces.Discrete):
        return int(space.start + generator.integers(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return space.start + generator.integers(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return generator.integers(2, size=space.shape, dtype=np.int8)
    return (9 * generator.random(space.shape)).astype(space.dtype)


class Signs(gymnasium.Env):
    """Right is the bright half of the picture, or the dark one where `inverted`: neither tells by itself."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        inverted=spaces.Discrete(2),
        picture=spaces.Box(0, 255, (6, 8, 1), np.uint8),
        noise=spaces.Box(-1, 1, (2,), np.float64),
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._show(), {}

    def step(self, action):
        reward = float(action == self.bright ^ self.inverted)
        self.time += 1
        return self._show(), reward, self.time == 8, False, {}

    def _show(self):
        self.bright, self.inverted = (int(x) for x in self.np_random.integers(2, size=2))
        picture = np.zeros((6, 8, 1), np.uint8)
        picture[:, 4 * self.bright : 4 * self.bright + 4] = 255
        return {
            "inverted": self.inverted,
            "picture": picture,
            "noise": self.np_random.uniform(-1, 1, 2),
        }


class Alone(gymnasium.Env):
    """Shows drawn elements of any space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return drawn(self.observation_space, self.np_random), {}

    def step(self, action):
        return drawn(self.observation_space, self.np_random), 1.0, False, self.np_random.random() < 0.2, {}


def _register(name, entry, **kwargs):
    gymnasium.register(f"packed/{name}-v0", entry, kwargs=kwargs)


_register("Masked", Masked)
_register("MaskedMany", Masked, choices=(3, 4))
_register("MaskedImage", Masked, shows="image")
_register("MaskedDict", Masked, shows="dict")
_register("Signs", Signs)
ALONE = {
    "Discrete": spaces.Discrete(4, start=3),
    "MultiBinary": spaces.MultiBinary((2, 3)),
    "MultiDiscrete": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "Matrix": spaces.Box(-1, 1, (3, 4), np.float64),
    "Number": spaces.Box(-5, 5, (), np.int8),
    "Depth": spaces.Box(0, 1, (8, 8, 1), np.float32),
    "Dict": spaces.Dict(PLACES),
    "Text": spaces.Text(30),
    "Flags": spaces.Box(0, 1, (4,), bool),
}
for _name, _space in ALONE.items():
    _register(_name, Alone, space=_space)


def named(spec, rows):
    """The arrays of rows [..., n] by identifier, as the env shows them."""
    found = {}
    for part in spec.parts:
        stored = rows[..., spec.places[part]].view(spec.stored_type(part.kind))
        array = stored.reshape((*rows.shape[:-1], *part.shape))
        if part.layout is not None:  # those of PLACES are [C, H, W]
            array = np.moveaxis(array, -1, -3)
        if part.kind == "choices":
            array = array + np.array(part.starts, np.int64).reshape(part.shape)
        found[spec.identifiers[part]] = array.astype(part.env_dtype)
    return found


def packed(name):
    """The id of one of these envs."""
    return f"packed_envs:packed/{name}-v0"
