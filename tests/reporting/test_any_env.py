"""Reports of envs without levels, of several algorithms, and of what others published."""

import dataclasses
import json
import re

import numpy as np
import pytest
from made_runs import make_run

from tfrl import report
from tfrl.algorithms import drac, ppg, ppo
from tfrl.algorithms.ppo import Config
from tfrl.algorithms.registry import reader
from tfrl.envs.published import returns_elsewhere
from tfrl.envs.registry import level_set_title
from tfrl.report import render
from tfrl.reporting import plots, runs
from tfrl.training.learner import results_table

_GYMNASIUM = {**reader("ppo").changes_of("gymnasium"), "preset": "gymnasium"}
_GYMNASIUM.pop("total_steps")


def made(folder, env, seed=1, **settings):
    settings = {**_GYMNASIUM, "run_name": f"{env}-seed{seed}", **settings}
    return make_run(folder, env, seed, total_steps=40_000, **settings)


def shown(page):
    """A page without pictures, style and settings."""
    return re.sub(r"data:[^'\"]*|<details>.*?</details>|<style>.*?</style>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def gymnasium_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    for seed in (1, 2):
        made(folder, "CartPole-v1", seed)
    made(folder, "InvertedDoublePendulum-v5", lr=1e-3)
    assert report.main([str(folder)]) == 0
    return folder, (folder / "report.html").read_text()


def test_reports_of_envs_without_levels_do_not_mention_levels(gymnasium_page):
    folder, page = gymnasium_page
    for word in ("training levels", "unseen levels against", "generalization", "ormalised", "gap"):
        assert word not in shown(page), word
    assert "<th>return, evaluation</th>" in page and "2 envs" in page
    assert re.findall(r"<img id=(\w+)", page) == ["learning_curves", "training"]


def test_settings_of_one_env_do_not_name_another(gymnasium_page):
    folder, _ = gymnasium_page
    groups = runs.group([runs.load(path) for path in runs.find([folder])])
    assert [(g.env, g.label, len(g.runs)) for g in groups] == [
        ("CartPole-v1", "ppo", 2),
        ("InvertedDoublePendulum-v5", "ppo", 1),
    ]


def test_published_returns_stand_beside_the_runs(gymnasium_page):
    page = shown(gymnasium_page[1])
    row = "<td>CartPole-v1: published, ppo (CleanRL docs)</td><td>3</td><td>500,000</td><td>-</td>"
    assert f"{row}<td>490 \u00b1 6.1</td>" in page
    assert "InvertedDoublePendulum-v5: published of InvertedDoublePendulum-v4, ppo (TorchRL" in page
    assert "dqn" not in page


@pytest.mark.parametrize(
    ("env", "algorithm", "settings", "means"),
    [
        ("CartPole-v1", "dqn", {}, {488.7, 500.0}),
        ("CartPole-v0", "ppo", {}, {490.0, 500.0}),
        ("Pendulum-v1", "reinforce", {}, set()),
        ("bigfish", "ppo", {}, set()),
        ("bigfish", "ppo", {"num_levels": 0}, {16.46}),  # CleanRL trains on all levels
        ("bigfish", "ppg", {"num_levels": 0}, {24.23, 15.94}),
        ("bigfish", "ppg", {"distribution_mode": "hard", "num_levels": 500}, set()),
        (
            "bigfish",
            "ppg",
            {"distribution_mode": "hard", "num_levels": 0},
            {22.74, 33.54},
        ),  # and so do PPG's authors
        ("bigfish", "drac", {}, {9.7}),
        ("catch", "ppo", {}, set()),
    ],
)
def test_published_returns_are_of_the_same_env_and_algorithm(env, algorithm, settings, means):
    assert {found.mean for found in returns_elsewhere(env, algorithm, **settings)} == means


@dataclasses.dataclass(frozen=True)
class Other(Config):
    """Another algorithm with a setting of its own."""

    algorithm: str = "other"
    tau: float = 0.1


def test_runs_of_different_algorithms_are_separate_variants(tmp_path):
    ours = [runs.load(make_run(tmp_path, seed=seed, total_steps=40_000)) for seed in (1, 2)]
    settings = {f.name: getattr(ours[0].config, f.name) for f in dataclasses.fields(Config)}
    settings["algorithm"] = "other"
    theirs = dataclasses.replace(ours[0], config=Other(**settings), path=tmp_path / "other")
    groups = runs.group([*ours, theirs])
    assert [(g.label, len(g.runs)) for g in groups] == [("ppo", 2), ("other", 1)]
    differing = runs.differences([ours[0], theirs])
    assert differing["algorithm"] == ["ppo", "other"] and differing["tau"] == ["-", "0.1"]
    page = render([*ours, theirs], groups, {})
    assert "<th>setting</th><th>ppo</th><th>other</th>" in page
    assert "<td>ppo</td><td>other</td>" in page and "<td>-</td><td>0.1</td>" in page
    titles = [ax.get_title() for ax in plots.training(runs.group([theirs])).axes]
    assert "policy loss" in titles and "first ratio error" in titles, "all of its metrics, by their names"


@pytest.mark.parametrize("kind", [ppo.Config, ppg.Config, drac.Config])
def test_published_ppo_scores_are_labelled_as_ppo(tmp_path, kind):
    loaded = [runs.load(make_run(tmp_path, total_steps=200_000, seed=seed, kind=kind)) for seed in (1, 2)]
    groups = runs.group(loaded)
    drawn = (plots.learning_curves, plots.final_scores)
    texts = [text.get_text() for draw in drawn for text in draw(groups).legends[0].get_texts()]
    named = [text for text in texts if "published" in text]
    assert len(named) == 3 and all(text.startswith("train-procgen's PPO (published)") for text in named), (
        named
    )
    assert "<td>fruitbot: published, ppo (train-procgen)</td>" in render(loaded, groups, {})


@pytest.mark.parametrize(
    ("mode", "levels", "published"),
    [
        ("easy", 200, [("25,000,000", "12.06", "4.70")]),
        ("easy", 0, [("25,000,000", "19.81", "-"), ("25,000,000", "24.23 \u00b1 10.73", "-")]),
        ("hard", 500, [("200,000,000", "10.12", "3.61")]),
        ("hard", 0, [("200,000,000", "23.44", "-")]),
        ("hard", 200, []),
    ],
)
def test_published_returns_are_of_the_same_levels(tmp_path, mode, levels, published):
    settings = {"distribution_mode": mode, "num_levels": levels}
    loaded = [runs.load(make_run(tmp_path, "bigfish", total_steps=40_000, kind=ppg.Config, **settings))]
    table = re.search("<table>.*?</table>", render(loaded, runs.group(loaded), {}))[0]
    header, own, *rows = (re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in table.split("</tr>")[:-1])
    assert own[0] == "bigfish" and all(name.startswith("bigfish: published, pp") for name, *_ in rows)
    columns = [header.index(n) for n in ("env steps", "return, training levels", "return, unseen levels")]
    found = [tuple(row[column] for column in columns) for row in rows]
    assert found[: len(published)] == published


def test_level_sets_are_named_by_the_env():
    assert [level_set_title("coinrun", s) for s in ("train", "test")] == ["training levels", "unseen levels"]
    assert level_set_title("CartPole-v1", "test") == "evaluation"


def test_the_table_at_the_end_has_no_empty_columns():
    score = {"return": 12.5, "normalized_return": float("nan"), "episodes": 8}
    content = {"algorithm": "ppo", "env": "CartPole-v1", "env_steps": 1024, "episode_return": float("nan")}
    content["episodes"] = 500
    header, rows = results_table(content | {"normalized_return": None, "eval": {"test": score}})
    assert header == ["ppo on CartPole-v1, 1,024 env steps", "return", "episodes"]
    assert rows == [["while training", "-", "last 100"], ["evaluation", "12.50", "8"]]
    scored = score | {"normalized_return": 0.5}
    content |= {"env": "coinrun", "normalized_return": 0.25, "eval": {"train": scored, "test": scored}}
    header, rows = results_table(content | {"episodes": 7})
    assert header[1:] == ["return", "normalised", "episodes"]
    assert rows[:2] == [
        ["while training", "-", "0.25", "last 7"],
        ["evaluation, training levels", "12.50", "0.50", "8"],
    ]


def test_a_run_that_was_solved_early_is_done(tmp_path):
    run = runs.load(made(tmp_path, "CartPole-v1", solved_at=90.0))
    rows = {name: values[:10] for name, values in run.progress.items()}
    early = {"env_steps": int(rows["env_steps"][-1]), "episode_return": 95.0}
    assert dataclasses.replace(run, progress=rows, results=early).is_done
    assert not dataclasses.replace(run, progress=rows, results=early | {"episode_return": 80.0}).is_done
    assert not dataclasses.replace(run, progress=rows, results=None).is_done


def test_a_report_tells_how_likely_one_algorithm_beats_another(tmp_path):
    """By pairs of runs, game by game; games that only one of them has do not count, nor do few runs."""
    for game in ("fruitbot", "bigfish"):
        for seed in (1, 2):
            make_run(tmp_path / "ppo", game, seed, total_steps=40_000)
            make_run(tmp_path / "drac", game, seed + 2, total_steps=40_000, kind=drac.Config)
    make_run(tmp_path / "ppo", "coinrun", 1, total_steps=40_000)
    folders = [tmp_path / "ppo", tmp_path / "drac"]
    assert report.main([*map(str, folders)]) == 0
    groups = runs.group([runs.load(path) for path in runs.find(folders)])
    ((names, games),) = report.paired_returns(groups, "test").items()
    assert names == ("ppo", "drac") and [(len(x), len(y)) for x, y in games] == [(2, 2), (2, 2)]
    wins = [(x[:, None] > y).mean() for x, y in games]
    page = shown((tmp_path / "ppo" / "report.html").read_text())
    row = re.search(r"<td>ppo over drac</td><td>([\d.]+) \[.*?\]</td><td>2 games</td><td>4 and 4</td>", page)
    assert float(row[1]) == pytest.approx(np.mean(wins), abs=0.006)
    assert "probability of improvement, unseen levels [95% interval]" in page
    assert re.findall(r"<img id=(\w+)", page)[2:4] == ["generalization_gap", "performance_profiles"]
    few = [g for g in groups if g.env == "fruitbot"]
    assert plots.performance_profiles(few) is None and not report._improvements(few)


def test_the_table_of_runs_counts_replicas_by_worker_and_leaves_out_what_an_env_does_not_have(tmp_path):
    game, other = make_run(tmp_path, total_steps=40_000), made(tmp_path, "CartPole-v1")
    found = json.loads((game / "results.json").read_text())
    (game / "results.json").write_text(json.dumps(found | {"workers": 2, "replicas": 4}))
    first, second = report._run_rows([runs.load(game), runs.load(other)])
    assert (first["workers x replicas"], second["workers x replicas"]) == ("2 x 2", "? x ?")
    assert (first["return, evaluation"], second["return, unseen levels"]) == ("", "")
    assert float(first["return, unseen levels"]) and float(second["return, evaluation"])
