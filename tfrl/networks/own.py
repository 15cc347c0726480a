"""The user's own torsos: functions from Keras inputs to features, found by name."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import keras

from tfrl.envs import callables
from tfrl.envs.observations import CHOICES, FLAGS, IMAGE, NUMBERS, ArraySpec
from tfrl.networks.array_policy import layers_of


def build(name: str, spec: ArraySpec, *, precision: str, seed: int) -> keras.Model:
    """Makes the torso that a function describes: features float32 [B, F] of `Entrance.inputs`.

    The function is called with one Keras tensor, or with a dict of them by name where the env shows several
    arrays: images float32 [B, H, W, C] from 0 to 1; vectors and other numbers float32 [B, ...]; Discrete and
    MultiDiscrete one-hot; texts and MultiBinary as flags.

    Args:
      name: `module:function`, or the name of a function of this process (`callables.give`).
      spec: of the observations.
      precision: "float32", or "bfloat16" for layers that compute in bfloat16.
      seed: decides the initial weights of layers whose initializers have no seed.

    Raises:
      ValueError: the function fails, does not return features [B, F], or its network has state.
    """
    function = callables.find(name)
    inputs, shown = _inputs(spec)
    state, policy = random.getstate(), keras.config.dtype_policy()
    random.seed(seed)  # Keras draws the seeds of initializers from it
    try:
        keras.config.set_dtype_policy("mixed_bfloat16" if precision == "bfloat16" else "float32")
        features = function(shown)
    except Exception as error:  # a user's function may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        raise ValueError(f"it raised {type(error).__name__}: {lines[0].rstrip('.')}") from error
    finally:
        random.setstate(state)
        keras.config.set_dtype_policy(policy)
    if not keras.backend.is_keras_tensor(features) or len(features.shape) != 2 or features.shape[1] is None:
        raise ValueError(f"it must return features [B, F], a Keras tensor, but returns {_in_words(features)}")
    features = keras.layers.Activation("linear", dtype="float32", name="own_features")(features)
    model = keras.Model(inputs, features, name="own_torso")
    layers = layers_of(model)
    _check_stateless(layers)
    _name_weights(layers)
    return model


def _inputs(spec: ArraySpec) -> tuple[Any, Any]:
    """The inputs of the model, and the argument of the function."""
    inputs, shown = [], {}
    parts = {part.identifier: part for part in spec.parts}
    for index, shape in enumerate(spec.image_shapes):
        inputs.append(keras.Input(shape, dtype="uint8", name=f"image{index}"))
        scaled = keras.layers.Rescaling(1.0 / 255.0, dtype="float32", name=f"scale{index}")(inputs[-1])
        names = [name for name, part in parts.items() if part.kind == IMAGE] or [""]
        shown[names[index]] = scaled
    if spec.vector_size:
        inputs.append(keras.Input((spec.vector_size,), name="vector"))
        shown |= _of_vector(spec, inputs[-1])
    (first, *others) = shown
    of_one = not others and (not parts or parts[first].keys == ())
    return inputs if len(inputs) > 1 else inputs[0], shown[first] if of_one else shown


def _of_vector(spec: ArraySpec, vector: Any) -> dict[str, Any]:
    """The arrays in a vector [B, D] by name; the whole vector under "" if the env's observation is this
    vector.
    """
    if not spec.parts:
        return {"": vector}
    found, begin = {}, 0
    for kind in (NUMBERS, CHOICES, FLAGS):
        for part in spec.of_kind(kind):
            size = sum(part.counts) if kind == CHOICES else part.size
            array = vector[:, begin : begin + size]
            if kind != CHOICES and len(part.shape) > 1:
                array = keras.layers.Reshape(part.shape)(array)
            found[part.identifier] = array
            begin += size
    return found


def _check_stateless(layers: Sequence[Any]) -> None:
    """Raises ValueError for layers whose results for an observation may change."""
    for layer in layers:
        state = getattr(layer, "non_trainable_variables", ())
        if any("seed" in variable.name for variable in state):
            raise ValueError(
                f"{layer.name} draws random numbers, like dropout, so the policy that is trained would "
                "differ from the policy that acted: remove this layer"
            )
        if state:
            raise ValueError(
                f"{layer.name} has state besides its trained weights, like batch normalization, so an "
                "action's probability would depend on other observations: use layer normalization, for "
                "example"
            )


def _name_weights(layers: Sequence[Any]) -> None:
    """Renames weights so that their names do not depend on layers made earlier in the process."""
    taken: set[str] = set()
    named: set[int] = set()
    for layer in layers:
        kind = re.sub(r"_\d+$", "", layer.name)
        for variable in getattr(layer, "trainable_variables", ()):
            if id(variable) in named:
                continue
            named.add(id(variable))
            count, name = 0, f"{kind}/{variable.name}"
            while name in taken:
                count += 1
                name = f"{kind}_{count}/{variable.name}"
            taken.add(name)
            variable.in_file = name


def _in_words(value: Any) -> str:
    return str(list(value.shape)) if hasattr(value, "shape") else f"a value of type {type(value).__name__}"
