"""Gymnasium envs made for tests (`made_envs:made/Hidden-v0`); as a program, goes on from saved states.

    python tests/made_envs.py FILE < JSON of {id: [states in hex]}

writes {id: digest} of 300 steps after them.
"""

import json
import os
import sys
import time
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv


class _Made(gymnasium.Env):
    """A walk by the agent's action and a drawn step; its end is drawn, too."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = float(self.np_random.normal()), 0
        return self.show(), {}

    def step(self, action):
        self.place += float(action) - 1 + self.np_random.normal()
        self.time += 1
        return self.show(), self.place / 3, bool(self.np_random.random() < 0.02), False, {}

    def show(self):
        return np.array([self.place, self.time])


class Hidden(_Made):
    """Rewards the action of five steps ago, which nothing shows."""

    def reset(self, *, seed=None, options=None):
        self.pending = deque([0] * 5)
        return super().reset(seed=seed)

    def step(self, action):
        self.pending.append(action)
        shown, _, terminated, truncated, info = super().step(self.pending.popleft())
        return shown, 0.1 * action, terminated, truncated, {"is_success": self.place > 0}


class Recall(_Made):
    """Shows a drawn sign first; after 10 steps, the action of that sign has a reward of 1."""

    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.sign, self.time = int(self.np_random.integers(2)), 0
        return self.show(), {}

    def step(self, action):
        self.time += 1
        asked = self.time == 11
        return self.show(), float(asked and action == self.sign), asked, False, {}

    def show(self):
        return np.array([2.0 * self.sign - 1 if self.time == 0 else 0.0, self.time == 10])


class Positions(CartPoleEnv):
    """CartPole that shows the two positions and hides the velocities."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, **settings):
        shown, info = super().reset(**settings)
        return shown[::2], info

    def step(self, action):
        shown, *rest = super().step(action)
        return shown[::2], *rest


class Unseeded(_Made):
    """Draws from the system's randomness after `quiet` steps of an episode."""

    def __init__(self, quiet=0):
        self.quiet = quiet

    def step(self, action):
        if self.time >= self.quiet:
            self.place += int.from_bytes(os.urandom(2), "little") / 65536
        shown, _, *ends = super().step(action)
        return shown, 1.0, *ends


class Fifty(Unseeded):
    """Ends after 50 steps of reward 1, and never goes on exactly."""

    def step(self, action):
        shown, reward, *_ = super().step(action)
        return shown, reward, self.time == 50, False, {}


class Counting(_Made):
    """Shows how many episodes it has begun, which no seed brings back."""

    begun = 0

    def reset(self, *, seed=None, options=None):
        self.begun += 1
        return super().reset(seed=seed)

    def show(self):
        return np.array([self.place, self.begun])


class Slow(_Made):
    """Takes a tenth of a second a step, and ends never."""

    def step(self, action):
        time.sleep(0.1)
        shown, reward, *_ = super().step(action)
        return shown, reward, False, False, {}


class Both(_Made):
    """Ends after 10 + 5 * action steps; terminated and truncated at once if the last action was 2."""

    def step(self, action):
        shown, reward, _, _, info = super().step(action)
        ended = self.time >= 10 + 5 * action
        return shown, reward, ended and action != 1, ended and action > 0, info


class Spaced(_Made):
    """Any spaces; shows the action that it was given."""

    def __init__(self, shown, taken):
        self.observation_space, self.action_space = shown, taken

    def show(self):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def step(self, action):
        assert self.action_space.contains(action), action
        shown = self.show() + np.resize(np.asarray(action), self.observation_space.shape)
        return shown.astype(self.observation_space.dtype), 0.0, False, False, {}


class Frames(Spaced):
    """Shows frames of 20 x 20, each darker than the last, channels first, as a stack of frames has them."""

    def __init__(self):
        super().__init__(spaces.Box(0, 255, (4, 20, 20), np.uint8), _DISCRETE)

    def show(self):
        frame = np.arange(400, dtype=np.uint8).reshape(20, 20)
        return np.stack([frame // 2 ** (i + self.time % 2) for i in range(4)])


class Sized(_Made):
    """Needs the length of what it shows; its info has a mask of actions."""

    def __init__(self, size):
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def reset(self, *, seed=None, options=None):
        shown, _ = super().reset(seed=seed)
        return shown, {"action_mask": np.ones(3, np.int8)}

    def step(self, action):
        *parts, _ = super().step(action)
        return *parts, {"action_mask": np.ones(3, np.int8)}

    def show(self):
        return np.full(self.observation_space.shape, self.place)


class Faulty(_Made):
    """Has a fault, from the first call or only from step 30 of all episodes, each of 12 steps, on."""

    def __init__(self, fault, late=False):
        self.fault, self.quiet = fault, 30 if late else 0
        self.taken = 0

    def has(self, fault):
        return self.fault == fault and self.taken >= self.quiet

    def burn(self):
        raise RuntimeError("the motor is on fire.")

    def reset(self, *, seed=None, options=None):
        shown, info = super().reset(seed=seed)
        if self.has("reset-raises"):
            self.burn()
        given = {"reset-bare": shown, "reset-none": None}
        return given[self.fault] if self.has(self.fault) and self.fault in given else (shown, info)

    def step(self, action):
        shown, reward, *_ = super().step(action)
        self.taken += 1
        if self.has("step-raises"):
            self.burn()
        if self.has("step-library"):
            json.loads(chr(123))  # fails in the library's code
        if self.has("step-quits"):
            sys.exit(0)
        ended, info = self.time == 12, {}
        if self.has("step-four"):
            return shown, reward, ended, info
        if self.has(self.fault):
            rewards = {"large": 1e300, "none": None, "two": np.ones(2), "nan": np.nan, "inf": np.inf}
            shows = {"shape-short": shown[:1], "shape-long": np.ones(3), "shown-none": None}
            shows |= {"shown-nan": np.array([0, np.nan]), "shown-inf": np.array([-np.inf, 0])}
            reward = rewards[self.fault[7:]] if self.fault.startswith("reward-") else reward
            shown = shows.get(self.fault, shown)
            ended = None if self.fault == "terminated-none" else ended
            info = None if self.fault == "info-none" else info
        return shown, reward, ended, False, info


class Unseedable(_Made):
    """Has the reset of Gym's early days."""

    def reset(self):
        return super().reset()[0]


class Lists(_Made):
    """Shows lists, whose numbers are first ints and then not."""

    def show(self):
        return [self.time, 1e9] if self.time % 2 else [float(self.time), 10**9]


def _register(name, entry, limit=None, **kwargs):
    gymnasium.register(f"made/{name}-v0", entry, max_episode_steps=limit, kwargs=kwargs)


_VECTOR, _DISCRETE = spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3)
_register("Hidden", Hidden, limit=60)
_register("Endless", Hidden)
_register("Recall", Recall)
_register("Positions", Positions, limit=500)
_register("Unseeded", Unseeded, limit=60)
_register("LateUnseeded", Unseeded, limit=60, quiet=40)
_register("Fifty", Fifty)
_register("Counting", Counting, limit=60)
_register("Both", Both)
_register("Slow", Slow)
_register("Limit", Hidden, limit=1)
_register("Ints", Spaced, shown=spaces.Box(0, 9, (3,), np.int64), taken=spaces.Discrete(3, start=5))
_register("Pixels", Spaced, shown=spaces.Box(0, 255, (8, 6, 3), np.uint8), taken=_DISCRETE)
_register(
    "Lopsided",
    Spaced,
    shown=spaces.Box(-np.inf, np.inf, (2,), np.float64),
    taken=spaces.Box(np.array([0.0, -3.0]), np.array([0.5, 1.0]), dtype=np.float64),
)
_register("Frames", Frames)
_register("Sized", Sized)
_register("Several", Spaced, shown=spaces.Dict(a=spaces.Sequence(_VECTOR)), taken=_DISCRETE)
_register("Nothing", Spaced, shown=spaces.Dict(), taken=_DISCRETE)
_register("Table", Spaced, shown=_VECTOR, taken=spaces.MultiDiscrete([[2, 2], [2, 2]]))
_register("Unbounded", Spaced, shown=_VECTOR, taken=spaces.Box(-np.inf, np.inf, (2,)))
for _name, _most, _type in (
    *(("Huge", 3.4e38, np.float32), ("Huge64", 1.7e308, np.float64)),
    *(("Wide", 1e38, np.float32), ("Half", 65504, np.float16)),
):
    _register(_name, Spaced, shown=_VECTOR, taken=spaces.Box(-_most, _most, (2,), _type))
_register("Whole", Spaced, shown=_VECTOR, taken=spaces.Box(0, 9, (2,), np.int64))
for _fault in (
    *("step-raises", "step-library", "step-quits", "step-four", "reset-raises", "reset-bare", "reset-none"),
    *(
        "reward-large",
        "reward-none",
        "reward-two",
        "reward-nan",
        "reward-inf",
        "terminated-none",
        "info-none",
    ),
    *("shape-short", "shape-long", "shown-none", "shown-nan", "shown-inf"),
):
    _register(_fault, Faulty, fault=_fault)
    _register(f"late-{_fault}", Faulty, fault=_fault, late=True)
_register("reset-unseeded", Unseedable)
_register("Lists", Lists)


def made(name):
    """The id of one of these envs."""
    return f"made_envs:made/{name}-v0"


def vector(name, indices, seed=3, **settings):
    """A GymnasiumVec of envs `indices`."""
    from tfrl.envs.gymnasium import GymnasiumVec
    from tfrl.envs.spec import EnvSpec

    return GymnasiumVec(EnvSpec(name, num_envs=len(indices), seed=seed, **settings), indices)


def play(env, steps, seed=0):
    """The steps of a vector after random actions, which `seed` decides."""
    generator, spec, shown = np.random.default_rng(seed), env.action_spec, []
    for _ in range(steps):
        shape = (env.num_envs, *spec.shape)
        discrete = spec.dtype == "int32"
        env.act(generator.integers(spec.n, size=shape) if discrete else generator.uniform(-1, 1, shape))
        shown.append(env.observe())
    return shown


def digest(steps):
    """A hash of all that steps show."""
    import hashlib

    whole = hashlib.sha256()
    for step in steps:
        for array in step:
            whole.update(b"none" if array is None else array.tobytes())
    return whole.hexdigest()


def main():
    """Goes on from the states on stdin."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    digests = {}
    for name, states in json.load(sys.stdin).items():
        env = vector(name, range(len(states)), seed=99)
        env.set_state([bytes.fromhex(state) for state in states])
        digests[name] = [env.exact_state, digest([env.observe(), *play(env, 300, seed=1)])]
    Path(sys.argv[1]).write_text(json.dumps(digests))


if __name__ == "__main__":
    main()
