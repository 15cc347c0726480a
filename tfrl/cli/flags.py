"""Reads flags and YAML files into the typed fields of a flat dataclass, and checks the ranges of numbers.

`parse` reads the command line of a tool, such as `tfrl.report`; `tfrl.cli.settings` reads that of a trainer.
A setting means the same in a file and on the command line (`1e6` is a whole number in both), and every
mistake gets one sentence.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml

from tfrl.cli.errors import UserError
from tfrl.cli.help import Group, print_help
from tfrl.cli.other_systems import other_name

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from _typeshed import DataclassInstance


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known word that is most like `word`, as ` (did you mean …?)`; "" if none has this `likeness`."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=likeness)
    return f" (did you mean {close[0]}?)" if close else ""


def setting_hint(word: str, kinds: Iterable[str], likeness: float = 0.6) -> str:
    """A hint for an unknown setting: its name here, if other systems call it `word`; otherwise the nearest.

    Args:
      word: as the user wrote it: a flag, or the name of a field.
      kinds: the settings of the command, and their aliases.
      likeness: as in `nearest`.
    """
    known = list(kinds)
    if hint := other_name(word, known):
        return hint if word.startswith("--") else re.sub(r"(?<=mean )--(\S+?)(?=[ ?])", _as_field, hint)
    return nearest(word, map(flag, known) if word.startswith("--") else known, likeness)


def _as_field(found: re.Match[str]) -> str:
    return found[1].replace("-", "_")


def flag(name: str) -> str:
    """The field's flag: `num_envs` gives `--num-envs`."""
    return "--" + name.replace("_", "-")


ENDLESS = 10**15 - 1
"""The whole number that `inf` stands for, as in --total-steps inf. Nobody types it."""


def shown(value: Any) -> str:
    """A value in a sentence; a long one is shortened."""
    if value == ENDLESS:
        return "inf"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def without_none(kind: Any) -> Any:
    """Returns T for a type `T | None`, the only union that settings use, and other types unchanged."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):  # `Literal | None` is a typing.Union
        return kind
    (closed,) = set(typing.get_args(kind)) - {types.NoneType}
    return closed


def coerce(value: Any, kind: Any, where: str) -> Any:
    """Converts a value of a flag, YAML or Python to the type `kind`. Raises UserError, which has `where`."""
    if (closed := without_none(kind)) is not kind:
        if value is None or str(value).lower() in ("none", "null"):
            return None
        return coerce(value, closed, where)
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            hint = nearest(str(value), choices)
            raise UserError(f"{where} must be one of {', '.join(choices)}; got {shown(value)}{hint}.")
        return value
    kind = typing.get_origin(kind) or kind
    try:
        return _convert(value, kind)
    except (ValueError, OverflowError, RecursionError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        wanted[dict] = 'a JSON object, such as {"size": 8}'
        raise UserError(f"{where} must be {wanted[kind]}; got {shown(value)}.") from None


def _convert(value: Any, kind: type) -> Any:
    """Converts to a bool, int, float, str or dict. Raises ValueError or OverflowError."""
    converted: Any = value
    if kind is str:
        if isinstance(value, list | tuple):  # hidden=(256, 256)
            converted = ",".join(map(str, value))
        elif isinstance(value, Path) or (isinstance(value, int) and not isinstance(value, bool)):  # hidden=64
            converted = str(value)
    elif kind is bool:
        converted = {"true": True, "false": False}.get(str(value).lower())
    elif kind is dict:
        try:  # YAML has values that JSON lacks: dates and sets
            converted = json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
        except TypeError:
            raise ValueError from None
    elif kind is int and str(value).lower() in ("inf", "infinity"):
        converted = ENDLESS
    elif kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        try:  # PyYAML reads 5e-4 as text; a float would round integers of many digits
            converted = kind(value) if isinstance(value, str) else value
        except ValueError:
            converted = float(value)  # 1e6
        if kind is int and converted != int(converted):
            raise ValueError
        converted = kind(converted)
    if not isinstance(converted, kind):
        raise ValueError
    return converted


SEVERAL = tuple[str, ...]
"""The type of a flag that may be given several times, with a text each time."""


def is_switch(kind: Any) -> bool:
    """True for the type of a flag without a value, `--name` or `--no-name`."""
    return kind is bool or kind == bool | None


def read_flags(
    kinds: Mapping[str, Any],
    aliases: Mapping[str, str],
    argv: Sequence[str],
    words: list[str] | None = None,
) -> dict[str, Any]:
    """The settings in `argv` by field name. If a flag is given twice, the last one counts.

    Args:
      kinds: the type of every field. All values of a flag of type SEVERAL count.
      aliases: further names of fields.
      argv: the arguments.
      words: gets the arguments that are neither flags nor values; None: such arguments are refused.

    Raises UserError for an unknown flag, and for a missing or wrong value.
    """
    values: dict[str, Any] = {}
    tokens = list(reversed(argv))
    while tokens:
        token = tokens.pop()
        if words is not None and not token.startswith("-"):
            words.append(token)
            continue
        spelled, equals, text = token.partition("=")
        name = _field(spelled, kinds, aliases, "--help-all" if words is None else "--help")
        if is_switch(kinds.get(name)) and not equals:
            values[name] = True
        elif name not in kinds:
            if equals:
                raise UserError(f"{spelled} takes no value; got {text!r}.")
            values[name.removeprefix("no_")] = False
        else:
            if not equals:
                if not tokens or tokens[-1].startswith("--"):
                    if tokens and kinds[name] is str:
                        raise UserError(f"{spelled} needs a value; write {spelled}=... if it begins with --.")
                    raise UserError(f"{spelled} needs a value.")
                text = tokens.pop()
            if kinds[name] == SEVERAL:
                values[name] = (*values.get(name, ()), text)
            else:
                values[name] = coerce(text, kinds[name], spelled)
    return values


def _field(spelled: str, kinds: Mapping[str, Any], aliases: Mapping[str, str], lists: str) -> str:
    """The field of a flag; a `--no-` flag of a switch keeps its `no_`. `lists` lists all flags."""
    if not spelled.startswith("--"):
        raise UserError(
            f"{spelled!r} is not a flag; settings are given as --name value, switches as --name or --no-name."
        )
    name = spelled[2:].replace("-", "_")
    name = aliases.get(name, name)
    if name in kinds or is_switch(kinds.get(name.removeprefix("no_"))):
        return name
    hint = setting_hint(spelled, [*kinds, *aliases], 0.7)  # --learning-rate is not like --learners
    raise UserError(f"there is no flag {spelled}{hint}; {lists} lists them.")


def read_yaml(kinds: Mapping[str, Any], aliases: Mapping[str, str], path: Traversable) -> dict[str, Any]:
    """The settings in a YAML file by field name. The file may have sections of any name: `task: {env: maze}`.

    Raises UserError if the file cannot be read or is no mapping, or if a name is unknown, given twice, or has
    a value of another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"cannot read the settings file {path}: {reason}.") from None
    loader = yaml.SafeLoader(text)
    values: dict[str, Any] = {}
    unknown: list[str] = []

    def add(section: yaml.MappingNode) -> None:
        # `yaml.safe_load` would give a dict, which keeps the last of two equal keys in silence.
        for key_node, value_node in section.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise UserError(f"{path} merges settings with <<, which is not supported; write them out.")
            key = loader.construct_object(key_node, deep=True)
            # To YAML, an unquoted `yes` is no text.
            spelled = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key)
            name = aliases.get(name := spelled.replace("-", "_"), name)
            if isinstance(value_node, yaml.MappingNode) and name not in kinds:
                add(value_node)
                continue
            value = loader.construct_object(value_node, deep=True)
            if name not in kinds:
                unknown.append(f"{key!r}{setting_hint(name, [*kinds, *aliases])}")
                continue
            if name in values:
                raise UserError(f"{path} gives {name} twice; leave one out.")
            if type(value) is int and without_none(kinds[name]) is str:
                value = value_node.value  # the digits as they are written: YAML reads 010 as 8
            values[name] = coerce(value, kinds[name], f"{key} in {path}")

    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"the settings file {path} must hold one `name: value` a line.")
        add(node)
    # ValueError: a month 13, a number of thousands of digits; RecursionError: thousands of brackets.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"the settings file {path} is not valid YAML{line}.") from None
    if len(unknown) == 1:
        raise UserError(f"{path} has an unknown setting {unknown[0]}.")
    if unknown:
        lines = "".join(f"\n  {name}." for name in unknown)
        raise UserError(f"{path} has {len(unknown)} unknown settings:{lines}")
    return values


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
"""The largest option of procgen's C++ code and the largest index of TensorFlow; both have 32 bits."""

_LARGEST = 1e38  # the largest float32 is a little larger
POSITIVE = Range(0, _LARGEST, above=True)
NOT_NEGATIVE = Range(0, _LARGEST)
FRACTION = Range(0, 1)
ANY = Range(-_LARGEST, _LARGEST)
NATURAL = Range(0, MOST)
COUNT = Range(1, MOST)

WIDTH = Range(1, 64)  # the number of weights grows with the square

_SEASON = 1e7  # seconds; the operating system refuses more than 9e9
TIMEOUT = Range(0, _SEASON, above=True)
TIMEOUT_OR_NONE = Range(0, _SEASON)


def check_ranges(config: DataclassInstance) -> None:
    """Raise UserError for the first number outside the range in its annotation. None is always allowed."""
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        for allowed in getattr(kind, "__metadata__", ()):
            if value == ENDLESS and not allowed.holds(value):
                raise UserError(f"{flag(name)} must be a whole number; got inf.")
            if value is not None and not allowed.holds(value):
                raise UserError(f"{flag(name)} must be {allowed}; got {shown(value)}.")


def check_effects(given: Any, plain: Any, spelled: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """Raises UserError for the first setting of `given.ineffective` that differs from its value in `plain`.

    `spelled` has the settings that the message does not call by their flags.
    """
    for name, why in given.ineffective.items():
        value = getattr(given, name)
        if value != getattr(plain, name):
            word = spelled.get(name, flag(f"no_{name}" if value is False else name))
            raise UserError(f"{word} has no effect {why}; leave it out.")


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields by name, with their ranges."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def texts_of(kind: type) -> dict[str, str]:
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


# The command lines of the tools: folders by position, and flags from a dataclass

Options = TypeVar("Options", bound="DataclassInstance")
_HELP = ("-h", "--help", "--help-all")


def parse(options: type[Options], argv: Sequence[str], usage: str, summary: str) -> tuple[list[str], Options]:
    """Returns the positional arguments in order, and the flags as an `options`.

    Args:
      options: a dataclass, one flag a field; the text under a field is its help. A property `ineffective` may
        give the flags that have no effect beside the others, each with the reason.
      argv: the arguments. --help and --help-all print the same help and raise SystemExit(0).
      usage, summary: for the help.

    Raises UserError for an unknown flag, a value of another type, a number outside its range, and a flag that
    has no effect.
    """
    kinds = typing.get_type_hints(options)
    if any(token in _HELP for token in argv):
        print_help(usage, summary, [Group("", "", kinds, texts_of(options), vars(options()))])
    words: list[str] = []
    given = options(**read_flags(kinds, {}, argv, words))
    check_ranges(given)
    if hasattr(given, "ineffective"):
        check_effects(given, options())
    return words, given


def leading(arguments: Sequence[str]) -> int:
    """The number of arguments before the first one that is neither a flag nor its value; no flag is a switch
    but --help.
    """
    end = 0
    while end < len(arguments) and arguments[end].startswith("-") and arguments[end] != "--":
        alone = "=" in arguments[end] or arguments[end] in _HELP or arguments[end + 1 : end + 2] == ["--"]
        end += 1 if alone else 2
    return min(end, len(arguments))


def one(words: Sequence[str], what: str, usage: str) -> str:
    """The only positional argument. Raises UserError if there is none, or more than one."""
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"give one {what}, {got}; usage: {usage}")
    return words[0]
