"""The report's HTML: one file, images and videos inside, no script and nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tfrl import __version__
from tfrl.cli.flags import flag
from tfrl.envs.published import PublishedReturn, normalized_return
from tfrl.envs.registry import LEVEL_SETS, TRAIN, family, level_set_title
from tfrl.reporting import comparison, intervals, labels
from tfrl.reporting.comparison import PUBLISHED, Group
from tfrl.reporting.labels import run_names
from tfrl.reporting.runs import Run
from tfrl.run.folder import EVALUATION_FILE, read_json

_MOST_VIDEOS = 4
_VIDEO_LIMIT = 12_000_000  # bytes: a page of more opens slowly
_CAPTIONS = {
    "learning_curves": (
        "Learning curves",
        "Mean return of the last 100 episodes while training (lines) and in evaluations, of games on unseen "
        "levels (open markers). Bands and bars go from the least to the greatest seed, as far as all have "
        "come.",
    ),
    "final_scores": (
        "Final scores on unseen levels",
        "Normalised as (return - min) / (max - min) with the ranges of Cobbe et al. 2020. Intervals are "
        "percentile bootstraps that draw runs anew within each game (Agarwal et al. 2021). "
        "IQM: the mean of the middle half of all runs.",
    ),
    "generalization_gap": (
        "Training levels against unseen levels",
        "Both ends of a line are the same policies: filled on the levels that they were trained on, open on "
        "levels that they have not seen.",
    ),
    "performance_profiles": (
        "Performance profiles",
        "How many of the runs, over all games and seeds, score above a threshold: higher is better.",
    ),
    "training": (
        "While training",
        "Losses, the size of policy updates, entropy and speed. "
        "An axis ends before the most extreme hundredth of its values where they would flatten the rest.",
    ),
}
_OF_ONE_RUN = ("env", "seed", "run_name", "logdir")  # the table of runs has these
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 84rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
p.lead, figcaption, .small { color: #555; font-size: .9rem; }
figure { margin: 0 0 1rem; } figure img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; text-align: right; border-bottom: 1px solid #e2e2e2; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td:first-child { white-space: normal; min-width: 11rem; } thead th { border-bottom: 2px solid #333; }
.videos { display: flex; flex-wrap: wrap; gap: 1rem; } .videos figure { width: 24rem; }
.videos video, .videos img { width: 100%; }
summary { cursor: pointer; }
ul.notes { border-left: 4px solid #D55E00; background: #fdf3ec; padding: .6rem .8rem .6rem 2rem; }
"""


def render(runs: Sequence[Run], groups: Sequence[Group], pictures: Mapping[str, bytes]) -> str:
    """Returns the page as HTML, with everything that it shows inside.

    Args:
      runs: what it is about; groups: the same runs by what tells them apart.
      pictures: PNG files by the names of `_CAPTIONS`; those without a picture are left out.
    """
    names = sorted({g.env for g in groups})
    counted = [run for g in groups for run in g.runs]
    seeds = len({run.config.seed for run in counted})
    title = names[0] if len(names) == 1 else f"{len(names)} {_kind(groups)}s"
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    parts = [
        f"<h1>tfrl report: {_text(title)}</h1>",
        f'<p class="lead">{_count(len(counted), "run")}, {_count(seeds, "seed")}, made {made} by tfrl '
        f"{_text(__version__)}</p>",
        "<h2>Results</h2>",
        _notes(groups),
        _results(groups),
        _aggregates(groups),
        _improvements(groups),
    ]
    for name, (heading, caption) in _CAPTIONS.items():
        if name in pictures:
            source = _embed(pictures[name], "image/png")
            parts.append(
                f"<h2>{heading}</h2><figure><img id={name} alt='{heading}' src='{source}'>"
                f"<figcaption>{caption}</figcaption></figure>"
            )
    parts += [_videos(runs), _evaluations(runs), _settings(runs, groups), _run_table(runs)]
    body = "\n".join(filter(None, parts))
    icon = '<link rel="icon" href="data:,">'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{icon}'
        f'<meta name="viewport" content="width=device-width"><title>tfrl report: {_text(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _notes(groups: Sequence[Group]) -> str:
    found = "".join(f"<li>{_text(note)}</li>" for note in comparison.notes(groups))
    return f"<ul class='notes'>{found}</ul>" if found else ""


def _kind(groups: Sequence[Group]) -> str:
    """The word for what was learned."""
    return "game" if all(TRAIN in g.level_sets for g in groups) else "env"


def _results(groups: Sequence[Group]) -> str:
    """Returns a table with a row a group, and under each what others published of its env and algorithm."""
    several = len(comparison.variants(groups)) > 1
    rows, shown = [], set()
    for g in groups:
        rows.append(_result_row(g, _kind(groups), several=several))
        others = [found for found in comparison.returns_of_others(g) if found not in shown]
        rows += [_published_row(g, found, _kind(groups)) for found in others]
        shown.update(others)
    return _table_of(rows)


def _result_row(g: Group, kind: str, *, several: bool) -> dict[str, str]:
    at, returns = g.scored_at("test"), {s: g.returns(s) for s in g.level_sets}
    counted = sum(map(math.isfinite, returns["test"])) if at is not None else len(g.runs)
    row = {kind: g.env}
    if several:
        row["settings"] = g.label
    row["seeds"] = str(len(g.runs)) if counted == len(g.runs) else f"{counted} of {len(g.runs)}"
    row["env steps"] = f"{g.env_steps:,}"
    row["evaluated at"] = "-" if at is None else "each at its end" if g.ended_apart else f"{at:,}"
    titles = {s: level_set_title(g.env, s) for s in g.level_sets}
    row |= {f"return, {title}": _mean(returns[s]) for s, title in titles.items()}
    if any(g.scores(s).size for s in g.level_sets):
        row |= {f"normalised, {title}": _mean(g.scores(s), 3) for s, title in titles.items()}
    if (published := comparison.published_finals(g)) is not None:
        steps, finals = published
        row |= {
            f"{PUBLISHED}, return at {steps / 1e6:.0f} M, {titles[s]}": _number(v) for s, v in finals.items()
        }
    return row


def _published_row(g: Group, found: PublishedReturn, kind: str) -> dict[str, str]:
    """A row of another project's return, under the level set that its source names; else of training."""
    level_set = "test" if "(test" in found.source or TRAIN not in g.level_sets else TRAIN
    spread = "" if found.spread is None else f" \u00b1 {found.spread:g}"
    of = "" if found.env == g.env or found.env.startswith("procgen-") else f" of {found.env}"
    source = found.source.replace(" (", ", ").rstrip(")")
    score = normalized_return(g.env, g.mode, found.mean)
    return {
        kind: f"{g.env}: published{of}, {found.algorithm} ({source})",
        "seeds": str(found.runs),
        "env steps": f"{found.env_steps:,}",
        f"return, {level_set_title(g.env, level_set)}": f"{found.mean:g}{spread}",
    } | ({} if score is None else {f"normalised, {level_set_title(g.env, level_set)}": _number(score, 3)})


def _aggregates(groups: Sequence[Group]) -> str:
    """Returns a table of statistics over all games and seeds, "" where no variant has two scores."""
    rows, most = [], 0
    # Both rows of a variant are of the same games, unless no unseen levels have been played yet.
    shared = comparison.over_games(groups, LEVEL_SETS) or comparison.over_games(groups, [TRAIN])
    for name in comparison.variants(groups):
        for level_set in LEVEL_SETS:
            members = [g for g in shared if g.label == name]
            scores = [of_game for g in members if (of_game := g.scores(level_set)).size]
            if not scores:
                continue
            most = max(most, sum(map(len, scores)))
            cells = []
            for statistic in (intervals.iqm, intervals.mean, intervals.median):
                value = float(statistic(intervals.pooled(scores)))
                low, high = intervals.stratified_bootstrap(scores, statistic)
                cells.append(_number(value, 3) + (f" [{low:.3f}, {high:.3f}]" if math.isfinite(low) else ""))
            rows.append([f"{name}, {level_set_title(members[0].env, level_set)}", *cells])
    if most < 2:
        return ""
    header = [_with_interval("normalised scores of all runs", rows), "IQM", "mean", "median"]
    return "<p></p>" + _table(header, rows)


def _improvements(groups: Sequence[Group]) -> str:
    """Returns a table of which variant beats which, "" where there is one alone."""
    pairs = comparison.paired_returns(groups, "test")
    rows = []
    for (name, other), games in pairs.items():
        chance, (low, high) = (
            intervals.probability_of_improvement(games),
            intervals.improvement_interval(games),
        )
        interval = f" [{low:.2f}, {high:.2f}]" if math.isfinite(low) else ""
        runs = [sum(len(of_game[k]) for of_game in games) for k in (0, 1)]
        cells = [f"{chance:.2f}{interval}", _count(len(games), _kind(groups)), f"{runs[0]} and {runs[1]}"]
        rows.append([f"{name} over {other}", *cells])
    if not rows:
        return ""
    titles = {level_set_title(g.env, "test") for g in groups}
    where = titles.pop() if len(titles) == 1 else "evaluation"
    header = [_with_interval(f"probability of improvement, {where}", rows), "", "over", "runs"]
    return "<p></p>" + _table(header, rows)


def _with_interval(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A table's title, which says what brackets are, where there are any."""
    return f"{title} [95% interval]" if any("[" in cell for _, *cells in rows for cell in cells) else title


def _videos(runs: Sequence[Run]) -> str:
    # A name that begins with a dot is of a video that is being written, or was cut off.
    files = [
        (name, file)
        for run, name in zip(runs, run_names(runs), strict=True)
        for file in sorted((run.path / "videos").glob("[!.]*.*"), key=_written)[-2:]
    ]
    shown = []
    for name, file in files:
        if len(shown) == _MOST_VIDEOS or file.stat().st_size > _VIDEO_LIMIT:
            continue
        caption = f"<figcaption>{_text(name)}: {_text(file.name)}</figcaption>"
        if file.suffix == ".mp4":
            source = _embed(file.read_bytes(), "video/mp4")
            shown.append(f"<figure><video controls loop muted src='{source}'></video>{caption}</figure>")
        elif file.suffix == ".gif":
            source = _embed(file.read_bytes(), "image/gif")
            shown.append(f"<figure><img alt='{_text(file.name)}' src='{source}'>{caption}</figure>")
    return f"<h2>Videos</h2><div class='videos'>{''.join(shown)}</div>" if shown else ""


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _evaluations(runs: Sequence[Run]) -> str:
    """Returns a table of what `python -m tfrl.evaluate` found of these runs, "" where it found nothing."""
    rows = []
    for run, name in zip(runs, run_names(runs), strict=True):
        found = read_json(run.path / EVALUATION_FILE) or {}
        parts = found.get("evaluations")
        for part in filter(lambda part: isinstance(part, dict), parts if isinstance(parts, list) else []):
            columns = ("return_mean", "return_standard_error", "return_median", "return_iqm")
            titles = ("mean return", "standard error", "median", "IQM")
            row = {"run": name, "policy": _policy(found), "what": _played(part)}
            row["episodes"] = str(part.get("episodes"))
            row |= {title: _number(part.get(column)) for column, title in zip(columns, titles, strict=True)}
            if (score := _normalized(part)) is not None:
                row["normalised"] = _number(score, 3)
            if part.get("solve_rate") or TRAIN in run.config.level_sets:  # few other envs know of it
                row["solved"] = _number(part.get("solve_rate"))
            rows.append(row | {"length (env steps)": _number(part.get("length_mean"))})
    return "<h2>Evaluations</h2>" + _table_of(rows) if rows else ""


def _policy(found: Mapping[str, Any]) -> str:
    """Returns whose an evaluation is of a run's policies, in words: it may be an early one, or the best."""
    env_steps = found.get("env_steps")
    at = f", {env_steps:,} env steps" if isinstance(env_steps, int) else ""
    return f"{found.get('checkpoint', '?')}{at}"


def _played(part: Mapping[str, Any]) -> str:
    """Returns what an evaluation played, in words."""
    env, level_set = str(part.get("env")), part.get("levels")
    known = family(env).level_sets
    levels = [level_set_title(env, level_set)] if TRAIN in known and level_set in known else []
    return ", ".join([env, *levels, str(part.get("actions"))])


def _normalized(part: Mapping[str, Any]) -> float | None:
    """Scores an evaluation by today's ranges: the one in its file may be of other ranges."""
    value = part.get("return_mean")
    if not isinstance(value, int | float):
        return None
    return normalized_return(str(part.get("env")), str(part.get("distribution_mode")), value)


def _settings(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    differences = labels.differences(runs)
    telling = {name: values for name, values in differences.items() if name not in _OF_ONE_RUN}
    parts = ["<h2>Settings</h2>"]
    if telling:
        titles, columns = _alike(runs, groups, list(zip(*telling.values(), strict=True)))
        rows = [[flag(name), *values] for name, *values in zip(telling, *columns, strict=True)]
        parts += ["<p>Where the runs differ, besides env and seed:</p>", _table(["setting", *titles], rows)]
    every = {"algorithm": runs[0].config.algorithm, **vars(runs[0].config)}
    same = [[flag(n), str(v)] for n, v in every.items() if n not in differences]
    what = "The same in all runs" if len(runs) > 1 else "All settings"
    parts.append(f"<details><summary>{what}</summary>{_table(['setting', 'value'], same)}</details>")
    return "".join(parts)


def _alike(
    runs: Sequence[Run], groups: Sequence[Group], settings: Sequence[tuple[str, ...]]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns titles and settings, once for runs that have the same ones.

    A title is the variant, where all of its runs are alike, or the runs' names.
    """
    variant = {run.path: g.label for g in groups for run in (*g.runs, *g.repeated)}
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for run, name, of_run in zip(runs, run_names(runs), settings, strict=True):
        found.setdefault(of_run, []).append((variant[run.path], name))
    members = [{label for label, _ in of_column} for of_column in found.values()]
    titles = []
    for mine, of_column in zip(members, found.values(), strict=True):
        if len(mine) == 1 and sum(not mine.isdisjoint(other) for other in members) == 1:
            titles.append(f"{mine.pop()}: {_count(len(of_column), 'run')}")
        else:
            titles.append(", ".join(name for _, name in of_column))
    return titles, list(found)


def _run_table(runs: Sequence[Run]) -> str:
    rows = []
    for run, name in zip(runs, run_names(runs), strict=True):
        config, done = run.config, run.results or {}
        seconds = done.get("seconds")
        hours = seconds / 3600 if isinstance(seconds, int | float) else None
        rows.append(
            {
                "run": name,
                "algorithm": config.algorithm,
                "env": config.env,
                "seed": str(config.seed),
                "state": "done" if run.is_done else "not finished",
                "env steps": f"{run.env_steps:,}",
                **{
                    f"return, {level_set_title(config.env, s)}": _number(run.final_return(s))
                    for s in config.level_sets
                },
                "hours": _number(hours),
                "env steps/s": _number(run.speed(), 0),
                "precision": run.precision,
                "workers x replicas": f"{done.get('workers', '?')} x {done.get('replicas', '?')}"
                if done
                else "-",
                "weights": str(done.get("weights_sha256", "-"))[:12],
            }
        )
    return "<h2>Runs</h2>" + _table_of(rows)


def _table_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table of rows by column, with "-" where a row has not got one.

    A column that the first rows lack stands after the one that it follows in its own row.
    """
    header: list[str] = []
    for row in rows:
        place = 0
        for name in row:
            if name not in header:
                header.insert(place, name)
            place = header.index(name) + 1
    return _table(header, [[row.get(name, "-") for name in header] for row in rows])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _mean(values: Sequence[float], digits: int = 2) -> str:
    finite = [float(v) for v in values if math.isfinite(v)]
    return _number(sum(finite) / len(finite) if finite else None, digits)


def _number(value: Any, digits: int = 2) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:,.{digits}f}" if known else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _embed(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _text(value: str) -> str:
    return html.escape(str(value))
