"""The network, a torso of the zoo under the heads of an algorithm, and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import resnet
from tfrl.cli.errors import UserError
from tfrl.cli.flags import flag, nearest
from tfrl.cli.settings import FRACTION, NATURAL, POSITIVE, WIDTH, Range
from tfrl.envs import callables, registry
from tfrl.envs.spec import EnvSettings
from tfrl.ops.optimizers import OptimizerSettings

if TYPE_CHECKING:
    from tfrl.config.run import RLSettings

DECIDE_WEIGHTS = (
    *("torso", "critic_torso", "torso_width", "share_torso", "free_deviation", "dueling", "freeze_torso"),
    *("normalize_observations", "optimizer", "memory", "memory_size", "memory_inputs"),
)
"""Settings that decide which weights exist, what they mean, and which slots the optimizer has. Some
algorithms lack some of these settings."""
DECIDE_MLP = ("hidden", "activation")
"""Settings that decide this for the torso mlp."""
DECIDE_MEMORY = ("memory_size", "memory_inputs", "sequence_length")
"""Settings that have an effect only with --memory."""

_MOST_LAYERS, _MOST_UNITS = 16, 65_536
_ACTIVATIONS = ("tanh", "relu", "elu", "gelu", "silu")


@dataclass(frozen=True)
class Torso:
    """The network."""

    torso: str = "impala"
    """The network from observation to features; `python -m resnet` lists the names. auto: impala for images,
    mlp for vectors. my_package.my_module:FUNCTION is your own function from Keras inputs to features."""
    critic_torso: str | None = None
    """The critics' torso, a name or FUNCTION. It implies --no-share-torso. None: the same as --torso."""
    torso_width: Annotated[int, WIDTH] = 1
    """Multiply the channels of impala and impala-pooled by this."""
    hidden: str = "64,64"
    """Units of each layer of mlp."""
    activation: str = "tanh"
    """Activation function of mlp: tanh, relu, elu, gelu or silu. Give one name for all layers, or one for
    each layer of --hidden: relu,tanh for example."""

    @property
    def hidden_units(self) -> tuple[int, ...]:
        """The units of each layer of mlp. Raises UserError if --hidden is no such list."""
        words = self.hidden.replace(" ", "").split(",")
        if not all(word.isdecimal() and 1 <= int(word) <= _MOST_UNITS for word in words):
            raise UserError(
                "--hidden must list the units of each layer, such as 256,256, each from 1 to "
                f"{_MOST_UNITS}; got {self.hidden!r}."
            )
        if len(words) > _MOST_LAYERS:
            raise UserError(f"--hidden must be at most {_MOST_LAYERS} layers; got {len(words)}.")
        return tuple(map(int, words))

    @property
    def activations(self) -> tuple[str, ...]:
        """The activation of each layer of mlp. Raises UserError if --activation is no such list."""
        names, layers = self.activation.replace(" ", "").split(","), len(self.hidden_units)
        for name in names:
            if name not in _ACTIVATIONS:
                hint = nearest(name, _ACTIVATIONS)
                raise UserError(f"--activation {name} is unknown{hint}; known: {', '.join(_ACTIVATIONS)}.")
        if len(names) not in (1, layers):
            raise UserError(
                f"--activation must be one name, or one for each of the {layers} layers of --hidden "
                f"{self.hidden}; got {self.activation!r}."
            )
        return tuple(names * layers if len(names) == 1 else names)

    @property
    def hidden_options(self) -> dict[str, Any]:
        """The options that the zoo builds an mlp with."""
        return {"hidden": self.hidden_units, "activation": self.activations}

    @property
    def torso_options(self) -> dict[str, Any]:
        """The options that the zoo builds the torso with, if they differ from its defaults."""
        if self.torso == "mlp":
            return self.hidden_options
        return {"width": self.torso_width} if self.torso_width != 1 else {}


@dataclass(frozen=True)
class Network(Torso, EnvSettings):
    """The network."""

    share_torso: bool = True
    """Policy and value share one torso. With --no-share-torso each has its own torso."""
    torso_weights: str | None = None
    """The folder of a complete run of `python -m resnet.train`. This run begins with its torso."""
    freeze_torso: bool = False
    """Do not train the weights of --torso-weights; train all other weights."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """A recurrent layer between torso and heads, for envs whose observations do not show the whole state. Its
    state is zero at the start of an episode."""
    memory_size: Annotated[int, Range(16, 4096)] = 256
    """Units of the recurrent layer, a multiple of 16."""
    memory_inputs: bool = False
    """The recurrent layer also takes the last action and the last reward, clipped to [-1, 1]."""
    sequence_length: Annotated[int, NATURAL] = 0
    """Steps through which gradients flow back in the recurrent layer. It must divide --num-steps. 0: the
    whole rollout."""

    @property
    def state_size(self) -> int:
        """The size of the recurrent state of one env; actor and critic may have a state each."""
        vectors = {"none": 0, "lstm": 2, "gru": 1}[self.memory]
        return vectors * self.memory_size * (1 if self.share_torso else 2)

    @property
    def remembered_size(self) -> int:
        """The size of the memory of one env: recurrent state, last action and reward."""
        inputs = registry.specs(self)[1].encoded_size + 1 if self.memory_inputs else 0
        return self.state_size + inputs


@dataclass(frozen=True)
class Optimizer(OptimizerSettings):
    """The optimizer."""

    optimizer: Literal["adam", "nadam", "rmsprop", "sgd"] = "adam"
    """Optimizer of the weights; rmsprop and sgd have no momentum."""
    rmsprop_decay: Annotated[float, FRACTION] = 0.99
    """Decay rate of the mean square of gradients in rmsprop."""
    adam_epsilon: Annotated[float, POSITIVE] = 1e-8
    """Epsilon of the optimizer. adam and nadam add it to the root of the mean square of gradients; rmsprop
    adds it to the mean square."""


def check(config: RLSettings) -> None:
    """Raise UserError if a torso does not exist or cannot take the observations, or if memory cannot work."""
    for name, torso in (("torso", config.torso), ("critic_torso", config.critic_torso)):
        if torso is not None:
            _check_torso(config, flag(name), torso)
    config.activations  # noqa: B018 - raises UserError for a wrong list
    if isinstance(config, Network) and config.freeze_torso and config.torso_weights is None:
        raise UserError("--freeze-torso needs --torso-weights: random weights would stay random.")
    if isinstance(config, Network) and config.memory_size % 16:
        raise UserError(f"--memory-size must be a multiple of 16; got {config.memory_size}.")


def _check_torso(config: RLSettings, spelled: str, torso: str) -> None:
    """Raise UserError if the torso does not exist or cannot take the env's observations."""
    if callables.is_name(torso):
        try:
            callables.find(torso)
        except ValueError as error:
            raise UserError(f"{spelled}: {error}.") from None
        return
    try:
        for shape in registry.specs(config)[0].image_shapes or [(1,)]:
            entry = resnet.entry(torso, shape)
    except ValueError as error:
        raise UserError(f"--env {config.env}: {spelled} {error}") from None
    if config.torso_width != 1 and not entry.has_width:
        raise UserError(
            f"{spelled} {torso} has no width to choose, so it cannot be {config.torso_width}; "
            "leave --torso-width out."
        )
