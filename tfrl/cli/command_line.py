"""The command lines of the tools: folders by position, and flags from a dataclass."""

from __future__ import annotations

import typing
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from tfrl.cli.errors import UserError
from tfrl.cli.flags import read_flags
from tfrl.cli.settings import check_ranges

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def parse(options: type[Options], argv: Sequence[str], usage: str, summary: str) -> tuple[list[str], Options]:
    """Returns the positional arguments in order, and the flags as an `options`.

    Args:
      options: a dataclass, one flag a field; the text under a field is its help.
      argv: the arguments. --help prints the help and raises SystemExit(0).
      usage, summary: for the help.

    Raises UserError for an unknown flag, a value of another type, or a number outside its range.
    """
    if any(token in ("-h", "--help") for token in argv):
        import tyro

        tyro.cli(options, prog=usage, description=summary, args=["--help"])
    kinds = typing.get_type_hints(options)
    words: list[str] = []
    given = options(**read_flags(kinds, {}, argv, words))
    check_ranges(given)
    return words, given


def take(argv: list[str], names: Collection[str]) -> list[str]:
    """Removes the named flags from `argv`, and returns each as `--name=value`.

    A flag that lacks its value is returned as it is, and `parse` refuses it.
    """
    taken, rest = [], []
    tokens = list(reversed(argv))
    while tokens:
        token = tokens.pop()
        if token.partition("=")[0] not in names:
            rest.append(token)
        elif "=" in token or not tokens or tokens[-1].startswith("--"):
            taken.append(token)
        else:
            taken.append(f"{token}={tokens.pop()}")
    argv[:] = rest
    return taken


def one(words: Sequence[str], what: str, usage: str) -> str:
    """The only positional argument. Raises UserError if there is none, or more than one."""
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"give one {what}, {got}; usage: {usage}")
    return words[0]
