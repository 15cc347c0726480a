"""The callbacks that `tfrl.callbacks` gives to users, each beside the others in one run."""

import contextlib
import sys
import types

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

import tfrl
from tfrl import callbacks
from tfrl.algorithms.runs import find_policy

SMALL = {"env": "CartPole-v1", "num_envs": 4, "num_steps": 64, "epochs": 1, "eval_episodes": 2, "hidden": "8"}
SMALL |= {"num_minibatches": 1, "eager": True}  # tracing takes longer than a few gradient steps


def heavier():
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.masspole = 0.5
    return env


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("logs")
    given = [
        callbacks.Evaluate(heavier, steps=512, episodes=3, name="heavier"),
        callbacks.Checkpoint(steps=600),
        callbacks.RecordVideo(steps=1024, format="gif"),
        callbacks.TensorBoard(logdir / "shared"),
        callbacks.StopOnReturn(10.0, metric="heavier/return"),
    ]
    return tfrl.train("ppo", total_steps=100_000, logdir=logdir, run_name="r", callbacks=given, **SMALL)


def test_bad_arguments_of_callbacks_are_refused_when_they_are_made():
    for steps in (0, "64", 0.5):
        with pytest.raises(tfrl.SettingsError, match="steps must be a number of env steps, 1 or more; got"):
            callbacks.Checkpoint(steps=steps)
    with pytest.raises(tfrl.SettingsError, match='format must be "mp4" or "gif"; got \'avi\''):
        callbacks.RecordVideo(steps=64, format="avi")


def test_a_run_ends_once_a_metric_is_high_enough(run):
    assert run.results["stopped"].startswith("heavier/return has reached 10")
    assert run.results["env_steps"] == 512


def test_an_error_of_a_callback_reaches_the_caller_and_is_the_reason_in_the_status(tmp_path):
    class Faulty(tfrl.Callback):
        def on_update(self, run, metrics):
            raise KeyError("speed")

    with pytest.raises(KeyError):
        tfrl.train("ppo", total_steps=512, logdir=tmp_path, run_name="r", callbacks=Faulty(), **SMALL)
    assert (tmp_path / "r/failed").read_text() == "KeyError: 'speed'\n"


@pytest.mark.parametrize(("episodes", "stops"), [(99, False), (100, True)])
def test_a_run_does_not_end_after_a_few_lucky_episodes(episodes, stops):
    stopped = []
    metrics = {"rollout/episode_return": 2.0, "rollout/episodes": episodes}
    callbacks.StopOnReturn(1.0).on_update(types.SimpleNamespace(stop=stopped.append), metrics)
    assert bool(stopped) == stops


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("eval_test/return", []),
        ("other/return", []),
        (
            "eval_test/retrun",
            ["waits for eval_test/retrun, which is not among the metrics (did you mean eval_test/return?)."],
        ),
        (
            "late/return",
            ["has not seen the metric late/return in this process; a callback that adds the metric"],
        ),
    ],
)
def test_a_metric_that_does_not_come_is_named_once(metric, said):
    """The second row has an evaluation. The metrics of another callback come before, or too late."""
    told, given = [], callbacks.StopOnReturn(500.0, metric=metric)
    run = types.SimpleNamespace(warn=told.append)
    for more in ({}, {"eval_test/return": 9.0, "other/return": 9.0}, {"eval_test/return": 9.0}):
        given.on_update(run, {"train/entropy": 0.1, **more})
    given.on_end(run, {})
    callbacks.StopOnReturn(500.0, metric=metric).on_end(run, {})  # a resumed run that has no more updates
    assert len(told) == len(said)
    assert all(
        sentence.startswith(f"StopOnReturn {words}") for sentence, words in zip(told, said, strict=True)
    )


def test_a_warning_of_a_callback_is_shown(tmp_path, capsys):
    given = [callbacks.StopOnReturn(500.0, metric="late/return"), Metric(1.0)]
    tfrl.train("ppo", total_steps=256, logdir=tmp_path, callbacks=given, **SMALL)
    assert "warning: StopOnReturn has not seen the metric late/return" in capsys.readouterr().out


def test_numbers_are_checked_before_training():
    with pytest.raises(tfrl.SettingsError, match="threshold must be a number; got '450'."):
        callbacks.StopOnReturn("450")
    for wrong, said in (
        ({"episodes": 0}, "episodes must be at least 1 and at most 1000000; got 0."),
        ({"seed": -1}, "seed must be at least 0 and at most 2147483647; got -1."),
    ):
        with pytest.raises(tfrl.SettingsError, match=said):
            callbacks.Evaluate(heavier, steps=512, name="heavier", **wrong)
    with pytest.raises(tfrl.SettingsError, match="max_steps must be at least 1 and at most .*; got -1."):
        callbacks.RecordVideo(steps=512, max_steps=-1)


def test_another_env_is_evaluated_among_the_metrics(run):
    column = run.progress["heavier/return"]
    assert np.isnan(column[0]) and column[1] == run.progress["heavier/episode_length"][1] >= 10


def test_lambdas_of_one_function_are_different_envs(tmp_path):
    given = callbacks.Evaluate(
        lambda: gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: -reward),
        steps=256,
        episodes=2,
        name="negative",
    )
    settings = SMALL | {"env": lambda: gymnasium.make("CartPole-v1")}
    run = tfrl.train("ppo", total_steps=512, logdir=tmp_path, run_name="r", callbacks=[given], **settings)
    assert run.progress["negative/return"].max() < 0 < run.results["eval"]["test"]["return"]


def test_curves_are_also_written_to_another_folder(run):
    place = run.folder.parent / "shared" / run.folder.parent.name / "r"
    events = EventAccumulator(str(place))
    events.Reload()
    points = events.Tensors("train/entropy")
    assert [point.step for point in points] == [256, 512]
    assert not (place / "progress.csv").exists()


def test_policies_and_videos_are_kept(tmp_path):
    given = [callbacks.Checkpoint(steps=300), callbacks.RecordVideo(steps=512, format="gif", max_steps=6)]
    run = tfrl.train("ppo", total_steps=1024, logdir=tmp_path, run_name="r", callbacks=given, **SMALL)
    assert sorted(path.name for path in (run.folder / "policies").iterdir()) == ["1024", "512", "768"]
    shown = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    last, first = (tfrl.load(run.folder / "policies" / steps) for steps in ("1024", "512"))
    np.testing.assert_array_equal(last.sample(shown, seed=1), tfrl.load(run.folder).sample(shown, seed=1))
    assert last.config.env == "CartPole-v1" and set(first(shown)) <= {0, 1}
    assert find_policy(run.folder / "policies" / "512", "last").env_steps == 512
    videos = sorted((run.folder / "videos").iterdir())
    assert [video.name for video in videos] == ["callback-1024.gif", "callback-512.gif"]
    assert len(imageio.mimread(videos[0])) == 6


class Slow(tfrl.Callback):
    """Notes whether other workers would wait for it without a limit."""

    def __init__(self):
        self.unhurried = []

    def on_update(self, run, metrics):
        self.unhurried.append(run._session.watchdog._unhurried)


def test_a_users_callback_may_take_as_long_as_it_likes(tmp_path, monkeypatch):
    from tfrl.workers.watchdog import NoWatchdog

    @contextlib.contextmanager
    def noted(watchdog):
        watchdog._unhurried = True
        yield
        watchdog._unhurried = False

    monkeypatch.setattr(NoWatchdog, "unhurried", noted)
    slow = Slow()
    run = tfrl.train("ppo", total_steps=512, logdir=tmp_path, run_name="r", callbacks=[slow], **SMALL)
    assert slow.unhurried == [True, True] and "stopped" not in run.results


def test_a_stop_at_the_start_on_another_worker_stops_all(tmp_path, monkeypatch):
    from tfrl.workers.strategy import Runtime

    class Stop(tfrl.Callback):
        def on_start(self, run):
            monkeypatch.setattr(Runtime, "any_worker", lambda runtime, mine: True)

    run = tfrl.train("ppo", total_steps=512, logdir=tmp_path, run_name="r", callbacks=[Stop()], **SMALL)
    assert run.results["env_steps"] == 0
    assert run.results["stopped"] == "a callback of another worker asked for it"


def test_weights_and_biases_gets_each_row_once(tmp_path, monkeypatch):
    """A fake module stands for wandb; a long test uses the real package offline."""
    told = []
    experiment = types.SimpleNamespace(
        id="abc",
        log=lambda metrics, step: told.append((step, metrics)),
        summary={},
        finish=lambda: told.append("finished"),
    )
    module = types.SimpleNamespace(init=lambda **options: told.append(options) or experiment)
    monkeypatch.setitem(sys.modules, "wandb", module)
    given = callbacks.WandB(project="mine", mode="offline")
    tfrl.train("ppo", total_steps=512, logdir=tmp_path, run_name="r", callbacks=[given], **SMALL)
    options, first, last, end = told
    assert (options["project"], options["name"], options["config"]["num_steps"]) == ("mine", "r", 64)
    assert (first[0], last[0], end) == (256, 512, "finished") and "train/entropy" in first[1]
    assert experiment.summary["env_steps"] == 512 and given.get_state() == {"id": "abc"}


def test_a_missing_package_gives_a_one_sentence_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(tfrl.SettingsError, match="needs the package mlflow: pip install mlflow"):
        callbacks.MLflow()


@pytest.mark.parametrize("wrong", [callbacks.StopOnReturn, print], ids=["class", "function"])
def test_what_is_no_callback_gives_a_one_sentence_error(wrong, tmp_path):
    with pytest.raises(tfrl.SettingsError, match="must be objects of classes that extend .* got <"):
        tfrl.train("ppo", total_steps=512, logdir=tmp_path, callbacks=[wrong], **SMALL)


class Noted(tfrl.Callback):
    """Notes the runs of all its objects."""

    runs: list[str] = []

    def on_end(self, run, results):
        self.runs.append(run.folder.name)


def test_a_single_callback_needs_no_list_and_text_is_that_of_the_flag(tmp_path):
    Noted.runs.clear()
    name = "test_user_callbacks:Noted"
    for run, given in (("object", Noted()), ("text", name), ("texts", f"{name}, {name}")):
        tfrl.train("ppo", total_steps=256, logdir=tmp_path, run_name=run, callbacks=given, **SMALL)
    assert Noted.runs == ["object", "text", "texts", "texts"]
    assert f"\ncallbacks: {name}\n" in (tmp_path / "text" / "config.yaml").read_text()


class Metric(tfrl.Callback):
    """Adds a metric."""

    def __init__(self, value):
        self.value = value

    def on_update(self, run, metrics):
        metrics["my/metric"] = self.value


@pytest.mark.parametrize("value", ["high", None, np.zeros(2)], ids=["text", "none", "array"])
def test_a_metric_that_is_no_number_gives_a_one_sentence_error(value, tmp_path):
    told = f"Metric set the metric my/metric to a value of type {type(value).__name__}; a metric is a single"
    with pytest.raises(tfrl.SettingsError, match=told):
        tfrl.train("ppo", total_steps=256, logdir=tmp_path, callbacks=[Metric(value)], **SMALL)


class Overwriting(tfrl.Callback):
    """Sets a number among the metrics of updates or of evaluations."""

    def __init__(self, name, method):
        setattr(self, method, lambda run, metrics: metrics.__setitem__(name, 7.0))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("env_steps", "on_update"),
        ("train/entropy", "on_update"),
        ("eval_test/return", "on_update"),  # the first row has no evaluation
        ("eval_test/return", "on_evaluation"),
    ],
)
def test_a_metric_of_the_run_itself_is_not_changed(name, method, tmp_path):
    said = (
        f"the callback Overwriting changed {name}, which is a column of the run itself: choose another name."
    )
    given = [tfrl.Callback(), Overwriting(name, method)]
    with pytest.raises(tfrl.SettingsError, match=f"^{said}"):
        tfrl.train("ppo", total_steps=512, logdir=tmp_path, run_name="r", callbacks=given, **SMALL)


def test_the_name_of_a_metric_is_text(tmp_path):
    with pytest.raises(tfrl.SettingsError, match="Overwriting gave a metric the name 3; a name is text."):
        tfrl.train("ppo", total_steps=256, logdir=tmp_path, callbacks=Overwriting(3, "on_update"), **SMALL)
