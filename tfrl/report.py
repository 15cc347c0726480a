"""python -m tfrl.report RUN [RUN ...]: one page about runs, with pictures, that opens without a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfrl.cli import command_line, endings
from tfrl.cli.errors import UserError
from tfrl.cli.streams import tell
from tfrl.config.of_run import folder
from tfrl.reporting import runs
from tfrl.run import files

_USAGE = "python -m tfrl.report RUN [RUN ...]"


@dataclass(frozen=True)
class Options:
    """The place of the report."""

    out: str | None = None
    """The folder of report.html and plots/; None: the run's own, or the one that several runs lie in."""


def main(arguments: Sequence[str]) -> int:
    """Writes the report; returns the exit code."""
    words, options = command_line.parse(
        Options, arguments, _USAGE, "Write report.html and plots/*.png about runs, or all runs in folders."
    )
    if not words:
        raise UserError(f"give the folder of a run, or of many; usage: {_USAGE}")
    loaded = [runs.load(path) for path in runs.find(map(folder, words))]
    if not any(run.env_steps for run in loaded):
        raise UserError(f"{words[0]} has no finished update yet, so there is nothing to report.")
    loaded = [run for run in loaded if run.env_steps]
    out = Path(options.out) if options.out else loaded[0].path
    if not options.out and len(loaded) > 1:
        out = folder(words[0]) if len(words) == 1 else loaded[0].path.resolve().parent
    print(write(loaded, out))
    return 0


def write(loaded: Sequence[runs.Run], out: Path) -> Path:
    """Writes `out/report.html` and `out/plots/*.png`, and tells on stderr what readers must know.

    Returns the page's path.

    Raises:
      UserError: the folder cannot be written in.
    """
    from tfrl.reporting import comparison, curve_plots, page

    groups = comparison.group(loaded)
    for note in comparison.notes(groups):
        tell(f"warning: {note}")
    try:
        files.make_folder(out / "plots")
        pictures = {}
        for name, draw in _pictures().items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing, where a run has no number
                figure = draw(groups)
            path = out / "plots" / f"{name}.png"
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            with files.replacing(path) as staged:
                figure.savefig(staged)
            figure.clear()
            pictures[name] = path.read_bytes()
        written = out / "report.html"
        files.write(written, page.render(loaded, groups, pictures))
    except OSError as error:
        raise UserError(f"cannot write the report in {out}: {files.reason(error)}.") from None
    for run in loaded:
        try:
            curve_plots.save_learning_curve(run)
        except OSError as error:  # a run of somebody else's, say
            tell(f"warning: cannot write the learning curve in {run.path}: {files.reason(error)}.")
    return written


def _pictures() -> dict[str, Callable]:
    from tfrl.reporting import curve_plots, score_plots

    return {
        "learning_curves": curve_plots.learning_curves,
        "final_scores": score_plots.final_scores,
        "generalization_gap": score_plots.level_gap,
        "performance_profiles": score_plots.performance_profiles,
        "training": curve_plots.training,
    }


if __name__ == "__main__":
    endings.run(main)
