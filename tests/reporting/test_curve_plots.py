"""Curves against env steps: which lines there are, how far they go, and what they are called."""

import dataclasses

import numpy as np
import pytest
from made_runs import COLUMNS, make_run

from tfrl.config.ppo import PRESETS
from tfrl.reporting import comparison, curve_plots, runs

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
    assert figure.axes[1].get_title() == f"value loss ({what})"


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
