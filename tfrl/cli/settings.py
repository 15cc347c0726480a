"""The settings of a trainer: typed fields with help and ranges, read from flags and files.

A trainer's settings are one frozen dataclass, such as `Config` in `tfrl/algorithms/ppo.py`. Nothing here
imports TensorFlow, so that `--help` and a bad setting are answered at once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import os
import sys
import textwrap
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NoReturn, TypeVar

import yaml

from tfrl import __version__
from tfrl.cli.errors import UserError
from tfrl.cli.flags import (
    COUNT,
    NATURAL,
    TIMEOUT,
    TIMEOUT_OR_NONE,
    Range,
    check_ranges,
    field_types,
    flag,
    read_flags,
    read_yaml,
    shown,
)

if TYPE_CHECKING:
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
    """Compute gradients in parts of this many samples, and sum them. The gradient step is the same; smaller
    parts need less memory. 0: chosen for speed."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """Transport of gradients between workers: ring (any device) or nccl (GPUs); auto: TensorFlow chooses."""
    cluster_timeout: Annotated[float, TIMEOUT] = 120.0
    """Seconds to wait for all workers at the start; then the run ends."""
    stall_timeout: Annotated[float, TIMEOUT_OR_NONE] = 0.0
    """End the run after this many seconds without a step of any worker. 0: the time of ten measured
    updates, but at least a minute."""


@dataclass(frozen=True)
class Run(NoResult):
    """The run's folder."""

    logdir: str = "logs"
    """The run's folder is LOGDIR/RUN_NAME."""
    run_name: str | None = None
    """Name of the run's folder. None: it follows from other settings, so that the same command continues its
    run."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue the run in the folder if it has a checkpoint; never: refuse an existing run; must:
    refuse to begin a new run."""
    checkpoint_every: Annotated[int, COUNT] = 10
    """Updates between checkpoints."""
    keep_checkpoints: Annotated[int, COUNT] = 3
    """Number of checkpoints to keep."""


@dataclass(frozen=True)
class Command:
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
    + ("actors", "observers", "model", "dataset", "augment", "config", "print_config")
)
"""Names of the settings that people change first. --help shows only them; --help-all shows all settings."""


@dataclass(frozen=True)
class Settings(Run, Hardware, ABC):
    """The settings of every trainer; a base for a frozen dataclass of flags.

    Attributes:
      algorithm: the name that config.yaml begins with; "resnet" is the supervised trainer.
      sections: dataclasses that together have all fields: the groups of --help. The text under a field is its
        help.
      presets: by name, what each preset changes in the defaults.
      preset_summaries: what the presets are, in words.
      aliases: further names of fields.
      step_name: the name of one step in messages; a checkpoint has its number.
    """

    algorithm: ClassVar[str]
    sections: ClassVar[tuple[type, ...]]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    preset_summaries: ClassVar[Mapping[str, str]] = {}
    aliases: ClassVar[Mapping[str, str]] = {"learning_rate": "lr"}
    step_name: ClassVar[str] = "update"

    preset: str = "default"
    """A whole set of defaults, which --help lists; flags and files win over it."""

    def default_preset(self) -> str:
        """The preset of a command line or file that names none and has these settings."""
        return self.preset

    @classmethod
    def derive(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that follow from the given ones; given values win. Raises UserError."""
        return {}

    def inherit_from_run(self) -> dict[str, Any]:
        """Settings to take from the run in this folder if the command line does not give them."""
        return {}

    def complete(self) -> Self:
        """These settings with derived values filled in, such as the run's name."""
        name = self.default_run_name if self.run_name is None else self.run_name
        return dataclasses.replace(self, run_name=name, logdir=expand_home(self.logdir))

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        check_ranges(self)
        _check_folder_names(self)
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
    def least_parts(self) -> int:
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
        return Path(self.logdir) / (self.run_name or self.default_run_name)

    def validate(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine, or has no effect."""
        self.check()
        # A failure with one worker is a failure with more workers, whose shares are fractions of its share.
        self.check_topology(workers=getattr(self, "learners", 1), replicas_per_worker=max(1, self.replicas))
        plain = self.of_preset(self.preset)
        for name, why in self.ineffective.items():
            value = getattr(self, name)
            if value != getattr(plain, name):
                spelled = flag(f"no_{name}" if value is False else name)
                raise UserError(f"{spelled} has no effect {why}; leave it out.")

    @classmethod
    def of_preset(cls, preset: str) -> Self:
        """The settings that a preset stands for."""
        return cls(**cls.presets[preset])


# Reading


@dataclass(frozen=True)
class Reader(Generic[SettingsT]):
    """Reads the settings of one command.

    Attributes:
      kind: the dataclass of the settings.
      summary: the text of --help before the flags.
      command: the command, for --help.
      defaults: values that differ from those of the dataclass.
    """

    kind: type[SettingsT]
    summary: str
    command: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        values = dict(values)
        path = values.pop("config", None)
        file = self._read_file(path, values.get("preset")) if path else {}
        given = {**self.kind.derive(file), **file, **self.kind.derive(values), **values}
        return self._inheriting(self._in_full(given))

    def from_yaml(self, path: str | Path) -> SettingsT:
        """The unchecked settings of a YAML file; its preset gives the others. Raises UserError."""
        return self._in_full(self._read_yaml(path)).complete()

    @cached_property
    def flag_kinds(self) -> dict[str, Any]:
        """The types of all flags, by name."""
        return self._kinds | typing.get_type_hints(Command)

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        hints = typing.get_type_hints(self.kind)
        kinds = {field.name: hints[field.name] for field in dataclasses.fields(self.kind)}
        return kinds | {"preset": Literal[tuple(self.kind.presets)]}

    def _read_yaml(self, path: str | Path) -> dict[str, Any]:
        named, mine = algorithm_of(Path(path)), self.kind.algorithm
        # Before a setting that only the other algorithm has would be called unknown.
        if named not in (None, mine):
            command = "resnet.train" if named == "resnet" else f"tfrl {named}"
            raise UserError(f"{path} has settings of {named}, not of {mine}; use python -m {command}.")
        values = read_yaml(self._kinds | {"algorithm": str}, self.kind.aliases, path)
        values.pop("algorithm", None)
        return values

    def _read_file(self, path: str, preset: str | None) -> dict[str, Any]:
        """The file's settings, without those that follow from settings that the flags may change.

        These are a default run name, a default threshold of the env, and the values of the file's preset if
        the flags give another preset.
        """
        values = self._read_yaml(path)
        for name in {"run_name", "solved_at"} & values.keys():
            filled_in = getattr(self._in_full({**values, name: None}).complete(), name)
            if filled_in is not None and filled_in == values[name]:
                del values[name]
        own = values.get("preset")
        if own is None or preset in (None, own):
            return values
        plain = self.kind.of_preset(own).complete()
        kept = self.defaults.keys() - self.kind.presets[own].keys()
        return {n: value for n, value in values.items() if n in kept or value != getattr(plain, n)}

    def _inheriting(self, config: SettingsT) -> SettingsT:
        """These settings, complete and valid; the run in the folder gives those that are left open."""
        complete = config.complete()
        inherited = {
            name: value
            for name, value in complete.inherit_from_run().items()
            if getattr(config, name) is None and value != getattr(complete, name)
        }
        complete = dataclasses.replace(config, **inherited).complete()
        try:
            complete.validate()
        except UserError as error:
            if not inherited:
                raise
            its_own = " and ".join(f"{flag(name)} {shown(value)}" for name, value in inherited.items())
            raise UserError(f"{error} The run in {complete.run_dir} has {its_own}.") from None
        return complete

    def _in_full(self, values: Mapping[str, Any]) -> SettingsT:
        """These settings, and the others from their preset and the defaults."""
        preset = values.get("preset") or self.kind(**{**self.defaults, **values}).default_preset()
        if preset not in self.kind.presets:  # a default of the algorithm that it extends
            preset = next(iter(self.kind.presets))
        return self.kind(**{**self.defaults, **self.kind.presets[preset], **values, "preset": preset})

    def _help(self, *, whole: bool) -> NoReturn:
        """Prints the help and exits; the whole help has all settings and the presets' values."""
        import tyro

        values = vars(Command()) | vars(self._in_full({}).complete()) | {"run_name": None}
        groups = []
        for section in (*self.kind.sections, Command):
            texts, fields = _help_of_fields(self.kind) | _help_of_fields(section), []
            for name, kind in field_types(section).items():
                if whole or name in _CHANGED_FIRST:
                    value, metavar = values[name], None
                    if isinstance(value, dict):  # tyro would omit the flag of an empty mapping
                        kind, value, metavar = str, json.dumps(value), "JSON"
                    kind = Annotated[kind, tyro.conf.arg(help=texts.get(name, ""), metavar=metavar)]
                    fields.append((name, kind, dataclasses.field(default=value)))
            if fields:
                group = dataclasses.make_dataclass(section.__name__, fields)
                group.__doc__ = section.__doc__
                omit: Any = tyro.conf.OmitArgPrefixes
                flat = omit[group]
                groups.append((section.__name__, flat, dataclasses.field(default_factory=group)))
        flags = dataclasses.make_dataclass("Flags", groups)
        presets, summaries = self.kind.presets, self.kind.preset_summaries
        described = []
        for name, changes in presets.items():
            summary = f" ({summaries[name]})" if name in summaries else ""
            flags_of_it = ", ".join(f"{n.replace('_', '-')} {value}" for n, value in changes.items())
            described.append(f"{name}{summary}{f': {flags_of_it}' if changes and whole else ''}.")
        more = [] if whole else ["--help-all shows all settings, and what the presets change."]
        description = "\n\n".join([self.summary, *more, "The presets:", *described])
        tyro.cli(flags, prog=self.command, description=description, args=["--help"])
        raise SystemExit(0)


# Writing


def to_yaml(config: Settings) -> str:
    """The settings as YAML with their help as comments. `Reader.from_yaml` reads back equal settings."""
    lines = [f"algorithm: {config.algorithm}\n", f"{_WRITTEN_BY}{__version__}\n"]
    texts = _help_of_fields(type(config))
    for name, value in dataclasses.asdict(config).items():
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


@functools.cache
def _help_of_fields(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass and its bases, by name, in one line."""
    found: dict[str, str] = {}
    for of_class in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(of_class)))
        except (OSError, TypeError):  # there is no source code
            continue
        for field, text in pairwise(typing.cast(ast.ClassDef, tree.body[0]).body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


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
