"""The settings of a trainer: typed fields with help and ranges, read from flags and files.

A trainer's settings are one frozen dataclass, such as `Config` in `tfrl/algorithms/ppo.py`. Nothing here
imports TensorFlow, so that `--help` and a bad setting are answered at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import sys
import textwrap
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NamedTuple, NoReturn, TypeVar

import yaml

from tfrl import __version__
from tfrl.cli.errors import UserError
from tfrl.cli.flags import (
    COUNT,
    ENDLESS,
    NATURAL,
    TIMEOUT,
    TIMEOUT_OR_NONE,
    Range,
    check_effects,
    check_ranges,
    flag,
    read_flags,
    read_yaml,
    shown,
    texts_of,
)
from tfrl.cli.help import Group, print_help

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from typing_extensions import Self

SettingsT = TypeVar("SettingsT", bound="Settings")
Precision = Literal["auto", "float32", "bfloat16"]

SETTINGS_FILE = "config.yaml"
"""The file of settings in a run's folder."""
_COMMENT_WIDTH = 98

# Settings of every trainer. A trainer's own class adds fields, and repeats a field to change its help.


class NoResult:
    """A base for sections of settings that do not change the result, so a resumed run may change them."""


@dataclass(frozen=True)
class Hardware(NoResult):
    """The hardware."""

    strategy: Literal["auto", "one-device", "mirrored", "multi-worker"] = "auto"
    """TensorFlow's strategy. auto: multi-worker if TF_CONFIG is set, mirrored for several GPUs or --replicas,
    otherwise one-device."""
    replicas: Annotated[int, Range(0, 256)] = 0
    """Devices of this process that learn together: GPUs, or this many equal parts of its CPU. 0: all GPUs,
    or the CPU as one."""
    precision: Precision = "auto"
    """Precision of the torso; everything else is float32. auto: bfloat16 where it is faster (GPUs of compute
    capability 8.0 or higher, CPUs with AMX, AMD's CPUs with AVX512-BF16; never for mlp), otherwise float32. A
    resumed run keeps its precision."""
    micro_batch: Annotated[int, NATURAL] = 0
    """Compute gradients in parts of this many samples, and sum them. The gradient step is the same (except
    that of TD3+BC); smaller parts need less memory. 0: chosen for speed."""
    device: str = "auto"
    """cpu, gpu (all GPUs, at least one), or gpu:NUMBER (this one, counted from 0). auto: the GPUs if there
    are any."""
    threads: Annotated[int, Range(0, 1024)] = 0
    """Threads of this process that compute on a CPU. The result does not depend on their number, up to
    rounding where a gradient step is not computed in parts. 0: one for each core, or
    TF_NUM_INTRAOP_THREADS."""
    eager: bool = False
    """Run TensorFlow's functions eagerly, for debugging with print and breakpoints: much slower, and equal up
    to rounding."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """Transport of gradients between workers: ring (any device) or nccl (GPUs); auto: TensorFlow chooses."""
    cluster_timeout: Annotated[float, TIMEOUT] = 120.0
    """Seconds to wait for all workers at the start; then the run ends."""
    stall_timeout: Annotated[float, TIMEOUT_OR_NONE] = 0.0
    """End the run after this many seconds without a step of any worker. 0: the time of ten measured
    updates, but at least a minute."""


@dataclass(frozen=True)
class RunSettings(NoResult):
    """The run's folder."""

    logdir: str = "logs"
    """The run's folder is LOGDIR/RUN_NAME."""
    run_name: str | None = None
    """Name of the run's folder. None: it follows from other settings, so that the same command continues its
    run."""
    resume: Literal["auto", "never", "must", "restart"] = "auto"
    """auto: continue the run in the folder if it has a checkpoint; never: refuse an existing run; must:
    refuse to begin a new run; restart: delete the run in the folder, after a question, and begin anew."""
    yes: bool = False
    """Answer the question of --resume restart with yes, which is necessary without a terminal."""
    checkpoint_every: Annotated[int, COUNT] = 10
    """Updates between checkpoints."""
    keep_checkpoints: Annotated[int, COUNT] = 3
    """Number of checkpoints to keep."""
    log_level: Literal["error", "warning", "info", "debug"] = "warning"
    """Messages of TensorFlow and Python's logging that are shown: only errors, also warnings, also
    information, or all. debug also shows each phase of the run."""


@dataclass(frozen=True)
class CommandSettings:
    """The command itself."""

    config: str | None = None
    """A YAML file of settings, such as a run's config.yaml. Flags win over the file. --preset replaces the
    file's preset and its values."""
    print_config: bool = False
    """Print the resulting settings as YAML, and exit."""


_CHANGED_FIRST = frozenset(
    ("env", "preset", "total_steps", "seed", "num_envs", "num_steps", "lr", "gamma", "torso", "hidden")
    + ("memory", "epochs", "num_minibatches", "entropy_coef", "batch_size", "replay_size", "train_every")
    + ("batch_episodes", "normalize_observations", "eval_every", "logdir", "run_name", "resume", "replicas")
    + ("actors", "observers", "model", "dataset", "augment", "config", "print_config", "device")
)
"""Names of the settings that people change first. --help shows only them; --help-all shows all settings."""


@dataclass(frozen=True)
class Settings(RunSettings, Hardware, ABC):
    """The settings of every trainer; a base for a frozen dataclass of flags.

    Attributes:
      algorithm: the name that config.yaml begins with; "resnet" is the supervised trainer.
      sections: dataclasses that together have all fields: the groups of --help. The text under a field is its
        help.
      aliases: further names of fields.
      inherit_from_run: settings that the run in the folder gives where they are None.
      step_name: the name of one step in messages; a checkpoint has its number.
    """

    sections: ClassVar[tuple[type, ...]]
    aliases: ClassVar[Mapping[str, str]] = {"learning_rate": "lr"}
    inherit_from_run: ClassVar[tuple[str, ...]] = ()
    step_name: ClassVar[str] = "update"

    algorithm: str = ""
    preset: str = "default"
    """A whole set of defaults, which --help lists; flags and files win over it."""

    @classmethod
    def preset_folder(cls) -> Traversable:
        """The folder of the presets, a file NAME.yaml each."""
        return resources.files("tfrl") / "presets" / cls.algorithm

    def default_preset(self) -> str:
        """The preset of a command line or file that names none and has these settings."""
        return self.preset

    @classmethod
    def derive(cls, given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that follow from the given ones; given values win, unless they are `auto`.

        `over` has settings that win over the given ones, as flags win over a file. Raises UserError.
        """
        return {}

    def complete(self) -> Self:
        """These settings with derived values filled in, such as the run's name."""
        name = self.default_run_name if self.run_name is None else self.run_name
        return dataclasses.replace(self, run_name=name, logdir=expand_home(self.logdir))

    def with_own_functions(self) -> Self:
        """These settings with those that a function of the user decides, which it imports."""
        return self

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        check_ranges(self)
        _check_folder_names(self)
        if not re.fullmatch(r"auto|cpu|gpu(:\d{1,4})?", self.device):
            raise UserError(f"--device must be auto, cpu, gpu or gpu:NUMBER; got {shown(self.device)}.")
        if self.strategy == "one-device" and self.replicas > 1:
            raise UserError(f"--strategy one-device has one replica; got --replicas {self.replicas}.")

    @property
    def ineffective(self) -> dict[str, str]:
        """Settings without an effect by name, each with the reason, such as "without --double"."""
        return {}

    @abstractmethod
    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if the replicas of all workers cannot share the work evenly."""

    @property
    def may_change(self) -> frozenset[str]:
        """Names of the settings that a resumed run may change: what it writes, and where it runs."""
        sections: list[Any] = [section for section in self.sections if issubclass(section, NoResult)]
        names = {field.name for section in sections for field in dataclasses.fields(section)}
        return frozenset(names - {"precision"})

    @property
    @abstractmethod
    def steps_per_update(self) -> int:
        """The most env steps of one update, or the images of a gradient step, all workers together."""

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Samples of one gradient step, all workers together."""

    @property
    def whole_batches(self) -> bool:
        """True if a batch is not computed in parts, which the cores of a CPU would share."""
        return False

    @property
    def min_parts(self) -> int:
        """The least number of equal parts of a minibatch on CPUs, which 1, 2 or 4 replicas can share."""
        return 4

    @property
    def small_network(self) -> bool:
        """True if the network is too small to gain from bfloat16."""
        return False

    @property
    @abstractmethod
    def default_run_name(self) -> str:
        """The name of a run without --run-name. The same command gets the same name, so that it resumes."""

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(expand_home(self.logdir)) / (self.run_name or self.default_run_name)


# Presets


class Preset(NamedTuple):
    """A whole set of defaults.

    Attributes:
      summary: what it is for, in words.
      changes: the settings that differ from the defaults of the dataclass.
    """

    summary: str
    changes: Mapping[str, Any]


@functools.cache
def preset_files(kind: type[Settings]) -> dict[str, Traversable]:
    """The files of the presets of a dataclass of settings, by name in the order of the alphabet."""
    files = [file for file in kind.preset_folder().iterdir() if file.name.endswith(".yaml")]
    return dict(sorted((file.name.removesuffix(".yaml"), file) for file in files))


@functools.cache
def read_preset(kind: type[Settings], name: str) -> Preset:
    """Reads a preset of a dataclass of settings. Raises UserError if its file is wrong."""
    file = preset_files(kind)[name]
    found = read_yaml(setting_types(kind), kind.aliases, file)
    changes = {name: value for name, value in found.items() if name not in ("algorithm", "preset")}
    lines = file.read_text(encoding="utf-8").splitlines()
    summary = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return Preset(" ".join(line.removeprefix("#").strip() for line in summary), changes)


# Reading


@functools.cache
def setting_types(kind: type[Settings]) -> dict[str, Any]:
    """The types of the settings that a file may give, by name."""
    hints = typing.get_type_hints(kind)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return types | {"preset": Literal[tuple(preset_files(kind))]}


@functools.cache
def own_settings(kind: type[Settings]) -> tuple[str, ...]:
    """The settings that a user's dataclass adds to those of tfrl, by name."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith(("tfrl.", "resnet."))]
    known = {name for base in (*bases, *kind.sections) for name in getattr(base, "__dataclass_fields__", ())}
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in known)


@dataclass(frozen=True)
class Reader(Generic[SettingsT]):
    """Reads the settings of one command.

    Attributes:
      kind: the dataclass of the settings.
      summary: the text of --help before the flags.
      command: the command, for --help.
      defaults: values that differ from those of the dataclass.
      algorithm: the name that config.yaml begins with.
      overrides: settings that win over the presets.
      own: the title of the group in --help of the settings that are in none of the sections.
    """

    kind: type[SettingsT]
    summary: str
    command: str
    algorithm: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: str = ""

    def parse(self, argv: Sequence[str]) -> SettingsT:
        """Checked settings of a command line. Flags win over the --config file, which wins over the preset.

        A --preset also replaces the preset of the file and its values. --help, --help-all and --print-config
        raise SystemExit(0). Raises UserError for a wrong setting.
        """
        if {"-h", "--help", "--help-all"} & set(argv):
            self._help(whole="--help-all" in argv)
        flags = read_flags(self.flag_kinds, self.kind.aliases, argv)
        print_config = flags.pop("print_config", False)
        config = self.of_values(flags)
        if print_config:
            sys.stdout.write(to_yaml(config))
            raise SystemExit(0)
        return config

    def of_values(self, values: Mapping[str, Any]) -> SettingsT:
        """Checked settings from values by field name, as `parse` makes them from flags; `config` is a file.

        Raises UserError for a wrong setting.
        """
        flags = dict(values)
        path = flags.pop("config", None)
        file = self._left_of_file(path, flags.get("preset")) if path else {}
        of_file, of_flags = self.kind.derive(file, flags), self.kind.derive(flags, {})
        given = {**of_file, **file, **of_flags, **flags}
        left_open = {n: x for n, x in {**of_file, **of_flags}.items() if given[n] == "auto"}
        config = self._over_preset(given | left_open)
        kept = self._inherited_from_run(config)
        complete = dataclasses.replace(config, **kept).complete().with_own_functions()
        try:
            self.validate(complete, {name: f"{name} in {path}" for name in file.keys() - flags.keys()})
        except UserError as error:
            plain = config.complete()
            named = [n for n in kept if flag(n) in str(error) and kept[n] != getattr(plain, n)]
            of_run = [f"{flag(n)} {shown(kept[n])}" for n in named]
            if not of_run:
                raise
            raise UserError(f"{error} The run in {complete.run_dir} has {' and '.join(of_run)}.") from None
        return complete

    def from_yaml(self, path: str | Path) -> SettingsT:
        """The unchecked settings of a YAML file; its preset gives the others. Raises UserError."""
        return self._over_preset(self._read_file(path)).complete()

    def validate(self, config: SettingsT, spelled: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises UserError for the first setting that cannot work on any machine, or has no effect.

        `spelled` has the settings that a message does not call by their flags.
        """
        self.check(config)
        check_effects(config, self.of_preset(config.preset), spelled)

    def check(self, config: SettingsT) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        config.check()
        # A failure with one worker is a failure with more workers, whose shares are fractions of its share.
        workers = getattr(config, "learners", 1)
        config.check_topology(workers, replicas_per_worker=max(1, config.replicas))

    def of_preset(self, preset: str) -> SettingsT:
        """The settings that a preset stands for."""
        return self.kind(**self.changes_of(preset))

    def changes_of(self, preset: str) -> dict[str, Any]:
        """The settings that a preset changes in the defaults."""
        return {**read_preset(self.kind, preset).changes, **self.overrides}

    @cached_property
    def flag_kinds(self) -> dict[str, Any]:
        """The types of all flags, by name."""
        types = setting_types(self.kind) | typing.get_type_hints(CommandSettings)
        return {name: kind for name, kind in types.items() if name != "algorithm"}

    def _read_file(self, path: str | Path) -> dict[str, Any]:
        """The settings that a file gives. Raises UserError."""
        named = algorithm_of(Path(path))
        # Before a setting that only the other algorithm has would be called unknown.
        if named not in (None, self.algorithm):
            command = "resnet.train" if named == "resnet" else f"tfrl {named}"
            raise UserError(
                f"{path} has settings of {named}, not of {self.algorithm}; use python -m {command}."
            )
        values = read_yaml(setting_types(self.kind), self.kind.aliases, Path(path))
        values.pop("algorithm", None)
        return values

    def _left_of_file(self, path: str, preset: str | None) -> dict[str, Any]:
        """The file's settings, without those that follow from settings that the flags may change.

        These are a default run name, a default threshold of the env, and the values of the file's preset if
        the flags give another preset.
        """
        values = self._read_file(path)
        filled_in = {"run_name", "solved_at"} & values.keys()
        if filled_in:
            plain = self._over_preset(values | dict.fromkeys(filled_in)).complete()
            values = {n: x for n, x in values.items() if n not in filled_in or x != getattr(plain, n)}
        own = values.get("preset")
        if own is None or preset in (None, own):
            return values
        changes = self.changes_of(own)
        plain, mine = self.kind(**changes).complete(), self.defaults.keys() - changes.keys()
        return {n: x for n, x in values.items() if n in mine or x != getattr(plain, n)}

    def _over_preset(self, given: Mapping[str, Any]) -> SettingsT:
        """The given settings, and the others from their preset and the defaults."""
        preset = given.get("preset") or self.kind(**{**self.defaults, **given}).default_preset()
        names = preset_files(self.kind)
        if preset not in names:  # a default of the algorithm that it extends
            preset = next(iter(names))
        named = {"algorithm": self.algorithm, "preset": preset}
        return self.kind(**{**self.defaults, **self.changes_of(preset), **given, **named})

    def _inherited_from_run(self, config: SettingsT) -> dict[str, Any]:
        """The settings that are left open and that the run in the folder gives, if it has this algorithm."""
        left_open = [name for name in config.inherit_from_run if getattr(config, name) is None]
        file = config.run_dir / SETTINGS_FILE
        if not left_open or config.resume in ("never", "restart") or algorithm_of(file) != self.algorithm:
            return {}
        try:
            there = self.from_yaml(file)
        except UserError:  # the check of the folder reports it
            return {}
        return {name: getattr(there, name) for name in left_open}

    def _help(self, *, whole: bool) -> NoReturn:
        """Prints the help and exits; the whole help has all settings and the presets' values."""
        values = vars(CommandSettings()) | vars(self._over_preset({}).complete()) | {"run_name": None}
        groups = []
        for title, about, kinds, texts in self._groups():
            known = {name: kind for name, kind in kinds.items() if whole or name in _CHANGED_FIRST}
            if known:
                groups.append(Group(f"{title} options", about, known, texts, values))
        described = []
        for name in preset_files(self.kind):
            summary, changes = read_preset(self.kind, name).summary, self.changes_of(name)
            text = f"{name} ({summary})" if summary else name
            listed = ", ".join(f"{n.replace('_', '-')} {value}" for n, value in changes.items())
            described.append(f"{text}: {listed}." if listed and whole else f"{text}.")
        more = [] if whole else ["--help-all shows all settings, and what the presets change."]
        print_help(self.command, "\n\n".join([self.summary, *more, "The presets:", *described]), groups)

    def _groups(self) -> Iterator[tuple[str, str, dict[str, Any], dict[str, str]]]:
        """The groups of --help: title, a line about it, and the types and texts of its fields."""
        mine, texts = setting_types(self.kind), texts_of(self.kind)
        for section in (*self.kind.sections, CommandSettings):
            kinds = typing.get_type_hints(section) | {"preset": mine["preset"]}
            of_section = {field.name: kinds[field.name] for field in dataclasses.fields(section)}
            yield (
                _title(section.__name__.removesuffix("Settings")),
                _first_line(section),
                of_section,
                texts | texts_of(section),
            )
            if section is self.kind.sections[0]:
                own = {name: mine[name] for name in own_settings(self.kind)}
                yield self.own, _first_line(self.kind), own, texts


def _title(name: str) -> str:
    """The words of a class's name: LevelReplay is "Level replay"."""
    return re.sub(r"(?<=[a-z])[A-Z](?=[a-z])", lambda found: f" {found[0].lower()}", name)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


# Writing


def to_yaml(config: Settings) -> str:
    """The settings as YAML with their help as comments. `Reader.from_yaml` reads back equal settings."""
    lines = [f"algorithm: {config.algorithm}\n", f"{_WRITTEN_BY}{__version__}\n"]
    texts = texts_of(type(config))
    values = dataclasses.asdict(config)
    del values["algorithm"]
    for name, value in values.items():
        value = math.inf if value == ENDLESS else value
        comment = textwrap.wrap(texts.get(name, ""), _COMMENT_WIDTH, break_on_hyphens=False)
        lines += ["\n", *(f"# {line}\n" for line in comment), yaml.safe_dump({name: value})]
    return "".join(lines)


_WRITTEN_BY = "# Written by tfrl "


def is_of_earlier_version(path: Path) -> bool:
    """True for a settings file of tfrl 0.1.0, which names no version."""
    return not any(line.startswith(_WRITTEN_BY) for line in path.read_text(errors="replace").splitlines())


def algorithm_of(path: Path) -> str | None:
    """The algorithm that a settings file names; None if it names none or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        # Older files of the supervised trainer name none, but have a dataset.
        older = "algorithm: resnet" if any(line.startswith("dataset:") for line in lines) else ""
        named = next((line for line in lines if line.startswith("algorithm:")), older)
        algorithm = (yaml.safe_load(named) or {}).get("algorithm")
        return None if algorithm is None else str(algorithm)
    except (OSError, yaml.YAMLError):
        return None


# Folders


def expand_home(path: str) -> str:
    """Replaces `~`, which a shell does not do in `--logdir=~/x` or in a file."""
    return os.path.expanduser(path)  # noqa: PTH111 - Path raises for an unknown user, and turns "" into "."


def _check_folder_names(config: Settings) -> None:
    """Raise UserError if --logdir and --run-name cannot name a folder."""
    if not config.logdir or "\0" in config.logdir:
        raise UserError(f"--logdir must be a folder's path; got {config.logdir!r}.")
    name = config.run_name
    if name is None:
        return
    # Other characters may control a terminal, or may not be text.
    printable = name.isprintable() and not {"/", "\\"} & {*name}
    if name in ("", ".", "..") or not printable or len(name.encode()) > 200:
        raise UserError(
            "--run-name must be a folder's name, at most 200 bytes of printable characters, no slashes; "
            f"got {name[:60]!r}."
        )
