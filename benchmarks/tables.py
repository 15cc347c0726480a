"""python -m benchmarks.tables: the tables of the documents that follow from the kept runs or the code.

A document marks such a block with two comments, `<!-- tables: NAME -->` and `<!-- end -->`. Without flags,
the program names a document whose blocks differ from `benchmarks/runs` and `tfrl`. `--write` renews the
blocks. `--draw` draws the figures of the same runs into docs/images. A test compares the blocks, so that a
table, its figure and the notebook cannot differ.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from benchmarks import command
from benchmarks.learning_procgen import over_games
from tfrl.algorithms import registry as settings
from tfrl.cli.errors import TrainingError, UserError
from tfrl.envs.published import published_curve, score_range
from tfrl.envs.spec import Box, Discrete, MultiDiscrete
from tfrl.reporting import plots, runs, scores

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "benchmarks" / "runs"
QUARTER = ROOT / "benchmarks" / "runs-quarter"
HALF = ROOT / "benchmarks" / "runs-half"
IMAGES = ROOT / "docs" / "images"
DOCUMENTS = (
    *("README.md", "docs/results.md", "docs/algorithms.md", "docs/it-does-not-learn.md"),
    *("docs/notebook/ppo-procgen.md", "docs/notebook/ppg-and-drac.md", "docs/notebook/impala.md"),
    "docs/notebook/offline.md",
)
_BLOCK = re.compile(r"(<!-- tables: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NAMES = {"ppo": "PPO", "drac": "DrAC", "ppg": "PPG", "impala": "IMPALA", "impact": "IMPACT"}
_OF_A_MILLION = ("ppo", "drac", "ppg", "impala")  # env steps
_BELOW = "**below**"
_WINDOW = 163_840  # env steps of ten updates of PPO
_QUARTER, _HALF = 262_144, 524_288  # env steps of the short runs
_COLUMNS = range(_WINDOW, 983_040 + 1, _WINDOW)
_END, _LAST = _COLUMNS[-1], 1_015_808  # of the training returns; of the runs and their evaluations
_AMD = "2 shared cores of an AMD EPYC"
_MACHINES = {"ppo": _AMD, "drac": _AMD, "ppg": _AMD, "impala": "1 shared core of an AMD EPYC"}
_ON_A_XEON = (
    "drac-fruitbot-seed2",
    "ppg-bigfish-seed2",
)  # the others of a machine: benchmarks/runs/README.md


@dataclasses.dataclass(frozen=True)
class Options:
    """The parts to renew."""

    write: bool = False
    """Write the blocks into the documents."""
    draw: bool = False
    """Draw the figures."""


def main(options: Options) -> None:
    """Compares or writes the blocks, and draws the figures."""
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        renewed = renew(text)
        if options.write:
            path.write_text(renewed, encoding="utf-8")
        elif renewed != text:
            raise TrainingError(f"{name} differs from the kept runs: python -m benchmarks.tables --write")
    if options.draw:
        for file, (algorithms, games) in FIGURES.items():
            draw(algorithms, games).savefig(IMAGES / file, dpi=110)
        draw_float32().savefig(IMAGES / OF_FLOAT32, dpi=110)


def renew(text: str) -> str:
    """A document with the content of its blocks computed anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


# Numbers


@functools.cache
def _names() -> list[tuple[str, str, Path]]:
    """Algorithm, game and folder of the kept runs."""
    found = [(path.parent, json.loads(path.read_text())) for path in RUNS.glob("*/results.json")]
    return [(results["algorithm"], results["env"], path) for path, results in found]


@functools.cache
def kept(algorithm: str, game: str) -> list[runs.StoredRun]:
    """The kept runs of an algorithm on a game, by seed."""
    of_game = [path for *names, path in _names() if names == [algorithm, game]]
    return sorted((runs.load(path) for path in of_game), key=lambda run: run.config.seed)


def window_mean(curve: tuple[np.ndarray, np.ndarray], step: float) -> float:
    """The mean of a curve's points in the ten updates that end at an env step."""
    at, returns = curve
    return float(returns[(at > step - _WINDOW) & (at <= step)].mean())


def training(run: runs.StoredRun, step: float) -> float:
    """The mean training return of a run over the ten updates that end at an env step."""
    return window_mean(run.points("rollout/episode_return"), step)


def published(game: str, level_set: str, step: float) -> list[float]:
    """The same of the three published runs; on unseen levels, their returns at the end of our runs."""
    at, curves = published_curve(game, level_set)
    if level_set == "train":
        return [window_mean((at, curve), step) for curve in curves]
    return [float(np.interp(_LAST, at, curve)) for curve in curves]


@functools.cache
def float32_returns(game: str) -> dict[int, list[float]]:
    """PPO's mean training returns in float32, a list of all seeds by env steps.

    These runs were not kept, only the mean over the ten updates that end at each of seven env steps.
    """
    found: dict[int, list[float]] = {}
    with (RUNS / "ppo-float32.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["env"] == game:
                found.setdefault(int(row["env_steps"]), []).append(float(row["episode_return"]))
    return found


def verdict(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The place of our mean beside the range of the published runs: below, within, above."""
    mean = float(np.mean(ours))
    return _BELOW if mean < min(theirs) else "above" if mean > max(theirs) else "within"


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# Blocks


def levels_table(algorithms: Sequence[str], games: Sequence[str]) -> str:
    """Returns on training and on unseen levels, a row for each algorithm and level set."""
    rows = []
    for level_set, title in (("train", "training"), ("test", "unseen")):
        cells = [_range(published(game, level_set, _END)) for game in games]
        rows.append(["published PPO, 3 runs" if level_set == "train" else "", title, *cells, ""])
    for algorithm in algorithms:
        for level_set, title in (("train", "training"), ("test", "unseen")):
            cells, found = [], []
            for game in games:
                theirs, of_game = published(game, level_set, _END), kept(algorithm, game)
                if not of_game:
                    cells.append("–")
                    continue
                ours = [
                    training(r, _END) if level_set == "train" else r.final_return("test") for r in of_game
                ]
                cells.append(_numbers(ours))
                found.append((verdict(ours, theirs), game))
            name = _NAMES[algorithm] if level_set == "train" else ""
            rows.append([name, title, *cells, _in_words(found)])
    return _table(["", "levels", *games, "mean of our seeds"], rows)


def short_table(game: str, games: Sequence[str]) -> str:
    """Returns on one game, and on how many games the mean of an algorithm's seeds is not below the range."""
    sets = ("train", "test")
    rows = [["published PPO", *(_range(published(game, level_set, _END)) for level_set in sets), "", ""]]
    for algorithm in _OF_A_MILLION:
        cells = [_numbers(_ours(run, level_set) for run in kept(algorithm, game)) for level_set in sets]
        for level_set in sets:
            found = [
                verdict(
                    [_ours(run, level_set) for run in kept(algorithm, other)],
                    published(other, level_set, _END),
                )
                for other in games
                if kept(algorithm, other)
            ]
            reached = sum(where != _BELOW for where in found)
            share = f"{reached} of {len(found)}"
            cells.append(share if reached == len(found) else f"**{share}**")
        rows.append([_NAMES[algorithm], *cells])
    head = ("", f"{game}, training levels", "unseen levels", "games reached: training", "unseen")
    return _table(head, rows)


def _ours(run: runs.StoredRun, level_set: str) -> float:
    """The return of a run on a level set, as the tables have it."""
    return training(run, _END) if level_set == "train" else run.final_return("test")


def _in_words(found: Sequence[tuple[str, str]]) -> str:
    """The verdicts of a row: `within; **below** on bigfish`."""
    by_verdict: dict[str, list[str]] = {}
    for where, game in found:
        by_verdict.setdefault(where, []).append(game)
    if len(by_verdict) == 1:
        return f"{next(iter(by_verdict))} on all" if len(found) > 1 else next(iter(by_verdict))
    return "; ".join(f"{where} on {' and '.join(games)}" for where, games in by_verdict.items())


def course_table(
    rows: Sequence[tuple[str, str]], columns: Sequence[int] = _COLUMNS, *, ends: bool = True
) -> str:
    """Training returns at some env steps, and returns at the end, a row for each game and algorithm."""
    table, last = [], None
    at_end = ("training levels", "unseen levels") if ends else ()
    for game, algorithm in rows:
        if algorithm == "published":
            name = "PPO, published"
            cells = [_range(published(game, "train", step)) for step in columns] + [""] * len(at_end)
        else:
            of_game = kept(algorithm, game)
            name = _NAMES[algorithm]
            cells = [_numbers([training(run, step) for run in of_game]) for step in columns]
            if ends:
                cells += [_numbers([run.final_return(of) for run in of_game]) for of in ("train", "test")]
        table.append([name if game == last else f"{game}, {name}", *cells])
        last = game
    return _table(["", *(f"{step:,}" for step in columns), *at_end], table)


def _by_game(found: Iterable[runs.StoredRun]) -> dict[str, list[runs.StoredRun]]:
    """The runs of each game, games and seeds in order."""
    by_game: dict[str, list[runs.StoredRun]] = {}
    for run in sorted(found, key=lambda run: (run.config.env, run.config.seed)):
        by_game.setdefault(run.config.env, []).append(run)
    return by_game


def _runs_in(folder: Path) -> list[runs.StoredRun]:
    return [runs.load(path) for path in folder.glob("*-seed*")]


@functools.cache
def _played() -> dict[str, list[runs.StoredRun]]:
    """All kept runs of PPO with its defaults, by game."""
    games = sorted({game for algorithm, game, _ in _names() if algorithm == "ppo"})
    of_a_million = [run for game in games for run in kept("ppo", game)]
    return _by_game(_runs_in(QUARTER) + _runs_in(HALF) + of_a_million)


def _returns_at(
    step: int, found: Sequence[runs.StoredRun], level_set: str, *, evaluated: bool
) -> list[float]:
    """The returns at some env steps, while training or evaluated, of the runs that have them there."""
    if not evaluated:
        return [training(run, step) for run in found if run.env_steps >= step]
    evaluations = [zip(*run.evaluations(level_set), strict=True) for run in found]
    return [float(value) for of_run in evaluations for at, value in of_run if at == step]


def _published_at(step: int, game: str, level_set: str) -> list[float]:
    """The same of the three published runs; on unseen levels, of their last 100 episodes."""
    at, curves = published_curve(game, level_set)
    if level_set == "train":
        return [window_mean((at, curve), step) for curve in curves]
    return [float(np.interp(step, at, curve)) for curve in curves]


def games_table(step: int, *, only_mean: bool = False) -> str:
    """PPO's returns at some env steps beside the published runs', a row for each game with such runs.

    The last row, or the only one, has the means over games of the normalised returns, with standard errors.
    """
    rows, scores = [], {"train": [], "test": []}
    for game, played in _played().items():
        found = [run for run in played if run.env_steps >= step]
        if not found:
            continue
        cells = []
        for level_set, of_set in scores.items():
            ours = _returns_at(step, found, level_set, evaluated=level_set == "test")
            theirs = _published_at(step, game, level_set)
            if not ours:
                cells += ["–", "–", ""]
                continue
            cells += [_numbers(ours), _range(theirs), verdict(ours, theirs)]
            ends = score_range(game, "easy")
            assert ends is not None, game
            low, high = ends
            of_set.append([(np.array(returns) - low) / (high - low) for returns in (ours, theirs)])
        rows.append([game, *cells])
    means = []
    for of_set in scores.values():
        mine, theirs = over_games(*zip(*of_set, strict=True))
        difference, error = mine.value - theirs.value, float(np.hypot(mine.error, theirs.error))
        where = _BELOW if difference < -2 * error else "above" if difference > 2 * error else "within"
        means += [f"{mine} ({len(of_set)} games)", str(theirs), where]
    rows = [*([] if only_mean else rows), ["mean, normalised", *means]]
    head = ("training: ours", "published", "", "unseen: ours", "published", "")
    return _table(["", *head], rows)


def variants_table() -> str:
    """The returns of PPO's variants, of DAAC and of PPG after 262,144 env steps.

    Those while training are of the levels that were replayed, so there are evaluations on training levels.
    """
    ours = {name: _by_game(_runs_in(QUARTER / folder)) for name, folder in _VARIANTS.items()}
    of_a_million = [run for game in _GAMES for run in kept("ppg", game)]
    ours = {"PPO": _played(), **ours, "PPG": _by_game(_runs_in(QUARTER / "ppg") + of_a_million)}
    rows = []
    for title, level_set, evaluated in (
        ("while training", "train", False),
        ("evaluated, training levels", "train", True),
        ("evaluated, unseen levels", "test", True),
    ):
        of_set = []
        if (level_set, evaluated) != ("train", True):
            theirs = [_range(_published_at(_QUARTER, game, level_set)) for game in _OF_VARIANTS]
            of_set.append(["", "published PPO, 3 runs", *theirs])
        for name, played in ours.items():
            of_games = [
                _returns_at(_QUARTER, played.get(game, []), level_set, evaluated=evaluated)
                for game in _OF_VARIANTS
            ]
            of_set.append(["", name, *(_numbers(returns) or "–" for returns in of_games)])
        of_set[0][0] = title
        rows += of_set
    return _table(["", "", *_OF_VARIANTS], rows)


def offline_table() -> str:
    """The returns of the offline algorithms on Pendulum-v1's set, and d3rlpy's, with standard errors."""
    found: dict[tuple[str, str], list[float]] = {}
    with (RUNS / "offline-pendulum.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault((row["algorithm"], row["library"]), []).append(float(row["return"]))

    def cell(algorithm: str, library: str) -> str:
        returns = found.get((algorithm, library), [])
        if not returns:
            return "–"
        error = np.std(returns, ddof=1) / np.sqrt(len(returns))
        return f"{np.mean(returns):.0f} ± {error:.0f} ({len(returns)} seeds)"

    rows = []
    for algorithm in dict.fromkeys(name for name, _ in found):
        ours, theirs = (found.get((algorithm, library), []) for library in ("tfrl", "d3rlpy"))
        beside = "–"
        if theirs:
            spread = np.sqrt(sum(np.var(x, ddof=1) / len(x) for x in (ours, theirs)))
            difference = np.mean(ours) - np.mean(theirs)
            beside = f"{difference:+.0f} ± {spread:.0f}, {_BELOW if difference < -spread else 'not below'}"
        rows.append([f"`{algorithm}`", cell(algorithm, "tfrl"), cell(algorithm, "d3rlpy"), beside])
    return _table(["", "tfrl", "d3rlpy", "difference"], rows)


def float32_table() -> str:
    """PPO's returns in float32 near the end, a column for each game, with the verdict and its past."""
    returns, verdicts = ["seeds 1, 2"], ["mean of our seeds"]
    for game in _OF_FLOAT32:
        returns.append(_numbers(float32_returns(game)[_END]))
        found = {step: verdict(ours, published(game, "train", step)) for step, ours in _float32(game)}
        below = [step for step, where in found.items() if where == _BELOW and step < _END]
        verdicts.append(found[_END] + (f"; {_BELOW} up to {max(below):,} env steps" if below else ""))
    return _table(["", *_OF_FLOAT32], [returns, verdicts])


def float32_course() -> str:
    """PPO's returns in float32 at seven env steps, with the verdicts outside the published range."""
    rows = []
    for game in _OF_FLOAT32:
        theirs = [published(game, "train", step) for step, _ in _float32(game)]
        rows.append([f"{game}, published", *map(_range, theirs)])
        cells = []
        for (_, ours), of_step in zip(_float32(game), theirs, strict=True):
            mark = {"within": "", "above": " (above)", _BELOW: f" {_BELOW}"}[verdict(ours, of_step)]
            cells.append(_numbers(ours) + mark)
        rows.append(["seeds 1 and 2", *cells])
    return _table(["", *(f"{step:,}" for step, _ in _float32(_OF_FLOAT32[0]))], rows)


def _float32(game: str) -> list[tuple[int, list[float]]]:
    return sorted(float32_returns(game).items())


def caption(algorithms: Sequence[str], games: Sequence[str]) -> str:
    """A figure's caption: the runs, their precision, their machine, and what its lines and bands are."""
    found = [run for of in algorithms for game in games for run in kept(of, game)]
    precisions = [run.results["precision"] for run in found if run.results]
    common = max(set(precisions), key=precisions.count)
    others = [
        f"seed {run.config.seed} of {_NAMES[run.config.algorithm]}'s {run.config.env} ({run.precision}"
        f"{', Intel Xeon' if run.name in _ON_A_XEON else ''})"
        for run, precision in zip(found, precisions, strict=True)
        if precision != common
    ]
    seeds = sorted({run.config.seed for run in found})
    except_for = f", except {_all(others)}" if others else ""
    machines = dict.fromkeys(_MACHINES[of] for of in algorithms)
    names, of_seeds = _all([_NAMES[of] for of in algorithms]), _all([str(seed) for seed in seeds])
    lines = [
        f"*{names}: n = {len(seeds)} (seeds {of_seeds}), {common}{except_for}; {_all(list(machines))}.",
        f"Grey: the {len(published(games[0], 'train', _END))} published runs. Lines are means over runs, and"
        " bands go from the lowest to the highest run.",
        "Open markers are returns on unseen levels at the end (128 episodes each), with bars to both runs.*",
    ]
    return "\n".join(lines)


def caption_of_float32() -> str:
    """The caption of the figure of PPO in float32."""
    seeds, theirs = len(float32_returns(_OF_FLOAT32[0])[_END]), len(published(_OF_FLOAT32[0], "train", _END))
    lines = [
        f"*PPO: n = {seeds} (seeds 1 and 2), float32, training levels; {_AMD} with AVX2.",
        f"Grey: the {theirs} published runs. Lines are means over runs, and bands go from the lowest to the"
        " highest run.",
        "Each point is the mean of the ten updates before it.*",
    ]
    return "\n".join(lines)


def _all(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def matrix() -> str:
    """The features of each algorithm, by its action spaces and the settings that it takes."""
    rows = []
    for name in settings.ALGORITHMS:
        kind = settings.reader(name).kind
        spaces = (Discrete, Box, MultiDiscrete)
        taken = [space for space in spaces if issubclass(space, kind.action_spaces)]
        has = settings.reader(name).flag_kinds
        replay = "train_every" in has
        offline = "no" if "dataset" not in has else "half of each batch" if replay else "only"
        cells = [", ".join(space.kind for space in taken), "images" if name == "drac" else "images, vectors"]
        cells += ["`--memory`" if takes(name, memory="lstm") else "–"]
        cells += ["yes" if {Discrete, MultiDiscrete} & {*taken} else "–"]
        cells += ["yes" if takes(name, **{of: 2}) else "–" for of in ("actors", "learners", "replicas")]
        rows.append([f"`{name}`", *cells, offline])
    names = ("actions", "observations", "memory", "masks", "`--actors`", "`--learners`", "`--replicas`")
    return _table(["", *names, "recorded data"], rows)


def takes(algorithm: str, **values: Any) -> bool:
    """True if an algorithm has these settings and does not refuse them."""
    reader = settings.reader(algorithm)
    has = reader.flag_kinds
    if not values.keys() <= has.keys():
        return False
    needed: dict[str, Any] = {}
    if "train_every" in has:
        needed = {"num_envs": 4}
    elif "dataset" in has:
        takes_discrete = issubclass(Discrete, reader.kind.action_spaces)
        needed = {"dataset": "a/set", "env": "CartPole-v1" if takes_discrete else "Pendulum-v1"}
    try:
        reader.of_values(needed | values)
    except UserError:
        return False
    return True


_HEALTHY = {
    "train/first_ratio_error": (
        "below 1e-4 without `--lag`; on a GPU in bfloat16 below 1e-3",
        "learner and actor compute different probabilities: report a bug",
    ),
    "train/approx_kl": ("0.001 to 0.03 nats", "above: lower `--lr`, or `--target-kl`; 0: raise `--lr`"),
    "train/clip_fraction": ("0.01 to 0.3", "as above"),
    "train/explained_variance": (
        "rises towards 1; 0 or less only at first",
        "near 0 for long: the critic learns nothing; `--normalize-rewards`, another `--gamma`",
    ),
    "train/entropy": (
        "begins near log(number of actions), falls slowly",
        "at its start or at 0: see the symptoms",
    ),
    "train/grad_norm": ("within a factor of ten of its median", "peaks: lower `--lr` or `--max-grad-norm`"),
}


def healthy() -> str:
    """Healthy ranges of PPO's metrics, beside the range over the kept runs after five updates."""
    found = [run.progress for game in _GAMES for run in kept("ppo", game)]
    rows = []
    for column, (healthy_range, advice) in _HEALTHY.items():
        values = np.concatenate([progress[column][5:] for progress in found])
        least, most = (f"{value:.2g}" for value in (values.min(), values.max()))
        rows.append([f"`{column}`", healthy_range, f"{least} … {most}", advice])
    return _table(["column", "healthy", f"{len(found)} runs", "if it is outside"], rows)


# Figures


@matplotlib.rc_context(plots.STYLE)
def draw(algorithms: Sequence[str], games: Sequence[str]) -> Figure:
    """Draws training returns over env steps, a panel for each game, with the published runs."""
    figure = Figure(figsize=(3.6 * len(games), 3.5))
    for ax, game in zip(figure.subplots(1, len(games), squeeze=False).flat, games, strict=True):
        every = [run for of in algorithms for run in kept(of, game)]
        end = max(run.env_steps for run in every)
        for level_set, dash in (("train", "-"), ("test", (0, (2, 1.5)))):
            at, curves = published_curve(game, level_set)
            at, curves = at[at <= 1.03 * end], curves[:, at <= 1.03 * end]
            levels = "training" if level_set == "train" else "unseen"
            style: dict[str, Any] = {"color": plots.GREY, "linewidth": 1.3, "linestyle": dash}
            ax.plot(at, curves.mean(0), label=f"published PPO, {levels} levels (n = {len(curves)})", **style)
            if level_set == "train":
                ax.fill_between(at, curves.min(0), curves.max(0), color=plots.GREY, alpha=0.22, linewidth=0)
        for v, algorithm in enumerate(algorithms):
            found = kept(algorithm, game)
            if not found:
                continue
            style = plots.line_style(v)
            at, mean, low, high = scores.over_seeds([run.points("rollout/episode_return") for run in found])
            ax.plot(at, mean, label=f"{_NAMES[algorithm]} (n = {len(found)})", **style)
            ax.fill_between(at, low, high, color=style["color"], alpha=0.18, linewidth=0)
            unseen = [run.final_return("test") for run in found]
            middle = float(np.mean(unseen))
            bars = [[middle - min(unseen)], [max(unseen) - middle]]
            place = end * (1.02 + 0.025 * v)  # beside each other
            points = {"markerfacecolor": "white", "capsize": 2, "clip_on": False, "zorder": 4}
            ax.errorbar([place], [middle], bars, **plots.marker_style(v), **points)
        ax.set(title=game, xlabel="env steps", xlim=(0, 1.1 * end))
    return _completed(figure)


@matplotlib.rc_context(plots.STYLE)
def draw_float32() -> Figure:
    """Draws PPO's returns in float32, a panel for each game, with the published runs."""
    figure = Figure(figsize=(3.6 * len(_OF_FLOAT32), 3.5))
    for ax, game in zip(figure.subplots(1, len(_OF_FLOAT32)), _OF_FLOAT32, strict=True):
        at = [step for step, _ in _float32(game)]
        lines = (
            (
                "published PPO",
                np.array([published(game, "train", step) for step in at]),
                {"color": plots.GREY},
            ),
            ("PPO", np.array([ours for _, ours in _float32(game)]), plots.line_style(0)),
        )
        for name, returns, style in lines:
            ax.plot(at, returns.mean(1), label=f"{name} (n = {returns.shape[1]})", marker="o", ms=4, **style)
            ax.fill_between(at, returns.min(1), returns.max(1), color=style["color"], alpha=0.2, linewidth=0)
        ax.set(title=game, xlabel="env steps", xlim=(0, 1.05 * _LAST))
    return _completed(figure)


def _completed(figure: Figure) -> Figure:
    """Formats the axes, and adds a legend of all panels."""
    for ax in figure.axes:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(4))
    figure.axes[0].set_ylabel("episode return (raw reward)")
    labels = {
        label: handle
        for ax in figure.axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    columns = min(len(labels), 3 if len(figure.axes) > 1 else 1)
    figure.legend(list(labels.values()), list(labels), loc="outside upper left", ncols=columns)
    return figure


_GAMES = ("starpilot", "fruitbot", "bigfish")
_OF_VARIANTS = ("starpilot", "fruitbot", "ninja", "bigfish")
_VARIANTS = {"PPO, level replay": "levels", "PPO, pooled torso": "pooled", "DAAC": "daac"}
_OF_IMPALA = ("coinrun", "starpilot", "fruitbot")
_OF_FLOAT32 = ("coinrun", "starpilot", "fruitbot")
OF_FLOAT32 = "learning-float32.png"
FIGURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "learning-ppo.png": (("ppo",), _GAMES),
    "learning-generalisation.png": (("ppo", "drac", "ppg"), _GAMES),
    "learning-impala.png": (("impala",), _OF_IMPALA),
}
"""Algorithms and games of each figure in docs/images."""
BLOCKS: dict[str, Callable[[], str]] = {
    "procgen-readme": lambda: short_table("fruitbot", ("coinrun", *_GAMES)),
    "procgen": lambda: levels_table(_OF_A_MILLION, ("coinrun", *_GAMES)),
    "course-generalisation": lambda: course_table(
        [(game, of) for game in _GAMES for of in ("ppo", "published", "drac", "ppg")]
    ),
    "course-impala": lambda: course_table(
        [(game, of) for game in _OF_IMPALA for of in ("published", "impala")]
    ),
    "course-impact": lambda: course_table(
        [
            (game, of)
            for game in ("starpilot", "fruitbot", "bigfish", "ninja")
            for of in ("published", "ppo", "impact")
        ],
        (_WINDOW, 229_376, _QUARTER, 327_680, 491_520),
        ends=False,
    ),
    "quarter": lambda: games_table(_QUARTER),
    "quarter-mean": lambda: games_table(_QUARTER, only_mean=True),
    "half": lambda: games_table(_HALF),
    "half-mean": lambda: games_table(_HALF, only_mean=True),
    "million": lambda: games_table(_LAST),
    "million-mean": lambda: games_table(_LAST, only_mean=True),
    "variants": variants_table,
    "offline": offline_table,
    "float32": float32_table,
    "course-float32": float32_course,
    "caption-float32": caption_of_float32,
    "matrix": matrix,
    "healthy": healthy,
    **{
        f"caption-{Path(file).stem.removeprefix('learning-')}": lambda shown=shown: caption(*shown)
        for file, shown in FIGURES.items()
    },
}
"""The content of each block, by its name."""


if __name__ == "__main__":
    command.run(Options, main)
