"""Torsos that begin with the weights of a supervised run, `python -m resnet.train`."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from tfrl.cli.errors import UserError
from tfrl.run.folder import SETTINGS_FILE

if TYPE_CHECKING:
    from tfrl.config.network import Network
    from tfrl.networks.actor_critic import ActorCritic

_PREFIX = "torso/"


def check(config: Network) -> None:
    """Raises UserError if the run of --torso-weights cannot serve --torso; needs no TensorFlow."""
    run = config.torso_weights
    read(run)
    settings = _trained(Path(run) / SETTINGS_FILE)
    model, width = settings.get("model"), settings.get("width", 1)
    # Without settings, or of another trainer: the weights' shapes will tell.
    if model is not None and (model, width) != (config.torso, config.torso_width):
        raise UserError(
            f"--torso-weights {run} is of another network: give --torso {model} --torso-width {width}, as it "
            f"was trained, instead of {config.torso} and {config.torso_width}."
        )
    if settings.get("per_image_standardization"):
        raise UserError(
            f"--torso-weights {run} was trained on standardised images, and agents see plain ones; train it "
            "without --per-image-standardization."
        )


def _trained(settings: Path) -> dict[str, Any]:
    """The settings of a supervised run; empty where there are none."""
    try:
        values = yaml.safe_load(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def read(run: str) -> dict[str, np.ndarray]:
    """The torso's weights in a run's folder, by LAYER/WEIGHT; needs no TensorFlow.

    Raises UserError if there are none, or they cannot serve PPO.
    """
    path = Path(run) / "export" / "weights.npz"
    if not path.exists():
        raise UserError(
            f"--torso-weights {run} holds no finished run of resnet.train: there is no {path}; "
            "train one with `python -m resnet.train --normalization group`."
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name.startswith(_PREFIX)]
            weights = {name.removeprefix(_PREFIX): file[name] for name in names}
    except (OSError, ValueError, zipfile.BadZipFile):
        raise UserError(f"--torso-weights {run}: {path} is damaged.") from None
    if any(name.endswith("/moving_mean") for name in weights):
        raise UserError(
            f"--torso-weights {run} was trained with batch normalization, which breaks PPO's probability "
            "ratio; train it with `python -m resnet.train --normalization group`."
        )
    if not weights:
        raise UserError(
            f"--torso-weights {run} has no torso of its own in {path}; give a run of resnet.train."
        )
    return weights


def start(network: ActorCritic, run: str) -> dict[str, np.ndarray]:
    """The vectors of the network's torsos with the weights of a run, by the torsos' names.

    Raises UserError if the weights are of another network.
    """
    weights = read(run)
    vectors = {}
    for name in network.torsos:
        function = network.functions[name]
        shapes = {key: array.shape for key, array in function.split(function.initial()).items()}
        _check(run, shapes, weights)
        vectors[name] = function.join(weights)
    return vectors


def _check(run: str, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, np.ndarray]) -> None:
    odd = sorted(set(shapes) ^ set(weights))
    if odd:
        where = "this torso" if odd[0] in shapes else "that run"
        raise UserError(
            f"--torso-weights {run} is of another network: only {where} has the weights {odd[0]}; "
            "give --torso the name that run was trained with as --model, and the same normalization, group."
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise UserError(
                f"--torso-weights {run} is of another network: {name} has the shape {weights[name].shape} "
                f"there and {shape} here; train it on images of this env's size and with this --torso-width."
            )
