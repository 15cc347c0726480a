"""A supervised run in words: the table before training, the progress line, the results."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from resnet.supervised.config import Config
from resnet.supervised.data import Dataset
from tfrl.run.checkpoint import Checkpoint
from tfrl.run.summary import folder, hardware, network, tensorboard
from tfrl.workers.strategy import Runtime


def rows(
    config: Config,
    runtime: Runtime,
    dataset: Dataset,
    found: Checkpoint | None,
    *,
    steps: int,
    parameters: int,
) -> dict[str, str]:
    """Rows that say what is to be trained, and where; `found` is the checkpoint that it goes on from."""
    shape = " x ".join(map(str, dataset.image_shape))
    sizes = f"{len(dataset.train):,} + {len(dataset.test):,} of {shape}"
    lines = {
        "images": f"{config.dataset}, {sizes}, {len(dataset.classes)} classes",
        **hardware(runtime),
        "steps": f"{steps:,} of {config.batch_size} images, {config.optimizer}, "
        f"learning rate {config.lr:g}, {config.schedule}",
        "network": network(config.model, config.width, parameters),
        **folder(config),
    }
    if found is not None:
        lines["continues at"] = f"{found.env_steps:,} images (step {found.update})"
    return lines


def highlights(metrics: Mapping[str, float]) -> list[str]:
    """The texts of the progress line for a row of metrics."""
    if not metrics:
        return []
    texts = [f"{metrics['time/images_per_second']:,.0f} images/s", f"loss {metrics['train/loss']:.3f}"]
    return texts + [f"test {metrics[k]:.2%}" for k in ("test/accuracy",) if k in metrics]


def scores(result: Mapping[str, float], test_images: int) -> dict[str, Any]:
    """The parts `train` (the steps of the last row of metrics) and `test` of results.json."""
    parts = {
        part: {"accuracy": result[f"{part}/accuracy"], "loss": result[f"{part}/loss"]}
        for part in ("train", "test")
    }
    parts["test"] |= {"hits": result["hits"], "images": test_images}
    return parts


def table(config: Config, result: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the final table."""
    header = [f"{config.model} on {config.dataset}", "accuracy", "loss"]
    return header, [
        [part, f"{result[f'{part}/accuracy']:.2%}", f"{result[f'{part}/loss']:.4f}"]
        for part in ("train", "test")
    ]


def next_commands(config: Config) -> list[str]:
    """The commands to type after a run."""
    return [shlex.join(["python", "-m", "resnet.evaluate", str(config.run_dir)]), tensorboard(config)]
