"""Sweeps over the settings of an algorithm: which trials there are, and the flags of each."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfrl import config as settings
from tfrl.algorithms import ppo
from tfrl.cli.errors import UserError
from tfrl.cli.flags import coerce, flag, nearest
from tfrl.cli.settings import Reader
from tfrl.config.network import DECIDE_MLP, DECIDE_WEIGHTS
from tfrl.config.run import RLSettings

_KINDS = ("uniform", "loguniform", "choice")
_OURS = ("logdir", "run_name", "resume", "print_config")  # a sweep gives each trial its own
_APART = ("--resume", "never")  # a trial does not continue the run that its flags alone would name
_FIXED = (*_OURS, "start_from", "config", "total_steps")


@dataclass(frozen=True)
class Sampled:
    """A setting that is drawn at random.

    Attributes:
      name: the name of the setting.
      kind: uniform or loguniform between the two values, or a choice of them.
      values: the two ends, or the choices, in the type of the setting.
    """

    name: str
    kind: str
    values: tuple[Any, ...]

    def draw(self, generator: np.random.Generator) -> Any:
        """A value; whole numbers are rounded, others have four digits, so that people can type them."""
        if self.kind == "choice":
            return self.values[int(generator.integers(len(self.values)))]
        low, high = self.values
        share = generator.random()
        value = low + share * (high - low)
        if self.kind == "loguniform":
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        return self.inside(value)

    def inside(self, value: float) -> Any:
        """The number between the ends that is closest to `value`, in the type of the setting."""
        low, high = self.values
        whole = isinstance(low, int)
        return min(max(round(value) if whole else float(f"{value:.4g}"), low), high)


@dataclass(frozen=True)
class Sweep:
    """The trials of one algorithm.

    Attributes:
      algorithm: as in `python -m tfrl.ALGORITHM`.
      flags: the flags of all trials.
      trials: the settings of each trial that vary, by name.
      sampled: the settings that are drawn, which a scheduler may change.
      scheduler: none, asha or pbt.
      metric: the column of progress.csv by which trials are compared; larger is better.
      total_steps: the env steps of a trial.
    """

    algorithm: str
    flags: tuple[str, ...]
    trials: tuple[Mapping[str, Any], ...]
    sampled: tuple[Sampled, ...]
    scheduler: str
    metric: str
    total_steps: int

    def arguments(self, trial: Mapping[str, Any]) -> list[str]:
        """The flags of a trial with these varied settings."""
        return [*self.flags, *(f"{flag(name)}={_typed(value)}" for name, value in trial.items())]

    def command(self, trial: Mapping[str, Any]) -> str:
        """The command that trains with the settings of a trial outside the sweep."""
        return shlex.join(["python", "-m", f"tfrl.{self.algorithm}", *self.arguments(trial)])

    def config(self, trial: Mapping[str, Any]) -> RLSettings:
        """All settings of a trial. Raises UserError if they contradict each other."""
        return reader_of(self.algorithm).parse([*self.arguments(trial), *_APART])

    def is_possible(self, trial: Mapping[str, Any]) -> bool:
        """True if these settings do not contradict each other."""
        try:
            self.config(trial)
        except UserError:
            return False
        return True

    def content(self) -> dict[str, Any]:
        """The sweep as JSON's types, for a file that identifies it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def trial_name(index: int) -> str:
    """The name of a trial and of its run's folder."""
    return f"trial-{index:03d}"


def reader_of(algorithm: str) -> Reader:
    """The reader of `python -m tfrl.ALGORITHM`. Raises UserError if there is none."""
    return ppo.PROCGEN_READER if algorithm == "ppo_procgen" else settings.reader(algorithm)


def plan(
    algorithm: str,
    flags: Sequence[str],
    *,
    grids: Sequence[str],
    samples: Sequence[str],
    trials: int,
    seed: int,
    scheduler: str,
    metric: str,
) -> Sweep:
    """The sweep that a command line describes: each point of the grid, `trials` times if values are drawn.

    Raises UserError if the algorithm has no such setting, a value is not allowed, or a trial cannot work.
    """
    reader = reader_of(algorithm)
    grid, sampled = [_grid(text, reader) for text in grids], [_sampled(text, reader) for text in samples]
    names = [name for name, _ in grid] + [each.name for each in sampled]
    if not names:
        raise UserError("a sweep needs --grid or --sample, for example --grid lr=5e-4,1e-3.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{flag(twice[0])} is varied twice; give it once.")
    if not sampled and trials > 1:
        raise UserError(f"--trials {trials} needs --sample: each point of a grid is one trial.")
    if scheduler == "pbt" and not sampled:
        raise UserError("--scheduler pbt needs --sample: it changes the sampled settings.")
    _check_flags(flags, reader)
    generator = np.random.default_rng(seed)
    made = []
    for values in itertools.product(*(values for _, values in grid)):
        fixed = {name: value for (name, _), value in zip(grid, values, strict=True)}
        made += [fixed | {s.name: s.draw(generator) for s in sampled} for _ in range(trials)]
    sweep = Sweep(algorithm, tuple(flags), tuple(made), tuple(sampled), scheduler, metric, 0)
    trials_of = [*made, *_ends(made[0], sampled)]
    configs = [reader.parse([*sweep.arguments(trial), *_APART]) for trial in trials_of]
    on_the_way = configs[0].eval_every or configs[0].eval_every_steps
    if scheduler != "none" and not on_the_way and metric.startswith("eval"):
        raise UserError(
            f"--scheduler {scheduler} compares trials during their training: give --eval-every after the --."
        )
    if scheduler == "pbt":
        _check_exploits(grids, sampled, configs)
    return dataclasses.replace(sweep, total_steps=configs[0].total_steps)


def _check_flags(flags: Sequence[str], reader: Reader) -> None:
    """Raises UserError for a flag that the sweep itself gives each trial."""
    for word in flags:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and reader.kind.aliases.get(name, name).removeprefix("no_") in _OURS:
            raise UserError(
                f"a sweep chooses {flag(name)} of its trials: leave it out after the --; --logdir may "
                "stand before the --."
            )


def _check_exploits(grids: Sequence[str], sampled: Sequence[Sampled], configs: Sequence[RLSettings]) -> None:
    """Raises UserError if a trial could not continue from another trial's weights, as PBT requires."""
    if grids:
        raise UserError(
            "--scheduler pbt copies another trial's settings, so a trial would not keep its value of "
            f"--grid {grids[0]}: give --sample instead."
        )
    if fixed := [each.name for each in sampled if each.name in (*DECIDE_WEIGHTS, *DECIDE_MLP, "env")]:
        raise UserError(
            f"--scheduler pbt copies weights between trials, so {flag(fixed[0])}, which changes the "
            "network, cannot be sampled."
        )
    config = configs[0]
    if hasattr(config, "learning_starts"):
        raise UserError(
            f"--scheduler pbt is not for {config.algorithm}: a run that starts with the weights of another "
            "run has an empty replay."
        )
    for name in ("start_from", "torso_weights"):
        if any(getattr(each, name, None) is not None for each in configs):
            raise UserError(f"--scheduler pbt copies weights between trials: leave {flag(name)} out.")


def _ends(trial: Mapping[str, Any], sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """The trial with each sampled setting at each of its ends."""
    return [{**trial, each.name: value} for each in sampled for value in each.values]


def _grid(text: str, reader: Reader) -> tuple[str, tuple[Any, ...]]:
    name, values = _named(text, reader, "--grid lr=5e-4,1e-3")
    found = _values(name, values, reader)
    if len(set(found)) < len(found):
        raise UserError(f"--grid {text} has a value twice; where values have commas, put ; between them.")
    return name, found


def _sampled(text: str, reader: Reader) -> Sampled:
    usage = "--sample lr=loguniform:1e-4,1e-2"
    name, rest = _named(text, reader, usage)
    kind, colon, values = rest.partition(":")
    if kind not in _KINDS or not colon:
        raise UserError(f"--sample {text} must be like {usage}; known: {', '.join(_KINDS)}.")
    found = _values(name, values, reader)
    if kind == "choice":
        return Sampled(name, kind, found)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
    if len(found) != 2 or not numbers or found[0] >= found[1]:
        raise UserError(f"--sample {text}: {kind} is between two numbers, the smaller one first.")
    if kind == "loguniform" and found[0] <= 0:
        raise UserError(f"--sample {text}: loguniform is between numbers above 0.")
    return Sampled(name, kind, found)


def _named(text: str, reader: Reader, usage: str) -> tuple[str, str]:
    word, equals, values = text.partition("=")
    if not equals or not values:
        raise UserError(f"{text!r} must be like {usage}.")
    name = word.strip().lstrip("-").replace("-", "_")
    name = reader.kind.aliases.get(name, name)
    if name in _FIXED:
        raise UserError(f"{flag(name)} cannot be varied.")
    if name not in reader.flag_kinds:
        hint = nearest(name, reader.flag_kinds)
        raise UserError(f"{text!r}: {reader.command} has no setting {word}{hint}.")
    return name, values


def _values(name: str, text: str, reader: Reader) -> tuple[Any, ...]:
    words = text.split(";" if ";" in text else ",")
    return tuple(coerce(word.strip(), reader.flag_kinds[name], flag(name)) for word in words)


def _typed(value: Any) -> str:
    """A value as a user types it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
