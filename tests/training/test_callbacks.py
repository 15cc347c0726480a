"""What a run does besides learning leaves its steps alone, and TensorBoard shows all of it."""

import csv
import dataclasses
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import types
import urllib.request

import imageio.v2 as imageio
import numpy as np
import pytest
from learners import train
from scripted import Acting

import tfrl
from tfrl.algorithms.registry import reader
from tfrl.algorithms.runs import find_policy, of_run
from tfrl.cli.endings import Stopped
from tfrl.envs import registry
from tfrl.experience.episodes import evaluation_results, level_spec, play
from tfrl.record import UniformPolicy
from tfrl.reporting import runs
from tfrl.run import loop
from tfrl.run.folder import read_results
from tfrl.run.session import Session, tensorboard
from tfrl.training import callbacks
from tfrl.training.callbacks import kernel_picture
from tfrl.workers import strategy

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    from small_run import SMALL

    folder = tmp_path_factory.mktemp("logs")
    config = dataclasses.replace(SMALL, logdir=str(folder), total_steps=512, eval_episodes=8)
    watched = dataclasses.replace(
        config,
        run_name="watched",
        eval_every_steps=200,
        record_every=2,
        eval_at_start=True,
        keep_policies="all",
        tensorboard_graph=True,
        histograms_every=2,
    )
    assert train(dataclasses.replace(config, run_name="plain")) == 0
    assert train(watched) == 0
    return folder


def test_evaluations_and_videos_do_not_disturb_the_run(logdir):
    plain, watched = (read_results(logdir / name) for name in ("plain", "watched"))
    assert plain["weights_sha256"] == watched["weights_sha256"]
    assert plain["eval"] == watched["eval"]


def test_the_best_policy_and_the_videos_are_kept(logdir):
    best = find_policy(logdir / "watched", "best")
    with (logdir / "watched" / "progress.csv").open() as file:
        evaluated = {int(row["env_steps"]): row["eval_test/return"] for row in csv.DictReader(file)}
    scores = {steps: float(cell) for steps, cell in evaluated.items() if cell}
    assert list(scores) == [0, 256, 512]  # with the baseline
    assert best.env_steps == max(scores, key=scores.get)
    assert {path.name for path in (logdir / "watched" / "videos").iterdir()} == {
        "catch-test-256.mp4",
        "catch-test-512.mp4",
    }


def test_a_baseline_is_evaluated_before_the_first_update(logdir):
    """It is of the initial weights, and is no update."""
    run = runs.load(logdir / "watched")
    assert run.progress["env_steps"].tolist()[:2] == [0, 128]
    assert np.isnan(run.progress["rollout/mean_reward"][0])
    steps, returns = run.evaluations("test")
    _, rewards = run.points("eval_test/mean_reward")
    _, lengths = run.points("eval_test/episode_length")
    assert steps[0] == 0
    np.testing.assert_allclose(rewards, returns / lengths, rtol=1e-6)
    plain = runs.load(logdir / "plain")
    for name in ("rollout/episode_return", "train/policy_loss"):
        np.testing.assert_array_equal(run.progress[name][1:], plain.progress[name])


def test_every_policy_of_an_evaluation_is_kept_and_loads(logdir):
    folder = logdir / "watched" / "policies"
    steps, returns = runs.load(logdir / "watched").evaluations("test")
    names = [f"{int(at)}_{value:.2f}.npz" for at, value in zip(steps, returns, strict=True)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    last = find_policy(logdir / "watched", "last")
    kept = find_policy(folder / names[-1], "last")
    assert kept.env_steps == 512
    assert all(np.array_equal(kept.weights[name], last.weights[name]) for name in last.weights)
    first = tfrl.load(folder / names[0])
    assert tfrl.evaluate(first, episodes=8).mean == pytest.approx(returns[0])
    with pytest.raises(tfrl.SettingsError, match="holds one policy, so it has no checkpoint best"):
        tfrl.load(folder / names[0], "best")


def test_only_the_last_policy_of_an_evaluation_is_kept(tmp_path):
    from small_run import SMALL

    config = dataclasses.replace(SMALL, logdir=str(tmp_path), keep_policies="last")
    messages = []
    session = types.SimpleNamespace(
        console=types.SimpleNamespace(message=messages.append, warn=messages.append)
    )
    weights = {"actor/kernel": np.ones(3, np.float32)}
    run = types.SimpleNamespace(is_chief=True, folder=tmp_path, weights=lambda: weights)
    keeps = callbacks.EvaluatedPolicies(config, session)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "mine.npz").touch()
    for run.env_steps, score in ((256, -1.5), (512, 2.0)):
        keeps.on_evaluation(run, {"eval_test/return": score})
    assert {path.name for path in (tmp_path / "policies").iterdir()} == {"512_2.00.npz", "mine.npz"}
    assert messages[-1] == f"policy: {tmp_path / 'policies' / '512_2.00.npz'}"


@pytest.mark.parametrize("display", [None, ":7"])
def test_the_learning_curve_is_named_and_shown_where_there_is_a_display(
    logdir, tmp_path, monkeypatch, drawn, display
):
    """The viewer is a program of this test, which notes its argument."""
    viewer = tmp_path / "xdg-open"
    viewer.write_text("#!/bin/sh\necho $1 > $0.part\nmv $0.part $0.opened\n")
    viewer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    said = []
    chief = types.SimpleNamespace(is_chief=True)
    session = types.SimpleNamespace(runtime=chief, console=types.SimpleNamespace(message=said.append))
    run = types.SimpleNamespace(folder=logdir / "plain", config=of_run(logdir / "plain"))
    callbacks.LearningCurve(types.SimpleNamespace(show=True), session).on_end(run, {})
    picture = logdir / "plain" / "plots" / "learning_curve.png"
    assert said[0] == f"learning curve: {picture}"
    if display is None:
        assert said[1:] == ["There is no display here, so --show does not open the picture."]
        return
    for _ in range(100):
        if (tmp_path / "xdg-open.opened").exists():
            break
        time.sleep(0.05)
    assert (tmp_path / "xdg-open.opened").read_text().strip() == str(picture)


def test_tensorboard_has_curves_hyperparameters_and_settings(logdir):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(logdir / "watched")).Reload()
    tags = set(events.Tags()["tensors"])
    assert {"rollout/episode_return", "eval_test/return"} <= tags
    assert {"_hparams_/session_start_info", "settings"} <= tags


def test_tensorboard_keeps_hyperparameters_and_weights_of_a_run_that_stopped_before_its_first_step(
    small, tmp_path, monkeypatch
):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    def stop(session):
        raise Stopped(143)

    config = small(
        logdir=str(tmp_path), total_steps=128, eval_episodes=2, eval_at_start=True, histograms_every=1
    )
    with monkeypatch.context() as patch:
        patch.setattr(Session, "raise_if_stopped", stop)
        assert train(config) == 143
    assert list((config.run_dir / "checkpoints").iterdir())
    (events,) = config.run_dir.glob("events.out.tfevents.*")
    events.rename(config.run_dir / "events.out.tfevents.0.earlier.tfrl")  # as if it had another process
    assert train(config) == 0
    events = EventAccumulator(str(config.run_dir)).Reload()
    for tag in ("_hparams_/session_start_info", "settings", "command"):
        assert [event.step for event in events.Tensors(tag)] == [0], tag
    histograms = [tag for tag in events.Tags()["tensors"] if tag.startswith("weights/")]
    assert histograms
    for tag in (*histograms, "eval_test/return"):
        assert [event.step for event in events.Tensors(tag)] == [0, 128], tag


def test_tensorboard_has_the_graph_histograms_and_pictures_of_kernels(logdir):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(logdir / "watched"), size_guidance={"tensors": 0}).Reload()
    nodes = {node.op for node in events.Graph().node}
    assert {"Placeholder", "Conv2D"} <= nodes
    weights = find_policy(logdir / "watched", "last").weights
    for name, array in weights.items():
        points = events.Tensors(f"weights/{name}")
        assert [point.step for point in points] == [0, 256, 512]
        buckets = make_ndarray(points[-1].tensor_proto)  # from, to, how many
        assert buckets[:, 2].sum() == array.size
        assert (buckets[0, 0], buckets[-1, 1]) == pytest.approx((array.min(), array.max()), abs=1e-6)
    (first,) = (n for n, a in weights.items() if a.ndim == 4 and a.shape[2] == 1)
    assert [tag for tag in events.Tags()["tensors"] if tag.startswith("kernels/")] == [f"kernels/{first}"]
    width, height, png = make_ndarray(events.Tensors(f"kernels/{first}")[-1].tensor_proto)
    picture = imageio.imread(png)
    assert picture.shape == (int(height), int(width), 3)
    np.testing.assert_array_equal(picture, kernel_picture(weights[first]))
    plain = EventAccumulator(str(logdir / "plain")).Reload()
    assert not plain.Tags()["graph"] and not [t for t in plain.Tags()["tensors"] if "weights/" in t]


def test_a_kernel_is_drawn_filter_by_filter():
    """Red and blue of three channels; each of two channels by itself, one below the other."""
    kernel = np.zeros((1, 1, 3, 2))
    kernel[0, 0, 0, 0] = kernel[0, 0, 2, 1] = 1.0
    picture = kernel_picture(kernel)
    assert picture[0, 0].tolist() == [255, 0, 0] and picture[0, 2 * 6].tolist() == [0, 0, 255]
    assert picture[0, 6].tolist() == [255, 255, 255]  # between two filters
    grey = kernel_picture(np.array([-1.0, 1.0]).reshape(1, 1, 2, 1))
    assert grey[0, 0].tolist() == [0, 0, 0] and grey[6, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize(("mode", "num_levels"), [("easy", 200), ("easy", 0), ("exploration", 200)])
def test_a_gap_needs_unseen_levels(small, learner, mode, num_levels):
    """With `exploration`, or with all levels, training and test levels are the same."""
    config = small(env="coinrun", distribution_mode=mode, num_levels=num_levels, eval_episodes=2)

    policy = UniformPolicy(*registry.specs(config))
    found = callbacks.evaluate(config, learner(config).session, policy)
    assert math.isfinite(found["eval_train/return"]) and math.isfinite(found["eval_test/return"])
    gap = evaluation_results(config, found)["generalization_gap"]
    assert math.isfinite(gap) == (mode == "easy" and num_levels > 0)
    if math.isfinite(gap):
        assert gap == found["eval_train/normalized_return"] - found["eval_test/normalized_return"]


def test_an_evaluation_shows_the_episodes_that_have_ended(small, learner):
    config = small(eval_episodes=256)  # several in each env
    session, shown = learner(config).session, []

    def follow(observations, uniforms):
        shown.append(session.console.progress.phase)
        return np.zeros(len(observations), np.int32)

    callbacks.evaluate(config, session, Acting(follow))
    assert shown[0] == "evaluating on train levels"
    assert any(
        re.fullmatch(r"evaluating on (train|test) levels, \d+ of 256 episodes", text) for text in shown
    )


def test_each_level_set_is_played_on_its_own_levels(small, learner):
    """All balls of the one training level fall in one column, which this policy always catches."""
    config = small(num_levels=1, start_level=7, eval_episodes=32)
    spec = level_spec(config, "train", 1)
    column = registry.make(spec).observe().observation[0, 0, :, 0].argmax()

    def towards(observations, uniforms):
        paddle = observations[:, -1, :, 0].argmax(axis=1)
        return (np.sign(column - paddle) + 1).astype(np.int32)

    found = callbacks.evaluate(config, learner(config).session, Acting(towards))
    assert found["eval_train/return"] == 1.0
    unseen = play(Acting(towards), level_spec(config, "test", 32), range(32), episodes_each=1)
    assert found["eval_test/return"] == unseen.returns.mean() < 0
    assert found["eval/generalization_gap"] == 1.0 - found["eval_test/return"]


@pytest.mark.parametrize("env", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.long)])
def test_evaluations_of_vector_envs_are_printed_and_plotted(env, tmp_path, capfd, drawn):
    """Each evaluation gives a row of a table and a point of a curve."""

    flags = f"--env {env} --total-steps 512 --num-envs 8 --num-steps 32 --num-minibatches 4 --epochs 1"
    flags += f" --eval-every 1 --eval-episodes 2 --precision float32 --logdir {tmp_path}"
    assert train(reader("ppo").parse(flags.split())) == 0
    run = runs.load(tmp_path / f"{env}-seed1")
    said = capfd.readouterr().out
    spread = r"(-?[\d.]+) \u00b1 ([\d.]+)"
    table = re.findall(rf"^ +([\d,]+) +\d+ +{spread} +{spread} +(\S+) +(\S+)$", said, re.M)
    assert said.count("critic loss") == 1 and "levels" not in said
    assert re.search(r"^ +env steps +seconds +return ± std +length ± std ", said, re.M)
    assert [row[0] for row in table] == ["256", "512"]
    columns = [f"eval_test/{name}{of}" for name in ("return", "episode_length") for of in ("", "_std")]
    for at, column in enumerate([*columns, "train/value_loss"], start=1):
        np.testing.assert_allclose(
            [float(row[at]) for row in table], run.points(column)[1], rtol=1e-2, atol=0.05
        )
    assert (run.path / "plots" / "learning_curve.png").is_file()


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
        assert "eval_test/return" in tags
        browser = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        browser += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        # Tall, for cards are made when they come into view.
        browser += [f"--user-data-dir={tmp_path}", "--window-size=1600,5000"]
        browser += ["--virtual-time-budget=20000", "--dump-dom"]
        shown = subprocess.run(
            [*browser, f"http://127.0.0.1:{port}/#timeseries"], capture_output=True, text=True, timeout=120
        ).stdout
        assert "eval_test/return" in shown
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


def test_an_evaluation_that_a_resume_leaves_out_is_forgotten(small, tmp_path, monkeypatch):
    """Otherwise its update would be written in place of the last one."""
    config = small(logdir=str(tmp_path), total_steps=640, eval_every=2, eval_episodes=8, checkpoint_every=1)

    def stop(*_):
        raise Stopped(0)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "evaluate", stop)
        assert train(config) == 0
    config = dataclasses.replace(config, eval_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "raise_if_stopped", lambda session: session.step < 3 or stop())
        assert train(config) == 0
    before = runs.load(config.run_dir).progress
    assert before["env_steps"].tolist() == [128, 256, 384]
    assert train(dataclasses.replace(config, total_steps=384)) == 0
    after = runs.load(config.run_dir).progress
    np.testing.assert_array_equal(after["train/policy_loss"], before["train/policy_loss"])


def test_an_evaluation_by_env_steps_that_was_stopped_is_done_on_resume(small, tmp_path, monkeypatch):
    config = small(logdir=str(tmp_path), total_steps=384, eval_every_steps=250, eval_episodes=8)

    def stop(*_):
        raise Stopped(0)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks, "evaluate", stop)
        assert train(config) == 0
    assert train(config) == 0
    steps, _ = runs.load(config.run_dir).evaluations("test")
    assert steps.tolist() == [256, 384]


def test_a_run_that_begins_again_before_its_first_checkpoint_says_so(small, tmp_path):
    session = types.SimpleNamespace(runtime=strategy.make(small(), None), found=None)
    learner = types.SimpleNamespace(summary=dict, callbacks=(), unit="env steps")
    run = loop.TrainingRun(small(), session, learner, followed=False)
    shown = [run._summary(logged).get("lost") for logged in (0, 384)]
    assert shown == [None, "384 env steps before the first checkpoint, which are taken again"]


def test_commands_to_type_next_are_what_a_shell_takes(small):
    assert tensorboard(small(logdir="my logs")) == "tensorboard --logdir 'my logs'"


class Noting(tfrl.Callback):
    """Notes its calls, adds a metric that changes with its state, and may end the run."""

    def __init__(self, stop_at=None):
        self.stop_at, self.calls, self.seen = stop_at, [], np.zeros(2)

    def on_start(self, run):
        self.calls.append(("start", run.env_steps))

    def on_update(self, run, metrics):
        self.calls.append(("update", run.env_steps))
        self.seen[0] += metrics["train/policy_loss"]
        metrics["own/sum"] = self.seen[0]
        if run.env_steps == self.stop_at:
            run.stop("it is enough")

    def on_evaluation(self, run, evaluation):
        self.calls.append(("evaluation", run.env_steps))
        self.seen[1] += evaluation["eval_test/return"]

    def on_end(self, run, results):
        self.calls.append(("end", results["env_steps"]))

    def get_state(self):
        return {"seen": self.seen.copy(), "note": [1, "two"]}

    def set_state(self, state):
        assert state["note"] == [1, "two"]
        self.seen = state["seen"].copy()


FLAGS = {"total_steps": 384, "eval_every": 2, "eval_episodes": 2, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def noted(small, tmp_path_factory):
    """The settings of a run that nothing disturbed, and its callback."""
    config, noting = small(logdir=str(tmp_path_factory.mktemp("noted")), **FLAGS), Noting()
    assert train(config, callbacks=[noting]) == 0
    return config, noting


def test_a_callback_is_called_in_order_and_its_metrics_are_written(noted):
    config, noting = noted
    before = [("start", 0), ("update", 128), ("evaluation", 256), ("update", 256)]
    assert noting.calls == [*before, ("evaluation", 384), ("update", 384), ("end", 384)]
    progress = runs.load(config.run_dir).progress
    np.testing.assert_allclose(progress["own/sum"], np.cumsum(progress["train/policy_loss"]), rtol=1e-6)


@pytest.mark.parametrize("killed_in", ["evaluation", pytest.param("update", marks=pytest.mark.long)])
def test_a_run_that_was_killed_goes_on_with_the_state_of_its_callbacks(small, noted, tmp_path, killed_in):
    whole, expected = noted

    class Killed(Noting):
        def on_update(self, run, metrics):
            super().on_update(run, metrics)
            if killed_in == "update" and run.env_steps == 384:
                raise KeyboardInterrupt

        def on_evaluation(self, run, evaluation):
            super().on_evaluation(run, evaluation)
            if killed_in == "evaluation":
                raise KeyboardInterrupt

    Killed.__name__ = Noting.__name__  # a checkpoint has the state by the name of the class
    config = small(logdir=str(tmp_path), **FLAGS)
    with pytest.raises(KeyboardInterrupt):
        train(config, callbacks=[Killed()])
    found = Noting()
    assert train(config, callbacks=[found]) == 0
    np.testing.assert_array_equal(found.seen, expected.seen)
    a, b = (runs.load(c.run_dir).progress["own/sum"] for c in (whole, config))
    np.testing.assert_array_equal(a, b)
    assert read_results(config.run_dir)["weights_sha256"] == read_results(whole.run_dir)["weights_sha256"]


def test_a_callback_ends_a_run_with_its_results(small, tmp_path, capfd):
    config = small(logdir=str(tmp_path), total_steps=384, eval_every=2, eval_episodes=2)
    assert train(config, callbacks=[Noting(stop_at=256)]) == 0
    found = read_results(config.run_dir)
    assert found["env_steps"] == 256 and found["stopped"] == "it is enough" and found["eval"]
    assert "Ended after 256 env steps: it is enough." in capfd.readouterr().out
    again = Noting()
    assert train(config, callbacks=[again]) == 0
    assert "is complete; a callback stopped it (it is enough)" in capfd.readouterr().out
    assert not again.calls
    assert train(config) == 0, "without the callback it goes on"
    assert read_results(config.run_dir)["env_steps"] == 384
