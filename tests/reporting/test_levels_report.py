"""What the report says about levels: the scores of level replay, procgen's version, ranges, unseen levels."""

import json

import numpy as np
from made_runs import make_run

from tfrl import report
from tfrl.envs import procgen
from tfrl.experience.levels import LevelSampler
from tfrl.reporting import plots, runs


def test_the_report_shows_the_scores_of_levels(tmp_path):
    run = make_run(tmp_path, "jumper", total_steps=100_000)
    assert plots.level_scores(runs.group([runs.load(run)])) is None
    levels = LevelSampler(9, 3, temperature=1.0, staleness=0.1, schedule="proportionate", seed=1)
    levels.scores[:], levels.seen[:] = np.arange(9), True
    levels.episodes[:] = np.arange(9)[::-1]
    (run / "levels.csv").write_text(levels.table())
    found = runs.read_levels(run)
    assert found["level"].tolist() == list(range(3, 12)) and found["score"].tolist() == list(range(9))
    figure = plots.level_scores(runs.group([runs.load(run)]))
    score, episodes = figure.axes[0].lines[0], figure.axes[1].lines[0]
    assert score.get_ydata().tolist() == episodes.get_ydata().tolist()[::-1] == list(range(9))[::-1]
    levels.seen[0] = False
    (run / "levels.csv").write_text(levels.table())
    score = plots.level_scores(runs.group([runs.load(run)])).axes[0].lines[0]
    np.testing.assert_array_equal(score.get_ydata(), [*range(8, 0, -1), np.nan])
    page = report.write([runs.load(run)], tmp_path).read_text()
    assert "<h2>Levels</h2>" in page and (tmp_path / "plots" / "level_scores.png").is_file()


def test_the_report_names_version_ranges_and_the_meaning_of_unseen_levels(tmp_path):
    path = make_run(tmp_path, "jumper", total_steps=100_000)
    results = json.loads((path / "results.json").read_text())
    (path / "results.json").write_text(json.dumps(results | {"procgen": {"version": procgen.version()}}))
    page = report.render(*_rendered([path]))
    assert f"Trained with {procgen.version()}." in page and "procgen" in procgen.version()
    assert "arXiv:1912.01588" in page and "differ: jumper 1 to 10." in page
    assert "Unseen levels are the full distribution of levels" in page
    page = report.render(*_rendered([make_run(tmp_path, "bigfish", total_steps=100_000)]))
    assert "differ:" not in page and "Unseen levels are" in page
    page = report.render(*_rendered([make_run(tmp_path, "catch", total_steps=100_000, num_levels=0)]))
    assert "Unseen levels" not in page


def test_the_statistics_have_both_ranges_where_they_differ(tmp_path):
    paths = [make_run(tmp_path, "jumper", seed, total_steps=100_000) for seed in (1, 2)]
    (row, *_) = report._aggregates(runs.group([runs.load(path) for path in paths]))
    assert float(row["mean, rliable's ranges"]) > float(row["mean"].split()[0])


def _rendered(paths):
    loaded = [runs.load(path) for path in paths]
    return loaded, runs.group(loaded), {}
