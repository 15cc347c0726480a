"""The interface of an env: its specs, its `Step`, the numbers in its infos, and `VecEnv`, which every family
implements.

The specs decide the sizes of networks, buffers and noise.
"""

from __future__ import annotations

import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tfrl.envs.observations import ArraySpec

METRICS = "metrics"
"""The key of an info with a dict of numbers by name."""

Sums = dict[str, np.ndarray]
"""Sums of the numbers of each of B envs, and how many there were, by name: float64 [2, B]."""


@dataclass(frozen=True)
class ActionSpec(ABC):
    """An action space: shape, type and uniform actions. `ActionDistribution` has its distributions.

    Attributes:
      dtype: NumPy's name of the dtype of actions.
      kind: the adjective for its actions in messages, such as "discrete".
    """

    dtype: ClassVar[str]
    kind: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one action; () of a single number."""

    @abstractmethod
    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, [count, *shape]."""

    @abstractmethod
    def from_uniform(self, numbers: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Uniform actions [B, *shape] from numbers in [0, 1), float32 [B, K], one for each number of an
        action.

        `allowed`, bool [B, mask_size], excludes forbidden actions.
        """

    @property
    def mask_counts(self) -> tuple[int, ...]:
        """The number of mask flags of each choice of an action; () if actions cannot be masked."""
        return ()

    @property
    def mask_size(self) -> int:
        """The length of an action mask; 0 if actions cannot be masked."""
        return sum(self.mask_counts)

    def forbidden_by(self, masks: np.ndarray) -> str:
        """Names what masks uint8 [..., mask_size] forbid wholly: every action, or all values of a part of it.

        Returns "" if each part of an action has an allowed value.
        """
        begins = np.cumsum((0, *self.mask_counts[:-1]))
        allowed = np.maximum.reduceat(masks, begins, axis=-1)
        if allowed.all():
            return ""
        part = np.argwhere(allowed == 0)[0, -1]
        return "every action" if len(begins) == 1 else f"every value of part {part} of the action"

    def as_env_takes(self, actions: np.ndarray) -> np.ndarray:
        """Converts an agent's actions [B, *shape] to the env's; overridden if the env takes others.

        Those of Discrete may also be tensors.
        """
        return actions

    def env_inputs(self, actions: np.ndarray) -> Sequence[Any] | np.ndarray:
        """The arguments of the N envs' `step` for agents' actions [N, *shape]."""
        return self.as_env_takes(actions)

    @property
    def encoded_size(self) -> int:
        """A, the size of one action in `encoded`."""
        return math.prod(self.shape)

    def encoded(self, actions: np.ndarray) -> np.ndarray:
        """Actions [B, *shape] as inputs of a network, float32 [B, A]."""
        return actions.reshape(len(actions), -1).astype(np.float32)


@dataclass(frozen=True)
class Discrete(ActionSpec):
    """One of `n` actions: an int32 scalar, 0 ... n - 1.

    The env counts from `start`, which `as_env_takes` adds.
    """

    n: int
    start: int = 0

    dtype: ClassVar[str] = "int32"
    kind: ClassVar[str] = "discrete"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: a scalar."""
        return ()

    def __str__(self) -> str:
        return f"{self.n} discrete actions, {self.start} to {self.start + self.n - 1}"

    def as_env_takes(self, actions: np.ndarray) -> np.ndarray:
        """Actions int32 [B], counted from `start`."""
        return actions + self.start if self.start else actions

    def env_inputs(self, actions: np.ndarray) -> list[int]:
        """Python's integers, with which envs are faster than with NumPy's."""
        return self.as_env_takes(actions).tolist()

    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, int32 [count]."""
        return generator.integers(self.n, size=count, dtype=np.int32)

    @property
    def mask_counts(self) -> tuple[int, ...]:
        """One flag for each action."""
        return (self.n,)

    def from_uniform(self, numbers: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Uniform actions, int32 [B], by numbers in [0, 1), float32 [B, 1]."""
        if allowed is None:
            return (numbers[:, 0] * self.n).astype(np.int32)
        return _one_of(numbers[:, 0], allowed)

    @property
    def encoded_size(self) -> int:
        """A = n."""
        return self.n

    def encoded(self, actions: np.ndarray) -> np.ndarray:
        """Actions [B] as inputs of a network, one-hot, float32 [B, n]."""
        return np.eye(self.n, dtype=np.float32)[actions]


@dataclass(frozen=True)
class MultiDiscrete(ActionSpec):
    """K choices at once, int32 [K]: number k is one of `counts[k]`, 0 ... counts[k] - 1.

    The env counts from `starts`, which `as_env_takes` adds, and takes an array of the shape `env_shape`
    (None: [K]) and of the NumPy type `env_dtype`. The choices of MultiBinary have two values each. A mask has
    the flags of all choices, one choice after the other.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    env_shape: tuple[int, ...] | None = field(default=None, compare=False)
    env_dtype: str = field(default="int64", compare=False)

    dtype: ClassVar[str] = "int32"
    kind: ClassVar[str] = "multi-discrete"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: (K,)."""
        return (len(self.counts),)

    @property
    def mask_counts(self) -> tuple[int, ...]:
        """One flag for each value of each choice."""
        return self.counts

    def __str__(self) -> str:
        alike = len(self.counts) > 1 and len(set(self.counts)) == 1
        counts = f"each of {self.counts[0]}" if alike else f"of {', '.join(map(str, self.counts))}"
        return f"{len(self.counts)} choices at once, {counts} values{_shaped(self.env_shape)}"

    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, int32 [count, K]."""
        return generator.integers(self.counts, size=(count, len(self.counts)), dtype=np.int32)

    def from_uniform(self, numbers: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Uniform actions, int32 [B, K], by numbers in [0, 1), float32 [B, K]."""
        if allowed is None:
            return (numbers * np.array(self.counts)).astype(np.int32)
        masks = np.split(allowed, np.cumsum(self.counts)[:-1], axis=1)
        return np.stack([_one_of(numbers[:, k], mask) for k, mask in enumerate(masks)], axis=1)

    def as_env_takes(self, actions: np.ndarray) -> np.ndarray:
        """Actions int32 [B, K], counted from `starts` and in the env's shape and type."""
        counted = (actions + np.array(self.starts)).astype(self.env_dtype)
        return counted.reshape(len(actions), *(self.env_shape or self.shape))

    @property
    def encoded_size(self) -> int:
        """A = sum(counts)."""
        return sum(self.counts)

    def encoded(self, actions: np.ndarray) -> np.ndarray:
        """Actions [B, K] as inputs of a network, one-hot vectors side by side, float32 [B, A]."""
        one_hot = np.zeros((len(actions), sum(self.counts)), np.float32)
        np.put_along_axis(one_hot, actions + np.cumsum((0, *self.counts[:-1])), np.float32(1), axis=1)
        return one_hot


def _shaped(env_shape: tuple[int, ...] | None) -> str:
    """The env's shape in words, if it is not that of a vector."""
    return "" if env_shape is None or len(env_shape) == 1 else f", as {list(env_shape)}"


def _one_of(numbers: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Uniform choices int32 [B] among those allowed, bool [B, A], by numbers in [0, 1), float32 [B]."""
    counts = allowed.sum(axis=1)
    wanted = np.minimum((numbers * counts).astype(np.int64), counts - 1)
    return (allowed.cumsum(axis=1) > wanted[:, None]).argmax(axis=1).astype(np.int32)


@dataclass(frozen=True)
class Box(ActionSpec):
    """D real numbers, float32 [D], between `low` and `high` in the env.

    Agents act in [-1, 1]; `as_env_takes` rescales that to [low, high], in the NumPy type `env_dtype` and the
    shape `env_shape` (None: [D]).
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    env_dtype: str = field(default="float32", compare=False)  # policies fit envs of either type
    env_shape: tuple[int, ...] | None = field(default=None, compare=False)

    dtype: ClassVar[str] = "float32"
    kind: ClassVar[str] = "continuous"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one action: (D,)."""
        return (len(self.low),)

    def __str__(self) -> str:
        bounds = f"from {min(self.low):g} to {max(self.high):g}"
        return f"float32 {list(self.shape)} {bounds}{_shaped(self.env_shape)}"

    @cached_property
    def _scale(self) -> tuple[np.ndarray, ...]:
        """Low, high, their middle, and half their distance."""
        low, high = np.asarray(self.low, self.env_dtype), np.asarray(self.high, self.env_dtype)
        return low, high, low / 2 + high / 2, high / 2 - low / 2  # in this order no bound overflows by itself

    def as_env_takes(self, actions: np.ndarray) -> np.ndarray:
        """Actions float32 [B, D] in [-1, 1], rescaled to [low, high]."""
        low, high, middle, half = self._scale
        scaled = actions * half
        scaled += middle
        np.maximum(scaled, low, out=scaled)
        scaled = np.minimum(scaled, high, out=scaled).astype(self.env_dtype, copy=False)
        return scaled if self.env_shape is None else scaled.reshape(len(scaled), *self.env_shape)

    def env_inputs(self, actions: np.ndarray) -> Sequence[Any] | np.ndarray:
        """Arrays of the shape `env_shape`; a single number is an array, too."""
        taken = self.as_env_takes(actions)
        return taken if taken.ndim > 1 else [np.asarray(number) for number in taken]

    def uniform(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Uniform actions, float32 [count, D] in [-1, 1)."""
        return generator.uniform(-1.0, 1.0, (count, *self.shape)).astype(np.float32)

    def from_uniform(self, numbers: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Uniform actions, float32 [B, D] in [-1, 1), by numbers in [0, 1), float32 [B, D]."""
        return 2 * numbers - 1


class EnvSettings:
    """The settings of an env; `tfrl.config.run.Task` explains them."""

    env: str
    env_kwargs: Mapping[str, Any]
    frame_skip: int | None
    max_episode_steps: int | None
    distribution_mode: str
    num_levels: int
    start_level: int
    action_masks: str


@dataclass(frozen=True)
class EnvSpec(EnvSettings):
    """The description of a global vector of envs: the same spec gives the same envs everywhere.

    `num_levels=0` is the full distribution of levels; envs without levels ignore these fields. With
    `level_replay`, `VecEnv.act` takes the level that an env begins next; `first_levels` has the first ones.
    `num_threads`, `num_processes` and `render` change only the speed; `VecEnv.render` needs `render`.
    `env_kwargs`, `frame_skip`, `max_episode_steps` and `action_masks` are as in `tfrl.config.run.Task`.
    `log_info` are the keys of infos whose numbers `VecEnv.take_info` sums.
    """

    env: str
    num_envs: int
    seed: int
    distribution_mode: str = "easy"
    num_levels: int = 200
    start_level: int = 0
    num_threads: int = 2
    num_processes: int = 0
    render: bool = False
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    frame_skip: int | None = None
    max_episode_steps: int | None = None
    action_masks: str = "auto"
    level_replay: bool = False
    log_info: tuple[str, ...] = ()

    def first_levels(self, indices: Sequence[int]) -> np.ndarray:
        """The first levels of the envs with these global indices, uniform, int64 [B]."""
        drawn = [np.random.default_rng((self.seed, 0x1E7E1, i)).integers(self.num_levels) for i in indices]
        return np.array(drawn, np.int64) + self.start_level

    @classmethod
    def of(cls, task: EnvSettings, *, num_envs: int, seed: int, **changes: Any) -> EnvSpec:
        """The spec for the settings of `task`, with `changes` applied."""
        shared = {name: getattr(task, name) for name in EnvSettings.__annotations__}
        return cls(num_envs=num_envs, seed=seed, **{**shared, **changes})


class Step(NamedTuple):
    """The results of the last actions of B envs. Later steps do not change these arrays.

    Attributes:
      reward: float32 [B]: the raw reward of the last action; 0 before the first action.
      observation: [B, *shape]: o_t. If an episode has just ended, the first observation of the next one.
      first: bool [B]: o_t begins a new episode.
      truncated: bool [B]: the ended episode was truncated, by a time limit for example, and did not
        terminate. Implies `first`. An episode that was both counts as terminated.
      final_observation: [K, *shape]: the last observations of the K truncated episodes, in the order of the
        envs; None if K = 0.
    """

    reward: np.ndarray
    observation: np.ndarray
    first: np.ndarray
    truncated: np.ndarray
    final_observation: np.ndarray | None


def pack_state(step: Step, i: int, about: Mapping[str, Any], **arrays: np.ndarray) -> bytes:
    """The state of env i as npz, without pickle: its part of a step, JSON values by name, and arrays."""
    parts = {"reward": float(step.reward[i]), "first": bool(step.first[i])}
    parts["truncated"] = bool(step.truncated[i])
    arrays["observation"] = step.observation[i]
    if step.final_observation is not None and step.truncated[i]:
        arrays["final_observation"] = step.final_observation[step.truncated[:i].sum()]
    file = io.BytesIO()
    np.savez_compressed(file, about=np.array(json.dumps({**about, **parts})), **arrays)
    return file.getvalue()


def unpack_state(state: bytes) -> dict[str, Any]:
    """The values and arrays of `pack_state` by name; those of the step have the names of its fields."""
    with np.load(io.BytesIO(state), allow_pickle=False) as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("about"))) | arrays


def step_of(rows: Sequence[Mapping[str, Any]]) -> Step:
    """The step of all envs, from the results of `unpack_state`."""
    finals = [row["final_observation"] for row in rows if row["truncated"]]
    return Step(
        np.array([row["reward"] for row in rows], np.float32),
        np.stack([row["observation"] for row in rows]),
        np.array([row["first"] for row in rows]),
        np.array([row["truncated"] for row in rows]),
        np.stack(finals) if finals else None,
    )


class VecEnv(Protocol):
    """A vector of B envs that reset themselves in the last step of an episode (Gymnasium's SAME_STEP).

    Env i depends only on (seed, i) and its actions, never on the other envs.

    Attributes:
      num_envs: B.
      observation_spec: uint8 images [H, W, C], float32 vectors [D], or rows [n] of several arrays.
      action_spec: the action of one env.
      exact_state: False if the last `set_state` could not restore exactly, and began new episodes.
    """

    num_envs: int
    observation_spec: ArraySpec
    action_spec: ActionSpec
    exact_state: bool

    @property
    def levels(self) -> np.ndarray:
        """The levels of the running episodes, int64 [B]; only with `EnvSpec.level_replay`."""

    def observe(self) -> Step:
        """Waits for the step. A second call without `act` returns the same."""

    def act(self, actions: np.ndarray, levels: np.ndarray | None = None) -> None:
        """Starts one step with actions [B, *action_spec.shape]; may return while the envs still step.

        With `EnvSpec.level_replay`, an env whose episode ends with this step begins the next one on its level
        of `levels`, int64 [B].
        """

    def solved(self) -> np.ndarray:
        """True where the last finished episode reached its goal, bool [B]."""

    def take_info(self) -> Sums:
        """The sums of the numbers in the infos of all steps since the last call; {} without any."""

    def render(self) -> Sequence[np.ndarray]:
        """Video frames, uint8 [H, W, 3] per env; needs `EnvSpec.render`."""

    def get_state(self) -> list[bytes]:
        """One complete state per env, without pickle, with the result of `observe`."""

    def set_state(self, states: Sequence[bytes]) -> None:
        """Restores states of `get_state`; `observe` then returns the same as before."""

    def close(self) -> None:
        """Frees threads and memory."""


# Numbers in infos


class InfoSums:
    """Sums of the numbers in the infos of B envs.

    Args:
      keys: the keys of an info that are numbers, beside those of `info["metrics"]`.
      num_envs: B.
    """

    def __init__(self, keys: Sequence[str], num_envs: int) -> None:
        self._keys, self._num_envs = tuple(keys), num_envs
        self._sums: Sums = {}

    def add(self, env: int, info: Mapping[str, Any]) -> None:
        """Adds the finite numbers of one step of an env, also flags; ignores other values."""
        given = info.get(METRICS)
        found = [*given.items()] if isinstance(given, Mapping) else []
        found += [(key, info[key]) for key in self._keys if key in info]
        for name, value in found:
            number = _number(value)
            if number is None:
                continue
            sums = self._sums.get(str(name))
            if sums is None:
                sums = self._sums[str(name)] = np.zeros((2, self._num_envs))
            sums[0, env] += number
            sums[1, env] += 1

    def take(self) -> Sums:
        """The sums since the last call."""
        taken, self._sums = self._sums, {}
        return taken


def _number(value: Any) -> float | None:
    """A finite number or a flag as a float; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_number = isinstance(value, int | float | np.integer | np.floating | np.bool_)
    return float(value) if is_number and math.isfinite(value) else None


def joined(parts: Sequence[tuple[Sums, Sequence[int] | slice]], num_envs: int) -> Sums:
    """Joins the sums of parts of B envs, each with the places of its envs."""
    whole: Sums = {}
    for part, places in parts:
        for name, sums in part.items():
            whole.setdefault(name, np.zeros((2, num_envs)))[:, places] = sums
    return whole


def added(first: Sums, second: Sums) -> Sums:
    """The sums of two stretches of time of the same envs, the earlier one first."""
    both = {name: sums.copy() for name, sums in first.items()}
    for name, sums in second.items():
        both[name] = both[name] + sums if name in both else sums
    return both
