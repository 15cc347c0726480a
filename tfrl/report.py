"""python -m tfrl.report RUN [RUN ...]: write a page about runs, with pictures."""

from __future__ import annotations

import base64
import html
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tfrl import __version__
from tfrl.algorithms.runs import run_folder
from tfrl.cli import endings, flags
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag
from tfrl.cli.streams import tell
from tfrl.envs.procgen import UNSEEN_LEVELS
from tfrl.envs.published import (
    RANGES,
    normalized_return,
    published_returns,
    returns_elsewhere,
    score_range,
)
from tfrl.envs.registry import LEVEL_SETS, TRAIN, distribution_modes, games, level_set_title
from tfrl.reporting import runs as run_folders
from tfrl.reporting import scores
from tfrl.reporting.runs import Group, StoredRun, over_games, run_names, steps_title, variants
from tfrl.run import files
from tfrl.run.folder import EVALUATION_FILE, read_json

if TYPE_CHECKING:
    from tfrl.reporting.supervised import SupervisedRun

RunT = TypeVar("RunT")
_USAGE = "python -m tfrl.report RUN [RUN ...]"
_MAX_VIDEOS = 4
_RUN_COLUMNS = 6  # more runs of one variant share a column
_VIDEO_LIMIT = 12_000_000  # bytes: a page with larger videos opens slowly
_CAPTIONS = {
    "learning_curves": (
        "Learning curves",
        "Mean return of the last 100 episodes while training (lines) and in evaluations, of games on unseen "
        "levels (open markers). Bands and bars go from the lowest to the highest seed, up to the env steps "
        "that all seeds have reached.",
    ),
    "final_scores": (
        "Final scores on unseen levels",
        "Normalised as (return - min) / (max - min) with the ranges of Cobbe et al. 2020. Intervals are "
        "percentile bootstraps that draw runs anew within each game (Agarwal et al. 2021); for few runs "
        "they are too narrow. "
        "IQM: the mean of the middle half of all runs.",
    ),
    "level_scores": (
        "Levels",
        "Level replay: the last score of each training level, and how many of its episodes were finished. "
        "Returns while training are those of the levels that were chosen, not of all levels alike.",
    ),
    "generalization_gap": (
        "Training levels against unseen levels",
        "Both ends of a line are the same policies: filled on the levels that they were trained on, open on "
        "levels that they have not seen.",
    ),
    "performance_profiles": (
        "Performance profiles",
        "The share of the runs, over all games and seeds, that score above a threshold: higher is better.",
    ),
    "training": (
        "While training",
        "Losses, the size of policy updates, entropy and speed. "
        "An axis ends before the most extreme hundredth of its values where they would flatten the rest.",
    ),
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; max-width: 84rem; margin: 2rem auto; }
body { padding: 0 1.2rem; }
h2 { font-size: 1.2rem; margin-top: 2.4rem; } figure { margin: 0 0 1rem; } img, video { max-width: 100%; }
figcaption, .small { color: #555; font-size: .9rem; } .wide { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; text-align: right; border-bottom: 1px solid #e2e2e2; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 11rem; }
th { white-space: normal; } thead th { border-bottom: 2px solid #333; }
.videos { display: flex; flex-wrap: wrap; gap: 1rem; } .videos figure { width: 24rem; }
ul.notes { border-left: 4px solid #D55E00; background: #fdf3ec; padding: .6rem .8rem .6rem 2rem; }
"""
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Options:
    """The place of the report."""

    out: str | None = None
    """Folder of report.html and plots/. None: the run's folder; for several runs, the parent of the first."""


def main(arguments: Sequence[str]) -> int:
    """Writes the report; returns the exit code."""
    words, options = flags.parse(
        Options, arguments, _USAGE, "Write report.html and plots/*.png about runs, or all runs in folders."
    )
    if not words:
        raise UserError(f"give the folder of a run, or of many; usage: {_USAGE}")
    given = [run_folder(word) for word in words]
    paths = run_folders.find(given)
    supervised = [path for path in paths if run_folders.is_supervised(path)]
    loaded = _load(run_folders.load, [path for path in paths if path not in supervised], given)
    if supervised and loaded:
        raise UserError(f"{supervised[0]} is a run of resnet.train, and others are not: write two reports.")
    if supervised:
        from tfrl.reporting.supervised import load  # matplotlib takes a second

        trained = _load(load, supervised, given)
        print(write_supervised(trained, _place(options, words, [run.path for run in trained])))
        return 0
    if not any(run.env_steps for run in loaded):
        raise UserError(f"{words[0]} has no finished update yet, so there is nothing to report.")
    for run in loaded:
        if not run.env_steps:
            tell(f"warning: {run.path} has no finished update yet, and is left out.")
    loaded = [run for run in loaded if run.env_steps]
    print(write(loaded, _place(options, words, [run.path for run in loaded])))
    return 0


def _load(load: Callable[[Path], RunT], paths: Sequence[Path], given: Sequence[Path]) -> list[RunT]:
    """The runs in folders; a run of a given folder of runs that cannot be read is left out with a warning.

    Raises UserError for a given run that cannot be read, and if no run can be read.
    """
    loaded = []
    for path in paths:
        try:
            loaded.append(load(path))
        except UserError as error:
            if path in given:
                raise
            tell(f"warning: {path} is left out: {error}")
    if paths and not loaded:
        raise UserError(f"no run in {paths[0].parent} can be read.")
    return loaded


def _place(options: Options, words: Sequence[str], paths: Sequence[Path]) -> Path:
    """The folder of the report on these runs."""
    if options.out:
        return Path(options.out)
    if len(paths) == 1:
        return paths[0]
    return run_folder(words[0]) if len(words) == 1 else paths[0].resolve().parent


def write_supervised(loaded: Sequence[SupervisedRun], out: Path) -> Path:
    """Writes `out/report.html` and `out/plots/training.png` about supervised runs. Returns the page's path.

    If runs have the same settings and seed, only the longest one counts, with a warning on stderr.

    Raises UserError if a run has no progress yet, or the folder cannot be written.
    """
    from tfrl.reporting import supervised  # matplotlib takes a second

    if not all(run.images for run in loaded):
        empty = next(run.path for run in loaded if not run.images)
        raise UserError(f"{empty} has no row in its progress.csv yet, so there is nothing to report.")
    repeated = supervised.repeated(loaded)
    counted = [run for run in loaded if run.path not in repeated]
    found = [run_folders.ignored(run, repeated[run.path]) for run in loaded if run.path in repeated]
    for note in found:
        tell(f"warning: {note}")
    picture, written = out / "plots" / "training.png", out / "report.html"
    try:
        files.make_folder(picture.parent)
        with files.replacing(picture) as staged:
            supervised.curves(counted).savefig(staged)
        names = dict.fromkeys(f"{run.config.model} on {run.config.dataset}" for run in loaded)
        title = f"tfrl report: {next(iter(names)) if len(names) == 1 else _count(len(loaded), 'run')}"
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f"<img id=training alt='curves' src='data:image/png;base64,{data}'>"
        differing = supervised.differences(loaded)
        settings = [{"setting": flag(name), "value": v} for name, v in loaded[0].settings.items()]
        differences = [
            {"setting": flag(name), **dict(zip(run_names(loaded), values, strict=True))}
            for name, values in differing.items()
        ]
        parts = [
            _notes(found),
            "<h2>Results</h2>",
            _table(supervised.result_rows(counted)),
            f"<h2>While training</h2><figure>{image}",
            "<figcaption>Thin lines: training rows; others: tests after each epoch.</figcaption></figure>",
            "<h2>Settings</h2>",
            _table(differences),
            f"<details><summary>All of {_text(loaded[0].path)}</summary>{_table(settings)}</details>",
            "<h2>Runs</h2>",
            _table(supervised.run_rows(loaded)),
        ]
        files.write(written, _PAGE.format(title=_text(title), style=_STYLE, body="\n".join(parts)))
    except OSError as error:
        raise UserError(f"cannot write the report in {out}: {files.reason(error)}.") from None
    return written


def write(loaded: Sequence[StoredRun], out: Path) -> Path:
    """Writes `out/report.html` and `out/plots/*.png`, and warns on stderr. Returns the page's path.

    Raises UserError if the folder cannot be written.
    """
    from tfrl.reporting import plots  # matplotlib takes a second

    draw = {
        "learning_curves": plots.learning_curves,
        "final_scores": plots.final_scores,
        "level_scores": plots.level_scores,
        "generalization_gap": plots.level_gap,
        "performance_profiles": plots.performance_profiles,
        "training": plots.training,
    }
    groups = run_folders.group(loaded)
    for note in notes(groups):
        tell(f"warning: {note}")
    try:
        files.make_folder(out / "plots")
        pictures = {}
        for name in _CAPTIONS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing are NaN
                figure = draw[name](groups)
            path = out / "plots" / f"{name}.png"
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            with files.replacing(path) as staged:
                figure.savefig(staged)
            figure.clear()
            pictures[name] = path.read_bytes()
        written = out / "report.html"
        files.write(written, render(loaded, groups, pictures))
    except OSError as error:
        raise UserError(f"cannot write the report in {out}: {files.reason(error)}.") from None
    for run in loaded:
        try:
            plots.save_learning_curve(run)
        except OSError as error:  # such as another user's run
            tell(f"warning: cannot write the learning curve in {run.path}: {files.reason(error)}.")
    return written


def notes(groups: Sequence[Group]) -> list[str]:
    """Sentences about faults of the comparison, for the readers of a report."""
    found = []
    for g in groups:
        for run in g.repeated:
            (kept,) = (other for other in g.runs if other.config.seed == run.config.seed)
            found.append(run_folders.ignored(run, kept))
        if len({run.env_steps for run in g.runs}) > 1:
            states = [(r.config.seed, r.env_steps, "" if r.is_done else " (not finished)") for r in g.runs]
            reached = ", ".join(f"{seed} at {steps:,}{state}" for seed, steps, state in states)
            at = g.scored_at("test")
            after = "their ends" if g.is_done else f"{at:,} {g.config.counts}" if at else "no evaluation yet"
            found.append(
                f"{g.env}, {g.label}: the seeds have reached different {g.config.counts} ({reached}). Curves "
                f"are compared up to {g.env_steps:,}, scores are those after {after}."
            )
    scored = [g for g in groups if TRAIN in g.level_sets and g.scores("test").size]
    steps = [at for g in scored if (at := g.scored_at("test")) is not None]
    if steps and max(steps) - min(steps) >= max(g.config.steps_per_update for g in scored):
        found.append(
            f"Scores are after different numbers of env steps ({min(steps):,} to {max(steps):,}): the "
            'column "evaluated at" has the number of each row.'
        )
    counted = {g.env for g in over_games(groups, ["test"])}
    if left_out := {g.env for g in scored} - counted:
        what = f"leave out {', '.join(sorted(left_out))}" if counted else "are missing"
        found.append(f"Statistics over games {what}: they need scores of all variants in a game.")
    return found


def render(runs: Sequence[StoredRun], groups: Sequence[Group], pictures: Mapping[str, bytes]) -> str:
    """Returns the page as HTML. It contains its pictures, and has no script.

    Args:
      runs, groups: the runs, and the same runs in groups.
      pictures: PNG files by the names of `_CAPTIONS`; some may be missing.
    """
    names = sorted({g.env for g in groups})
    counted = [run for g in groups for run in g.runs]
    seeds = len({run.config.seed for run in counted})
    title = f"tfrl report: {names[0] if len(names) == 1 else _count(len(names), _kind(groups))}"
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f'<p class="small">{_count(len(counted), "run")}, {_count(seeds, "seed")}, made {made} by tfrl '
        f"{_text(__version__)}</p>"
    ]
    parts += [
        _notes(notes(groups)),
        "<h2>Results</h2>",
        _table(_results(groups)),
        _table(_aggregates(groups)),
        _about_procgen(groups),
    ]
    parts.append(_table(_improvements(groups)))
    for name, (heading, caption) in _CAPTIONS.items():
        if name in pictures:
            image = f"<img id={name} alt='{heading}' src='{_embed(pictures[name], 'image/png')}'>"
            parts.append(f"<h2>{heading}</h2><figure>{image}<figcaption>{caption}</figcaption></figure>")
    parts.append(_videos(runs))
    if evaluations := _evaluations(runs):
        parts += ["<h2>Evaluations</h2>", _table(evaluations)]
    parts += [_settings(runs, groups), "<h2>Runs</h2>", _table(_run_rows(runs))]
    return _PAGE.format(title=_text(title), style=_STYLE, body="\n".join(filter(None, parts)))


def _kind(groups: Sequence[Group]) -> str:
    """The word for the envs."""
    return "game" if all(TRAIN in g.level_sets for g in groups) else "env"


def _results(groups: Sequence[Group]) -> list[dict[str, str]]:
    """A row for each group, and published results under the first group of each env and algorithm."""
    rows, shown, steps = [], set(), steps_title(run for g in groups for run in g.runs)
    for g in groups:
        at, returns = g.scored_at("test"), {s: g.returns(s) for s in g.level_sets}
        counted = int(np.isfinite(returns["test"]).sum()) if at is not None else len(g.runs)
        row = {_kind(groups): g.env}
        if len(variants(groups)) > 1:
            row["settings"] = g.label
        row["seeds"] = str(len(g.runs)) if counted == len(g.runs) else f"{counted} of {len(g.runs)}"
        row[steps] = f"{g.env_steps:,}"
        ended_apart = g.is_done and len({run.env_steps for run in g.runs}) > 1
        row["evaluated at"] = "-" if at is None else "each at its end" if ended_apart else f"{at:,}"
        titles = {s: level_set_title(g.env, s) for s in g.level_sets}
        row |= {f"return, {titles[s]}": _mean(values) for s, values in returns.items()}
        if any(g.scores(s).size for s in g.level_sets):
            row |= {f"normalised, {title}": _mean(g.scores(s), 3) for s, title in titles.items()}
        rows.append(row)
        for published in _published(g, steps):
            name, of_others = published.pop("name"), dict.fromkeys(row, "-")
            if (g.env, name) not in shown:
                shown.add((g.env, name))
                rows.append(of_others | {_kind(groups): f"{g.env}: {name}"} | published)
    return rows


def _published(g: Group, steps: str) -> list[dict[str, str]]:
    """Rows of published results for the group's env (any version), mode and number of levels.

    `steps` is the title of the column of steps.

    They are of train-procgen's PPO, and of the group's own algorithm.
    """
    if g.config.start_level:
        return []
    task = {"distribution_mode": g.mode, "num_levels": g.config.num_levels}
    rows = []
    if final := published_returns(g.env, **task):
        row = {"name": "published, ppo (train-procgen)", "seeds": "3", steps: f"{final[0]:,}"}
        for level_set, value in final[1].items():
            row[f"return, {level_set_title(g.env, level_set)}"] = f"{value:.2f}"
            score = normalized_return(g.env, g.mode, value)
            row[f"normalised, {level_set_title(g.env, level_set)}"] = _number(score, 3)
        rows.append(row)
    for found in returns_elsewhere(g.env, g.config.algorithm, **task):
        level_set = "test" if "(test" in found.source or TRAIN not in g.level_sets else TRAIN
        title = level_set_title(g.env, level_set)
        of = "" if found.env == g.env or found.env.startswith("procgen-") else f" of {found.env}"
        source = found.source.replace(" (", ", ").rstrip(")")
        spread = "" if found.spread is None else f" \u00b1 {found.spread:g}"
        row = {"name": f"published{of}, {found.algorithm} ({source})", "seeds": str(found.runs)}
        row |= {steps: f"{found.env_steps:,}", f"return, {title}": f"{found.mean:g}{spread}"}
        score = normalized_return(g.env, g.mode, found.mean)
        rows.append(row | ({} if score is None else {f"normalised, {title}": _number(score, 3)}))
    return rows


def _aggregates(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Statistics over all games and seeds: a row for each variant and level set with two scores or more."""
    rows = []
    # Both rows of a variant are of the same games, unless nothing was evaluated on unseen levels yet.
    shared = over_games(groups, LEVEL_SETS) or over_games(groups, [TRAIN])
    for name in variants(shared):
        members = [g for g in shared if g.label == name]
        for level_set in LEVEL_SETS:
            found = [g.scores(level_set) for g in members]
            if sum(map(len, found)) < 2 or not all(map(len, found)):
                continue
            row = {
                "normalised scores of all runs [95% interval]": f"{name}, "
                f"{level_set_title(members[0].env, level_set)}"
            }
            for title, statistic in (("IQM", scores.iqm), ("mean", scores.mean), ("median", scores.median)):
                value = statistic(np.concatenate(found))
                row[title] = _number(value, 3) + _interval(scores.interval_of_runs(found, statistic), 3)
            others = [g.scores(level_set, "rliable") for g in members]
            if any((a != b).any() for a, b in zip(found, others, strict=True)):
                row["mean, rliable's ranges"] = _number(scores.mean(np.concatenate(others)), 3)
            rows.append(row)
    return rows


def _about_procgen(groups: Sequence[Group]) -> str:
    """A paragraph with procgen's version, the ranges of normalised returns, and what unseen levels are."""
    of_procgen = [g for g in groups if g.env in games()]
    if not of_procgen:
        return ""
    done = [run.results for g in of_procgen for run in g.runs if run.results]
    versions = sorted({str(found["procgen"]["version"]) for found in done if "procgen" in found})
    ranges = f"Normalised returns have the ranges of {RANGES['paper']}."
    changed = {
        (g.env, g.mode): pair
        for g in of_procgen
        if (pair := score_range(g.env, g.mode, "rliable")) != score_range(g.env, g.mode) and pair
    }
    if changed:
        other = ", ".join(f"{env} {low:g} to {high:g}" for (env, _), (low, high) in changed.items())
        ranges += f" The ranges of {RANGES['rliable']}, differ: {other}."
    by = f"Trained with {', '.join(versions)}. " if versions else ""
    return f"<p class='small'>{_text(f'{by}{ranges} Unseen levels are {UNSEEN_LEVELS}.')}</p>"


def paired_returns(
    groups: Sequence[Group], level_set: str
) -> dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]]:
    """The evaluated returns [runs] of every two variants, by their labels: a pair for each game of both.

    A pair of variants is there once, in the order of the groups.
    """
    returns = [(g, g.returns(level_set)) for g in groups if level_set in g.level_sets]
    known = [(g, values[np.isfinite(values)]) for g, values in returns if np.isfinite(values).any()]
    order = variants(groups)
    found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for g, ours in known:
        for other, theirs in known:
            same_game = (g.env, g.mode) == (other.env, other.mode)
            if same_game and order.index(g.label) < order.index(other.label):
                found.setdefault((g.label, other.label), []).append((ours, theirs))
    return found


def _improvements(groups: Sequence[Group]) -> list[dict[str, str]]:
    """How likely a variant beats another: a row for each two of them that have enough runs."""
    where = "unseen levels" if _kind(groups) == "game" else "evaluation"
    rows = []
    for (name, other), pairs in paired_returns(groups, "test").items():
        ours, theirs = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
        if min(ours, theirs) >= scores.ENOUGH:
            chance = f"{scores.probability_of_improvement(pairs):.2f}"
            rows.append(
                {
                    f"probability of improvement, {where} [95% interval]": f"{name} over {other}",
                    "": chance + _interval(scores.improvement_interval(pairs), 2),
                    "over": _count(len(pairs), _kind(groups)),
                    "runs": f"{ours} and {theirs}",
                }
            )
    return rows


def _videos(runs: Sequence[StoredRun]) -> str:
    """The two newest videos of each run, up to four in all."""
    shown = []
    for run, name in zip(runs, run_names(runs), strict=True):
        # A name that begins with a dot belongs to a video that is being written, or was cut off.
        found = [file for file in (run.path / "videos").glob("[!.]*.*") if file.suffix in (".mp4", ".gif")]
        for file in sorted(found, key=lambda file: file.stat().st_mtime)[-2:]:
            if file.stat().st_size > _VIDEO_LIMIT:
                continue
            is_video = file.suffix == ".mp4"
            source = _embed(file.read_bytes(), "video/mp4" if is_video else "image/gif")
            tag = (
                f"<video controls loop muted src='{source}'></video>" if is_video else f"<img src='{source}'>"
            )
            caption = f"<figcaption>{_text(name)}: {_text(file.name)}</figcaption>"
            shown.append(f"<figure>{tag}{caption}</figure>")
    return f"<h2>Videos</h2><div class='videos'>{''.join(shown[:_MAX_VIDEOS])}</div>" if shown else ""


def _evaluations(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    """The content of each run's eval.json, of `python -m tfrl.evaluate`: a row for each evaluation."""
    rows = []
    for run, name in zip(runs, run_names(runs), strict=True):
        content = read_json(run.path / EVALUATION_FILE) or {}
        parts, env_steps = content.get("evaluations"), content.get("env_steps")
        at = f", {env_steps:,} {run.config.counts}" if isinstance(env_steps, int) else ""
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                unused = () if distribution_modes(run.config.env) else ("distribution_mode", "levels")
                cells = {key.replace("_", " "): _cell(part[key]) for key in part if key not in unused}
                rows.append({"run": name, "policy": f"{content.get('checkpoint', '?')}{at}"} | cells)
    return rows


def _settings(runs: Sequence[StoredRun], groups: Sequence[Group]) -> str:
    """The settings in which the variants differ, except for env and seed, and those of all runs."""
    differing = run_folders.differences(runs)
    labels = {run.path: g.label for g in groups for run in (*g.runs, *g.repeated)}
    columns = variants(groups)
    if len(columns) == 1 and 1 < len(runs) <= _RUN_COLUMNS:  # they differ, but not in hyperparameters
        labels = {run.path: name for run, name in zip(runs, run_names(runs), strict=True)}
        columns = list(labels.values())
    rows = []
    for name, values in differing.items():
        if name not in ("env", "seed", "run_name", "logdir"):  # the table of runs has these
            row = {"setting": flag(name)}
            for label in columns:
                of_variant = [v for run, v in zip(runs, values, strict=True) if labels[run.path] == label]
                row[label] = ", ".join(dict.fromkeys(of_variant))
            rows.append(row)
    every = {"algorithm": runs[0].config.algorithm, **vars(runs[0].config)}
    same = [{"setting": flag(n), "value": str(v)} for n, v in every.items() if n not in differing]
    what = "The same in all runs" if len(runs) > 1 else "All settings"
    differences = f"<p>Where the runs differ, besides env and seed:</p>{_table(rows)}" if rows else ""
    return f"<h2>Settings</h2>{differences}<details><summary>{what}</summary>{_table(same)}</details>"


def _run_rows(runs: Sequence[StoredRun]) -> list[dict[str, str]]:
    rows, steps = [], steps_title(runs)
    for run, name in zip(runs, run_names(runs), strict=True):
        config, done = run.config, run.results or {}
        seconds = done.get("seconds")
        row = {"run": name, "algorithm": config.algorithm, "env": config.env, "seed": str(config.seed)}
        row |= {"state": "done" if run.is_done else "not finished", steps: f"{run.env_steps:,}"}
        row |= {
            f"return, {level_set_title(config.env, s)}": _number(run.final_return(s))
            for s in config.level_sets
        }
        row["hours"] = _number(seconds / 3600 if isinstance(seconds, int | float) else None)
        row |= {f"{steps}/s": _number(run.speed, 0), "precision": run.precision}
        row["workers x replicas"] = run_folders.workers_and_replicas(done)
        rows.append(row | {"weights": str(done.get("weights_sha256", "-"))[:12]})
    # An env without unseen levels has no return there, and one with levels has no other evaluation.
    return [{name: row.get(name, "") for each in rows for name in each} for row in rows]


def _notes(found: Sequence[str]) -> str:
    """Returns a list of sentences; "" without any."""
    items = "".join(f"<li>{_text(note)}</li>" for note in found)
    return f"<ul class='notes'>{items}</ul>" if items else ""


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table of rows by column, with "-" for a missing cell; "" without rows."""
    if not rows:
        return ""
    header = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    cells = ("".join(f"<td>{_text(row.get(name, '-'))}</td>" for name in header) for row in rows)
    body = "".join(f"<tr>{of_row}</tr>" for of_row in cells)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _mean(values: np.ndarray, digits: int = 2) -> str:
    finite = values[np.isfinite(values)]
    return _number(float(finite.mean()) if finite.size else None, digits)


def _number(value: Any, digits: int = 2) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:,.{digits}f}" if known else "-"


def _cell(value: Any) -> str:
    return _number(value, 3) if value is None or isinstance(value, float) else str(value)


def _interval(ends: tuple[float, float], digits: int) -> str:
    return f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if math.isfinite(ends[0]) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _embed(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _text(value: object) -> str:
    return html.escape(str(value))


if __name__ == "__main__":
    endings.run(main)
