"""`python -m tfrl.env ENV`: facts, what tfrl makes of an env, a check, and the exit codes."""

import re

import formed_envs
import made_envs
import numpy as np
import pytest
from gymnasium import spaces

from tfrl import env as command
from tfrl.__main__ import COMMANDS, main
from tfrl.cli.errors import UserError
from tfrl.envs import registry
from tfrl.envs.checking import silent_faults
from tfrl.envs.spec import EnvSpec

FAST = ["--steps", "60"]


def rows(text):
    """The rows of the tables."""
    pairs = (re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_an_env_is_described_and_checked(capsys):
    assert command.main(["CartPole-v1", "--steps", "400", "--max-episode-steps", "100"]) == 0
    text = capsys.readouterr().out
    found = rows(text)
    assert found["observes"] == "float32 [4]" and found["takes"] == "2 discrete actions, 0 to 1"
    assert found["time limit"] == "100 steps" and found["action masks"] == "none"
    assert found["algorithms"] == "ppo, daac, ppg, impala, impact, dqn, sac, reinforce, bc, iql, cql"
    assert found["network of ppo"].startswith("mlp of 64,64")
    assert found["resumes exactly"] == "yes" and found["rewards"] == "1 to 1 a step"
    assert re.match(r"\d+ of \d+ to \d+ steps", found["episodes"])
    assert text.endswith("The check has found no fault.\n")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ("catch", {"network of ppo": "impala, by --preset openai-easy", "level sets": "train, test"}),
        ("formed_envs:make_stack", {"observes": "uint8 [20, 24, 12] from uint8 [4, 20, 24, 3]"}),
        ("formed_envs:MaskInside", {"action masks": 'from observation["action_mask"]'}),
        ("formed_envs:make_masked_below", {"action masks": "from action_masks()", "time limit": "7 steps"}),
        ("formed_envs:make_table", {"takes": "4 choices at once, of 2, 3, 4, 2 values, as [2, 2]"}),
        ("formed_envs:make_global", {"resume": "begins new episodes", "resumes exactly": "no"}),
    ],
)
def test_what_tfrl_makes_of_an_env_is_told(env, expected, capsys):
    assert command.main([env, *FAST]) == 0
    found = rows(capsys.readouterr().out)
    assert all(found[name].startswith(text) for name, text in expected.items()), found


def test_a_warning_gives_2_only_with_strict(capsys):
    assert command.main(["formed_envs:make_wide", *FAST]) == 0
    text = capsys.readouterr().out
    assert "\nwarning: actions go from -10000 to 10000" in text
    assert "note: no episode has ended in 60 steps" in text
    assert command.main(["formed_envs:make_wide", "--strict", *FAST]) == 2
    assert command.main(["made_envs:made/Unseeded-v0", "--strict", "--steps", "200"]) == 2
    assert "warning: the same seed and actions do not give the same steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["Mine-v0"], "there is no env 'Mine-v0'"),
        ([], "give one env, got none; usage: python -m tfrl.env ENV"),
        (["made_envs:made/late-step-raises-v0", "--steps", "400"], "RuntimeError: the motor is on fire"),
        (["formed_envs:ZeroPart"], "forbids every value of part 1"),
        (["CartPole-v1", "--action-masks", "must"], "--action-masks must needs"),
        (["CartPole-v1", "--env-kwargs", "3"], "--env-kwargs must be a JSON object"),
    ],
)
def test_an_env_that_cannot_be_trained_on_gives_a_one_sentence_error(arguments, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        command.main(arguments)
    assert "\n" not in str(caught.value)


class Doubtful(made_envs.Hidden):
    """Has a fault that ends no run."""

    def __init__(self, fault):
        self.fault = fault
        large = np.float64(1e12 if fault == "digits" else 9)
        self.observation_space = spaces.Dict(place=spaces.Box(-large, large, (2,), np.float64))

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if self.fault == "seed" else seed)

    def step(self, action):
        shown, reward, _, _, info = super().step(action)
        ended = self.time == 20
        return shown, reward, ended, False, {"TimeLimit.truncated": ended and self.fault == "limit"}

    def show(self):
        place = {"outside": np.array([0, 10 * self.time]), "digits": np.array([0, 1e9 + 1])}
        return {"place": place.get(self.fault, np.array([np.tanh(self.place), 0]))} | (
            {"more": 1} if self.fault == "key" else {}
        )


DOUBTS = {
    "none": [],
    "seed": ["reset(seed=...) shows other observations for the same seed"],
    "outside": ["observation place is outside the bounds of its observation_space"],
    "digits": ["observation place has numbers beyond 16,777,216, which lose digits as float32"],
    "key": ["an observation has the key 'more', which its observation_space does not have"],
    "limit": ['episodes that a time limit ends, by info["TimeLimit.truncated"], count as terminated'],
}


@pytest.mark.parametrize("fault", DOUBTS)
def test_faults_that_end_no_run_are_found(fault):
    task = EnvSpec(registry.name_of(lambda: Doubtful(fault)), num_envs=1, seed=1)
    found = silent_faults(task, 50, seed=1)
    assert len(found) == len(DOUBTS[fault])
    assert all(one.startswith(text) for one, text in zip(found, DOUBTS[fault], strict=True)), found


def test_a_generator_that_is_used_late_is_found():
    class Late(formed_envs.Shown):
        def step(self, action):
            if self.time == 5:
                np.random.rand()
            return super().step(action)

    name = registry.name_of(lambda: Late(spaces.Box(-1, 1, (2,), np.float32)))
    (found,) = silent_faults(EnvSpec(name, num_envs=1, seed=1), 50, seed=1)
    assert found.startswith("the env draws from np.random at some steps")


def test_the_command_is_listed(capsys):
    assert "tfrl.env" in COMMANDS and main([]) == 0
    assert "python -m tfrl.env ENV: describe an env" in capsys.readouterr().out
