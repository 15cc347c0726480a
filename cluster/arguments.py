"""The common part of the cluster's commands: flags, and errors told the way all of tfrl's commands do."""

import argparse
from typing import NoReturn

from tfrl.cli.errors import UserError


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
