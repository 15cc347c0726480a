"""The ways a command ends badly. `endings.run` turns each into one sentence and an exit code."""


class UserError(Exception):
    """Bad settings or input: one sentence with what was wrong, the value, what is right. Exit code 2."""

    exit_code = 2


class SettingsError(UserError, ValueError):
    """A UserError as the Python library raises it."""


class TrainingError(Exception):
    """The run itself failed (a NaN in a loss, say): one sentence. Exit code 1."""

    exit_code = 1


class EnvError(TrainingError):
    """An env of anybody's failed, or gave what nothing can be learned from: one sentence that names it."""


class PeerError(TrainingError):
    """Another process died, hung or kept this one waiting for too long: a worker that did not come, one of
    the last attempt that still has the port or the run. A launcher may start all again, from the last
    checkpoint.
    """

    exit_code = 75
