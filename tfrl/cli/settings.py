"""The common part of all trainers' settings: reading them from flags and files, and the ranges of numbers.

A trainer's settings are one frozen dataclass, such as `Config` in `tfrl/algorithms/ppo.py`. Nothing here
imports TensorFlow, so that `--help` and a bad setting are answered at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar

import yaml

from tfrl.cli.errors import UserError
from tfrl.cli.field_help import field_help
from tfrl.cli.flags import flag, read_flags, read_yaml, shown

Settings = TypeVar("Settings")

_COMMENT_WIDTH = 98

# Ranges


class Range(NamedTuple):
    """Numbers from `low` to `high`; without `low` itself if it is `above`."""

    low: float
    high: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """True if `value` is inside."""
        enough = value > self.low if self.above else value >= self.low
        return enough and value <= self.high

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return f"{low} and at most {self.high:.10g}"


MOST = 2**31 - 1
"""The largest of procgen's C++ options and of TensorFlow's indices, which have 32 bits."""

# Numbers, and whole numbers.
_LARGEST = 1e38  # float32 holds a little more
POSITIVE = Range(0, _LARGEST, above=True)
NOT_NEGATIVE = Range(0, _LARGEST)
FRACTION = Range(0, 1)
ANY = Range(-_LARGEST, _LARGEST)
NATURAL = Range(0, MOST)
COUNT = Range(1, MOST)

WIDTH = Range(1, 64)  # of a network: its weights go with the square

_SEASON = 1e7  # seconds; the operating system's clocks take no more than 9e9
TIMEOUT = Range(0, _SEASON, above=True)
TIMEOUT_OR_NONE = Range(0, _SEASON)


def check_ranges(config: Any) -> None:
    """Raise UserError for the first number outside the range of its field: `lr: Annotated[float, POSITIVE]`.

    None is left alone.
    """
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        for allowed in getattr(kind, "__metadata__", ()):
            if value is not None and not allowed.holds(value):
                raise UserError(f"{flag(name)} must be {allowed}; got {shown(value)}.")


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with their ranges."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# What every trainer can be told. A trainer's own class adds fields, and gives one again to word its help.


@dataclass(frozen=True)
class Hardware:
    """The hardware."""

    strategy: Literal["auto", "one-device", "mirrored", "multi-worker"] = "auto"
    """Strategy; auto: multi-worker where TF_CONFIG is set, mirrored on several GPUs or --replicas, else
    one-device."""
    replicas: Annotated[int, Range(0, 256)] = 0
    """Replicas in this process; on a CPU, as many logical devices are made. 0: one, or one for each GPU."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the torso; all else is float32. auto: bfloat16 where it is the faster (GPUs from compute
    capability 8.0 on, CPUs with AMX, AMD's with AVX512-BF16; not for the torso mlp); a resumed run keeps what
    it began with."""
    micro_batch: Annotated[int, NATURAL] = 0
    """Sum gradients over parts of this many samples, on a CPU as many at once as it has cores: the same step;
    smaller parts take less memory. 0: chosen for speed."""
    communication: Literal["auto", "ring", "nccl"] = "auto"
    """Library by which workers sum gradients."""
    cluster_timeout: Annotated[float, TIMEOUT] = 120.0
    """Seconds to wait for all workers to appear before giving up."""
    stall_timeout: Annotated[float, TIMEOUT_OR_NONE] = 0.0
    """Seconds without a step of any worker before giving up;
    0: a minute or ten measured updates, whichever is more."""


@dataclass(frozen=True)
class Run:
    """The run's folder."""

    logdir: str = "logs"
    """The run's folder is LOGDIR/RUN_NAME."""
    run_name: str | None = None
    """Name of the run; None: one that follows from the other settings, so that the same command goes on with
    its run."""
    resume: Literal["auto", "never", "must", "restart"] = "auto"
    """Dealing with an existing run. auto: go on from its checkpoint, if any; never: refuse it; must: refuse a
    new one; restart: remove its files, after a question, and begin anew."""
    checkpoint_every: Annotated[int, COUNT] = 10
    """Updates between checkpoints."""
    keep_checkpoints: Annotated[int, COUNT] = 3
    """Checkpoints that are kept."""


@dataclass(frozen=True)
class Command:
    """The command itself."""

    config: str | None = None
    """A YAML file of settings, flat as a run's config.yaml or in sections; flags win over it, and --preset
    over what it has from its own preset."""
    print_config: bool = False
    """Print the settings that result, as YAML, and end."""
    yes: bool = False
    """Answer the question of --resume restart with yes."""


MAY_CHANGE = frozenset(
    ("logdir", "run_name", "resume", "checkpoint_every", "keep_checkpoints", "strategy", "replicas")
    + ("micro_batch", "communication", "cluster_timeout", "stall_timeout")
)
"""Names of the settings that any resumed run may change: what it writes, and where it runs."""


# Reading


@dataclass(frozen=True)
class Reader(Generic[Settings]):
    """Reads the settings of one trainer.

    Attributes:
      kind: a frozen dataclass, one field a flag. It has a `preset` and a `run_name`, and may have an
        `algorithm`, a class variable that its files then begin with, and `idle`, the names of settings that
        have no effect beside the others, each with why: "without --prioritized".
      sections: dataclasses that together have its fields: the groups of --help. The text under a field is its
        help.
      presets: by name, what each preset changes in the defaults; preset_summaries: what they are, in words.
      complete: the settings with what follows from others, such as the run's name, filled in.
      check: raises UserError for the first setting that cannot work on any machine.
      prog: how the command is called.
      summary: what --help says before the flags.
      defaults: what a command line begins with otherwise than the dataclass; files do not.
      default_preset: the preset of settings that are given none, by these; None: the dataclass's.
      aliases: further names of fields.
      before: what was used before there was a setting, where that is not what every preset says now: a run's
        own file of then has all of its section but this.
      implied: settings that follow from given ones, unless they are given as well. Raises UserError.
      kept: of the run in the folder of these settings, if there is one, what it has of those that may be left
        open: it goes on with its own where a command line leaves them None.
    """

    kind: type[Settings]
    sections: Sequence[type]
    presets: Mapping[str, Mapping[str, Any]]
    complete: Callable[[Settings], Settings]
    check: Callable[[Settings], None]
    prog: str
    summary: str
    preset_summaries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    default_preset: Callable[[Settings], str] | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda flags: {}
    kept: Callable[[Settings], Mapping[str, Any]] = lambda config: {}

    def parse(self, argv: Sequence[str]) -> Settings:
        """Checked settings of a command line: the preset's, over them the --config file's, then the flags'.

        A --preset also takes the place of the file's own: what the file has from that gives way.

        Answers --help and --print-config by SystemExit(0). Raises UserError for anything that cannot be
        meant.
        """
        if any(token in ("-h", "--help") for token in argv):
            self._help(argv)
        flags = read_flags(self.flag_kinds, self.aliases, argv)
        path, print_config = flags.pop("config", None), flags.pop("print_config", False)
        flags.pop("yes", None)  # for the command, which asks
        file = self._read_file(path, flags.get("preset")) if path else {}
        given = {**self.implied(file), **file, **self.implied(flags), **flags}
        config = self._going_on(self._in_full(given, self.defaults))
        if print_config:
            sys.stdout.write(to_yaml(config))
            raise SystemExit(0)
        return config

    def from_yaml(self, path: str | Path) -> Settings:
        """The settings of a YAML file, unchecked; those it leaves out are its preset's. Raises UserError."""
        return self._resolve(self._read_yaml(path))

    def validate(self, config: Settings) -> None:
        """Raise UserError for the first setting that cannot work on any machine, or that would do nothing."""
        self.check(config)
        plain = self.kind(**self.presets[config.preset])
        for name, why in getattr(config, "idle", {}).items():
            value = getattr(config, name)
            if value != getattr(plain, name):
                spelled = flag(f"no_{name}" if value is False else name)
                raise UserError(f"{spelled} would do nothing {why}; leave it out.")

    @property
    def flag_kinds(self) -> dict[str, Any]:
        """The types of all flags, by name."""
        return self._kinds | typing.get_type_hints(Command)

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        hints = typing.get_type_hints(self.kind)
        kinds = {field.name: hints[field.name] for field in dataclasses.fields(self.kind)}
        return kinds | {"preset": Literal[tuple(self.presets)]}

    def _read_yaml(self, path: str | Path) -> dict[str, Any]:
        mine = getattr(self.kind, "algorithm", None)
        # First, before anything that only one of them has would be called unknown.
        self._check_algorithm(path, algorithm_of(Path(path)) or mine)
        values = read_yaml(self._kinds | {"algorithm": str}, self.aliases, path)
        self._check_algorithm(path, values.pop("algorithm", mine))  # in a section
        for section in self.sections:
            left_out = {field.name for field in dataclasses.fields(section)} - values.keys()
            if left_out <= self.before.keys():
                values |= {name: self.before[name] for name in left_out}
        return values

    def _check_algorithm(self, path: str | Path, algorithm: str | None) -> None:
        mine = getattr(self.kind, "algorithm", None)
        if algorithm != mine:
            raise UserError(f"{path} has settings of {algorithm}, not of {mine or 'this trainer'}.")

    def _read_file(self, path: str, preset: str | None) -> dict[str, Any]:
        """The file's settings, without what follows from others that the flags may change.

        That is its run's name, a threshold of its env's own, and what it has from a preset of its own where
        the flags give another; but not the env that no preset names.
        """
        values = self._read_yaml(path)
        for name in {"run_name", "solved_at"} & values.keys():
            filled_in = getattr(self._resolve({**values, name: None}), name)
            if filled_in is not None and filled_in == values[name]:
                del values[name]
        own = values.get("preset")
        if None in (own, preset) or own == preset:
            return values
        plain = self.complete(self.kind(**self.presets[own]))
        kept = self.defaults.keys() - self.presets[own].keys()
        return {n: value for n, value in values.items() if n in kept or value != getattr(plain, n)}

    def _going_on(self, config: Settings) -> Settings:
        """These settings resolved and checked, those that are left open by the run that they go on with."""
        resolved = self.complete(config)
        kept = {
            name: value
            for name, value in self.kept(resolved).items()
            if getattr(config, name) is None and value != getattr(resolved, name)
        }
        resolved = self.complete(dataclasses.replace(config, **kept))
        try:
            self.validate(resolved)
        except UserError as error:
            if not kept:
                raise
            its_own = " and ".join(f"{flag(name)} {shown(value)}" for name, value in kept.items())
            raise UserError(f"{error} The run in {resolved.run_dir} has {its_own}.") from None
        return resolved

    def _resolve(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> Settings:
        return self.complete(self._in_full(values, defaults))

    def _in_full(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Settings:
        """All settings: these, and the rest by their preset and the defaults."""
        preset = values.get("preset")
        if preset is None:
            preset = self.kind.preset
            if self.default_preset:
                preset = self.default_preset(self.kind(**{**defaults, **values}))
        return self.kind(**{**defaults, **self.presets[preset], **values, "preset": preset})

    def _help(self, argv: Sequence[str]) -> NoReturn:
        """Print the help, and end."""
        import tyro

        values = vars(self._resolve({}, self.defaults)) | {"run_name": None}
        fields = []
        for section in self.sections:
            names = {field.name for field in dataclasses.fields(section)}
            default = section(**{name: value for name, value in values.items() if name in names})
            fields.append(
                (section.__name__, tyro.conf.OmitArgPrefixes[section], dataclasses.field(default=default))
            )
        fields.append(("Command", tyro.conf.OmitArgPrefixes[Command], dataclasses.field(default=Command())))
        flags = dataclasses.make_dataclass("Flags", fields)
        presets = map(self._preset_help, self.presets)
        description = "\n\n".join([self.summary, "The presets:", *presets])
        with _json_in_help():
            tyro.cli(flags, prog=self.prog, description=description, args=list(argv))
        raise SystemExit(0)

    def _preset_help(self, name: str) -> str:
        changes, summary = preset_in_words(self.presets[name]), self.preset_summaries.get(name, "")
        return f"{name}{summary and f' ({summary})'}{changes and f': {changes}'}."


def _json_in_help() -> Any:
    """Has tyro show a mapping as one value of JSON; it would leave out the flag of an empty one."""
    import tyro

    rules = tyro.constructors.ConstructorRegistry()

    @rules.primitive_rule
    def _(kind: Any) -> Any:
        if typing.get_origin(kind.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda text: json.loads(text[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return rules


def algorithm_of(path: Path) -> str | None:
    """The algorithm that a settings file names; None if none, or the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        named = next((line for line in lines if line.startswith("algorithm:")), "")
        algorithm = (yaml.safe_load(named) or {}).get("algorithm")
        return None if algorithm is None else str(algorithm)
    except (OSError, yaml.YAMLError):
        return None


def to_yaml(config: Any) -> str:
    """The settings as a YAML file that `Reader.from_yaml` and --config take back exactly.

    A comment above each setting says what it is.
    """
    algorithm = getattr(config, "algorithm", None)
    lines = [f"algorithm: {algorithm}\n"] if algorithm else []
    texts = field_help(type(config))
    for name, value in dataclasses.asdict(config).items():
        comment = textwrap.wrap(texts.get(name, ""), _COMMENT_WIDTH, break_on_hyphens=False)
        lines += ["\n", *(f"# {line}\n" for line in comment), yaml.safe_dump({name: value})]
    return "".join(lines)


def preset_in_words(preset: Mapping[str, Any]) -> str:
    """The settings that a preset changes, as flags' names and values."""
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in preset.items())


# Folders


def expand_home(logdir: str) -> str:
    """Puts the home folder for `~`, as a shell would, but not in `--logdir=~/x` or in a file."""
    return os.path.expanduser(logdir)  # noqa: PTH111 - Path raises for a user that there is not, and makes "" "."


def check_folder_names(config: Run) -> None:
    """Raise UserError if --logdir and --run-name cannot name a folder."""
    if not config.logdir or "\0" in config.logdir:
        raise UserError(f"--logdir must be a folder's path; got {config.logdir!r}.")
    name = config.run_name
    if name is None:
        return
    # Other characters are commands to a terminal, or no text: files and messages could not hold them.
    printable = name.isprintable() and not {"/", "\\"} & {*name}
    if name in ("", ".", "..") or not printable or len(name.encode()) > 200:
        raise UserError(
            "--run-name must be a folder's name, at most 200 bytes of printable characters, no slashes; "
            f"got {name[:60]!r}."
        )
