"""The network: a torso of the zoo under the heads of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import resnet
from tfrl.cli.errors import EnvError, UserError
from tfrl.cli.flags import nearest
from tfrl.cli.settings import WIDTH
from tfrl.envs import registry

DECIDE_WEIGHTS = (
    "torso",
    "torso_width",
    "share_torso",
    "free_deviation",
    "dueling",
    "normalize_observations",
)
DECIDE_WEIGHTS += ("freeze_torso", "optimizer")
"""Settings that decide which weights there are, what they mean, and what the optimizer has of them. Not all
algorithms have all of it."""
DECIDE_MLP = ("hidden", "activation")
"""Settings that do so where the torso is an mlp."""

_MOST_LAYERS, _MOST_UNITS = 16, 65_536
_ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu")


@dataclass(frozen=True)
class Torso:
    """The network."""

    torso: str = "impala"
    """The part from observation to features; `python -m resnet` lists the names. auto: impala for images, mlp
    for vectors."""
    torso_width: Annotated[int, WIDTH] = 1
    """Multiplies the channels of impala and impala-pooled."""
    hidden: str = "64,64"
    """Units of each layer of mlp."""
    activation: str = "tanh"
    """Activation function of the layers of mlp: tanh, relu, elu, gelu or silu. One name for all, or one for
    each layer of --hidden with commas between: relu,tanh say."""


@dataclass(frozen=True)
class Network(Torso):
    """The network."""

    share_torso: bool = True
    """Policy and value are two heads on one torso; otherwise each has its own."""
    torso_weights: str | None = None
    """The folder of a finished run of `python -m resnet.train`, whose torso this one starts from."""
    freeze_torso: bool = False
    """Keep the weights of --torso-weights as they are, and train the heads alone."""


def resolved_torso(config: Any) -> str:
    """The torso's name, with `auto` chosen by the observations of the env, if there is such an env."""
    by_rank = {1: "mlp", 3: "impala"}
    return by_rank.get(_observation_rank(config), config.torso) if config.torso == "auto" else config.torso


def shows_images(task: Any) -> bool:
    """True if the task's env shows images; False for an env that does not exist."""
    return _observation_rank(task) == 3


def _observation_rank(task: Any) -> int:
    try:
        return len(registry.specs(task)[0].shape)
    except (ValueError, EnvError):  # said by the task's own check
        return 0


def torso_options(network: Torso) -> dict[str, Any]:
    """The options that the zoo builds the torso with, where they are not its defaults for PPO."""
    if network.torso == "mlp":
        return hidden_options(network)
    return {"width": network.torso_width} if network.torso_width != 1 else {}


def hidden_options(network: Torso) -> dict[str, Any]:
    """The options that the zoo builds an mlp with."""
    return {"hidden": hidden_units(network), "activation": activations(network)}


def hidden_units(network: Torso) -> tuple[int, ...]:
    """The units of each layer of mlp. Raise UserError if --hidden is no such list."""
    words = network.hidden.replace(" ", "").split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST_UNITS for word in words):
        raise UserError(
            f"--hidden must be units with commas between, 256,256 say, each from 1 to {_MOST_UNITS}; got "
            f"{network.hidden!r}."
        )
    if len(words) > _MOST_LAYERS:
        raise UserError(f"--hidden must be at most {_MOST_LAYERS} layers; got {len(words)}.")
    return tuple(map(int, words))


def activations(network: Torso) -> tuple[str, ...]:
    """The activation of each layer of an mlp. Raise UserError if --activation is no such list."""
    names, layers = network.activation.replace(" ", "").split(","), len(hidden_units(network))
    for name in names:
        if name not in _ACTIVATIONS:
            hint = nearest(name, _ACTIVATIONS)
            raise UserError(f"--activation {name} is unknown{hint}; known: {', '.join(_ACTIVATIONS)}.")
    if len(names) not in (1, layers):
        raise UserError(
            f"--activation must be one name, or one for each of the {layers} layers of --hidden "
            f"{network.hidden}; got {network.activation!r}."
        )
    return tuple(names * layers if len(names) == 1 else names)


def check(network: Any) -> None:
    """Raise UserError if the zoo has no such torso, or none that takes what the env of the settings shows."""
    env, shape = network.env, registry.specs(network)[0].shape
    fitting = [name for name in resnet.names() if len(resnet.entry(name).input_shape) == len(shape)]
    is_known = resnet.is_known(network.torso)
    if not is_known or len(resnet.entry(network.torso).input_shape) != len(shape):
        takes_no = f"takes no {'images' if len(shape) == 3 else 'vectors'}, which {env} shows"
        reason = takes_no if is_known else "is not a network of the zoo"
        hint = nearest(network.torso, fitting)
        raise UserError(f"--torso {network.torso} {reason}{hint}; known: {', '.join(fitting)}.")
    if network.torso_width != 1 and not resnet.entry(network.torso).has_width:
        raise UserError(
            f"--torso {network.torso} has no width to choose, so it cannot be {network.torso_width}; "
            "leave --torso-width out."
        )
    activations(network)
    if isinstance(network, Network) and network.freeze_torso and network.torso_weights is None:
        raise UserError("--freeze-torso needs --torso-weights: random weights would stay random.")
    if len(shape) == 3:
        try:
            resnet.check_size(network.torso, *shape[:2])
        except ValueError as error:
            raise UserError(f"--torso {network.torso} does not suit --env {env}: {error}") from None
