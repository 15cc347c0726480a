"""What the cluster commands share: flags and their faults, told the way all of tfrl's commands tell them."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from tfrl.errors import UserError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose faults are UserErrors: one sentence, without the usage around it."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            prog=program,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raises UserError with argparse's message."""
        raise UserError(f"{message}; {self.prog} --help lists the flags")


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command; a UserError becomes one line on stderr and exit code 2."""
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
