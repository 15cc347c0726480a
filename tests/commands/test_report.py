"""The report: what is in it, that a browser shows it without a network, and folders that are not whole."""

import html.parser
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from made_runs import make_run
from PIL import Image
from refusals import refusal

from resnet import config as supervised
from tfrl import report, status
from tfrl.algorithms import ppo
from tfrl.algorithms import runs as settings
from tfrl.cli.errors import UserError
from tfrl.cli.settings import to_yaml
from tfrl.envs.registry import games
from tfrl.report import render
from tfrl.reporting import runs
from tfrl.run import folder

PLOTS = ("learning_curves", "final_scores", "generalization_gap", "training")  # too few runs for profiles
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.images, self.references = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "img":
            self.images.append(attrs.get("id"))
        self.references += [attrs[k] for k in ("src", "href") if k in attrs]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    for seed in (1, 2):
        make_run(folder, seed=seed)
        make_run(folder, seed=seed, lr=0.001)
    make_run(folder, env="coinrun", finished=False)
    return folder


@pytest.fixture(scope="module")
def page(logdir):
    assert report.main([str(logdir)]) == 0
    return (logdir / "report.html").read_text()


def test_the_report_is_one_file_with_all_plots(logdir, page):
    parsed = Page(page)
    assert [i for i in parsed.images if i] == list(PLOTS)
    assert all(reference.startswith("data:") for reference in parsed.references)
    for name in PLOTS:
        with Image.open(logdir / "plots" / f"{name}.png") as picture:
            grey = np.asarray(picture.convert("L"))
        assert grey.shape[0] > 200 and grey.shape[1] > 600
        assert grey.std() > 5  # something is drawn


def test_the_report_shows_differences_and_results(logdir, page):
    assert "--lr" in page and "0.001" in page
    run = runs.load(logdir / "coinrun-seed1")
    assert f"{run.final_return('test'):.2f}" in page
    assert "<td>fruitbot: published, ppo (train-procgen)</td>" in page


def test_runs_with_the_same_settings_share_a_column(page):
    (header,) = re.findall("<th>setting</th>(.*?)</tr>.*<summary>", page)
    assert re.findall("<th>(.*?)</th>", header) == ["lr 0.0005", "lr 0.001"]
    assert not {"--env", "--seed", "--run-name"} & set(re.findall("<td>(--.*?)</td>", page))
    assert "<td>fruitbot-seed1-0.001</td><td>ppo</td><td>fruitbot</td><td>1</td>" in page


def test_runs_that_differ_in_no_hyperparameter_have_a_column_each(tmp_path):
    for seed, device in ((1, "auto"), (2, "cpu")):
        make_run(tmp_path, seed=seed, total_steps=40_000, device=device)
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    (header,) = re.findall("<th>setting</th>(.*?)</tr>.*<summary>", page)
    assert re.findall("<th>(.*?)</th>", header) == ["fruitbot-seed1-auto", "fruitbot-seed2-cpu"]
    assert "<td>--device</td><td>auto</td><td>cpu</td>" in page


def test_one_run_gets_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "logs", total_steps=40_000)
    assert report.main([run.name]) == 0  # found in logs/ by its name
    assert (run / "report.html").is_file()
    assert not (tmp_path / "report.html").exists()


def test_runs_are_grouped_by_settings_not_by_seed(logdir):
    groups = runs.group([runs.load(path) for path in runs.find([logdir])])
    assert [(g.env, g.label, len(g.runs)) for g in groups] == [
        ("coinrun", "lr 0.0005", 1),
        ("fruitbot", "lr 0.0005", 2),
        ("fruitbot", "lr 0.001", 2),
    ]


def test_a_report_of_sixteen_games_and_three_seeds_takes_under_20_seconds(tmp_path):
    for env in games():
        for seed in (1, 2, 3):
            run = make_run(tmp_path, env, seed, total_steps=1_000_000)
            (run / "plots").mkdir()
            curve = run / "plots" / "learning_curve.png"  # which training has drawn, after all else
            curve.touch()
            os.utime(curve, (time.time() + 1, time.time() + 1))
    began = time.process_time()
    assert report.main([str(tmp_path)]) == 0
    assert time.process_time() - began < 20


@needs_browser
def test_a_browser_shows_every_picture(logdir, page, tmp_path):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    # The page itself has no script; this copy measures what the browser made of its images.
    probe = (
        "<script>onload = () => { document.title = 'widths '"
        " + [...document.images].map(i => i.naturalWidth) }</script>"
    )
    copy = tmp_path / "page.html"
    copy.write_text(page.replace("</body>", f"{probe}</body>"))
    shown = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=120)
    widths = re.search(r"<title>widths ([\d,]+)</title>", shown.stdout)
    assert widths, shown.stderr[-2000:]
    assert all(int(width) > 500 for width in widths[1].split(","))
    assert "CONSOLE" not in shown.stderr


# Folders that are not whole

COMMANDS = ("report", "evaluate", "record")


def empty(run):
    shutil.rmtree(run)
    run.mkdir()


def missing(run):
    shutil.rmtree(run)


def a_file(run):
    shutil.rmtree(run)
    run.write_text("not a folder")


def without_settings(run):
    (run / "config.yaml").unlink()


def torn_settings(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: len(text) // 2] + "\n: [")


def binary_settings(run):
    (run / "config.yaml").write_bytes(bytes(range(256)))


def foreign_settings(run):
    (run / "config.yaml").write_text("learning_rate: 0.1\nmodel: resnet\n")


def impossible_settings(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("env: fruitbot", "env: pong"))


def impossible_numbers(run):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(num_envs|total_steps): [\d_]+", r"\1: 0", text))


def without_progress(run):
    (run / "progress.csv").unlink()


def empty_progress(run):
    (run / "progress.csv").write_text("")


def foreign_progress(run):
    (run / "progress.csv").write_text("step;loss\n1;2\n")


def damaged_progress(run):
    text = (run / "progress.csv").read_text()
    (run / "progress.csv").write_text(text.replace("16384,", "sixteen,", 1))


def endless_line(run):
    with (run / "progress.csv").open("a") as file:
        file.write("1" * 200_000 + "\n")


def infinite_progress(run):
    (run / "progress.csv").write_text("env_steps\n16384\ninf\n")


BROKEN = [empty, missing, a_file, without_settings, torn_settings, binary_settings, foreign_settings]
NO_PROGRESS = [without_progress, empty_progress, foreign_progress, damaged_progress]
NO_PROGRESS += [endless_line, infinite_progress]


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        *itertools.product(COMMANDS, BROKEN),
        ("evaluate", impossible_settings),  # a report plays no env
        ("record", impossible_settings),
        ("report", impossible_numbers),
    ],
)
def test_a_folder_that_is_no_run_gives_a_one_sentence_error(command, damage, tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    damage(run)
    with pytest.raises(UserError) as error:
        importlib.import_module(f"tfrl.{command}").main([str(run)])
    assert "\n" not in str(error.value)
    assert run.name in str(error.value)


def test_a_status_says_that_a_run_has_impossible_numbers(tmp_path, capsys):
    run = make_run(tmp_path, total_steps=40_000)
    impossible_numbers(run)
    assert importlib.import_module("tfrl.status").main([str(tmp_path)]) == 0
    assert "--total-steps must be at least 1" in capsys.readouterr().out


@pytest.mark.parametrize("torso", ["nets_of_a_user:net", "nets_elsewhere:net", "__main__:<lambda>"])
def test_a_report_and_a_status_do_not_import_the_network(torso, tmp_path, monkeypatch, capsys):
    (tmp_path / "nets_of_a_user.py").write_text("def net(inputs, outputs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    make_run(tmp_path / "logs", total_steps=40_000, torso=torso, share_torso=False, run_name="own")
    make_run(tmp_path / "logs", total_steps=40_000)
    assert report.main([str(tmp_path / "logs")]) == 0
    assert "warning" not in capsys.readouterr().err
    assert status.main([str(tmp_path / "logs")]) == 0
    assert capsys.readouterr().out.count(" done ") == 3  # a column has this title
    assert "nets_of_a_user" not in sys.modules


@pytest.mark.parametrize("damage", [torn_settings, binary_settings, foreign_settings])
def test_a_run_that_cannot_be_read_is_left_out_of_the_report_of_its_folder(damage, tmp_path, capsys):
    broken, _ = (make_run(tmp_path, seed=seed, total_steps=40_000) for seed in (1, 2))
    damage(broken)
    assert report.main([str(tmp_path)]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {broken} is left out: ") and warning.endswith(".")
    with pytest.raises(UserError):
        report.main([str(tmp_path), str(broken)])
    shutil.rmtree(tmp_path / "fruitbot-seed2")
    with pytest.raises(UserError, match=re.escape(f"no run in {tmp_path} can be read.")):
        report.main([str(tmp_path)])


def test_an_export_is_not_taken_for_a_run(tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    (run / "export").mkdir()
    (run / "config.yaml").rename(run / "export" / "config.yaml")
    with pytest.raises(UserError, match="there is no run in"):
        report.main([str(run)])


@pytest.mark.parametrize("damage", NO_PROGRESS)
def test_a_run_without_progress_has_no_report(damage, tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    damage(run)
    with pytest.raises(UserError, match=re.escape(str(run))):
        report.main([str(run)])


def test_a_run_without_progress_is_left_out_of_the_report_of_others(tmp_path, capsys):
    new, run = (make_run(tmp_path, seed=seed, total_steps=40_000) for seed in (1, 2))
    without_progress(new)
    assert report.main([str(new), str(run)]) == 0
    assert f"warning: {new} has no finished update yet, and is left out.\n" in capsys.readouterr().err
    assert (run / "report.html").is_file()


@pytest.mark.parametrize("command", ["evaluate", "record"])
@pytest.mark.parametrize("checkpoint", ["last", "best", "7", "newest"])
def test_a_run_without_weights_gives_a_one_sentence_error(command, checkpoint, tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    with pytest.raises(UserError):
        importlib.import_module(f"tfrl.{command}").main([str(run), "--checkpoint", checkpoint])


def test_a_half_written_row_and_damaged_results_are_left_out(tmp_path):
    run = make_run(tmp_path, total_steps=100_000)
    whole = runs.load(run).env_steps
    with (run / "progress.csv").open("a") as file:
        file.write("999999999,1.5,")
    (run / "results.json").write_text('{"eval": {"train"')
    assert runs.load(run).env_steps == whole
    assert np.isfinite(runs.load(run).final_return("test"))


def test_results_of_a_run_that_was_extended_are_ignored(tmp_path):
    """The longer run was killed between the last row of progress.csv and its own results."""
    shorter = make_run(tmp_path, total_steps=100_000)
    of_shorter = (shorter / "results.json").read_text()
    loaded = runs.load(make_run(tmp_path, total_steps=200_000))
    assert loaded.results is not None and loaded.is_done
    (shorter / "results.json").write_text(of_shorter)
    loaded = runs.load(shorter)
    assert loaded.results is None and not loaded.is_done
    assert loaded.final_return("test") == loaded.points("eval_test/return")[1][-1]
    assert not loaded.is_done_for(loaded.config)


def test_scores_are_by_the_papers_ranges_also_of_runs_that_were_scored_by_others(tmp_path):
    """Earlier results.json have other ranges for jumper and leaper; reports use the returns."""
    run = make_run(tmp_path, "jumper", total_steps=100_000)
    results = json.loads((run / "results.json").read_text())
    results["eval"]["test"] = {"return": 5.5, "normalized_return": 0.5, "episodes": 128}  # of 1 to 10
    (run / "results.json").write_text(json.dumps(results))
    loaded = [runs.load(run)]
    groups = runs.group(loaded)
    assert groups[0].scores("test") == pytest.approx((5.5 - 3) / (10 - 3))
    assert "<td>0.357</td>" in render(loaded, groups, {})


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"eval": null}',
        '{"eval": {"test": 3}}',
        '{"seconds": "x"}',
        '{"evaluations": 3}',
        '{"evaluations": [1, null, {"levels": {}}]}',
    ],
)
def test_results_of_another_shape_are_ignored(content, tmp_path):
    run = make_run(tmp_path, total_steps=100_000)
    (run / "results.json").write_text(content)
    (run / "eval.json").write_text(content)
    loaded = [runs.load(run)]
    assert "Settings" in render(loaded, runs.group(loaded), {})


def test_a_command_ends_with_one_sentence_and_exit_code_2_before_tensorflow(tmp_path):
    script = "import sys; from tfrl import record; from tfrl.cli import endings\n"
    script += "sys.argv[1:] = ['{}']; endings.run(record.main)"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script.format(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not re.search(r"\btensorflow$", done.stderr, re.MULTILINE)
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")]


def supervised_run(folder, *, older=False, **changes):
    config = supervised.Config(logdir=str(folder), **changes)
    config.run_dir.mkdir(parents=True)
    text = to_yaml(config)
    (config.run_dir / "config.yaml").write_text(text.replace("algorithm: resnet\n", "") if older else text)
    return config.run_dir


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_a_supervised_run_is_named_as_one(tmp_path, command, older):
    sentence = refusal(
        importlib.import_module(f"tfrl.{command}").main, [str(supervised_run(tmp_path, older=older))]
    )
    assert "is a run of resnet.train and has no policy to play, record or start from; " in sentence
    assert "python -m resnet.evaluate, or start from its torso with --torso-weights" in sentence


def test_a_supervised_run_beside_others_is_skipped(tmp_path, capsys):
    ours, other = make_run(tmp_path, total_steps=40_000), supervised_run(tmp_path)
    assert runs.find([tmp_path]) == [ours]
    command = f"python -m tfrl.report {other} --out {tmp_path / 'resnet'}"
    warning = f"warning: runs of resnet.train are left out; report them by {command}\n"
    assert capsys.readouterr().err == warning
    shutil.rmtree(ours)
    assert runs.find([tmp_path]) == [other]
    assert not capsys.readouterr().err


def reported(tmp_path, *paths):
    """The rows of the page's tables about supervised runs, each row as the texts of its cells."""
    assert report.main([*map(str, paths), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    return page, [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def trained_run(folder, images=(32, 64), results=None, **changes):
    run = supervised_run(folder, **changes)
    rows = "".join(f"{at},1,0.5\n" for at in images)
    (run / "progress.csv").write_text(f"images,epoch,test/accuracy\n{rows}")
    if results is not None:
        (run / "results.json").write_text(json.dumps(results | {"images": images[-1]}))
    return run


def test_a_copy_of_a_supervised_run_is_no_seed(tmp_path, capsys):
    first = trained_run(tmp_path, run_name="first", images=(32,))
    longer, other = trained_run(tmp_path, run_name="longer"), trained_run(tmp_path, run_name="other", seed=2)
    page, rows = reported(tmp_path, first, longer, other)
    assert rows[1][:3] == ["resnet-mini on procgen_frames/games", "2", "64"]
    note = f"{first} is ignored: it has the same settings and the same seed, 1, as {longer}."
    assert note in page and capsys.readouterr().err == f"warning: {note}\n"


def test_settings_without_influence_do_not_split_the_seeds_of_supervised_runs(tmp_path):
    every = [trained_run(tmp_path, run_name=f"run-{at}", seed=at, log_every=at) for at in (1, 2)]
    rows = reported(tmp_path, *every)[1]
    assert rows[1][:2] == ["resnet-mini on procgen_frames/games", "2"]
    assert ["--log-every", "1", "2"] in rows


def test_replicas_distinguish_supervised_runs_with_batch_normalization(tmp_path, capsys):
    for normalization in ("batch", "group"):
        every = [
            trained_run(
                tmp_path / normalization, run_name=f"run-{n}", replicas=n, normalization=normalization
            )
            for n in (1, 2)
        ]
        rows = reported(tmp_path, *every)[1]
        apart = [row[0] for row in rows[1:3]] == ["replicas 1", "replicas 2"]
        assert apart == (normalization == "batch") == ("is ignored" not in capsys.readouterr().err)


def test_supervised_runs_of_one_name_have_columns_of_their_own(tmp_path):
    every = [trained_run(tmp_path / at, run_name="r", lr=lr) for at, lr in (("a", 0.1), ("b", 0.2))]
    rows = reported(tmp_path, *every)[1]
    assert ["setting", *map(str, every)] in rows and ["--lr", "0.1", "0.2"] in rows


def test_the_replicas_of_a_supervised_run_are_those_of_each_worker(tmp_path):
    rows = reported(tmp_path, trained_run(tmp_path, results={"workers": 2, "replicas": 4}))[1]
    header, row = rows[-2:]
    assert row[header.index("workers x replicas")] == "2 x 2"


def test_a_missing_folder_is_named_beside_a_supervised_run(tmp_path):
    given = [str(supervised_run(tmp_path)), str(tmp_path / "nowhere")]
    with pytest.raises(UserError, match="nowhere does not exist"):
        report.main(given)
    with pytest.raises(UserError, match="is a run of resnet.train, and others are not: write two reports"):
        report.main([given[0], str(make_run(tmp_path, total_steps=40_000))])


def test_a_run_of_another_trainer_is_not_resumed(tmp_path):
    made, theirs = make_run(tmp_path, total_steps=40_000), supervised_run(tmp_path)
    for kind, read, run in (
        (ppo.Config, settings.from_yaml, theirs),
        (supervised.Config, supervised.from_yaml, made),
    ):
        config = kind(logdir=str(tmp_path), run_name=run.name)
        with pytest.raises(UserError, match="holds a run of another trainer; choose another --run-name"):
            folder.check_run(config, read)


def test_only_whole_videos_are_shown(tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    (run / "videos").mkdir()
    for name in ("fruitbot-test-1.mp4", ".fruitbot-test-2.mp4.tmp.mp4"):  # the second is being written
        (run / "videos" / name).write_bytes(b"moving pictures")
    loaded = [runs.load(run)]
    page = render(loaded, runs.group(loaded), {})
    assert "<video controls" in page and "fruitbot-test-1.mp4" in page and "fruitbot-test-2" not in page


def test_an_evaluation_is_shown_with_the_policy_that_it_is_of(tmp_path):
    run = make_run(tmp_path, total_steps=40_000)
    part = {"env": "fruitbot", "levels": "test", "actions": "sampled", "episodes": 64, "return_mean": 1.0}
    content = {"checkpoint": "best", "env_steps": 32_768, "evaluations": [part]}
    (run / "eval.json").write_text(json.dumps(content))
    loaded = [runs.load(run)]
    page = render(loaded, runs.group(loaded), {})
    assert "<td>best, 32,768 env steps</td>" in page and "<td>sampled</td>" in page
