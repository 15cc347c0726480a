"""The layout of a run in TensorBoard: charts of curves that belong together, and a row of hyperparameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

_CHARTS = {
    "return": {
        "raw": ("rollout/episode_return", "eval_train/return", "eval_test/return"),
        "normalised": (
            "rollout/normalized_return",
            "eval_train/normalized_return",
            "eval_test/normalized_return",
        ),
        "train/test gap": ("eval/generalization_gap",),
    },
    "episodes": {
        "mean reward of an env step": ("rollout/mean_reward",),
        "length": (
            "rollout/episode_length",
            "rollout/longest_episode",
            "eval_train/episode_length",
            "eval_test/episode_length",
        ),
    },
    "time": {
        "env steps per second": ("time/env_steps_per_second",),
        "seconds": ("time/rollout_seconds", "time/update_seconds"),
    },
}
# Whose last points the HParams tab shows beside the settings: those of the evaluation that ends every run.
_METRICS = (
    *(
        f"eval_{level_set}/{name}"
        for name in ("return", "normalized_return")
        for level_set in ("test", "train")
    ),
    "eval/generalization_gap",
    "rollout/episode_return",
)


def summaries(
    settings: Mapping[str, Any],
    chosen: Collection[str],
    charts: Mapping[str, Mapping],
    curves: Collection[str],
    run: Path,
) -> list[Any]:
    """Summary protocol buffers for a run's first step: custom scalars and hyperparameters.

    Args:
      settings: name to value; None and mappings become text.
      chosen: names of those that tell this run from others, which come first.
      charts: the algorithm's own, titles of groups -> titles of charts -> metrics.
      curves: the metrics that the run has; charts of others are left out.
      run: its folder.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2, summary
    from tensorboard.plugins.hparams import summary_v2 as hparams

    categories = [
        layout_pb2.Category(
            title=title,
            chart=[
                layout_pb2.Chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=_exactly(tags)))
                for name, tags in group.items()
                if not set(curves).isdisjoint(tags)
            ],
        )
        for title, group in {**_CHARTS, **charts}.items()
    ]
    categories = [category for category in categories if category.chart]
    values = {
        name: str(value) if value is None or isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return [
        # With TensorFlow installed, this one makes TensorFlow's own class of the same message.
        Summary.FromString(summary.pb(layout_pb2.Layout(category=categories)).SerializeToString()),
        _experiment(values, chosen, curves),
        # Trials of one name would be shown as one, by their mean, and TensorBoard cuts off long names.
        hparams.hparams_pb(values, trial_id=f"{run.resolve().name} in {run.resolve().parent}"),
    ]


def _experiment(names: Collection[str], chosen: Collection[str], curves: Collection[str]) -> Any:
    """Which hyperparameters and metrics there are: TensorBoard sorts by name, and first what differs."""
    from tensorboard.plugins.hparams import plugin_data_pb2
    from tensorboard.plugins.hparams import summary_v2 as hparams

    summary = hparams.hparams_config_pb(
        hparams=[hparams.HParam(name) for name in names],
        metrics=[hparams.Metric(tag, display_name=tag) for tag in _METRICS if tag in curves],
    )
    plugin = summary.value[0].metadata.plugin_data
    data = plugin_data_pb2.HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name in chosen
    plugin.content = data.SerializeToString()
    return summary


def _exactly(tags: tuple[str, ...]) -> list[str]:
    """Regular expressions, as the plugin wants them."""
    return [f"^{tag}$" for tag in tags]
