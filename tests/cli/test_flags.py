import typing
from dataclasses import dataclass
from typing import Literal

import pytest

from tfrl import completion
from tfrl.cli import flags
from tfrl.cli.errors import UserError


@dataclass
class Options:
    """The kinds of fields that settings have."""

    size: int | None = None
    end: None | float = None
    shape: Literal["step", "linear"] | None = None
    point: flags.SEVERAL = ()
    either: typing.Optional[Literal["a"]] = None  # noqa: UP045 - what `Literal | None` is on some versions


KINDS = typing.get_type_hints(Options)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--shape", "linear"], {"shape": "linear"}),
        (["--shape", "none"], {"shape": None}),
        (["--either=a", "--size", "1e3"], {"either": "a", "size": 1000}),
        (["--point", "a=1", "--size=2", "--point=b=none"], {"point": ("a=1", "b=none"), "size": 2}),
        (["--end", "1e3", "--size", "None"], {"end": 1000.0, "size": None}),
    ],
)
def test_flags_are_read_by_their_types(arguments, values):
    """A setting of any type may be none."""
    assert flags.read_flags(KINDS, {}, arguments) == values


def test_a_wrong_choice_of_an_optional_setting_gives_a_one_sentence_error():
    with pytest.raises(
        UserError, match=r"--shape must be one of step, linear; got 'liner' \(did you mean lin"
    ):
        flags.read_flags(KINDS, {}, ["--shape", "liner"])


def test_the_choices_of_an_optional_setting_are_completed():
    assert completion._of_kinds(KINDS, {})["--shape"] == ["step", "linear"]
