"""The names of data sets, checked without TensorFlow."""

from __future__ import annotations

import difflib
import re

from tfrl.cli.errors import UserError

OWN = "procgen_frames"
CONFIGS = ("games", "games-mini", "returns")
"""The configurations of procgen_frames; the first is its default."""


def full_name(name: str) -> str:
    """The data set's name with its configuration, where it is our own: procgen_frames has a default."""
    return f"{OWN}/{CONFIGS[0]}" if name == OWN else name


def check_dataset(name: str) -> None:
    """Raise UserError for a data set that neither this project nor tensorflow-datasets knows.

    Configurations of their sets are only known once TensorFlow is there.
    """
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?", name):
        raise UserError(f"--dataset must be a name such as {OWN}/games or cifar10; got {name!r}.")
    base, _, config = name.partition("/")
    if base == OWN:
        if config not in CONFIGS:
            known = ", ".join(f"{OWN}/{c}" for c in CONFIGS)
            raise UserError(f"there is no data set {name}; known: {known}.")
        return
    base = base.partition(":")[0]
    import tensorflow_datasets as tfds  # imports TensorFlow only when a set is opened

    known = tfds.list_builders(with_community_datasets=False)
    if base not in known:
        close = difflib.get_close_matches(base, [OWN, *known], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(
            f"there is no data set {base!r} in tensorflow-datasets{hint}; {OWN} needs no download."
        )
