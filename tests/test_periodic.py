"""What a run does besides learning leaves its steps alone, and TensorBoard shows all of it."""

import dataclasses
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tfrl import policy_files, results, suite, train
from tfrl.errors import UserError
from tfrl.settings import to_yaml

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    from conftest import SMALL

    folder = tmp_path_factory.mktemp("logs")
    config = dataclasses.replace(SMALL, logdir=str(folder), total_steps=512, eval_episodes=8)
    watched = dataclasses.replace(config, run_name="watched", eval_every=2, record_every=2)
    assert train.train(dataclasses.replace(config, run_name="plain"), None) == 0
    assert train.train(watched, None) == 0
    return folder


def test_evaluations_and_videos_do_not_disturb_the_run(logdir):
    plain, watched = (results.read(logdir / name) for name in ("plain", "watched"))
    assert plain["weights_sha256"] == watched["weights_sha256"]
    assert plain["eval"] == watched["eval"]


def test_the_best_policy_and_the_videos_are_kept(logdir):
    best = policy_files.find(logdir / "watched", "best")
    assert best.env_steps in (256, 512)
    assert {path.name for path in (logdir / "watched" / "videos").iterdir()} == {
        "catch-test-256.mp4",
        "catch-test-512.mp4",
    }


def test_tensorboard_has_charts_hyperparameters_and_video(logdir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logdir / "watched")).Reload()
    tags = set(events.Tags()["tensors"])
    assert {"rollout/episode_return", "eval_test/return", "video/test", "eval_test/episode"} <= tags
    assert {"custom_scalars__config__", "_hparams_/session_start_info", "settings"} <= tags


@needs_browser
def test_a_browser_shows_tensorboard(logdir, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--load_fast=false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        tags = _wait_for(f"http://127.0.0.1:{port}/data/plugin/timeseries/tags", "rollout/episode_return")
        assert "eval_test/episode" in tags
        browser = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        browser += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        browser += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
        shown = subprocess.run(
            [*browser, f"http://127.0.0.1:{port}/#timeseries"], capture_output=True, text=True, timeout=120
        ).stdout
        assert re.search(r"episode_return|rollout", shown)
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(url, text, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            content = urllib.request.urlopen(url, timeout=10).read().decode()
            if text in content:
                return content
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{url} did not show {text} in {seconds} s")


# Suites


def test_a_suite_is_games_times_seeds():
    tasks = suite.plan(["--envs", "coinrun,maze", "--seeds=3,4", "--total-steps", "1e6"])
    assert [(t.config.env, t.config.seed) for t in tasks] == [
        ("coinrun", 3),
        ("coinrun", 4),
        ("maze", 3),
        ("maze", 4),
    ]
    assert all(t.config.total_steps == 1_000_000 for t in tasks)
    assert len({t.config.run_dir for t in tasks}) == 4
    assert len(suite.plan([])) == 48


@pytest.mark.parametrize(
    "arguments", [["--envs", "pong"], ["--env", "maze"], ["--seeds", "x"], ["--run-name", "a"], ["--envs"]]
)
def test_a_suite_is_checked_before_it_starts(arguments):
    with pytest.raises(UserError):
        suite.plan(arguments)


def test_a_suite_skips_what_is_done_runs_the_rest_and_reports(tmp_path, monkeypatch, capsys):
    from made_runs import make_run

    make_run(tmp_path, "maze", 1, total_steps=40_000)
    started = []

    def call(command):
        started.append(command[command.index("--seed") + 1])
        make_run(tmp_path, "maze", int(started[-1]), total_steps=40_000)
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    arguments = ["--envs", "maze", "--seeds", "1,2", "--total-steps", "40000", "--logdir", str(tmp_path)]
    assert suite.main(arguments) == 0
    assert started == ["2"]
    assert (tmp_path / "report.html").is_file()
    assert "done before" in capsys.readouterr().out


def test_a_suite_that_is_told_to_stop_stops(tmp_path, monkeypatch):
    codes = []
    monkeypatch.setattr(subprocess, "call", lambda command: codes.append(143) or 143)
    assert suite.main(["--envs", "maze", "--logdir", str(tmp_path)]) == 143
    assert codes == [143]


def test_settings_know_the_video_flag(small):
    assert "record_every: 0" in to_yaml(small())
