"""Prints --help: groups of flags, each with its type, its text and its default."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

_MAX_COLUMNS = 140
_TEXTS_AT = 27  # the column where the texts of the flags begin
_INDENT = 2  # of the line under a title


class Group(NamedTuple):
    """Flags under a title.

    Attributes:
      title: "" for the group that also has --help.
      about: the line under the title.
      kinds: the types of the fields by name.
      texts: the helps of the fields by name.
      values: the defaults of the fields by name.
    """

    title: str
    about: str
    kinds: Mapping[str, Any]
    texts: Mapping[str, str]
    values: Mapping[str, Any]


def print_help(usage: str, description: str, groups: Iterable[Group]) -> NoReturn:
    """Prints the help of a command to stdout, and raises SystemExit(0)."""
    width = min(shutil.get_terminal_size().columns, _MAX_COLUMNS) - 2
    # argparse formats the texts with %.
    parser = argparse.ArgumentParser(
        usage=f"{usage} [OPTIONS]".replace("%", "%%"),
        description="\n\n".join(_wrapped(text, width) for text in description.split("\n\n")).replace(
            "%", "%%"
        ),
        formatter_class=lambda prog: _Formatter(prog, max_help_position=_TEXTS_AT, width=width),
    )
    for group in groups:
        section: Any = parser
        if group.title:
            section = parser.add_argument_group(group.title, _wrapped(group.about, width - _INDENT))
        for name, kind in group.kinds.items():
            is_repeatable = typing.get_origin(kind) is tuple
            more = "repeatable" if is_repeatable else f"default: {_spelled(group.values[name])}"
            section.add_argument(
                "--" + name.replace("_", "-"),
                help=f"{group.texts.get(name, '')} ({more})".replace("%", "%%"),
                default=argparse.SUPPRESS,  # the text has it
                **_action(kind),
            )
    parser.print_help()
    raise SystemExit(0)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no flag at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _wrapped(paragraph: str, width: int) -> str:
    """A paragraph in lines of a width; one with indented lines stays as it is."""
    if any(line.startswith(" ") for line in paragraph.splitlines()):
        return paragraph
    return textwrap.fill(paragraph, width, break_on_hyphens=False)


def _action(kind: Any) -> dict[str, Any]:
    """The arguments for argparse that show a type as `--name INT`, for example."""
    choices, of_types = [], [kind]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        of_types = [of for of in typing.get_args(kind) if of is not types.NoneType]
        choices = ["None"]
    if of_types == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    (of_type,) = of_types
    origin = typing.get_origin(of_type)
    if origin is typing.Literal:
        return {"metavar": f"{{{','.join([*choices, *typing.get_args(of_type)])}}}"}
    word = {int: "INT", float: "FLOAT", str: "STR", tuple: "STR", dict: "JSON"}[origin or of_type]
    return {"metavar": f"{{None}}|{word}" if choices else word}


def _spelled(value: Any) -> str:
    """A default as a user would write it."""
    value = json.dumps(value) if isinstance(value, dict) else value
    return shlex.quote(value) if isinstance(value, str) else str(value)
