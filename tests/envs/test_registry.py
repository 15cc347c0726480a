"""What is known of the games before any is made: checked against procgen's own lists, and the envs.

Also the names of callables.
"""

import ast
import functools
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from packed_envs import packed

from tfrl.algorithms.ppo import Config
from tfrl.config.run import Task
from tfrl.envs import callables, registry
from tfrl.envs.spec import EnvSpec


class Maker:
    """Stands for what makes envs."""

    def __init__(self, mass):
        self.mass = mass

    def __call__(self):
        return self.mass

    def make(self):
        return self.mass

    @classmethod
    def create(cls):
        return cls


class Hard(Maker):
    pass


def local(mass):
    def make():
        return mass

    return make


LOCAL = {  # makers of callables, which return the given number
    "code": lambda mass: (lambda: 1, lambda: 2, lambda: 3)[mass - 1],
    "closure": lambda mass: lambda: mass,
    "default": lambda mass: lambda mass=mass: mass,
    "keyword": lambda mass: lambda *, mass=mass: mass,
    "array": lambda mass: (lambda values: lambda: int(values[1]))(np.array([0, mass])),
    "inner": lambda mass: (lambda make: lambda: make())(local(mass)),
    "function": local,
    "object": Maker,
    "method": lambda mass: Maker(mass).make,
    "partial": lambda mass: functools.partial(local(mass)),
}


def procgen_constant(name: str):
    """A constant of procgen/env.py, read without importing it."""
    package = Path(importlib.util.find_spec("procgen").origin).parent
    for node in ast.parse((package / "env.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def test_the_games_are_procgens():
    assert list(registry.games()) == procgen_constant("ENV_NAMES")
    assert {"catch", *registry.games()} <= {*registry.env_names()}


def test_exploration_is_where_procgen_has_it():
    having = {game for game in registry.games() if "exploration" in registry.distribution_modes(game)}
    assert having == set(procgen_constant("EXPLORATION_LEVEL_SEEDS"))


@pytest.mark.parametrize("env", (*registry.games(), "catch"))
def test_modes_are_procgens_and_begin_with_easy_and_hard(env):
    modes = registry.distribution_modes(env)
    assert modes[:2] == ("easy", "hard")
    assert set(modes) <= set(procgen_constant("DISTRIBUTION_MODE_DICT"))


@pytest.mark.parametrize("family", registry.FAMILIES.values(), ids=registry.FAMILIES)
def test_specs_of_a_family_equal_those_of_its_envs(family):
    name = (*family.names, "CartPole-v1")[0]
    env = registry.make(EnvSpec(name, num_envs=2, seed=1))
    assert (env.observation_spec, env.action_spec) == registry.specs(Task(name))
    shown = env.observe().observation
    assert (shown.shape, shown.dtype) == ((2, *env.observation_spec.shape), env.observation_spec.dtype)
    env.close()


@pytest.mark.parametrize("name", ["pong", ""])
def test_unknown_names_raise_an_error(name):
    with pytest.raises(ValueError, match=f"{name!r}"):
        registry.make(EnvSpec(name, num_envs=1, seed=0))


@pytest.mark.parametrize("env", ["coinrun", "catch"])
@pytest.mark.parametrize("setting", [{"env_kwargs": {"size": 3}}, {"frame_skip": 2}])
def test_settings_of_gymnasiums_envs_are_refused_for_other_envs(env, setting):
    flag = next(iter(setting)).replace("_", "-")
    with pytest.raises(ValueError, match=f"--{flag} is for Gymnasium's envs, and {env} is not one"):
        registry.check(Task(env, **setting))


def test_a_game_is_of_one_family():
    assert len({*registry.env_names()}) == len(registry.env_names())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("CartPole", "CartPole-v1"), ("cartpole", "CartPole-v1"), ("Walker2d", "Walker2d-v5")),
        *(
            ("CartPole-v1 ", "CartPole-v1"),
            (" CartPole-v1", "CartPole-v1"),
            ("CartPole-v1?x=1", "CartPole-v1"),
        ),
        *(("Hopper-v4\n", "Hopper-v4"), ("Hopper-v3 ", "Hopper-v5"), ("Humanoid-v5-v5x", "Humanoid-v5")),
        *(("coinrum", "coinrun"), ("CoinRun", "coinrun"), ("Pendulun", "Pendulum-v1"), ("cach", "catch")),
        ("Cart\nPole", "CartPole-v1"),
    ],
)
def test_an_unknown_name_is_compared_with_games_and_ids(typed, meant):
    with pytest.raises(ValueError) as error:
        registry.check(Task(typed))
    assert f"there is no env {typed!r} (did you mean {meant}?)" in str(error.value)


def test_no_suggestion_for_a_name_that_resembles_none():
    with pytest.raises(ValueError, match="^there is no env 'xqzzy'; known: bigfish"):
        registry.check(Task("xqzzy"))


def test_file_names_have_no_special_characters_of_paths_or_shells():
    names = ("catch", "CartPole-v1", "dm_control/cartpole-swingup-v0", "module.of:ns/Name-v0")
    files = ("catch", "CartPole-v1", "dm_control-cartpole-swingup-v0", "module.of-ns-Name-v0")
    assert tuple(map(registry.file_name, names)) == files
    assert Config(env=names[-1]).default_run_name == "module.of-ns-Name-v0-seed1"


@pytest.mark.parametrize("kind", LOCAL.values(), ids=LOCAL)
def test_local_callables_that_differ_have_different_names(kind, monkeypatch):
    """The same one, or one made again with equal code and values, keeps its name."""
    monkeypatch.setattr(callables, "_given", {})
    one, two = kind(1), kind(2)
    given = [one, two, one, kind(1), kind(2), kind(3), two]
    plain, *names = map(callables.give, given)
    assert names == [plain + number for number in ("(2)", "", "", "(2)", "(3)", "(2)")]
    assert [callables.find(name)() for name in (plain, *names)] == [1, 2, 1, 1, 2, 3, 2]
    for name in (plain, *names):
        assert callables.is_name(name) and not callables.is_importable(name)


def test_a_class_that_is_made_again_keeps_its_name(monkeypatch):
    """As in a notebook, whose cell is run again after an interruption."""
    monkeypatch.setattr(callables, "_given", {})

    def cell():
        class Mine(Maker):
            pass

        return Mine, lambda: Mine(1), Mine(1)

    assert list(map(callables.give, cell())) == list(map(callables.give, cell()))


def test_an_importable_callable_keeps_its_name(monkeypatch):
    def reloaded(mass):
        return mass

    reloaded.__qualname__ = "local"
    assert callables.give(math.sqrt) == "math:sqrt"
    for given, name in (
        *((local, "local"), (reloaded, "local"), (Maker, "Maker")),
        *((Maker.create, "Maker.create"), (Hard.create, "Hard.create")),
    ):
        assert callables.give(given) == f"test_registry:{name}"
        assert callables.find(f"test_registry:{name}") == given
    monkeypatch.setattr(callables, "_given", {})  # as in another process
    assert callables.find("test_registry:Hard.create")() is Hard


def test_a_skip_of_frames_with_an_action_mask_is_refused():
    with pytest.raises(ValueError) as error:
        registry.check(Task(packed("Masked"), frame_skip=2))
    sentence = f"--frame-skip 2 would repeat actions that the action mask of {packed('Masked')} forbids"
    assert str(error.value).startswith(sentence) and ". " not in str(error.value)
    for settings in ({"frame_skip": 2, "action_masks": "never"}, {"frame_skip": 1}):
        registry.check(Task(packed("Masked"), **settings))
