"""Runs side by side: which are seeds of one experiment, and where they are compared."""

import dataclasses
import io
import json
import re
import shutil

import numpy as np
import pytest
from made_runs import make_run

from tfrl import report
from tfrl.config import drac, ppg, ppo, ppo_presets, reinforce
from tfrl.envs.published import published_curve
from tfrl.reporting import comparison, curve_plots, intervals, page, runs, score_plots
from tfrl.reporting.plot_style import color_of, dash_of, marker_of, panels, styled


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
def test_what_decides_a_result_is_never_pooled(make, setting, values, labels):
    plain = {"total_steps": 100_000, "precision": "float32", "run_name": None}
    loaded = [
        make(name=f"{v}", seed=seed, **plain | {setting: value})
        for v, value in enumerate(values)
        for seed in (1, 2)
    ]
    groups = comparison.group(loaded)
    assert [(g.label, len(g.runs)) for g in groups] == [(label, 2) for label in labels]
    assert comparison.variants(groups) == labels  # in statistics over games as well


def test_what_decides_no_result_does_not_split_seeds(make):
    loaded = [
        make(seed=1, total_steps=100_000, eval_every=5, replicas=2),
        make(seed=2, total_steps=100_001, env_threads=3),  # as many updates
    ]
    (group,) = comparison.group(loaded)
    assert (group.label, len(group.runs), group.notes()) == ("ppo", 2, [])


def test_precision_is_the_one_that_was_computed_in(make):
    """A file that a person wrote may say auto."""
    runs_of_both = [make(seed=seed, total_steps=100_000) for seed in (1, 2)]
    results = runs_of_both[1].results | {"precision": "bfloat16"}
    groups = comparison.group([runs_of_both[0], dataclasses.replace(runs_of_both[1], results=results)])
    assert [len(g.runs) for g in groups] == [1, 1]


def test_the_same_seed_twice_is_one_with_a_warning(make, tmp_path, capsys):
    first, second = (make(seed=seed, total_steps=100_000) for seed in (1, 2))
    copied = first.path.with_name("copied")
    shutil.copytree(first.path, copied)
    half = make(name="half", seed=2, total_steps=100_000, updates=4)
    for order in ([first, second, half, runs.load(copied)], [runs.load(copied), half, second, first]):
        (group,) = comparison.group(order)
        assert [run.config.seed for run in group.runs] in ([1, 2], [2, 1])
        assert group.env_steps == second.env_steps  # not half's
        assert len(group.scores("test")) == 2 and len(group.repeated) == 2
    report.main([str(tmp_path / "logs"), str(half.path), "--out", str(tmp_path / "out")])
    page, warned = (tmp_path / "out" / "report.html").read_text(), capsys.readouterr().err
    for text in (page, warned):
        assert text.count("does not count") == 2 and str(half.path) in text
    assert "2 runs, 2 seeds" in page


def test_seeds_of_different_lengths_are_compared_where_all_were_evaluated(make, tmp_path, capsys):
    """Evaluated every 20 updates: seed 1 is done, after 62 updates; seed 2 has come to the 50th."""
    done, running = make(seed=1), make(seed=2, updates=50)
    at = 40 * 16_384
    (group,) = comparison.group([done, running])
    assert (group.env_steps, group.scored_at("test")) == (50 * 16_384, at)
    for level_set in ("train", "test"):
        expected = [run.progress[f"eval_{level_set}/return"][39] for run in (done, running)]
        np.testing.assert_array_equal(group.returns(level_set), expected)
    at_published, published = published_curve("fruitbot", "test")
    expected = [np.interp(at, at_published, curve) for curve in published]
    np.testing.assert_allclose(
        comparison.published_scores(group)["test"], (np.array(expected) + 1.5) / (32.4 + 1.5)
    )
    report.main([str(tmp_path / "logs")])
    page, warned = (tmp_path / "logs" / "report.html").read_text(), capsys.readouterr().err
    for text in (page, warned):
        assert "1 at 1,015,808, 2 at 819,200 (not finished)" in text
        assert "curves are compared up to 819,200" in text
        assert "scores are those after 655,360 env steps" in text
    row = re.search(r"<td>fruitbot</td><td>2</td><td>819,200</td><td>655,360</td><td>([-\d.]+)</td>", page)
    assert float(row[1]) == pytest.approx(group.returns("train").mean(), abs=5e-3)


def test_seeds_that_ended_by_themselves_have_their_scores_at_their_own_ends(make):
    """As --solved-at ends them: not the slowest one alone, which came farthest."""
    loaded = []
    for seed, end in ((1, 40), (2, 62), (3, 45)):
        whole = make(seed=seed, solved_at=5.0)
        cut = {name: values[:end] for name, values in whole.progress.items()}
        results = {**whole.results, "env_steps": end * 16_384, "episode_return": 9.0}
        loaded.append(dataclasses.replace(whole, progress=cut, results=results))
    (group,) = comparison.group(loaded)
    assert group.ended_apart and group.scored_at("test") == 62 * 16_384
    np.testing.assert_array_equal(group.returns("test"), [run.final_return("test") for run in loaded])
    assert any("at each seed's end, after 655,360 to 1,015,808 env steps" in note for note in group.notes())
    shown = page.render(loaded, [group], {})
    assert "<td>3</td><td>655,360</td><td>each at its end</td>" in shown


def test_evaluations_by_drawn_and_by_most_likely_actions_are_told(make):
    loaded = [make(seed=1, total_steps=100_000), make(seed=2, total_steps=100_000, eval_greedy=True)]
    (note,) = (n for n in comparison.notes(comparison.group(loaded)) if "not made alike" in n)
    assert note.startswith("Evaluations on fruitbot were not made alike: of ppo by the most likely actions")
    assert not any("alike" in note for note in comparison.notes(comparison.group(loaded[:1])))


def test_an_evaluation_is_shown_with_the_policy_that_it_is_of(make):
    run = make(seed=1, total_steps=100_000)
    part = {"env": "fruitbot", "levels": "test", "actions": "sampled", "episodes": 64, "return_mean": 1.0}
    content = {"checkpoint": "best", "env_steps": 32_768, "evaluations": [part]}
    (run.path / "eval.json").write_text(json.dumps(content))
    assert "<td>best, 32,768 env steps</td>" in page.render([run], comparison.group([run]), {})


def test_a_run_with_a_name_like_mathematics_is_drawn():
    @styled
    def draw():
        figure, (ax,) = panels(1, width=3, height=3)
        ax.set_title("cost$2^$")
        return figure

    draw().savefig(io.BytesIO())


def test_a_seed_that_was_not_evaluated_with_the_others_is_left_out_by_name(make):
    loaded = [make(seed=1), make(seed=2), make(seed=3, updates=10)]
    (group,) = comparison.group(loaded)
    assert group.scored_at("test") == loaded[0].env_steps
    assert len(group.scores("test")) == 2
    assert any("without seed 3, not evaluated there" in note for note in group.notes())
    assert "<td>2 of 3</td>" in page.render(loaded, [group], {})
    (alone,) = comparison.group(loaded[2:])  # before its first evaluation: the episodes of training
    assert alone.returns("train") == loaded[2].progress["rollout/episode_return"][-1]
    assert np.isnan(alone.returns("test")).all() and not alone.notes()


def test_statistics_over_games_of_other_lengths_say_so(make):
    groups = comparison.group([make(env="coinrun"), make(env="maze", updates=25)])
    (note,) = comparison.notes(groups)
    assert note == "Statistics over games join scores after 327,680 and 1,015,808 env steps."


def test_a_wider_network_is_a_group_of_its_own(tmp_path):
    paths = [make_run(tmp_path, seed=seed, torso_width=width) for seed in (1, 2) for width in (1, 4)]
    groups = comparison.group([runs.load(path) for path in paths])
    assert [(g.label, len(g.runs)) for g in groups] == [("torso-width 1", 2), ("torso-width 4", 2)]


def test_published_scores_are_taken_at_as_many_steps(tmp_path):
    run = runs.load(make_run(tmp_path, total_steps=1_000_000))
    (group,) = comparison.group([run])
    at, returns = published_curve("fruitbot", "train")
    expected = (np.interp(run.env_steps, at, returns[1]) + 1.5) / (32.4 + 1.5)
    assert comparison.published_scores(group)["train"][1] == pytest.approx(expected)
    (hard,) = comparison.group([runs.load(make_run(tmp_path, distribution_mode="hard"))])
    assert comparison.published_scores(hard) == {}


def told_apart(make, *runs_of_algorithms):
    """Groups of runs that are given as (kind of settings, env, settings), two seeds each."""
    loaded = [
        make(name=f"{k}", seed=seed, env=env, kind=kind, **{"total_steps": 100_000, **settings})
        for k, (kind, env, settings) in enumerate(runs_of_algorithms)
        for seed in (1, 2)
    ]
    return loaded, comparison.group(loaded)


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
    assert comparison.variants(groups) == labels


def test_scores_after_other_env_steps_are_compared_with_a_warning(make):
    _, groups = told_apart(
        *(make, (ppo.Config, "bigfish", {}), (ppo.Config, "maze", {}), (ppo.Config, "coinrun", {})),
        *((ppg.Config, "bigfish", {"total_steps": 50_000}), (ppg.Config, "maze", {"total_steps": 50_000})),
        (ppg.Config, "coinrun", {"total_steps": 100_000}),
    )
    (note,) = [note for note in comparison.notes(groups) if "are compared" in note]
    assert note.startswith("Scores of bigfish and maze that are compared are after different env steps (ppo")
    assert "114,688; " in note and note.endswith(": 65,536).") and note.count("ppg") == 1
    short = {"num_steps": 64, "policy_updates": 2}
    _, alike = told_apart(make, (ppo.Config, "bigfish", {}), (ppg.Config, "bigfish", short))
    assert not comparison.notes(alike)  # 114,688 and 102,400: both are the first whole update there


def test_statistics_over_games_are_of_those_that_all_have(make):
    plays = {
        ppo: ("bigfish", "coinrun", "fruitbot"),
        ppg: ("bigfish", "fruitbot"),
        drac: ("fruitbot", "bigfish"),
    }
    of_ppg = {ppg: {"policy_updates": 2}}
    made = ((of.Config, env, of_ppg.get(of, {})) for of, envs in plays.items() for env in envs)
    loaded, groups = told_apart(make, *made)
    assert {g.env for g in comparison.over_games(groups, ["test"])} == {"bigfish", "fruitbot"}
    assert comparison.notes(groups) == [
        "Normalised scores over games are of bigfish and fruitbot, which all have scores of; left out: "
        "coinrun (only ppo).",
        "Probabilities of improvement are over all games that two of them have.",
    ]
    scores = [g.scores("test") for g in groups if g.label == "ppo" and g.env != "coinrun"]
    shown = page.render(loaded, groups, {})
    assert f"<td>ppo, unseen levels</td><td>{intervals.iqm(intervals.pooled(scores)):.3f} [" in shown
    (ax,) = score_plots.final_scores(groups).axes
    (mark,) = [
        line
        for line in ax.lines
        if list(line.get_ydata()) == [len(groups) + 0.42] and line.get_marker() == "o"
    ]
    assert mark.get_xdata()[0] == pytest.approx(intervals.iqm(intervals.pooled(scores)))
    first, second = (axes.lines for axes in score_plots.performance_profiles(groups).axes)
    assert {line.get_ydata()[0] for line in (*first, *second)} == {1.0}


def test_games_with_more_seeds_than_others_are_told(make):
    loaded = [make(env="bigfish"), make(env="bigfish", seed=2), make(env="fruitbot"), make(env="maze")]
    groups = comparison.group(loaded)
    (told,) = comparison.notes(groups)
    assert told == (
        "Statistics over games of ppo are of all its seeds, 2 of bigfish and 1 of fruitbot and maze: games "
        "with more weigh more, and there are no intervals."
    )
    assert "<td>ppo, unseen levels</td>" in (shown := page.render(loaded, groups, {}))
    assert "scores of all runs [95% interval]" not in shown
    loaded += [make(env=env, seed=s) for env in ("fruitbot", "maze", "bigfish") for s in (2, 3)][:-2]
    (told,) = comparison.notes(comparison.group(loaded))
    assert "2 of bigfish" in told and "intervals" not in told
    loaded += [make(env="bigfish", seed=3)]
    assert not comparison.notes(comparison.group(loaded))


def test_what_was_published_of_drac_is_not_beside_rad(make):
    _, (of_drac,) = told_apart(make, (drac.Config, "bigfish", {}))
    _, (of_rad,) = told_apart(make, (drac.Config, "bigfish", {"augment_use": "rad"}))
    assert comparison.returns_of_others(of_drac) and not comparison.returns_of_others(of_rad)


def test_runs_that_have_not_done_what_their_algorithm_is_for_are_named(make):
    """PPG before its first auxiliary phase, and evaluations of those who trained on all levels."""
    _, groups = told_apart(make, (ppo.Config, "bigfish", {}), (ppg.Config, "bigfish", {"num_levels": 0}))
    label = groups[1].label
    assert comparison.notes(groups)[:2] == [
        f"{label} trained on all levels, so what is called unseen levels is nothing new there.",
        f"{label} has not had an auxiliary phase: one comes after 32 updates.",
    ]


def test_only_what_has_phases_is_said_to_have_had_none_and_where(make):
    """Episodes of REINFORCE may be shorter than its longest update, by which its env steps count."""
    run = make(kind=reinforce.Config, env="CartPole-v1", total_steps=20_000, torso="mlp")
    steps = run.progress["env_steps"]
    steps[:] = np.arange(1, len(steps) + 1)
    assert steps[-1] < run.config.steps_per_update and not comparison.notes(comparison.group([run]))
    runs = [make(kind=ppg.Config, env="bigfish"), make(kind=ppg.Config, env="fruitbot", updates=5)]
    assert "ppg has not had an auxiliary phase in fruitbot: one comes after 32 updates." in comparison.notes(
        comparison.group(runs)
    )


def test_rows_of_training_and_unseen_levels_are_of_the_same_games(make):
    """Of a game that is not evaluated yet, the return while training is no score of the other row's."""
    loaded = [make(env="bigfish"), make(env="bigfish", seed=2), make(env="starpilot", updates=5)]
    groups = comparison.group(loaded)
    for level_set, title in (("train", "training levels"), ("test", "unseen levels")):
        value = intervals.iqm(groups[0].scores(level_set))
        assert f"<td>ppo, {title}</td><td>{value:.3f} [" in page.render(loaded, groups, {})


def test_long_labels_leave_out_what_is_usual_or_have_letters(make):
    """Of DrAC's variants, and of runs that differ in more than legends have room for."""
    plain, wide = (drac.Config, "bigfish", {}), (drac.Config, "bigfish", {"torso_width": 2})
    rad, ucb = ((drac.Config, "bigfish", changed) for changed in ({"augment_use": "rad"}, {"augment": "ucb"}))
    _, groups = told_apart(make, (ppo.Config, "bigfish", {}), plain, ucb, rad, wide)
    assert [g.label for g in groups] == [
        *("ppo", "drac", "drac, augment ucb", "drac, augment-use rad", "drac, torso-width 2")
    ]
    other = {"augment": "random-conv", "augment_use": "rad", "torso_width": 4, "lr": 1e-4}
    loaded, groups = told_apart(make, plain, wide, (drac.Config, "bigfish", other))
    assert [g.label for g in groups] == ["drac A", "drac B", "drac C"]
    assert "<th>setting</th><th>drac A: 2 runs</th><th>drac B: 2 runs</th>" in page.render(loaded, groups, {})


def test_styles_are_each_variants_own_in_all_pictures(make):
    """Beyond six variants, too, and where a picture leaves some of them out."""
    styles = {(color_of(v), marker_of(v)) for v in range(36)}
    assert len(styles) == len({(color_of(v), str(dash_of(v))) for v in range(36)}) == 36
    cartpole = {**ppo_presets.PRESETS["gymnasium"], "preset": "gymnasium", "total_steps": 100_000}
    of_other = (ppg.Config, "CartPole-v1", cartpole)
    _, groups = told_apart(make, of_other, (ppo.Config, "bigfish", {}), (drac.Config, "bigfish", {}))
    place = comparison.variants(groups).index("ppo")
    curves, scores = curve_plots.learning_curves(groups).axes[1], score_plots.final_scores(groups).axes[0]
    assert place > 0
    for ax in (curves, scores):
        assert {color_of(place), color_of(place + 1)} <= {line.get_color() for line in ax.lines}
        assert color_of(0) not in {line.get_color() for line in ax.lines}


def test_games_that_no_two_algorithms_share_have_no_statistics_over_them(make):
    loaded, groups = told_apart(make, (ppo.Config, "bigfish", {}), (drac.Config, "fruitbot", {}))
    assert not comparison.over_games(groups, ["test"])
    assert comparison.notes(groups) == [
        "There are no statistics over games, as none has scores of all: bigfish (only ppo), fruitbot "
        "(only drac)."
    ]
    assert "IQM</th>" not in page.render(loaded, groups, {})
    assert score_plots.performance_profiles(groups) is None
    labels = [label.get_text() for label in score_plots.final_scores(groups).axes[0].get_yticklabels()]
    assert labels == ["bigfish\nppo", "fruitbot\ndrac"]
