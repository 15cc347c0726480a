"""Runs side by side: which are seeds of one experiment, and where they are compared."""

import dataclasses
import io
import re
import shutil

import matplotlib
import numpy as np
import pytest
from made_runs import make_run

from tfrl import report
from tfrl.algorithms import drac, ppg, ppo
from tfrl.algorithms.registry import reader
from tfrl.envs.published import published_curve
from tfrl.reporting import plots, runs
from tfrl.reporting import scores as statistics


def color_of(variant):
    return plots.line_style(variant)["color"]


@pytest.mark.parametrize(
    ("setting", "values", "labels"),
    [
        ("total_steps", (100_000, 200_000), ["total-steps 114,688", "total-steps 212,992"]),
        ("precision", ("float32", "bfloat16"), ["precision float32", "precision bfloat16"]),
        ("distribution_mode", ("easy", "hard"), ["distribution-mode easy", "distribution-mode hard"]),
        ("torso_weights", (None, "a/run"), ["torso-weights None", "torso-weights a/run"]),
        ("gamma", (0.99, 0.999), ["gamma 0.99", "gamma 0.999"]),
    ],
)
def test_runs_with_different_result_settings_are_separate_groups(make, setting, values, labels):
    plain = {"total_steps": 100_000, "precision": "float32", "run_name": None}
    loaded = [
        make(name=f"{v}", seed=seed, **plain | {setting: value})
        for v, value in enumerate(values)
        for seed in (1, 2)
    ]
    groups = runs.group(loaded)
    assert [(g.label, len(g.runs)) for g in groups] == [(label, 2) for label in labels]
    assert runs.variants(groups) == labels  # in statistics over games as well


def test_settings_without_influence_on_results_do_not_split_seeds(make):
    loaded = [
        make(seed=1, total_steps=100_000, eval_every=5, replicas=2),
        make(seed=2, total_steps=100_001, env_threads=3),  # as many updates
    ]
    (group,) = runs.group(loaded)
    assert (group.label, len(group.runs), report.notes([group])) == ("ppo", 2, [])


def test_auto_precision_is_grouped_by_the_precision_used(make):
    """A file that a person wrote may say auto."""
    runs_of_both = [make(seed=seed, total_steps=100_000) for seed in (1, 2)]
    results = runs_of_both[1].results | {"precision": "bfloat16"}
    groups = runs.group([runs_of_both[0], dataclasses.replace(runs_of_both[1], results=results)])
    assert [len(g.runs) for g in groups] == [1, 1]


def test_the_same_seed_twice_is_one_with_a_warning(make, tmp_path, capsys):
    first, second = (make(seed=seed, total_steps=100_000) for seed in (1, 2))
    copied = first.path.with_name("copied")
    shutil.copytree(first.path, copied)
    half = make(name="half", seed=2, total_steps=100_000, updates=4)
    for order in ([first, second, half, runs.load(copied)], [runs.load(copied), half, second, first]):
        (group,) = runs.group(order)
        assert [run.config.seed for run in group.runs] in ([1, 2], [2, 1])
        assert group.env_steps == second.env_steps  # not half's
        assert len(group.scores("test")) == 2 and len(group.repeated) == 2
    report.main([str(tmp_path / "logs"), str(half.path), "--out", str(tmp_path / "out")])
    page, warned = (tmp_path / "out" / "report.html").read_text(), capsys.readouterr().err
    for text in (page, warned):
        assert text.count("is ignored") == 2 and str(half.path) in text
    assert "2 runs, 2 seeds" in page


def test_seeds_of_different_lengths_are_compared_where_all_were_evaluated(make, tmp_path, capsys):
    """Evaluations come every 20 updates; seed 1 has all 62 updates and seed 2 has 50."""
    done, running = make(seed=1), make(seed=2, updates=50)
    at = 40 * 16_384
    (group,) = runs.group([done, running])
    assert (group.env_steps, group.scored_at("test")) == (50 * 16_384, at)
    for level_set in ("train", "test"):
        expected = [run.progress[f"eval_{level_set}/return"][39] for run in (done, running)]
        np.testing.assert_array_equal(group.returns(level_set), expected)
    at_published, published = published_curve("fruitbot", "test")
    expected = [np.interp(at, at_published, curve) for curve in published]
    np.testing.assert_allclose(group.published_scores()["test"], (np.array(expected) + 1.5) / (32.4 + 1.5))
    report.main([str(tmp_path / "logs")])
    page, warned = (tmp_path / "logs" / "report.html").read_text(), capsys.readouterr().err
    for text in (page, warned):
        assert "1 at 1,015,808, 2 at 819,200 (not finished)" in text
        assert "Curves are compared up to 819,200, scores are those after 655,360 env steps" in text
    row = re.search(r"<td>fruitbot</td><td>2</td><td>819,200</td><td>655,360</td><td>([-\d.]+)</td>", page)
    assert float(row[1]) == pytest.approx(group.returns("train").mean(), abs=5e-3)


def test_complete_seeds_are_scored_at_their_own_ends(make):
    """--solved-at ends seeds at different env steps."""
    loaded = []
    for seed, end in ((1, 40), (2, 62), (3, 45)):
        whole = make(seed=seed, solved_at=5.0)
        cut = {name: values[:end] for name, values in whole.progress.items()}
        results = {**whole.results, "env_steps": end * 16_384, "episode_return": 9.0}
        loaded.append(dataclasses.replace(whole, progress=cut, results=results))
    (group,) = runs.group(loaded)
    assert group.is_done and group.scored_at("test") == 62 * 16_384
    np.testing.assert_array_equal(group.returns("test"), [run.final_return("test") for run in loaded])
    assert any("scores are those after their ends" in note for note in report.notes([group]))
    shown = report.render(loaded, [group], {})
    assert "<td>3</td><td>655,360</td><td>each at its end</td>" in shown


def test_evaluations_by_drawn_and_by_most_likely_actions_are_not_pooled(make):
    loaded = [make(seed=1, total_steps=100_000), make(seed=2, total_steps=100_000, eval_greedy=True)]
    assert [g.label for g in runs.group(loaded)] == ["eval-greedy False", "eval-greedy True"]


def test_a_run_with_a_name_like_mathematics_is_drawn():
    """`$2^$` is no formula that matplotlib can draw. It is drawn as text, which is wider than one digit."""

    widths = []

    @matplotlib.rc_context(plots.STYLE)
    def draw(title):
        figure = plots.Figure()
        ax = figure.subplots()
        drawn = ax.set_title(title)
        figure.savefig(io.BytesIO())
        widths.append(drawn.get_window_extent().width)

    for title in ("cost", "cost2", "cost$2^$"):
        draw(title)
    word, digit = widths[0], widths[1] - widths[0]
    assert widths[2] > word + 2 * digit


def test_a_seed_that_was_not_evaluated_with_the_others_is_left_out_by_name(make):
    loaded = [make(seed=1), make(seed=2), make(seed=3, updates=10)]
    (group,) = runs.group(loaded)
    assert group.scored_at("test") == loaded[0].env_steps
    assert len(group.scores("test")) == 2
    assert "<td>2 of 3</td>" in report.render(loaded, [group], {})
    (alone,) = runs.group(loaded[2:])  # before its first evaluation: the episodes of training
    assert alone.returns("train") == loaded[2].progress["rollout/episode_return"][-1]
    assert np.isnan(alone.returns("test")).all() and not report.notes([alone])


def test_statistics_over_games_of_different_lengths_have_a_warning(make):
    groups = runs.group([make(env="coinrun"), make(env="maze", updates=25)])
    (note,) = report.notes(groups)
    assert note.startswith("Scores are after different numbers of env steps (327,680 to 1,015,808)")


def test_a_wider_network_is_a_group_of_its_own(tmp_path):
    paths = [make_run(tmp_path, seed=seed, torso_width=width) for seed in (1, 2) for width in (1, 4)]
    groups = runs.group([runs.load(path) for path in paths])
    assert [(g.label, len(g.runs)) for g in groups] == [("torso-width 1", 2), ("torso-width 4", 2)]


def test_published_scores_are_from_the_same_number_of_env_steps(tmp_path):
    run = runs.load(make_run(tmp_path, total_steps=1_000_000))
    (group,) = runs.group([run])
    at, returns = published_curve("fruitbot", "train")
    expected = (np.interp(run.env_steps, at, returns[1]) + 1.5) / (32.4 + 1.5)
    assert group.published_scores()["train"][1] == pytest.approx(expected)
    (hard,) = runs.group([runs.load(make_run(tmp_path, distribution_mode="hard"))])
    assert hard.published_scores() == {}


def told_apart(make, *runs_of_algorithms):
    """Groups of runs that are given as (kind of settings, env, settings), two seeds each."""
    loaded = [
        make(name=f"{k}", seed=seed, env=env, kind=kind, **{"total_steps": 100_000, **settings})
        for k, (kind, env, settings) in enumerate(runs_of_algorithms)
        for seed in (1, 2)
    ]
    return loaded, runs.group(loaded)


@pytest.mark.parametrize(
    ("setting", "values", "labels"),
    [
        ("num_levels", (200, 0), ["ppo, num-levels 200", "ppg, num-levels 0"]),
        ("total_steps", (100_000, 300_000), ["ppo, total-steps 114,688", "ppg, total-steps 311,296"]),
        ("precision", ("float32", "bfloat16"), ["ppo, precision float32", "ppg, precision bfloat16"]),
        (
            "distribution_mode",
            ("easy", "hard"),
            ["ppo, distribution-mode easy", "ppg, distribution-mode hard"],
        ),
        ("lr", (1e-3, 5e-4), ["ppo", "ppg"]),  # each algorithm has its own
        ("num_steps", (256, 64), ["ppo", "ppg"]),  # which rounds 100,000 to 102,400
    ],
)
def test_a_task_that_is_not_the_same_for_all_algorithms_is_in_their_labels(make, setting, values, labels):
    ours, theirs = ({setting: value} for value in values)
    _, groups = told_apart(make, (ppo.Config, "bigfish", ours), (ppg.Config, "bigfish", theirs))
    assert runs.variants(groups) == labels


def test_scores_after_other_env_steps_are_compared_with_a_warning(make):
    short = (ppg.Config, "bigfish", {"total_steps": 50_000})
    _, groups = told_apart(make, (ppo.Config, "bigfish", {}), short)
    (note,) = report.notes(groups)
    assert note.startswith("Scores are after different numbers of env steps (65,536 to 114,688)")
    short = {"num_steps": 64, "policy_updates": 2}
    _, alike = told_apart(make, (ppo.Config, "bigfish", {}), (ppg.Config, "bigfish", short))
    assert not report.notes(alike)  # 114,688 and 102,400: both are the first whole update there


def test_statistics_use_only_games_in_which_all_variants_have_scores(make):
    plays = {
        ppo: ("bigfish", "coinrun", "fruitbot"),
        ppg: ("bigfish", "fruitbot"),
        drac: ("fruitbot", "bigfish"),
    }
    of_ppg = {ppg: {"policy_updates": 2}}
    made = ((of.Config, env, of_ppg.get(of, {})) for of, envs in plays.items() for env in envs)
    loaded, groups = told_apart(make, *made)
    assert {g.env for g in runs.over_games(groups, ["test"])} == {"bigfish", "fruitbot"}
    assert report.notes(groups) == [
        "Statistics over games leave out coinrun: they need scores of all variants in a game."
    ]
    scores = [g.scores("test") for g in groups if g.label == "ppo" and g.env != "coinrun"]
    shown = report.render(loaded, groups, {})
    assert f"<td>ppo, unseen levels</td><td>{statistics.iqm(np.concatenate(scores)):.3f} [" in shown
    (ax,) = plots.final_scores(groups).axes
    (mark,) = [
        line
        for line in ax.lines
        if list(line.get_ydata()) == [len(groups) + 0.12] and line.get_marker() == "o"
    ]
    assert mark.get_xdata()[0] == pytest.approx(statistics.iqm(np.concatenate(scores)))


def test_there_are_no_intervals_over_games_where_one_has_a_single_seed(make):
    loaded = [make(env="bigfish"), make(env="bigfish", seed=2), make(env="fruitbot")]
    shown = report.render(loaded, runs.group(loaded), {})
    assert re.search(r"<td>ppo, unseen levels</td><td>[\d.]+</td>", shown)
    loaded.append(make(env="fruitbot", seed=2))
    shown = report.render(loaded, runs.group(loaded), {})
    assert re.search(r"<td>ppo, unseen levels</td><td>[\d.]+ \[[\d.]+, [\d.]+\]</td>", shown)


def test_rows_of_training_and_unseen_levels_are_of_the_same_games(make):
    """A training return is not a score of a game without an evaluation."""
    loaded = [make(env="bigfish"), make(env="bigfish", seed=2), make(env="starpilot", updates=5)]
    groups = runs.group(loaded)
    for level_set, title in (("train", "training levels"), ("test", "unseen levels")):
        value = statistics.iqm(groups[0].scores(level_set))
        assert f"<td>ppo, {title}</td><td>{value:.3f}<" in report.render(loaded, groups, {})


def test_a_variant_has_the_same_style_in_all_pictures(make):
    """Also with more than six variants, and in pictures that omit some of them."""
    for style in (plots.line_style, plots.marker_style):
        assert len({str(style(v)) for v in range(36)}) == 36
    cartpole = {**reader("ppo").changes_of("gymnasium"), "preset": "gymnasium", "total_steps": 100_000}
    of_other = (ppg.Config, "CartPole-v1", cartpole)
    _, groups = told_apart(make, of_other, (ppo.Config, "bigfish", {}), (drac.Config, "bigfish", {}))
    place = runs.variants(groups).index("ppo")
    curves, scores = plots.learning_curves(groups).axes[1], plots.final_scores(groups).axes[0]
    assert place > 0
    for ax in (curves, scores):
        assert {color_of(place), color_of(place + 1)} <= {line.get_color() for line in ax.lines}
        assert color_of(0) not in {line.get_color() for line in ax.lines}


def test_games_that_no_two_algorithms_share_have_no_statistics_over_them(make):
    loaded, groups = told_apart(make, (ppo.Config, "bigfish", {}), (drac.Config, "fruitbot", {}))
    assert not runs.over_games(groups, ["test"])
    assert report.notes(groups) == [
        "Statistics over games are missing: they need scores of all variants in a game."
    ]
    assert "<th>IQM</th>" not in report.render(loaded, groups, {})
    labels = [label.get_text() for label in plots.final_scores(groups).axes[0].get_yticklabels()]
    assert labels == ["bigfish\nppo", "fruitbot\ndrac"]
