"""Callbacks for `tfrl.train`: `tfrl.callbacks.Evaluate` and so on. Of several workers the chief writes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tfrl.cli.errors import SettingsError
from tfrl.cli.streams import tell
from tfrl.config.run import RLSettings
from tfrl.evaluation import episodes as playing
from tfrl.evaluation.policy_files import keep
from tfrl.library import MakeEnv, task_of
from tfrl.reporting import video
from tfrl.run import files
from tfrl.run.callbacks import Callback as Callback
from tfrl.run.callbacks import RunOfCallback
from tfrl.run.metrics import MetricsWriter


class _Every(Callback):
    """Acts after updates, each time that `steps` further env steps have been taken.

    Args:
      steps: env steps from one time to the next; the first one is after so many.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0

    def is_due(self, run: RunOfCallback) -> bool:
        """True if it is time; asked once an update."""
        before, self._done = self._done, run.env_steps // self._steps
        return self._done > before

    def get_state(self) -> dict[str, Any]:
        """How often it has acted."""
        return {"done": self._done}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` gave."""
        self._done = state["done"]


class Evaluate(_Every):
    """Plays episodes of another env than the run's now and then, and adds their mean return to the metrics.

    Args:
      env: an id, or a callable that returns a `gymnasium.Env`, with the run's observations and actions.
      steps: env steps from one evaluation to the next.
      episodes: of an evaluation.
      name: of its metrics: `NAME/return` and `NAME/episode_length`.
      seed: decides the episodes; None: the run's.
    """

    def __init__(
        self, env: str | MakeEnv, *, steps: int, episodes: int = 16, name: str, seed: int | None = None
    ) -> None:
        super().__init__(steps)
        self._env, self._seed, self._episodes, self._name = env, seed, episodes, name

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Plays where it is time; the same on all workers."""
        if not self.is_due(run):
            return
        num_envs, each = playing.split_episodes(self._episodes)
        spec = playing.level_spec(
            task_of(cast(RLSettings, run.config), self._env, self._seed), "test", num_envs
        )
        played = playing.play(run, spec, range(num_envs), episodes_each=each)
        metrics[f"{self._name}/return"] = float(played.returns.mean())
        metrics[f"{self._name}/episode_length"] = float(played.lengths.mean())


class Checkpoint(_Every):
    """Keeps the policy of now in `RUN/policies/STEPS`, which `tfrl.load` loads; it is never removed.

    Args:
      steps: env steps from one to the next.
    """

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Writes where it is time. Raises OSError if it cannot."""
        if self.is_due(run) and run.is_chief:
            keep(run.folder, Path(run.folder) / "policies" / str(run.env_steps), run.weights())


class RecordVideo(_Every):
    """Records a video of the policy in `RUN/videos` now and then.

    Args:
      steps: env steps from one video to the next.
      episodes: side by side in the video.
      format: "mp4" or "gif".
    """

    def __init__(self, steps: int, *, episodes: int = 1, format: str = "mp4") -> None:  # noqa: A002
        super().__init__(steps)
        self._options, self._format = video.Recording(episodes=episodes, max_steps=300), format

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Records where it is time. Raises UserError if the env gives no pictures, OSError for the file."""
        if self.is_due(run) and run.is_chief:
            path = Path(run.folder) / "videos" / f"callback-{run.env_steps}.{self._format}"
            video.save(run, run.config, path, self._options)


class StopOnReturn(Callback):
    """Ends the run, as done, once a metric is high enough.

    Args:
      threshold: of the metric.
      metric: "eval_test/return", say, which only updates with an evaluation have.
    """

    def __init__(self, threshold: float, metric: str = "rollout/episode_return") -> None:
        self._threshold, self._metric = threshold, metric

    def on_update(self, run: RunOfCallback, metrics: dict[str, float]) -> None:
        """Looks at the metric, which may be missing or NaN."""
        if metrics.get(self._metric, float("-inf")) >= self._threshold:
            run.stop(f"{self._metric} has reached {self._threshold:g}")


class TensorBoard(Callback):
    """Writes the curves for TensorBoard into another folder as well, one that several runs share, say.

    Args:
      folder: the curves go into FOLDER/RUN_NAME.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writer: MetricsWriter | None = None

    def on_start(self, run: RunOfCallback) -> None:
        """Goes on with the curves at the run's env steps."""
        if run.is_chief:
            place = self._folder / Path(run.folder).name
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


class WandB(Callback):
    """Sends settings, metrics and results to Weights & Biases; needs `pip install wandb`.

    Args:
      options: of `wandb.init`: project, entity, mode.
    """

    def __init__(self, **options: Any) -> None:
        self._module, self._options = _installed("wandb"), options
        self._id: str | None = None
        self._experiment: Any = None

    def on_start(self, run: RunOfCallback) -> None:
        """Begins its run, or goes on with it."""
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
        """Sends results.json, and ends its run."""
        if self._experiment is not None:
            self._experiment.summary.update(dict(results))
            self._experiment.finish()

    def get_state(self) -> dict[str, Any]:
        """The id of its run."""
        return {"id": self._id}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` gave."""
        self._id = state["id"]


class MLflow(Callback):
    """Sends settings, metrics and results to MLflow; needs `pip install mlflow`, or mlflow-skinny.

    Args:
      tracking_uri: as MLflow has it: a database, "sqlite:///mlflow.db", or a server; None: MLflow's default.
      experiment: its name.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "tfrl") -> None:
        self._client = _installed("mlflow").MlflowClient(tracking_uri)
        self._experiment, self._id = experiment, None

    def on_start(self, run: RunOfCallback) -> None:
        """Begins its run, or goes on with it."""
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
        """Sends results.json, and ends its run."""
        if run.is_chief:
            self._client.log_dict(self._id, dict(results), "results.json")
            self._client.set_terminated(self._id)

    def get_state(self) -> dict[str, Any]:
        """The id of its run."""
        return {"id": self._id}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` gave."""
        self._id = state["id"]


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(f"tfrl.callbacks needs the package {module}: pip install {module}.") from error
