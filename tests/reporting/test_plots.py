"""Curves against env steps: which lines there are, how far they go, and what they are called."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run
from processes import ROOT

from tfrl.algorithms import drac, impala, ppg, ppo
from tfrl.algorithms.registry import reader
from tfrl.reporting import plots, runs
from tfrl.reporting import scores as statistics

GYMNASIUM = {k: v for k, v in reader("ppo").changes_of("gymnasium").items() if k != "total_steps"} | {
    "preset": "gymnasium"
}


def test_the_mean_curve_ends_with_the_shortest_seed_and_single_curves_continue(make):
    figure = plots.learning_curves(runs.group([make(seed=1), make(seed=2, updates=30)]))
    (panel,) = figure.axes
    mean, first, second = (
        line for line in panel.lines if line.get_linestyle() == "-" and line.get_color() != plots.GREY
    )
    assert mean.get_xdata()[-1] == second.get_xdata()[-1] == 30 * 16_384
    assert first.get_xdata()[-1] == 62 * 16_384 and first.get_linewidth() < mean.get_linewidth()
    assert "thin line: one seed" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_published_curve_is_drawn_from_its_first_point_on(tmp_path):
    figures = {}
    for steps in (100_000, 1_000_000):  # the published test curves begin at 163,840
        run = runs.load(make_run(tmp_path / str(steps), total_steps=steps))
        figures[steps] = plots.learning_curves(runs.group([run]))
    labels = {steps: {text.get_text() for text in f.legends[0].get_texts()} for steps, f in figures.items()}
    assert "train-procgen's PPO (published), training levels" in labels[100_000]
    assert labels[1_000_000] - labels[100_000] == {"train-procgen's PPO (published), unseen levels"}


def test_titles_of_metrics_stay_beside_each_other(tmp_path):
    """Also if algorithms use one metric name for different metrics."""
    kinds = (ppo.Config, impala.Config, ppg.Config, drac.Config)
    made = [make_run(tmp_path / kind.algorithm, total_steps=40_000, kind=kind) for kind in kinds]
    loaded = [runs.load(run) for run in made]
    for run in loaded:
        ones = np.ones_like(run.progress["env_steps"])
        run.progress.update({f"train/metric_{i}_of_a_long_name": ones for i in range(8)})
    figure = plots.training(runs.group(loaded))
    figure.draw_without_rendering()
    panels = [ax for ax in figure.axes if ax.get_title()]
    widths = [ax.title.get_window_extent().width / ax.get_window_extent().width for ax in panels]
    assert len(panels) > 10 and max(widths) < 1.15  # panels are a fifth of their width apart
    turned = plots.training(runs.group(loaded[::-1]))
    assert {ax.get_title() for ax in turned.axes} == {ax.get_title() for ax in figure.axes}


@pytest.mark.parametrize(("env", "lines"), [("CartPole-v1", 2), ("fruitbot", 3)])
def test_a_learning_curve_shows_training_and_evaluations(tmp_path, env, lines):
    settings = {} if env == "fruitbot" else GYMNASIUM | {"run_name": "run"}
    run = runs.load(make_run(tmp_path, env, total_steps=40_000, **settings))
    mean_reward, longest, returns, lengths = plots.learning_curve(run).axes
    for ax, column in ((mean_reward, "mean_reward"), (longest, "longest_episode")):
        (line,) = ax.lines
        np.testing.assert_array_equal(line.get_ydata(), run.points(f"rollout/{column}")[1])
        assert ax.get_title().startswith("training: ")
    assert len(returns.lines) == len(lengths.lines) == lines
    np.testing.assert_array_equal(
        returns.lines[-1].get_ydata()[-1], run.final_return("test" if lines == 2 else "train")
    )
    path = plots.save_learning_curve(run)
    before = path.stat().st_mtime_ns
    plots.save_learning_curve(run)
    assert path.stat().st_mtime_ns == before, "nothing new"


def test_a_picture_leaves_the_backend_of_a_notebook_and_its_figures(tmp_path):
    run = make_run(tmp_path, "CartPole-v1", total_steps=40_000, **GYMNASIUM | {"run_name": "run"})
    code = f"""
import matplotlib
matplotlib.use("svg")
from matplotlib import pyplot
mine, style = pyplot.figure(), dict(matplotlib.rcParams)
from pathlib import Path
from tfrl.reporting import plots, runs
from tfrl.reporting import scores as statistics
plots.save_learning_curve(runs.load(Path({str(run)!r})))
assert matplotlib.get_backend() == "svg"
assert pyplot.get_fignums() == [mine.number] and dict(matplotlib.rcParams) == style
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
    assert (run / "plots" / "learning_curve.png").is_file()


def with_metrics(run, **columns):
    """A run with columns of progress.csv as they are given, by their names without `train/`."""
    return dataclasses.replace(run, progress=run.progress | {f"train/{k}": v for k, v in columns.items()})


def test_a_single_run_is_seen_among_many_of_others_and_spikes_do_not_flatten_it(make):
    every = [make(env="bigfish", seed=seed) for seed in range(1, 8)] + [make(env="bigfish", kind=drac.Config)]
    wild = np.array(every[0].progress["train/policy_loss"])
    wild[0] = -1e6
    every[0] = with_metrics(every[0], policy_loss=wild)
    figure = plots.training(runs.group(every))
    (ax,) = (ax for ax in figure.axes if ax.get_title() == "policy loss")
    strong, *weak = sorted(ax.lines, key=lambda line: -line.get_alpha())
    assert strong.get_color() == plots.line_style(1)["color"] and len(weak) == 7
    assert {line.get_alpha() for line in weak} == {3 / 7} and strong.get_alpha() == 1.0
    assert strong.get_linewidth() > max(line.get_linewidth() for line in weak)
    shown = np.concatenate([line.get_ydata() for line in ax.lines])
    bottom, top = ax.get_ylim()
    assert -10 < bottom < 0 < top and np.mean((shown < bottom) | (shown > top)) < 0.01
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ppo, 7 runs", "drac"]


@pytest.mark.parametrize(("phases", "marked"), [(1, True), (2, True), (25, False)])
def test_a_metric_of_few_points_is_marked(make, phases, marked):
    """PPG's auxiliary phase gives one point in 1 M env steps, and a line of one point is invisible."""
    run = make(kind=ppg.Config, total_steps=1_000_000)
    found = np.full(len(run.progress["env_steps"]), np.nan)
    found[31 : 31 + phases] = 0.5
    figure = plots.training(runs.group([with_metrics(run, aux_policy_kl=found)]))
    (ax,) = (ax for ax in figure.axes if ax.get_title() == "aux policy kl")
    (line,) = ax.lines
    assert len(line.get_xdata()) == phases and line.get_xdata()[0] == 32 * 16_384
    assert (line.get_marker() != "None") == marked


@pytest.mark.parametrize("games", [["bigfish"], ["bigfish", "fruitbot", "starpilot"]])
def test_a_legend_is_not_wider_than_its_picture(make, games):
    levels = {ppo.Config: 200, ppg.Config: 0, drac.Config: 500}
    loaded = [
        make(env=env, kind=kind, num_levels=count, total_steps=(k + 1) * 100_000)
        for env in games
        for k, (kind, count) in enumerate(levels.items())
    ]
    groups = runs.group(loaded)
    assert runs.variants(groups)[1] == "ppg, num-levels 0, total-steps 212,992"
    for draw in (plots.learning_curves, plots.training, plots.final_scores):
        figure = draw(groups)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, draw


def test_the_rows_of_every_game_are_in_one_order(make):
    """Also if the runs were given in another order for each game."""
    loaded = [
        make(env="bigfish"),
        make(env="fruitbot", kind=drac.Config),
        make(env="bigfish", kind=drac.Config),
    ]
    groups = runs.group([*loaded, make(env="fruitbot")])
    assert [(g.env, g.label) for g in groups] == [
        *(("bigfish", "ppo"), ("bigfish", "drac"), ("fruitbot", "ppo"), ("fruitbot", "drac")),
    ]


def test_the_numbers_of_augmentations_are_explained():
    text = " ".join((Path(__file__).parents[2] / "docs/reading-results.md").read_text().split())
    assert ", ".join(f"{name} {number}" for number, name in enumerate(drac.AUGMENTATIONS)) in text


def test_no_gap_is_drawn_where_no_levels_are_unseen(make):
    every = [make(env="coinrun", total_steps=40_000, num_levels=0), make(env="maze", total_steps=40_000)]
    figure = plots.level_gap(runs.group(every))
    assert [label.get_text().split()[0] for label in figure.axes[0].get_yticklabels()] == ["maze"]
    assert plots.level_gap(runs.group(every[:1])) is None


def test_a_published_profile_has_the_runs_of_every_game_once(make):
    """However many variants stand beside it; each variant has its style of the other pictures."""
    made = [make(kind=kind, env="bigfish", seed=s) for kind in (ppo.Config, drac.Config) for s in (1, 2, 3)]
    groups = runs.group(made)
    published = groups[0].published_scores()["test"]
    axes = plots.performance_profiles(groups).axes[1]
    shares = {line.get_color(): line.get_ydata() for line in axes.lines}
    expected = statistics.performance_profile([published], axes.lines[0].get_xdata())
    np.testing.assert_array_equal(shares[plots.GREY], expected)
    assert len(published) == 3 and len(groups) == 2
    order = runs.variants(groups)
    for g in groups:
        own = statistics.performance_profile([g.scores("test")], axes.lines[0].get_xdata())
        np.testing.assert_array_equal(shares[plots.line_style(order.index(g.label))["color"]], own)
    fewer = runs.group([*made[:3], *made[3:5]])
    lines = plots.performance_profiles(fewer).axes[1].lines
    assert [line.get_color() for line in lines[1:]] == [plots.line_style(order.index("ppo"))["color"]]
