"""Callbacks for `tfrl.train`, such as `tfrl.callbacks.Evaluate`. Only the chief of several workers writes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfrl.cli.errors import SettingsError, UserError
from tfrl.cli.flags import nearest
from tfrl.cli.streams import tell
from tfrl.experience import episodes as playing
from tfrl.library import MakeEnv, options_of, task_of
from tfrl.networks.weights import keep
from tfrl.reporting import video
from tfrl.run import files
from tfrl.run.callbacks import Callback as Callback
from tfrl.run.callbacks import RunOfCallback as RunOfCallback
from tfrl.run.metrics import MetricsWriter


class _Every(Callback):
    """Acts after an update whenever `steps` more env steps have been taken.

    Args:
      steps: the interval in env steps; the first time is after one interval.
    """

    def __init__(self, steps: int) -> None:
        if not (isinstance(steps, int | float | np.integer) and steps >= 1):
            raise SettingsError(f"steps must be a number of env steps, 1 or more; got {steps!r}.")
        self._steps, self._done = steps, 0

    def is_due(self, run: RunOfCallback) -> bool:
        """True if it is time to act. Call it once in each update."""
        before, self._done = self._done, run.env_steps // self._steps
        return self._done > before

    def get_state(self) -> dict[str, Any]:
        """The number of times that the callback has acted."""
        return {"done": self._done}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` gave."""
        self._done = state["done"]


class Evaluate(_Every):
    """Evaluates the policy in another env at intervals, and adds the mean return to the metrics.

    Args:
      env: an id, or a callable that returns a `gymnasium.Env`, with the same observations and actions as the
        run's env.
      steps: the interval between evaluations, in env steps.
      episodes: the number of episodes of one evaluation.
      name: the prefix of the metrics `NAME/return` and `NAME/episode_length`.
      seed: decides the episodes. None: the seed of the run.
    """

    def __init__(
        self, env: str | MakeEnv, *, steps: int, episodes: int = 16, name: str, seed: int | None = None
    ) -> None:
        from tfrl.evaluate import Options

        super().__init__(steps)
        options = options_of(Options, episodes=episodes, seed=seed)
        self._env, self._seed, self._episodes, self._name = env, options.seed, options.episodes, name

    def on_start(self, run: RunOfCallback) -> None:
        """Raises UserError for a supervised run."""
        _check_acts(self, run)

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Evaluates if it is time, on all workers equally."""
        if not self.is_due(run):
            return
        task = task_of(run.config, self._env, self._seed)
        played = playing.play_level_set(run, task, "test", self._episodes)
        metrics[f"{self._name}/return"] = float(played.returns.mean())
        metrics[f"{self._name}/episode_length"] = float(played.lengths.mean())


class Checkpoint(_Every):
    """Saves the current policy in `RUN/policies/STEPS` at intervals, for `tfrl.load`. Only
    --resume restart removes these files.

    Args:
      steps: the interval in env steps.
    """

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Saves if it is time. Raises OSError if the files cannot be written."""
        if self.is_due(run) and run.is_chief:
            place = Path(run.folder) / "policies" / str(run.env_steps)
            keep(run.folder, place, run.weights(), env_steps=run.env_steps)


class RecordVideo(_Every):
    """Records a video of the policy in `RUN/videos` at intervals.

    Args:
      steps: the interval between videos, in env steps.
      episodes: the number of episodes, which are side by side in the video.
      format: "mp4" or "gif".
      max_steps: the env steps after which the video ends, also within an episode.
    """

    def __init__(
        self,
        steps: int,
        *,
        episodes: int = 1,
        format: str = "mp4",  # noqa: A002
        max_steps: int = 300,
    ) -> None:
        super().__init__(steps)
        if format not in ("mp4", "gif"):
            raise SettingsError(f'format must be "mp4" or "gif"; got {format!r}.')
        self._options = options_of(video.Recording, episodes=episodes, max_steps=max_steps)
        self._format = format

    def on_start(self, run: RunOfCallback) -> None:
        """Raises UserError for a supervised run."""
        _check_acts(self, run)

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Records if it is time. Raises UserError if the env cannot be drawn, and OSError if the file cannot
        be written.
        """
        if self.is_due(run) and run.is_chief:
            path = Path(run.folder) / "videos" / f"callback-{run.env_steps}.{self._format}"
            video.save(run, run.config, path, self._options)


def _check_acts(callback: Callback, run: RunOfCallback) -> None:
    """Raises UserError if a run has no policy that acts in envs."""
    if run.config.algorithm == "resnet":
        raise UserError(
            f"the callback {type(callback).__name__} is for runs in envs, not for supervised ones."
        )


class StopOnReturn(Callback):
    """Ends the run as complete when a metric reaches a threshold.

    A metric of training, `rollout/...`, counts once it is a mean of 100 episodes, as for --solved-at. A
    callback that adds the metric must come before this one. A warning says that the metric is missing: when
    other metrics of its group, such as `eval_test/...`, come without it, or at the end of the run.

    Args:
      threshold: the value of the metric that ends the run.
      metric: the name of the metric. "eval_test/return", for example, exists only after an evaluation.
    """

    def __init__(self, threshold: float, metric: str = "rollout/episode_return") -> None:
        if not isinstance(threshold, int | float | np.integer | np.floating):
            raise SettingsError(f"threshold must be a number; got {threshold!r}.")
        self._threshold, self._metric = threshold, metric
        # True: the metric was there, or the warning. None: there was no update yet.
        self._is_known: bool | None = None

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Compares the metric with the threshold; the metric may be missing or NaN."""
        if not self._is_known:
            prefix = self._metric.partition("/")[0]
            group = [name for name in metrics if name.partition("/")[0] == prefix]
            self._is_known = bool(group)
            if group and self._metric not in group:
                hint = nearest(self._metric, group)
                run.warn(f"StopOnReturn waits for {self._metric}, which is not among the metrics{hint}.")
        few = self._metric.startswith("rollout/") and metrics.get("rollout/episodes", 0) < 100
        if not few and metrics.get(self._metric, float("-inf")) >= self._threshold:
            run.stop(f"{self._metric} has reached {self._threshold:g}")

    def on_end(self, run: RunOfCallback, results: Mapping[str, Any]) -> None:
        """Warns if the metric has not come."""
        if self._is_known is False:
            run.warn(
                f"StopOnReturn has not seen the metric {self._metric} in this process; a callback that adds "
                "the metric must come before StopOnReturn."
            )


class TensorBoard(Callback):
    """Writes the curves for TensorBoard into a second folder, which several runs may share.

    Args:
      folder: the curves are written to FOLDER/LOGDIR/RUN_NAME, with the last part of --logdir.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writer: MetricsWriter | None = None

    def on_start(self, run: RunOfCallback) -> None:
        """Continues the curves at the env steps of the run."""
        if run.is_chief:
            ours = Path(run.folder).resolve()
            place = self._folder / ours.parent.name / ours.name
            files.make_folder(place)
            resume_at = run.env_steps or None
            self._writer = MetricsWriter(place, (), resume_at=resume_at, warn=tell)

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Adds the points of an update."""
        if self._writer is not None:
            self._writer.scalars(run.env_steps, metrics)

    def on_end(self, run: RunOfCallback, results: Mapping[str, Any]) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class _Tracker(Callback):
    """Continues the run of a service when the training run resumes."""

    _id: str | None = None

    def get_state(self) -> dict[str, Any]:
        """The id of the run of the service."""
        return {"id": self._id}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` gave."""
        self._id = state["id"]


class WandB(_Tracker):
    """Sends settings, metrics and results to Weights & Biases; needs `pip install wandb`.

    Args:
      options: arguments of `wandb.init`, such as project, entity and mode.
    """

    def __init__(self, **options: Any) -> None:
        self._module, self._options = _installed("wandb"), options
        self._experiment: Any = None

    def on_start(self, run: RunOfCallback) -> None:
        """Starts the run of the service, or continues it."""
        if run.is_chief:
            going_on = {"id": self._id, "resume": "allow"} if self._id else {}
            about = {"name": run.folder.name, "dir": str(run.folder), "config": vars(run.config)}
            self._experiment = self._module.init(**{**about, **going_on, **self._options})
            self._id = self._experiment.id

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Sends the metrics of an update."""
        if self._experiment is not None:
            self._experiment.log(dict(metrics), step=run.env_steps)

    def on_end(self, run: RunOfCallback, results: Mapping[str, Any]) -> None:
        """Sends the content of results.json, and ends the run of the service."""
        if self._experiment is not None:
            self._experiment.summary.update(dict(results))
            self._experiment.finish()


class MLflow(_Tracker):
    """Sends settings, metrics and results to MLflow; needs `pip install mlflow`, or mlflow-skinny.

    Args:
      tracking_uri: MLflow's tracking URI: a database such as "sqlite:///mlflow.db", or a server. None:
        MLflow's default.
      experiment: the name of the experiment.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "tfrl") -> None:
        self._client = _installed("mlflow").MlflowClient(tracking_uri)
        self._experiment = experiment

    def on_start(self, run: RunOfCallback) -> None:
        """Starts the run of the service, or continues it."""
        if not run.is_chief or self._id is not None:
            return
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._id = self._client.create_run(number, run_name=Path(run.folder).name).info.run_id
        for name, value in vars(run.config).items():
            self._client.log_param(self._id, name, value)

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Sends the metrics of an update."""
        if run.is_chief:
            for name, value in metrics.items():
                self._client.log_metric(self._id, name, value, step=run.env_steps)

    def on_end(self, run: RunOfCallback, results: Mapping[str, Any]) -> None:
        """Sends the content of results.json, and ends the run of the service."""
        if run.is_chief:
            self._client.log_dict(self._id, dict(results), "results.json")
            self._client.set_terminated(self._id)


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(f"tfrl.callbacks needs the package {module}: pip install {module}.") from error
