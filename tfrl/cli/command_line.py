"""The command lines of the tools beside the trainer: folders by position, and flags from a dataclass."""

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
    """Reads a command's arguments: returns those without a flag, in order, and the flags as an `options`.

    Args:
      options: a dataclass, one flag a field; the text under a field is its help.
      argv: the arguments.
      usage: how the command is called, for --help, which is answered by SystemExit(0).
      summary: what it does.

    Raises:
      UserError: an unknown flag, a value of another type, or a number outside its range.
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
    """Removes flags that take a value from `argv`, wherever they stand; each as `--name=value`.

    One without its value stays without it, for `parse` to refuse.
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
    """The single word of a command that takes one.

    Raises:
      UserError: there is none, or there are more.
    """
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UserError(f"give one {what}, {got}; usage: {usage}")
    return words[0]
