"""Our trainers beside other projects' scripts: how these are started, and what was found as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks import command, speed
from tfrl.cli.errors import UserError
from tfrl.run import files

OURS = "tfrl"
Found = Mapping[tuple[str, str], Sequence[speed.Speed]]
"""The runs of each contest and name, of which ours begin with `OURS`."""
_RATES = ("median", "whole", "per_cpu_second")  # of a Speed


def check_file(path: str, flag: str) -> None:
    """Raises UserError where a flag names a script that there is not; "" names none."""
    if path and not Path(path).is_file():
        raise UserError(f"{flag} {path} is not a file.")


def script(python: str, path: str, env: str, *, seed: int, steps: int) -> list[str]:
    """The command that starts a peer's script, by the words of --peer-python."""
    words = [*command.check_program(python, "--peer-python"), str(Path(path).absolute())]
    return [*words, "--env-id", env, "--seed", str(seed), "--total-timesteps", str(steps)]


def lines(path: Path, words: Sequence[str]) -> list[str]:
    """The lines that a peer's script prints, kept in a file: it runs only where there is none yet.

    Args:
      path: the file, in a folder that is made where it is missing.
      words: the script's command.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as staged, staged.open("w") as kept:
            command.finish(words, stdout=kept)
    return path.read_text().splitlines()


def table(
    title: str, contest: str, found: Found, floors: Mapping[str, Mapping[str, float]] | None = None
) -> Table:
    """Rows of each contest: ours, the others with ours in multiples of theirs, and the floors.

    Args:
      title: what is compared.
      contest: what the contests are called together.
      found: the runs, of which the medians are shown.
      floors: by contest and way to compute, env steps in a second of processor time.
    """
    medians = {key: median(of_key) for key, of_key in found.items()}
    made = Table(title=title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in (contest, ""):
        made.add_column(name, no_wrap=True)
    for name in ("median", "whole run", "a CPU second", "wall s", "CPU s"):
        made.add_column(name, justify="right", no_wrap=True)
    for of in dict.fromkeys(of for of, _ in medians):
        ours = medians[of, OURS]
        for name, row in ((name, row) for (its, name), row in medians.items() if its == of):
            beside = None if name.startswith(OURS) else ours
            cells = [_cell(getattr(row, rate), getattr(beside, rate, None)) for rate in _RATES]
            made.add_row(of, name, *cells, f"{row.wall_seconds:.1f}", f"{row.cpu_seconds:.1f}")
        for way, rate in (floors or {}).get(of, {}).items():
            made.add_row(of, f"floor, {way}", "", "", _cell(rate, ours.per_cpu_second))
        made.add_section()
    return made


def as_json(found: Found) -> dict[str, list[dict[str, float]]]:
    """All runs, by contest and name."""
    return {" ".join(key): [dataclasses.asdict(run) for run in of_key] for key, of_key in found.items()}


def _cell(rate: float, ours: float | None) -> str:
    return f" {rate:,.0f}" + ("" if ours is None else f" ({ours / rate:.2f}x)")


def median(of_runs: Sequence[speed.Speed]) -> speed.Speed:
    """Each number's median."""
    names = [field.name for field in dataclasses.fields(speed.Speed)]
    return speed.Speed(**{n: statistics.median(getattr(run, n) for run in of_runs) for n in names})
