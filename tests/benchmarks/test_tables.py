"""Tables and captions of the documents against the kept runs, and the verdicts in them."""

import json
import re

import pytest

from benchmarks import tables


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_the_tables_of_a_document_follow_from_the_kept_runs(name):
    text = (tables.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- tables:" in text
    assert tables.renew(text) == text, "python -m benchmarks.tables --write"


def test_every_figure_stands_above_its_caption():
    texts = {name: (tables.ROOT / name).read_text(encoding="utf-8") for name in tables.DOCUMENTS}
    for file in (*tables.FIGURES, tables.OF_FLOAT32):
        block = f"<!-- tables: caption-{file[:-4].removeprefix('learning-')} -->"
        shown = [text for text in texts.values() if f"images/{file})" in text]
        assert shown, file
        assert all(re.search(rf"images/{file}\)\n+{block}", text) for text in shown), file


def test_another_number_in_a_table_is_found():
    text = (tables.ROOT / "docs/results.md").read_text(encoding="utf-8")
    changed = text.replace("1.75, 5.08", "2.93, 4.24")
    assert changed != text
    assert tables.renew(changed) == text


def test_the_verdict_compares_the_mean_with_the_range():
    assert tables.verdict([1.0, 2.0], [1.4, 1.6]) == "within"
    assert tables.verdict([1.0, 1.5], [1.4, 1.6]) == "**below**"
    assert tables.verdict([1.7, 1.8], [1.4, 1.6]) == "above"


def test_the_matrix_has_the_settings_that_an_algorithm_does_not_refuse():
    assert tables.takes("ppo", actors=2)
    assert not tables.takes("ppg", actors=2), "it has the flag, and refuses it"
    assert not tables.takes("reinforce", replicas=2)
    assert not tables.takes("dqn", memory="lstm")


def test_the_means_in_the_notebooks_sentences_follow_from_the_kept_runs():
    def means(algorithm, games, of_run):
        return [sum(map(of_run, tables.kept(algorithm, game))) / 2 for game in games]

    at_end = means("ppo", ("starpilot", "fruitbot", "bigfish"), lambda run: tables.training(run, 983_040))
    text = (tables.ROOT / "docs/notebook/bfloat16.md").read_text().replace("\n", " ")
    found = re.search(r"are ([\d.]+) \(starpilot\), ([\d.]+) \(fruitbot\) and ([\d.]+) \(bigfish\)", text)
    assert [float(number) for number in found.groups()] == pytest.approx(at_end, abs=0.0051)
    text = (tables.ROOT / "docs/notebook/ppg-and-drac.md").read_text().replace("\n", " ")
    found = re.search(r"unseen levels the means of DrAC and PPO are ([\d.]+) and ([\d.]+)", text)
    unseen = [means(of, ("fruitbot",), lambda run: run.final_return("test"))[0] for of in ("drac", "ppo")]
    assert [float(number) for number in found.groups()] == pytest.approx(unseen, abs=0.0051)


def test_the_verdicts_of_gymnasium_follow_from_the_seeds_in_all_documents():
    """The seeds in the notebook give its counts, the rows of the results, and the counts in the README."""

    def read(name):
        return (tables.ROOT / name).read_text(encoding="utf-8")

    def numbers(text):
        return [float(number) for number in re.findall(r"-?\d+\.?\d*", text.replace(",", ""))]

    notebook = read("docs/notebook/replay.md") + read("docs/notebook/continuous-control.md")
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", notebook, re.M)]
    runs = [row for row in rows if len(row) == 6 and row[4].endswith(("of 5", "of 5**"))]
    results = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", read("docs/results.md"), re.M)]
    counts = {}
    for env, _, reference, algorithm, count, returns in runs:
        seeds = numbers(returns)
        reached = sum(value >= numbers(reference)[0] for value in seeds)
        assert count == ("5 of 5" if reached == 5 else f"**{reached} of 5**"), (env, algorithm)
        counts[env, algorithm] = reached
        if (env, algorithm) != ("CartPole-v1", "DQN"):  # the results have ten more runs of it
            (shown,) = (row for row in results if row[0].startswith(f"{env}, {algorithm}, "))
            assert numbers(shown[1])[:2] == [min(seeds), max(seeds)], shown
            assert numbers(shown[1])[2:] in ([], [pytest.approx(sum(seeds) / 5, abs=0.051)]), shown
            assert (numbers(shown[2])[0], shown[3]) == (numbers(reference)[0], count), shown
    assert len(counts) == 9
    found = re.search(r"(\d) \(DDPG\), (\d) \(TD3\) and (\d) \(SAC\) of 5 seeds", read("README.md"))
    assert [int(n) for n in found.groups()] == [counts["Pendulum-v1", of] for of in ("DDPG", "TD3", "SAC")]


def test_times_and_sentences_about_the_kept_runs_follow_from_them():
    def minutes(names):
        found = [
            json.loads(path.read_text())["seconds"] / 60
            for path in tables.RUNS.glob("*/results.json")
            if re.fullmatch(names, path.parent.name)
        ]
        assert found
        return min(found), max(found)

    page = (tables.RUNS / "README.md").read_text(encoding="utf-8")
    alone = "(?!ppg-bigfish-seed2|ppg-fruitbot-seed2|drac-fruitbot-seed2)"  # these have rows of their own
    for names, unit in (
        (r"impala-.*", 1),
        (r"\w+-seed\d", 1),
        (f"{alone}ppg-.*", 60),
        (f"{alone}drac-.*", 60),
    ):
        digits = 1 if unit == 60 else 0
        least, most = (f"{value / unit:.{digits}f}" for value in minutes(names))
        assert f"{least} to {most} {'hours' if unit == 60 else 'minutes'}" in page, names

    def end(algorithm):
        return sum(tables.training(run, 983_040) for run in tables.kept(algorithm, "starpilot")) / 2

    assert "IMPALA has half of PPO's return on starpilot" in (tables.ROOT / "docs/results.md").read_text()
    assert end("impala") / end("ppo") == pytest.approx(0.5, abs=0.05)


def test_the_figures_are_drawn_from_the_same_runs():
    figure = tables.draw(("impala",), ("coinrun",))
    mean = [line for line in figure.axes[0].lines if line.get_label() == "IMPALA (n = 2)"]
    assert len(mean) == 1
    (seed, other) = (run.points("rollout/episode_return")[1] for run in tables.kept("impala", "coinrun"))
    assert mean[0].get_ydata()[-1] == pytest.approx((seed[-1] + other[-1]) / 2)


def test_the_figure_of_float32_has_the_numbers_of_its_table():
    figure = tables.draw_float32()
    course = tables.float32_course().splitlines()
    for ax in figure.axes:
        (mean,) = (line for line in ax.lines if line.get_label() == "PPO (n = 2)")
        (row,) = (i for i, line in enumerate(course) if line.startswith(f"| {ax.get_title()}, published"))
        seeds = [re.findall(r"-?\d+\.\d+", cell) for cell in course[row + 1].split(" | ")[1:]]
        assert mean.get_ydata() == pytest.approx([(float(one) + float(two)) / 2 for one, two in seeds])
