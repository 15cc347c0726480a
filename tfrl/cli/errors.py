"""The errors that end a command. `endings.run` turns each into one sentence and an exit code."""

from pathlib import Path


class UserError(Exception):
    """Bad settings or input: one sentence with the fault, the value and what is allowed. Exit code 2."""

    exit_code = 2

    def __str__(self) -> str:
        """The sentence, without the trace that TensorFlow adds to an error in a function that it compiles."""
        return super().__str__().rpartition("UserError: ")[2].strip()


class SettingsError(UserError, ValueError):
    """A UserError of the Python library."""


class TrainingError(Exception):
    """The run itself failed, because of a NaN in a loss, for example: one sentence. Exit code 1."""

    exit_code = 1


class EnvError(TrainingError):
    """An env failed, or returned values that nothing can learn from: one sentence that names the env."""


class PeerError(TrainingError):
    """A worker died, hung or did not come, or a process of an earlier start still has the port or the run.
    A launcher may start all workers again, from the last checkpoint. Exit code 75.
    """

    exit_code = 75


def how_to_install(part: str) -> str:
    """The command that installs a part, such as "ray", for a checkout or for an installed package."""
    in_checkout = Path(__file__).parents[2].joinpath(f"requirements-{part}.txt").is_file()
    return f"pip install -r requirements-{part}.txt" if in_checkout else f"pip install 'tfrl[{part}]'"
