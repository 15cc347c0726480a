"""The entrance of networks: from observations to features, through torsos of the zoo or the user.

It unpacks rows of several arrays, and excludes forbidden actions from the outputs.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import resnet
from resnet.networks import dtype_policy
from tfrl.config.run import RLSettings
from tfrl.envs import callables
from tfrl.envs.images import Layout
from tfrl.envs.observations import CHOICES, FLAGS, FORBIDDEN, IMAGE, MASK, NUMBERS, ArraySpec

OWN_FEATURES = "own_features"
"""The name of the last layer of a user's torso."""


class Entrance:
    """Unpacks observations before a network's first layer; a plain array stays unchanged.

    Args:
      spec: of the observations.
    """

    def __init__(self, spec: ArraySpec) -> None:
        self.spec = spec

    def inputs(self, observations: tf.Tensor) -> list[tf.Tensor]:
        """Unpacks observations [B, *shape]: images uint8 [B, H, W, C] each, then a vector float32 [B, D] if
        there is one.
        """
        spec = self.spec
        if not spec.parts:
            return [observations]
        found = [
            tf.reshape(observations[:, spec.places[part]], (-1, *part.shape)) for part in spec.of_kind(IMAGE)
        ]
        if spec.vector_size:
            vectors = [self._of_kind(observations, NUMBERS), *self._one_hots(observations)]
            vectors.append(tf.cast(self._of_kind(observations, FLAGS), tf.float32))
            found.append(tf.concat([v for v in vectors if v.shape[1]], axis=1))
        return found

    def _of_kind(self, observations: tf.Tensor, kind: str) -> tf.Tensor:
        """The numbers of a kind, [B, size], from rows [B, n]."""
        stored, rows = self.spec.stored_type(kind), observations[:, self.spec.kind_places[kind]]
        if rows.dtype == tf.uint8 and stored != np.uint8:
            return tf.bitcast(tf.reshape(rows, (-1, rows.shape[1] // 4, 4)), stored)
        return rows

    def _one_hots(self, observations: tf.Tensor) -> list[tf.Tensor]:
        if not self.spec.choices:
            return []
        choices, found, begin = tf.cast(self._of_kind(observations, CHOICES), tf.int32), [], 0
        for count, group in itertools.groupby(self.spec.choices):  # neighbours of equal size in one operation
            size = len(list(group))
            found.append(tf.reshape(tf.one_hot(choices[:, begin : begin + size], count), (-1, size * count)))
            begin += size
        return found

    def rows(self, shown: Sequence[tf.Tensor]) -> tf.Tensor:
        """Packs observations [B, *shape] from the plain array, or from the parts in order."""
        if not self.spec.parts:
            return shown[0] if self.spec.layout is None else _image(shown[0], self.spec.layout)
        found = []
        for part, array in zip(self.spec.parts, shown, strict=True):
            stored = self.spec.stored_type(part.kind)
            if part.layout is not None:
                array = _image(array, part.layout)
            if part.kind == CHOICES:
                array = tf.cast(array, tf.int64) - np.array(part.starts, np.int64).reshape(part.shape)
            array = tf.reshape(tf.cast(array, stored), (tf.shape(array)[0], part.size))
            if self.spec.dtype == "uint8" and stored != np.uint8:
                array = tf.reshape(tf.bitcast(array, tf.uint8), (tf.shape(array)[0], 4 * part.size))
            found.append(array)
        return tf.concat(found, axis=1)

    def mask(self, observations: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Outputs float32 [B, A], one for each action, with FORBIDDEN for forbidden actions."""
        if not self.spec.num_actions:
            return outputs
        return tf.where(self._of_kind(observations, MASK) != 0, outputs, FORBIDDEN)

    def replace_images(self, observations: tf.Tensor, images: list[tf.Tensor]) -> tf.Tensor:
        """Observations [B, *shape] with their images replaced by others, uint8 [B, H, W, C] each."""
        if not self.spec.parts:
            return images[0]
        flat = [tf.reshape(image, (tf.shape(image)[0], image.shape[1:].num_elements())) for image in images]
        return tf.concat([*flat, observations[:, self.spec.kind_places[IMAGE].stop :]], axis=1)


def _image(shown: tf.Tensor, layout: Layout) -> tf.Tensor:
    """`Layout.stored` of arrays [B, *shape]."""
    images = tf.transpose(shown, (0, *(1 + axis for axis in layout.order)))
    images = tf.reshape(images, (-1, *layout.image_shape))
    if layout.dtype == "uint8" and layout.high == 255:
        return images
    scaled = tf.round(tf.cast(images, tf.float32) * np.float32(255 / layout.high))
    return tf.cast(tf.clip_by_value(scaled, 0, 255), tf.uint8)


class Unpack(keras.layers.Layer):
    """`Entrance.inputs` as a layer, for networks that are one Keras model from rows to outputs."""

    def __init__(self, spec: ArraySpec) -> None:
        super().__init__(name="unpack", dtype="float32", autocast=False)
        self._entrance = Entrance(spec)
        self.built = True

    def call(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """The input tensors of `torso`, from rows [B, n]."""
        return self._entrance.inputs(rows)


def torso(
    config: RLSettings,
    spec: ArraySpec,
    precision: str,
    seed: int,
    *,
    critic: bool = False,
    own_parameters: int | None = None,
) -> keras.Model:
    """Makes a torso: features float32 [B, F] from the tensors of `Entrance.inputs`.

    Each image has its own network. An mlp takes their features joined with all other inputs, because a linear
    head could not combine several arrays.

    Args:
      config: the settings, whose torso is a name of the zoo, or `module:function` (`own_torso`).
      spec: of the observations.
      precision: "float32" or "bfloat16".
      seed: decides the initial weights.
      critic: the torso is for a critic, which may have another one than the actor.
      own_parameters: the number of the policy's parameters, for a network that returns them itself.

    Raises:
      ValueError: it cannot be built.
    """
    name, options = config.torso, config.torso_options
    if critic and config.critic_torso is not None:
        name = config.critic_torso
        options = dataclasses.replace(config, torso=name).torso_options
    if callables.is_name(name):
        parameters = own_parameters if config.has_own_heads else None
        return own_torso(name, spec, precision=precision, seed=seed, parameters=parameters)
    dtype = "mixed_bfloat16" if precision == "bfloat16" else "float32"
    if resnet.entry(name).normalization:  # batch normalization would mix the rows of a batch
        options = {"normalization": "group", **options}
    if not spec.is_joined:
        shape = spec.image_shapes[0] if spec.image_shapes else (spec.vector_size,)
        return resnet.build(name, shape, dtype=dtype, seed=seed, **options)
    inputs: list[tf.Tensor] = []
    joined, made = [], {}
    for part in spec.of_kind(IMAGE):
        made[part.name] = resnet.build(
            name, part.shape, dtype=dtype, seed=_seed_of(seed, part.name), **options
        )
        inputs.append(keras.Input(part.shape, dtype="uint8", name=f"image{len(inputs)}"))
        made[part.name].name = f"torso{len(inputs)}"
        joined.append(made[part.name](inputs[-1]))
    if spec.vector_size:
        inputs.append(keras.Input((spec.vector_size,), name="vector"))
        joined.append(inputs[-1])
    whole = keras.layers.Concatenate(dtype="float32", name="joined")(joined)
    made["joined"] = resnet.build(
        "mlp", whole.shape[1:], dtype=dtype, seed=seed, row_by_row=True, **config.hidden_options
    )
    for of, model in made.items():
        for variable in model.trainable_variables:
            variable.in_file = f"{of}/{'/'.join(variable.path.split('/')[-2:])}"
    return keras.Model(inputs, made["joined"](whole), name="joined_torsos")


def torso_of_rows(
    config: RLSettings, spec: ArraySpec, precision: str, seed: int, *, critic: bool = False
) -> keras.Model:
    """The torso as one model whose input are observations [B, *shape], also of several arrays.

    Raises like `torso`.
    """
    made = torso(config, spec, precision, seed, critic=critic)
    if not spec.parts:
        return made
    rows = keras.Input(spec.shape, dtype=spec.dtype, name="observations")
    inputs = Unpack(spec)(rows)
    return keras.Model(rows, made(inputs if len(inputs) > 1 else inputs[0]), name=made.name)


def _seed_of(seed: int, name: str) -> int:
    """A seed for the torso of an image, so that the torsos of equal images begin with different weights."""
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0] >> 1)


def variable_name(variable: keras.Variable) -> str:
    """The name of a variable, LAYER/WEIGHT or PART/LAYER/WEIGHT, equal in every process and on every
    topology.
    """
    return getattr(variable, "in_file", None) or "/".join(variable.path.split("/")[-2:])


def layers_of(layer: keras.layers.Layer) -> list[Any]:
    """The layers and operations of a model and its inner models, in order; for a layer, the layer itself."""
    inner = inner_layers(layer)
    return [layer] if inner is None else [found for one in inner for found in layers_of(one)]


def inner_layers(layer: keras.layers.Layer) -> list[Any] | None:
    """The layers and operations that a model calls itself, in order; None for a layer."""
    return getattr(layer, "operations", None) or getattr(layer, "layers", None)


# Torsos of the user


def own_torso(
    name: str, spec: ArraySpec, *, precision: str, seed: int, parameters: int | None = None
) -> keras.Model:
    """Makes the torso that a function describes: features float32 [B, F] of `Entrance.inputs`.

    The function is called with one Keras tensor, or with a dict of them by name where the env shows several
    arrays: images float32 [B, H, W, C] from 0 to 1; vectors and other numbers float32 [B, ...]; Discrete and
    MultiDiscrete one-hot; texts and MultiBinary as flags.

    Args:
      name: `module:function`, or the name of a function of this process (`callables.give`).
      spec: of the observations.
      precision: "float32", or "bfloat16" for layers that compute in bfloat16.
      seed: decides the initial weights of layers whose initializers have no seed.
      parameters: P, if the function returns the policy's parameters [B, P] and the value [B, 1] instead of
        features, and takes P as a second argument. The features are then both, side by side.

    Raises:
      ValueError: the function fails, or does not return features [B, F].
    """
    function = callables.find(name)
    inputs, shown = _own_inputs(spec)
    state = random.getstate()
    random.seed(seed)  # Keras draws the seeds of initializers from it
    try:
        with dtype_policy("mixed_bfloat16" if precision == "bfloat16" else "float32"):
            features = function(shown) if parameters is None else function(shown, parameters)
    except Exception as error:  # a user's function may raise anything
        lines = str(error).strip().splitlines() or ["no message"]
        raise ValueError(f"it raised {type(error).__name__}: {lines[0].rstrip('.')}") from error
    finally:
        random.setstate(state)
    if parameters is not None:
        features = _joined_heads(features, parameters)
    if not keras.backend.is_keras_tensor(features) or len(features.shape) != 2 or features.shape[1] is None:
        raise ValueError(f"it must return features [B, F], a Keras tensor, but returns {_in_words(features)}")
    features = keras.layers.Activation("linear", dtype="float32", name=OWN_FEATURES)(features)
    model = keras.Model(inputs, features, name="own_torso")
    _name_weights(layers_of(model))
    return model


def _joined_heads(returned: Any, parameters: int) -> Any:
    """The policy's parameters and the value of a user's network, float32 [B, P + 1]. Raises ValueError."""
    found = list(returned) if isinstance(returned, list | tuple) else [returned]
    shapes = [tuple(x.shape) if keras.backend.is_keras_tensor(x) else None for x in found]
    if shapes not in ([(None, parameters), (None, 1)], [(None, parameters), (None,)]):
        raise ValueError(
            f"it must return the policy's parameters [B, {parameters}] and the value [B, 1], two Keras "
            f"tensors, but returns {' and '.join(map(_in_words, found))}"
        )
    logits, value = found
    value = keras.layers.Reshape((1,), dtype="float32", name="own_value")(value)
    return keras.layers.Concatenate(dtype="float32", name="own_heads")([logits, value])


def _own_inputs(spec: ArraySpec) -> tuple[Any, Any]:
    """The inputs of the model, and the argument of the function."""
    inputs, shown = [], {}
    parts = {spec.identifiers[part]: part for part in spec.arrays}
    for index, shape in enumerate(spec.image_shapes):
        inputs.append(keras.Input(shape, dtype="uint8", name=f"image{index}"))
        scaled = keras.layers.Rescaling(1.0 / 255.0, dtype="float32", name=f"scale{index}")(inputs[-1])
        names = [name for name, part in parts.items() if part.kind == IMAGE]
        shown[names[index]] = scaled
    if spec.vector_size:
        inputs.append(keras.Input((spec.vector_size,), name="vector"))
        shown |= _of_vector(spec, inputs[-1])
    (first, *others) = shown
    of_one = not others and parts[first].keys == ()
    return inputs if len(inputs) > 1 else inputs[0], shown[first] if of_one else shown


def _of_vector(spec: ArraySpec, vector: Any) -> dict[str, Any]:
    """The arrays in a vector [B, D] by name; for an observation that is a vector, the vector itself."""
    if not spec.parts:
        return {spec.identifiers[spec.arrays[0]]: vector}
    found, begin = {}, 0
    for kind in (NUMBERS, CHOICES, FLAGS):
        for part in spec.of_kind(kind):
            size = sum(part.counts) if kind == CHOICES else part.size
            array = vector[:, begin : begin + size]
            if kind != CHOICES and len(part.shape) > 1:
                array = keras.layers.Reshape(part.shape)(array)
            found[spec.identifiers[part]] = array
            begin += size
    return found


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
