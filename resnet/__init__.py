"""The model zoo: images [B, H, W, C] or vectors [B, D] become features [B, D], by name.

`python -m resnet` lists it. This module has the names, and `resnet.networks` the layers. This module imports
TensorFlow only when a model is built, so that commands can refuse a misspelt name at once. The other modules
are the supervised trainer, `python -m resnet.train`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Entry:
    """The zoo's entry for a network, known before it is built.

    `function` of resnet/networks.py makes it: (inputs, layers, **settings, **options) -> features.
    `input_shape` is the paper's. `normalization` is the default of networks that have the option, and empty
    for the others. `smallest` is the least height and width of its images, in pixels.
    """

    function: str
    paper: str
    input_shape: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    normalization: str = ""
    has_width: bool = False
    smallest: int = 1


_HE = "He 2015, arXiv:1512.03385"
_IMPALA = "Espeholt 2018, arXiv:1802.01561"
_IMPOOLA = "Trumpp 2025, arXiv:2503.05546"


def _residual(depth: int, *, family: str = "cifar", size: int = 32) -> Entry:
    return Entry(family, _HE, (size, size, 3), {"depth": depth}, "batch")


ZOO: dict[str, Entry] = {
    "impala": Entry("impala", _IMPALA, (64, 64, 3), has_width=True),
    "impala-pooled": Entry("impala", _IMPOOLA, (64, 64, 3), {"pooled": True}, has_width=True),
    "nature": Entry("nature", "Mnih 2015, Nature 518", (84, 84, 4), smallest=36),
    "cookbook": Entry("cookbook", "", (64, 64, 3)),
    "linear": Entry("linear", "", (64, 64, 3)),
    "mlp": Entry("mlp", "Schulman 2017, arXiv:1707.06347", (8,)),
    "resnet-mini": _residual(8),
    **{f"resnet{depth}": _residual(depth) for depth in (20, 32, 44, 56, 110)},
    **{f"resnet{depth}": _residual(depth, family="imagenet", size=224) for depth in (18, 34, 50)},
}


def entry(name: str, shape: tuple[int, ...] | None = None) -> Entry:
    """The zoo's entry of that name, or of resnetD with D = 6n + 2; needs no TensorFlow.

    Raises ValueError if there is none, or if it takes no inputs of `shape`: (H, W, C) or (D,).
    """
    known = ZOO.get(name)
    if known is None and (found := re.fullmatch(r"resnet([1-9]\d{0,3})", name)):
        depth = int(found[1])
        known = _residual(depth) if depth % 6 == 2 and 8 <= depth <= 1202 else None  # as deep as the paper's
    rank = None if shape is None else len(shape)
    if known is None or rank not in (None, len(known.input_shape)):
        fitting = [other for other, e in ZOO.items() if rank in (None, len(e.input_shape))]
        reason = (
            f"takes no {'images' if rank == 3 else 'vectors'}" if known else "is not a network of the zoo"
        )
        near = difflib.get_close_matches(name.lower(), fitting, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        others = "" if rank == 1 else ", and resnetD of any depth D = 6n + 2, such as resnet8 and resnet14"
        raise ValueError(f"{name} {reason}{hint}; known: {', '.join(fitting)}{others}.")
    if shape is not None and min(shape[:2]) < known.smallest:
        size, least = " x ".join(map(str, shape[:2])), f"{known.smallest} x {known.smallest}"
        raise ValueError(f"{name} needs images of at least {least} pixels, not {size}.")
    return known


def build(
    name: str,
    input_shape: tuple[int, ...],
    *,
    dtype: str = "float32",
    seed: int = 0,
    standardize: bool = False,
    preprocess: Callable[[Any], Any] | None = None,
    **options: Any,
) -> keras.Model:
    """Build the torso `name`: inputs [B, *input_shape] -> features [B, D], float32.

    Args:
        name: one of `names()`, or resnetD of a depth D = 6n + 2.
        input_shape: (H, W, C) for images, which are uint8 and are scaled to [0, 1] inside; (D,) for vectors,
            float32.
        dtype: the Keras policy of every layer, float32 or mixed_bfloat16. Variables and features are float32
            in both.
        seed: decides the initial weights together with each layer's name, equally in every process.
        standardize: shift and scale each image to mean 0 and variance 1 over all its pixels and channels, as
            `tf.image.per_image_standardization` does.
        preprocess: the user's function from tensors of images uint8 [B, H, W, C] to the images that the
            network takes: uint8, which are scaled to [0, 1], or floats, which are not.
        options: the network's own, described by its function in resnet/networks.py.

    Raises ValueError for an unknown name, and for a shape that the network cannot take. Raises TypeError for
    an unknown option.
    """
    import keras

    from resnet import networks

    known = entry(name, input_shape)
    has_images = len(input_shape) == 3
    with networks.dtype_policy(dtype):
        x = inputs = keras.Input(input_shape, dtype="uint8" if has_images else "float32", name="inputs")
        if preprocess is not None:
            x = networks.preprocessed(x, preprocess)
            entry(name, tuple(x.shape[1:]))  # raises ValueError if these are too small
        if x.dtype == "uint8":
            # In float32 where the mean is subtracted next: bfloat16 would round the pixels before.
            scale_dtype = "float32" if standardize else None
            x = keras.layers.Rescaling(1.0 / 255.0, dtype=scale_dtype, name="scale")(x)
        if standardize:
            # The least variance of tf.image.per_image_standardization: 1 / the number of pixels of 0 to 255.
            least = 1.0 / (255.0**2 * math.prod(x.shape[1:]))
            options_of_layer = {"epsilon": least, "center": False, "scale": False, "dtype": "float32"}
            x = keras.layers.LayerNormalization(axis=(1, 2, 3), name="standardize", **options_of_layer)(x)
        network = getattr(networks, known.function)
        x = network(x, networks.Layers(seed), **known.settings, **options)
    features = keras.layers.Activation("linear", dtype="float32", name="features")(x)
    return keras.Model(inputs, features, name=name.replace("-", "_"))


def classifier(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    dtype: str = "float32",
    seed: int = 0,
    **options: Any,
) -> keras.Model:
    """Build torso `name` with a softmax head: inputs [B, *input_shape] -> probabilities [B, classes].

    The head is computed in float32 under every policy: a dense layer named "logits", then "probabilities".
    Its kernel is penalised as those of the torso are. The torso's variables have the same paths as in
    `build`. The other arguments and errors are those of `build`.
    """
    import keras

    from resnet.networks import Layers, he_normal

    torso = build(name, input_shape, dtype=dtype, seed=seed, **options)
    regularizers = (getattr(layer, "kernel_regularizer", None) for layer in torso.layers)
    logits = keras.layers.Dense(
        classes,
        kernel_initializer=he_normal(seed=Layers(seed).seed_of("logits")),
        kernel_regularizer=next(filter(None, regularizers), None),
        dtype="float32",
        name="logits",
    )(torso.output)
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(logits)
    return keras.Model(torso.input, probabilities, name=torso.name)
