"""Observations of several arrays: packed into rows, taken apart again, and refused where they do not fit."""

import dataclasses
import keyword
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from made_envs import play, vector
from packed_envs import ALONE, PLACES, drawn, named, packed

from tfrl.algorithms import registry as settings
from tfrl.cli.errors import EnvError
from tfrl.envs import callables, observations, registry
from tfrl.envs.calls import checked_mask
from tfrl.envs.facts import find_facts
from tfrl.envs.making import observation_spec
from tfrl.envs.spec import EnvSpec
from tfrl.networks.entrance import Entrance, own_torso

WHOLE = spaces.Dict(PLACES)
VECTORS = spaces.Dict({key: space for key, space in PLACES.items() if key != "pixels"})


def flattened(shown):
    """Gymnasium's own encoding of the parts of PLACES, in our order: numbers, choices, flags."""
    arm, pair, order = (shown[key] for key in ("arm", "pair", "order"))
    encoded = [np.ravel(arm["angles"]), [pair[1]]]
    encoded += [spaces.flatten(PLACES["arm"]["grip"], arm["grip"])]
    encoded += [spaces.flatten(PLACES["pair"][0], pair[0]), arm["on"], observations.word_flags(order)]
    return np.concatenate(encoded).astype(np.float32)


@pytest.mark.parametrize("space", [WHOLE, VECTORS], ids=["bytes", "floats"])
def test_unpacking_a_row_gives_the_original_observation(space):
    spec = observation_spec("It-v0", space).with_mask(6)
    generator, pack = np.random.default_rng(0), observations.Packer(spec)
    shown = [drawn(space, generator) for _ in range(20)]
    masks = generator.integers(2, size=(20, 6))
    rows = np.stack([pack(one, mask) for one, mask in zip(shown, masks, strict=True)])
    assert rows.dtype == spec.dtype == ("uint8" if space is WHOLE else "float32")
    parts = named(spec, rows)
    np.testing.assert_array_equal(parts["arm_grip"], [one["arm"]["grip"] for one in shown])
    np.testing.assert_array_equal(parts["pair_0"], [one["pair"][0] for one in shown])
    np.testing.assert_array_equal(parts["pair_1"], [one["pair"][1] for one in shown])
    np.testing.assert_array_equal(parts["arm_on"], [one["arm"]["on"] for one in shown])
    np.testing.assert_array_equal(parts["arm_angles"], np.float32([one["arm"]["angles"] for one in shown]))
    np.testing.assert_array_equal(spec.allowed(rows), masks != 0)
    np.testing.assert_array_equal(spec.numbers(rows)[:, -1], [one["pair"][1] for one in shown])
    expected = np.stack([flattened(one) for one in shown])
    *images, found = Entrance(spec).inputs(tf.constant(rows))
    np.testing.assert_array_equal(found, expected)
    assert spec.vector_size == expected.shape[1]
    if space is WHOLE:
        np.testing.assert_array_equal(parts["pixels"], [one["pixels"] for one in shown])
        np.testing.assert_array_equal(images[0], np.moveaxis(parts["pixels"], 1, -1))
    else:
        np.testing.assert_array_equal(spec.vectors(rows), expected)
    as_shown = [tf.constant(parts[spec.identifiers[part]]) for part in spec.parts]
    np.testing.assert_array_equal(Entrance(spec).rows(as_shown), rows)


@pytest.mark.parametrize("name", ALONE)
def test_an_env_of_any_space_repeats_and_resumes_exactly(name):
    ours = vector(packed(name), range(2))
    played = play(ours, 40)
    spec, states = ours.observation_spec, ours.get_state()
    assert spec.parts
    again = vector(packed(name), range(2), seed=9)
    again.set_state(states)
    assert again.exact_state
    for expected, found in zip(play(ours, 30, seed=1), play(again, 30, seed=1), strict=True):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
    for key, array in named(spec, played[-1].observation).items():
        if name == "Discrete":
            assert key == "observation" and {*array.tolist()} <= {3, 4, 5, 6}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arm": None}, "None where its observation_space says a Dict or Tuple, in arm/angles"),
        ({"pair": (np.array([0, 4]), 1)}, "[0 4], which its observation_space does not have, in pair/0"),
        (
            {"pair": (np.array([0, 1]),)},
            "a value of type tuple where its observation_space says a Dict or Tuple",
        ),
        ({"order": 3}, "int64 [] where its observation_space says a text, in order"),
        (
            {"pixels": np.zeros((12, 12, 3), np.uint8)},
            "uint8 [12, 12, 3] where its observation_space says uint8",
        ),
        ({"pixels": np.zeros((3, 12, 12))}, "float64 [3, 12, 12] where its observation_space says uint8"),
    ],
)
def test_an_observation_outside_its_space_gives_a_one_sentence_error(changes, sentence):
    pack = observations.Packer(observation_spec("It-v0", WHOLE))
    with pytest.raises(ValueError) as error:
        pack(drawn(WHOLE, np.random.default_rng(0)) | changes)
    assert sentence in str(error.value)


def test_numbers_that_are_not_finite_are_refused():
    pack = observations.Packer(observation_spec("It-v0", WHOLE))
    shown = drawn(WHOLE, np.random.default_rng(0))
    shown["arm"]["angles"][0, 1] = np.nan
    with pytest.raises(ValueError, match="not finite, or too large for float32, in arm/angles"):
        pack(shown)


def test_a_mask_is_checked():
    spec, name = find_facts(packed("Masked")).action, 'info["action_mask"]'
    assert checked_mask("It-v0", [0, 1.0, 0, 0, True], name, spec).tolist() == [0, 1, 0, 0, 1]
    for mask, sentence in (
        (None, 'gives no info["action_mask"], but gave one at its first reset'),
        (np.zeros(5), 'forbids every action in its info["action_mask"]'),
        (np.ones(4), 'gives info["action_mask"] of 4 flags, but its actions need 5'),
        ([0, 1, 2, 3, 4], 'gives info["action_mask"] with other numbers than 1 for allowed and 0 for'),
        ([0, 0, -np.inf, 0, 0], "with other numbers than 1 for allowed and 0 for forbidden actions"),
    ):
        with pytest.raises(EnvError, match=re.escape(sentence)):
            checked_mask("It-v0", mask, name, spec)
    many = find_facts(packed("MaskedMany")).action
    with pytest.raises(EnvError, match="forbids every value of part 1 of the action in its action_masks"):
        checked_mask("It-v0", (np.ones(3), np.zeros(4)), "action_masks()", many)
    assert checked_mask("It-v0", None, name, many, ends=True).all()


def test_the_default_torso_follows_from_the_observations():
    for name, torso in (("Dict", "impala"), ("Matrix", "mlp"), ("Discrete", "mlp")):
        config = settings.reader("ppo").parse(["--env", packed(name)])
        assert config.torso == torso
    spec = registry.specs(EnvSpec(packed("Dict"), num_envs=1, seed=1))[0]
    assert spec == dataclasses.replace(spec) and hash(spec) == hash(dataclasses.replace(spec))


def test_each_array_has_an_identifier_of_its_own():
    keys = ("arm", "Q", "a b", "a_b", "A-B", "a_b_1", "q", "self", "Self", "_x", "of_x", "höhe", "h he")
    keys += ("class", "true", "action_mask", "")
    parts = {key: observations.Part((key,), observations.NUMBERS, (), "float32") for key in keys}
    spec = observations.ArraySpec.of_parts(list(parts.values())).with_mask(3)
    names = list(spec.identifiers.values())
    assert len({name.lower() for name in names}) == len(spec.parts) == len(keys) + 1
    for name in names:
        assert re.fullmatch(r"[a-zA-Z]\w*", name, re.ASCII) and not keyword.iskeyword(name)
        assert name != "self"
    assert names[:4] == ["arm", "Q", "a_b", "a_b_1"] and names[-1] == "action_mask_1"
    plain = observation_spec("It-v0", WHOLE)
    assert {part.name.replace("/", "_") for part in plain.parts} == {*plain.identifiers.values()}


def test_an_own_network_gets_all_arrays_of_keys_that_resemble_each_other():
    shapes = {}

    def network(inputs):
        shapes.update({name: x.shape for name, x in inputs.items()})
        return keras.layers.Concatenate()(list(inputs.values()))

    space = spaces.Dict({"a b": spaces.Box(-1, 1, (2,)), "a_b": spaces.Discrete(3)})
    spec = observation_spec("It-v0", space)
    model = own_torso(callables.give(network), spec, precision="float32", seed=1)
    assert shapes == {"a_b": (None, 2), "a_b_1": (None, 3)} and model.output_shape == (None, 5)
