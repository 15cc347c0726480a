"""Reports of supervised runs: what a page shows of them, and their curves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tfrl.algorithms.runs import from_yaml
from tfrl.cli.flags import flag
from tfrl.cli.settings import SETTINGS_FILE
from tfrl.reporting import plots, runs
from tfrl.run.folder import read_results
from tfrl.run.metrics import PROGRESS_FILE

_PANELS = {
    "accuracy": ("train/accuracy", "test/accuracy"),
    "loss": ("train/loss", "test/loss"),
    "learning rate": ("train/learning_rate",),
    "norm of the gradient": ("train/grad_norm",),
    "images a second": ("time/images_per_second",),
    "share of time that steps waited for images": ("time/input_wait_fraction",),
}


@dataclass(frozen=True)
class SupervisedRun:
    """One run's folder.

    Attributes:
      path: the folder.
      config: its settings.
      progress: the columns of progress.csv by name, float64 [rows], NaN without a number; first `images`.
      results: the content of results.json of a finished run, otherwise None.
    """

    path: Path
    config: Any
    progress: dict[str, np.ndarray]
    results: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def images(self) -> int:
        """Training images so far."""
        images = next(iter(self.progress.values()))
        return int(images[-1]) if images.size else 0

    @property
    def is_done(self) -> bool:
        """True if it is complete and has results."""
        return self.results is not None

    @property
    def share_done(self) -> float:
        """The part of the run that is done, 0 to 1: by epochs, or by --max-steps if that is more."""
        if self.is_done:
            return 1.0
        epochs, most = self.last("epoch"), self.config.max_steps
        shares = [epochs / self.config.epochs if np.isfinite(epochs) else 0.0]
        if most:
            shares.append(self.images / self.config.batch_size / most)
        return min(1.0, max(shares))

    @property
    def speed(self) -> float | None:
        """Images a second of all rows; None before the first one."""
        return runs.mean_speed(self.progress, "time/images_per_second")

    @property
    def settings(self) -> dict[str, str]:
        """The settings as texts."""
        return {
            field.name: str(getattr(self.config, field.name)) for field in dataclasses.fields(self.config)
        }

    def points(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Images and numbers of a column of progress.csv, both float64 [P]."""
        return runs.points(self.progress, None, column)

    def last(self, column: str) -> float:
        """The last number of a column; NaN if there is none."""
        values = self.points(column)[1]
        return float(values[-1]) if values.size else float("nan")

    def best(self, column: str) -> float:
        """The largest number of a column; NaN if there is none."""
        values = self.points(column)[1]
        return float(values.max()) if values.size else float("nan")


def load(path: Path) -> SupervisedRun:
    """Reads a run's folder. Raises UserError if its settings or its progress are damaged."""
    config: Any = from_yaml(path / SETTINGS_FILE)
    found, progress = read_results(path), runs.read_progress(path / PROGRESS_FILE)
    run = SupervisedRun(path, config, progress, found)
    # Results of fewer images are older than the resume of this run.
    return run if (found or {}).get("images", -1) >= run.images else dataclasses.replace(run, results=None)


def differences(loaded: Sequence[SupervisedRun]) -> dict[str, list[str]]:
    """The settings that differ between runs, with the value in every run."""
    of_runs = [run.settings for run in loaded]
    values = {name: [settings[name] for settings in of_runs] for name in of_runs[0]}
    return {name: found for name, found in values.items() if len({*found}) > 1}


def variants(loaded: Sequence[SupervisedRun]) -> list[str]:
    """The variant of each run in words: the settings besides the seed that distinguish it, or its model.

    Settings that do not change the result are left out. Callbacks may change it, and so may the number of
    replicas, whose shares of a batch are normalised apart.
    """
    same = loaded[0].config.may_change - {"callbacks"}
    if any(run.config.normalization == "batch" for run in loaded):
        same -= {"replicas"}
    names = differences(loaded).keys() - {"seed"} - same
    names = [name for name in loaded[0].settings if name in names]
    texts = [run.settings for run in loaded]
    labels = [", ".join(f"{flag(name)[2:]} {text[name]}" for name in names) for text in texts]
    return [
        label or f"{run.config.model} on {run.config.dataset}"
        for label, run in zip(labels, loaded, strict=True)
    ]


def repeated(loaded: Sequence[SupervisedRun]) -> dict[Path, SupervisedRun]:
    """The runs with the variant and the seed of a longer one, such as copies: the longer run by the path."""
    farthest: dict[tuple[str, int], SupervisedRun] = {}
    keys = [(label, run.config.seed) for run, label in zip(loaded, variants(loaded), strict=True)]
    pairs = list(zip(keys, loaded, strict=True))
    for key, run in sorted(pairs, key=lambda pair: (pair[1].is_done, pair[1].images), reverse=True):
        farthest.setdefault(key, run)
    return {run.path: farthest[key] for key, run in pairs if farthest[key] is not run}


def result_rows(loaded: Sequence[SupervisedRun]) -> list[dict[str, str]]:
    """A row for each variant: means over its seeds, with standard deviations where there are several.

    `loaded` has one run for each seed.
    """
    groups: dict[str, list[SupervisedRun]] = {}
    for run, label in zip(loaded, variants(loaded), strict=True):
        groups.setdefault(label, []).append(run)
    rows = []
    for label, members in groups.items():
        row = {"variant": label, "seeds": str(len(members))}
        row["images"] = ", ".join(dict.fromkeys(f"{run.images:,}" for run in members))
        for title, column in (("test accuracy", "test/accuracy"), ("train accuracy", "train/accuracy")):
            row[title] = _mean([run.last(column) for run in members])
        row["best test accuracy"] = _mean([run.best("test/accuracy") for run in members])
        row["test loss"] = _mean([run.last("test/loss") for run in members], "{:.4f}")
        rows.append(row)
    return rows


def run_rows(loaded: Sequence[SupervisedRun]) -> list[dict[str, str]]:
    """A row for each run."""
    rows = []
    for run in loaded:
        config, done = run.config, run.results or {}
        row = {
            "run": str(run.path),
            "model": config.model,
            "dataset": config.dataset,
            "seed": str(config.seed),
        }
        row |= {"state": "done" if run.is_done else "not finished", "images": f"{run.images:,}"}
        row["epochs"] = _mean([run.last("epoch")], "{:.2f}")
        row["test accuracy"] = _mean([run.last("test/accuracy")])
        row["images/s"] = _mean([run.last("time/images_per_second")], "{:,.0f}")
        row["precision"] = str(done.get("precision", config.precision))
        row["workers x replicas"] = runs.workers_and_replicas(done)
        rows.append(row | {"weights": str(done.get("weights_sha256", "-"))[:12]})
    return rows


def _mean(values: Sequence[float], text: str = "{:.2%}") -> str:
    """The mean of the finite values, and their standard deviation if there are several."""
    found = np.array([value for value in values if np.isfinite(value)])
    if not found.size:
        return "-"
    spread = f" \u00b1 {text.format(found.std(ddof=1))}" if found.size > 1 else ""
    return text.format(found.mean()) + spread


@matplotlib.rc_context(plots.STYLE)
def curves(loaded: Sequence[SupervisedRun]) -> Figure:
    """Draws accuracy, loss, learning rate, gradient norm and speed against images, a line for each run."""
    figure = Figure(figsize=(11.1, 7.6))
    labels = variants(loaded)
    places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    for ax, (title, columns) in zip(figure.subplots(2, 3).flat, _PANELS.items(), strict=True):
        for run, label in zip(loaded, labels, strict=True):
            for column in columns:
                style: Mapping[str, Any] = plots.line_style(places[label])
                if len(columns) > 1 and column.startswith("train/"):
                    style = {**style, "linewidth": 0.8, "alpha": 0.6}
                images, values = run.points(column)
                part = f"{label}, {column.partition('/')[0]}" if len(columns) > 1 else label
                ax.plot(images, values, marker="." if len(images) < 20 else "", label=part, **style)
        ax.set_title(title)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.supxlabel("training images")
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=2)
    return figure
