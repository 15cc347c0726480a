"""Curves against env steps: which lines there are, how far they go, and what they are called."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from made_runs import COLUMNS, make_run

from tfrl.config import drac, impala, ppg, ppo
from tfrl.config.ppo_presets import PRESETS
from tfrl.reporting import comparison, curve_plots, runs, score_plots
from tfrl.reporting.plot_style import color_of

GYMNASIUM = {k: v for k, v in PRESETS["gymnasium"].items() if k != "total_steps"} | {"preset": "gymnasium"}


def test_curves_of_seeds_end_together_and_go_on_alone(make):
    figure = curve_plots.learning_curves(comparison.group([make(seed=1), make(seed=2, updates=30)]))
    (panel,) = figure.axes
    mean, *alone = (
        line for line in panel.lines if line.get_linestyle() == "-" and line.get_color() != "#8A8A8A"
    )
    assert mean.get_xdata()[-1] == 30 * 16_384
    (first, second) = alone
    beyond = first.get_xdata()[np.isfinite(first.get_ydata())]
    assert beyond[-1] == 62 * 16_384 and set(beyond[1:]) == {k * 16_384 for k in range(30, 63)}
    assert second.get_xdata()[-1] == 30 * 16_384
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "thin line, small marker: one seed, where not all are" in texts


def test_a_published_curve_is_drawn_from_its_first_point_on(tmp_path):
    figures = {}
    for steps in (100_000, 1_000_000):  # the published test curves begin at 163,840
        run = runs.load(make_run(tmp_path / str(steps), total_steps=steps))
        figures[steps] = curve_plots.learning_curves(comparison.group([run]))
    labels = {steps: {text.get_text() for text in f.legends[0].get_texts()} for steps, f in figures.items()}
    assert "train-procgen's PPO (published), training levels" in labels[100_000]
    assert labels[1_000_000] - labels[100_000] == {"train-procgen's PPO (published), unseen levels"}


@pytest.mark.parametrize(
    ("clip_value", "what"),
    [
        ((True,), "half the squared error, clipped"),
        ((False,), "half the squared error"),
        ((True, False), "not the same in all runs"),
    ],
)
def test_the_value_loss_is_named_as_it_is_computed(make, clip_value, what):
    loaded = [make(total_steps=40_000, clip_value=clip) for clip in clip_value]
    figure = curve_plots.training(comparison.group(loaded))
    assert figure.axes[1].get_title().replace("\n", " ") == f"value loss ({what})"


def test_titles_of_metrics_stay_beside_each_other(tmp_path):
    """Also those of algorithms whose metrics of one name are not the same."""
    kinds = (ppo.Config, impala.Config, ppg.Config, drac.Config)
    made = [make_run(tmp_path / kind.algorithm, total_steps=40_000, kind=kind) for kind in kinds]
    loaded = [runs.load(run) for run in made]
    for run in loaded:
        ones = np.ones_like(run.progress["env_steps"])
        run.progress.update(dict.fromkeys(run.config.metric_titles, ones))
    figure = curve_plots.training(comparison.group(loaded))
    figure.canvas.draw()
    panels = [ax for ax in figure.axes if ax.get_title()]
    widths = [ax.title.get_window_extent().width / ax.get_window_extent().width for ax in panels]
    assert len(panels) > 10 and max(widths) < 1.15  # panels are a fifth of their width apart
    turned = curve_plots.training(comparison.group(loaded[::-1]))
    assert {ax.get_title() for ax in turned.axes} == {ax.get_title() for ax in figure.axes}


@pytest.mark.parametrize(("env", "lines"), [("CartPole-v1", 2), ("fruitbot", 3)])
def test_a_learning_curve_shows_training_and_evaluations(tmp_path, env, lines):
    settings = {} if env == "fruitbot" else GYMNASIUM | {"run_name": "run"}
    run = runs.load(make_run(tmp_path, env, total_steps=40_000, **settings))
    mean_reward, longest, returns, lengths = curve_plots.learning_curve(run).axes
    for ax, column in ((mean_reward, "mean_reward"), (longest, "longest_episode")):
        (line,) = ax.lines
        np.testing.assert_array_equal(line.get_ydata(), run.points(f"rollout/{column}")[1])
        assert ax.get_title().startswith("training: ")
    assert len(returns.lines) == len(lengths.lines) == lines
    np.testing.assert_array_equal(
        returns.lines[-1].get_ydata()[-1], run.final_return("test" if lines == 2 else "train")
    )
    earlier = {name: v for name, v in run.progress.items() if name not in COLUMNS[4:6]}
    assert len(curve_plots.learning_curve(dataclasses.replace(run, progress=earlier)).axes) == 2
    path = curve_plots.save_learning_curve(run)
    before = path.stat().st_mtime_ns
    curve_plots.save_learning_curve(run)
    assert path.stat().st_mtime_ns == before, "nothing new"


def with_metrics(run, **columns):
    """A run with columns of progress.csv as they are given, by their names without `train/`."""
    return dataclasses.replace(run, progress=run.progress | {f"train/{k}": v for k, v in columns.items()})


def test_a_single_run_is_seen_among_many_of_others_and_spikes_do_not_flatten_it(make):
    every = [make(env="bigfish", seed=seed) for seed in range(1, 8)] + [make(env="bigfish", kind=drac.Config)]
    wild = np.array(every[0].progress["train/policy_loss"])
    wild[0] = -1e6
    every[0] = with_metrics(every[0], policy_loss=wild)
    figure = curve_plots.training(comparison.group(every))
    (ax,) = (ax for ax in figure.axes if ax.get_title() == "policy loss")
    strong, *weak = sorted(ax.lines, key=lambda line: -line.get_alpha())
    assert strong.get_color() == color_of(1) and len(weak) == 7
    assert {line.get_alpha() for line in weak} == {3 / 7} and strong.get_alpha() == 1.0
    assert strong.get_linewidth() > max(line.get_linewidth() for line in weak)
    shown = np.concatenate([line.get_ydata() for line in ax.lines])
    bottom, top = ax.get_ylim()
    assert -10 < bottom < 0 < top and np.mean((shown < bottom) | (shown > top)) < 0.01
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ppo, 7 runs", "drac"]


@pytest.mark.parametrize(("phases", "marked"), [(1, True), (2, True), (25, False)])
def test_a_metric_of_few_points_is_marked(make, phases, marked):
    """As of PPG's auxiliary phase: a run of 1 M env steps has one, and a line of one point is not seen."""
    run = make(kind=ppg.Config, total_steps=1_000_000)
    found = np.full(len(run.progress["env_steps"]), np.nan)
    found[31 : 31 + phases] = 0.5
    figure = curve_plots.training(comparison.group([with_metrics(run, aux_policy_kl=found)]))
    (ax,) = (ax for ax in figure.axes if ax.get_title() == "KL of the auxiliary phase (nats)")
    (line,) = ax.lines
    assert len(line.get_xdata()) == phases and line.get_xdata()[0] == 32 * 16_384
    assert (line.get_marker() != "None") == marked


def test_the_choices_of_ucb_are_drawn_by_name(make):
    loaded = [
        make(kind=drac.Config, seed=seed, total_steps=200_000, augment=augment, run_name=f"{seed}")
        for seed, augment in ((1, "ucb"), (2, "ucb"), (3, "crop"))
    ]
    chosen = np.arange(len(loaded[0].progress["env_steps"])) % 8.0
    loaded = [
        with_metrics(run, augmentation=chosen if run.config.augment == "ucb" else 0 * chosen)
        for run in loaded
    ]
    figure = curve_plots.training(comparison.group(loaded))
    (ax,) = (ax for ax in figure.axes if ax.get_title() == "augmentation that UCB chose")
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        *("crop 0", "random-conv 1", "grayscale 2", "flip 3", "rotate 4", "cutout 5", "cutout-color 6"),
        "color-jitter 7",
    ]
    assert len(ax.lines) == 2, "none of the run whose augmentation is fixed"
    for line in ax.lines:
        np.testing.assert_array_equal(np.rint(line.get_ydata()), chosen)
    assert len({line.get_ydata()[0] for line in ax.lines}) == 2, "beside each other"
    fixed = curve_plots.training(comparison.group(loaded[2:]))
    assert not [ax for ax in fixed.axes if "augmentation" in ax.get_title()]


@pytest.mark.parametrize("games", [["bigfish"], ["bigfish", "fruitbot", "starpilot"]])
def test_a_legend_is_not_wider_than_its_picture(make, games):
    levels = {ppo.Config: 200, ppg.Config: 0, drac.Config: 500}
    loaded = [
        make(env=env, kind=kind, num_levels=count, total_steps=(k + 1) * 100_000)
        for env in games
        for k, (kind, count) in enumerate(levels.items())
    ]
    groups = comparison.group(loaded)
    assert comparison.variants(groups)[1] == "ppg, num-levels 0, total-steps 212,992"
    for draw in (curve_plots.learning_curves, curve_plots.training, score_plots.final_scores):
        figure = draw(groups)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, draw


def test_the_rows_of_every_game_are_in_one_order(make):
    """Also where another algorithm's run of a game was given first, as by names of folders."""
    loaded = [
        make(env="bigfish"),
        make(env="fruitbot", kind=drac.Config),
        make(env="bigfish", kind=drac.Config),
    ]
    groups = comparison.group([*loaded, make(env="fruitbot")])
    assert [(g.env, g.label) for g in groups] == [
        *(("bigfish", "ppo"), ("bigfish", "drac"), ("fruitbot", "ppo"), ("fruitbot", "drac")),
    ]


def test_the_numbers_of_augmentations_are_explained():
    text = " ".join((Path(__file__).parents[2] / "docs/reading-results.md").read_text().split())
    assert ", ".join(f"{name} {number}" for number, name in enumerate(drac.AUGMENTATIONS)) in text
