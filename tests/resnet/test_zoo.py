"""The model zoo: sizes, shapes, initial weights and the arithmetic of its blocks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from learners import build_actor_critic

import resnet
from benchmarks.costs import cost_of
from resnet import networks, operations
from resnet.__main__ import COSTS
from tfrl.envs.spec import ArraySpec, Discrete

ROOT = Path(resnet.__file__).parents[1]


def run_python(code: str, cwd: Path) -> str:
    """What another process prints."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def images(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, shape, dtype=np.uint8)


def part(model: keras.Model, layer: str) -> keras.Model:
    """The model up to and including `layer`."""
    return keras.Model(model.input, model.get_layer(layer).output)


def randomize(model: keras.Model) -> None:
    """Draw all variables anew, so that nothing that starts at zero or one hides a mistake."""
    random = np.random.RandomState(1)
    for variable in model.variables:
        variable.assign(random.uniform(0.05, 0.2, variable.shape))


def conv_same(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A 3 x 3 convolution of [H, W, C], pixel by pixel."""
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    out = np.empty((*x.shape[:2], kernel.shape[-1]))
    for i, j in np.ndindex(*x.shape[:2]):
        out[i, j] = np.tensordot(padded[i : i + 3, j : j + 3], kernel, 3) + bias
    return out


def max_pool_same(x: np.ndarray) -> np.ndarray:
    """TensorFlow's padded max pooling of 3 with stride 2: the larger margin is at the end."""
    sizes = [-(-n // 2) for n in x.shape[:2]]
    margins = [max(2 * (size - 1) + 3 - n, 0) for size, n in zip(sizes, x.shape[:2], strict=True)]
    padded = np.pad(x, [(m // 2, m - m // 2) for m in margins] + [(0, 0)], constant_values=-np.inf)
    out = np.empty((*sizes, x.shape[-1]))
    for i, j in np.ndindex(*sizes):
        out[i, j] = padded[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max(axis=(0, 1))
    return out


@pytest.mark.parametrize(
    ("name", "exact", "paper"),
    [
        ("resnet20", 269_722, "0.27"),
        ("resnet32", 464_154, "0.46"),
        ("resnet44", 658_586, "0.66"),
        ("resnet56", 853_018, "0.85"),
        ("resnet110", 1_727_962, "1.73"),
    ],
)
def test_cifar_parameter_counts_are_those_of_the_paper(name, exact, paper):
    count = cost_of(resnet.classifier(name, (32, 32, 3), 10)).parameters
    assert count == exact
    assert f"{count / 1e6:.2f}" == paper


def test_the_listed_costs_are_those_of_the_built_networks():
    found = {}
    for name, width in COSTS:
        with keras.StatelessScope():  # no variables: nothing is computed
            model = resnet.build(
                name, resnet.entry(name).input_shape, **({"width": width} if width > 1 else {})
            )
        cost = cost_of(model)
        found[name, width] = cost._replace(mflop=round(cost.mflop, 1))
    assert found == COSTS and {name for name, _ in COSTS} == {*resnet.ZOO}


def test_residual_networks_of_any_depth_6n_plus_2():
    assert cost_of(resnet.classifier("resnet14", (32, 32, 3), 10)).parameters == 172_506
    for name in ("resnet15", "resnet2", "resnet", "resnet020", "resnet1208"):
        with pytest.raises(ValueError, match=f"{name} is not a network of the zoo.*, such as resnet8 and "):
            resnet.entry(name)
    assert resnet.entry("resnet50").function == "imagenet"


@pytest.mark.parametrize(("name", "exact"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_imagenet_parameter_counts(name, exact):
    assert cost_of(resnet.classifier(name, (32, 32, 3), 1000)).parameters == exact


def test_impala_parameters_and_flop_are_those_of_a_hand_count():
    def conv(inputs, outputs):
        return 9 * inputs * outputs + outputs

    stages = (
        conv(3, 16) + 4 * conv(16, 16) + conv(16, 32) + 4 * conv(32, 32) + conv(32, 32) + 4 * conv(32, 32)
    )
    model = resnet.build("impala", (64, 64, 3))
    assert cost_of(model).parameters == stages + 8 * 8 * 32 * 256 + 256
    assert cost_of(model).mflop == pytest.approx(61.2, abs=0.1)
    assert cost_of(resnet.build("impala-pooled", (64, 64, 3))).parameters == stages + 32 * 256 + 256


@pytest.mark.parametrize(
    ("name", "shape", "features", "options"),
    [
        ("impala", (33, 47, 1), 256, {"width": 2}),
        ("impala-pooled", (7, 5, 3), 256, {}),
        ("nature", (36, 51, 4), 512, {}),
        ("cookbook", (13, 9, 2), 256, {}),
        ("mlp", (5,), 32, {"hidden": [16, 32]}),
        ("resnet-mini", (31, 17, 5), 64, {"normalization": "group"}),
        # Not 33 x 21: see the convolutions that read too much in docs/notebook/bfloat16.md.
        ("resnet18", (21, 33, 1), 512, {"normalization": "none"}),
        ("resnet-mini", (1, 1, 1), 64, {}),
    ],
)
def test_features_of_odd_sizes(name, shape, features, options):
    model = resnet.build(name, shape, dtype="mixed_bfloat16", **options)
    x = np.ones((2, *shape), "float32") if name == "mlp" else images(2, *shape)
    y = model(x)
    assert y.shape == (2, features)
    assert y.dtype == model.output.dtype == "float32"
    assert np.isfinite(y).all()
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}


def test_bfloat16_computes_in_bfloat16_close_to_float32():
    x = images(4, 16, 16, 3)
    full = resnet.build("impala", (16, 16, 3))
    half = resnet.build("impala", (16, 16, 3), dtype="mixed_bfloat16")
    assert half.get_layer("stage1_conv").compute_dtype == "bfloat16"
    np.testing.assert_allclose(half(x), full(x), atol=0.05 * np.abs(full(x)).max())


@pytest.mark.parametrize(
    "name",
    [
        *("impala", "impala-pooled", "nature", "cookbook", "mlp", "resnet-mini"),
        pytest.param("resnet20", marks=pytest.mark.long),
    ],
)
def test_gradients_in_bfloat16_are_those_of_float32(name):
    """Of every kernel, bias and scale, to the digits of bfloat16: TensorFlow's own of biases lose them."""
    if not operations._runs_onednn(tf.bfloat16):
        pytest.skip("a CPU without bfloat16 adds in it: gradients are up to 0.18 apart; a warning says so")
    x = np.random.RandomState(0).randn(4096, 8).astype("float32") if name == "mlp" else images(32, 64, 64, 3)
    found = []

    @tf.function(autograph=False)  # where layers have operations of their own
    def gradients(model: keras.Model) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(model(x, training=True))
        return tape.gradient(mean, [v.value for v in model.trainable_variables])

    for dtype in ("float32", "mixed_bfloat16"):
        options = {"normalization": "group"} if resnet.entry(name).normalization else {}
        model = resnet.build(name, x.shape[1:], dtype=dtype, seed=1, **options)
        found.append(gradients(model))
    for variable, full, half in zip(model.trainable_variables, *found, strict=True):
        error, size = np.linalg.norm(half - full), np.linalg.norm(full)
        assert error <= 0.03 * size, f"{variable.path}: {error} of {size}"


def test_uint8_is_scaled():
    x = images(2, 16, 16, 3)
    scaled = part(resnet.build("impala", (16, 16, 3)), "scale")(x)
    np.testing.assert_allclose(scaled, x.astype("float32") / 255.0, rtol=1e-6)


def test_impala_stage_agrees_with_numpy():
    model = resnet.build("impala", (6, 5, 3))
    randomize(model)
    weights = [np.asarray(v, "float64") for v in model.variables]
    x = images(1, 6, 5, 3)
    expected = max_pool_same(conv_same(x[0] / 255.0, *weights[0:2]))
    for first in (2, 6):
        hidden = conv_same(np.maximum(expected, 0.0), *weights[first : first + 2])
        expected = expected + conv_same(np.maximum(hidden, 0.0), *weights[first + 2 : first + 4])
    np.testing.assert_allclose(part(model, "stage1_block2_add")(x)[0], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "before", "after", "options"),
    [
        ("impala", "stage2_pool", "stage2_block1_add", {}),
        ("resnet20", "stage2_block1_relu", "stage2_block2_relu", {"normalization": "batch"}),
        ("resnet20", "stage2_block1_relu", "stage2_block2_relu", {"normalization": "group"}),
    ],
)
def test_a_residual_block_with_zero_weights_is_the_identity(name, before, after, options):
    model = resnet.build(name, (8, 8, 3), **options)
    block = after.rsplit("_", 1)[0]
    for variable in model.trainable_variables:
        if variable.path.startswith(block):
            variable.assign(np.zeros(variable.shape))
    x = images(2, 8, 8, 3)
    np.testing.assert_array_equal(part(model, after)(x), part(model, before)(x))


def test_an_unnormalized_network_starts_as_its_shortcuts():
    """Its features are means of the stem's output, every fourth pixel, and zero in the padded channels."""
    model = resnet.build("resnet56", (9, 9, 3), normalization="none")
    x = images(2, 9, 9, 3)
    stem = np.asarray(part(model, "stem_relu")(x))
    features = np.asarray(model(x))
    np.testing.assert_allclose(features[:, :16], stem[:, ::4, ::4].mean(axis=(1, 2)), rtol=1e-5)
    assert not features[:, 16:].any()


def test_strided_branches_are_centred_on_their_shortcuts():
    """A kernel of 3 with only its centre set picks the same pixels as the shortcut does."""
    model = resnet.build("resnet-mini", (8, 8, 1), normalization="none")
    conv = model.get_layer("stage2_block1_1_conv")
    centre = np.zeros(conv.kernel.shape, "float32")
    centre[1, 1] = 1.0
    conv.kernel.assign(centre)
    inner = part(model, "stage2_block1_1_conv")
    x = images(1, 8, 8, 1)
    sums = np.asarray(part(model, "stage1_block1_relu")(x)).sum(axis=-1)
    np.testing.assert_allclose(inner(x)[..., 0], sums[:, ::2, ::2], rtol=1e-5)


@pytest.mark.parametrize("name", ["impala", "nature", "resnet-mini"])
def test_weights_follow_from_the_seed_and_paths_are_unique(name):
    def build(seed: int) -> keras.Model:
        return resnet.build(name, (40, 40, 3), seed=seed)

    one, again, other = build(1), build(1), build(2)
    assert [v.path for v in one.variables] == [v.path for v in again.variables]
    assert len({v.path for v in one.variables}) == len(one.variables)
    for a, b, c in zip(one.variables, again.variables, other.variables, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not a.path.endswith("kernel") or np.abs(np.asarray(a) - np.asarray(c)).max() > 0.0


def test_layers_of_one_shape_start_differently():
    kernels = [v for v in resnet.build("impala", (8, 8, 3)).variables if v.path.endswith("kernel")]
    drawn = {np.asarray(kernel).tobytes() for kernel in kernels}
    assert len(drawn) == len(kernels)


def test_residual_kernels_begin_as_in_he_et_al_2015():
    """Normal numbers of variance 2 / fan-in (arXiv:1502.01852, eq. 10)."""
    convolutions = [
        np.asarray(layer.kernel)
        for layer in resnet.build("resnet14", (8, 8, 3), seed=3).layers
        if isinstance(layer, keras.layers.Conv2D) and layer.kernel.shape[0] == 3
    ]
    assert len(convolutions) == 13
    standard = [kernel * np.sqrt(kernel[..., 0].size / 2) for kernel in convolutions]
    assert all(abs(each.std() - 1) < 0.1 for each in standard)


@pytest.mark.long
def test_a_seed_means_the_same_in_every_process():
    code = "import resnet; print(resnet.build('mlp', (3,), seed=5).variables[0].numpy().tobytes().hex())"
    here = resnet.build("mlp", (3,), seed=5).variables[0].numpy()
    assert run_python(code, ROOT).strip() == here.tobytes().hex()


def test_kernels_are_penalised():
    model = resnet.classifier("resnet-mini", (8, 8, 3), 4, l2=0.5)
    kernels = [np.asarray(v) for v in model.trainable_variables if v.path.endswith("kernel")]
    expected = 0.5 * sum(np.square(kernel).sum() for kernel in kernels)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)
    assert not resnet.build("resnet-mini", (8, 8, 3), l2=0.0).losses


def test_classifier_gives_probabilities_and_shares_the_torsos_paths():
    x = images(3, 8, 8, 3)
    torso = resnet.build("resnet-mini", (8, 8, 3), dtype="mixed_bfloat16", seed=3)
    model = resnet.classifier("resnet-mini", (8, 8, 3), 7, dtype="mixed_bfloat16", seed=3)
    probabilities = model(x)
    assert probabilities.dtype == model.get_layer("logits").compute_dtype == "float32"
    np.testing.assert_allclose(np.sum(probabilities, axis=-1), 1.0, rtol=1e-6)
    assert [v.path for v in model.variables][: len(torso.variables)] == [v.path for v in torso.variables]
    np.testing.assert_array_equal(part(model, "features")(x), torso(x))


def test_a_saved_model_loads_without_this_package(tmp_path):
    model = resnet.classifier("resnet-mini", (8, 8, 3), 3, normalization="group")
    randomize(model)
    model.save(tmp_path / "model.keras")
    x = images(2, 8, 8, 3)
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, keras, numpy\n"
        "model = keras.models.load_model('model.keras')\n"
        "assert 'resnet' not in sys.modules\n"
        "numpy.save('y.npy', model(numpy.load('x.npy')))\n"
    )
    run_python(code, tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model(x), rtol=1e-6)


def test_no_agent_is_built_with_what_ppo_refuses():
    specs = {"observation_spec": ArraySpec((8, 8, 3), "uint8"), "action_spec": Discrete(2)}
    with pytest.raises(ValueError, match="has state besides its trained weights"):
        build_actor_critic(torso="resnet-mini", torso_options={"normalization": "batch"}, **specs)
    build_actor_critic(torso="resnet-mini", torso_options={}, **specs)


@pytest.mark.parametrize("normalization", ["group", "none"])
def test_what_ppo_accepts_does_not_mix_images(normalization):
    model = resnet.build("resnet-mini", (8, 8, 3), normalization=normalization)
    randomize(model)
    x = images(4, 8, 8, 3)
    np.testing.assert_allclose(model(x, training=True)[:1], model(x[:1], training=False), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet201", (8, 8, 3), {}, "did you mean resnet20"),
        ("nature", (35, 64, 3), {}, "at least 36 x 36 pixels, not 35 x 64"),
        ("impala", (12,), {}, "takes no vectors"),
        ("mlp", (8, 8, 3), {}, "takes no images"),
        ("resnet20", (8, 8, 3), {"normalization": "layer"}, "one of batch, group, none, not 'layer'"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(name, shape, options, message):
    with pytest.raises(ValueError, match=message):
        resnet.build(name, shape, **options)


@pytest.mark.parametrize("name", resnet.ZOO)
def test_the_zoo_knows_each_networks_options_before_it_is_built(name):
    entry = resnet.entry(name)
    function = getattr(networks, entry.function)
    parameters = inspect.signature(function).parameters
    assert entry.has_width == ("width" in parameters)
    default = parameters["normalization"].default if "normalization" in parameters else ""
    assert entry.normalization == default


def test_names_are_known_without_tensorflow():
    code = (
        "import sys, resnet\n"
        "assert resnet.entry('resnet20').normalization == 'batch'\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)\n"
    )
    run_python(code, ROOT)


def test_kerass_image_data_format_changes_no_network():
    """In a process of its own, because the format is Keras's, as ~/.keras/keras.json may set it."""
    code = (
        "import numpy, keras, resnet\n"
        "x = numpy.random.RandomState(0).randint(0, 256, (2, 40, 36, 3), dtype=numpy.uint8)\n"
        "for name in ('impala', 'nature', 'resnet-mini'):\n"
        "    found = []\n"
        "    for order in ('channels_last', 'channels_first'):\n"
        "        keras.config.set_image_data_format(order)\n"
        "        found.append(resnet.classifier(name, x.shape[1:], 4, seed=1)(x).numpy())\n"
        "        assert keras.config.image_data_format() == order\n"
        "    assert numpy.array_equal(*found), name\n"
    )
    run_python(code, ROOT)
