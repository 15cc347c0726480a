"""Gymnasium envs that fail or give what nothing can be learned from: one sentence, wherever it happens."""

import re
import sys
from pathlib import Path

import gymnasium
import made_envs
import numpy as np
import pytest
from made_envs import play, vector
from processes import Answer, Training

from tfrl.cli import endings
from tfrl.cli.errors import EnvError
from tfrl.envs import callables
from tfrl.envs.facts import find_facts
from tfrl.envs.gymnasium import GymnasiumVec
from tfrl.envs.spec import EnvSpec
from tfrl.envs.subprocesses import SubprocessVecEnv

HERE = Path(made_envs.__file__)


def sentence(name, steps=80):
    """What the first `steps` steps of two such envs end with; they never begin if that is found before."""
    with pytest.raises(EnvError) as caught:
        play(vector(f"made_envs:made/{name}-v0", [0, 1]), steps)
    said = str(caught.value)
    assert said.startswith(f"made_envs:made/{name}-v0 ") and "\n" not in said and len(said) < 300
    return said


def line_of(text):
    """The line of made_envs.py that has `text`, as FILE:LINE."""
    lines = HERE.read_text().splitlines()
    return f"{HERE}:{1 + next(n for n, line in enumerate(lines) if text in line)}"


# By the fault of `made_envs.Faulty`, what is said of it.
FAULTS = {
    "step-raises": "raised RuntimeError: the motor is on fire, in step(action)",
    "reset-raises": "raised RuntimeError: the motor is on fire, in reset(seed=..., options=...)",
    "step-library": "raised JSONDecodeError: Expecting property name",
    "step-quits": "raised SystemExit: 0, in step(action)",
    "reset-bare": "raised TypeError: ",
    "reset-none": "raised TypeError: cannot unpack non-iterable NoneType object, in reset(",
    "reset-unseeded": "unexpected keyword argument 'seed', in reset(seed=..., options=...)",
    "step-four": "raised ValueError: not enough values to unpack (expected 5, got 4), in step(action)",
    "reward-none": "raised TypeError: float() argument must be a string or a real number, not 'NoneType'",
    "reward-two": "raised TypeError: ",
    "info-none": "raised TypeError: 'NoneType' object is not iterable, in step(action)",
    "shape-short": "shows an observation of float64 [1] where its observation_space says numbers [2]",
    "shape-long": "shows an observation of float64 [3] where its observation_space says numbers [2]",
    "shown-none": "shows an observation of None where its observation_space says numbers [2]",
    "reward-nan": "gave a reward that is not a number (NaN)",
    "reward-large": "gave a reward that is infinite, or too large for float32",
    "reward-inf": "gave a reward that is infinite, or too large for float32",
    "shown-nan": "gave an observation that is not a number (NaN)",
    "shown-inf": "gave an observation that is infinite, or too large for float32",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_from_the_start_is_found_by_the_settings_check(fault):
    """Before TensorFlow is imported, or an actor is started."""
    with pytest.raises(EnvError, match=re.escape(FAULTS[fault])):
        find_facts(f"made_envs:made/{fault}-v0")


# Those that a step cannot tell from others when an env begins with them later, or has them from its class.
LATER = FAULTS.keys() - {"reset-unseeded"}
LATER_WORDS = {
    "reset-bare": "shows an observation of float64 []",
    "reward-none": "gave a reward that is not a number (NaN)",
    "reward-two": "raised ValueError: setting an array element with a sequence",
    "info-none": "raised TypeError: argument of type 'NoneType' is not iterable",
}


@pytest.mark.parametrize("fault", sorted(LATER))
def test_a_fault_late_in_training_gives_a_one_sentence_error(fault):
    assert LATER_WORDS.get(fault, FAULTS[fault]) in sentence(f"late-{fault}")


def test_the_line_of_the_envs_own_code_is_named():
    assert sentence("late-step-raises").endswith(f"({line_of('the motor is on fire')})")
    assert sentence("late-step-library").endswith(f"({line_of('json.loads(chr(123))')})")


@pytest.mark.parametrize("name", ["failing_import:Own", "failing_import:Own-v0"])
def test_the_line_that_fails_at_the_import_of_a_users_module_is_named(tmp_path, monkeypatch, name):
    path = tmp_path / "failing_import.py"
    path.write_text("import json\n\njson.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="JSONDecodeError: Expecting property name") as caught:
        find_facts(name)
    assert str(caught.value).endswith(f" ({path}:3)")
    path.write_text("raise AttributeError('gone')  # of another size, so that it is read again\n")
    with pytest.raises(ValueError, match=re.escape(f"AttributeError: gone) ({path}:1)")):
        callables.find("failing_import:Own")


@pytest.mark.parametrize("name", ["noisy_import:Own", "noisy_import:CartPole-v1"])
@pytest.mark.parametrize("imports", ["import tensorflow", "from keras import layers"])
def test_a_users_module_that_imports_tensorflow_prints_only_its_own_lines(
    tmp_path, monkeypatch, capfd, name, imports
):
    """Stand-ins for TensorFlow and Keras write TensorFlow's first line to the stderr of C++ code."""
    line = b"I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on\n"
    (tmp_path / "tensorflow.py").write_text(f"import os\nos.write(2, {line!r})\n")
    (tmp_path / "keras.py").write_text("import tensorflow\nlayers = None\n")
    made = f"import gymnasium, os\n{imports}\ndef Own(): return gymnasium.make('CartPole-v1')\n"
    (tmp_path / "noisy_import.py").write_text(f"{made}os.write(2, {line + line!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("tensorflow", "keras"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    find_facts(name)
    assert sys.modules.pop("noisy_import") and capfd.readouterr().err == 2 * line.decode()


@pytest.mark.parametrize("limit", [None, 50])
def test_a_time_limit_hides_no_fault(limit):
    gymnasium.register(
        f"made/limited-{limit}-v0", made_envs.Faulty, max_episode_steps=limit, kwargs={"fault": "step-four"}
    )
    with pytest.raises(EnvError, match="expected 5, got 4"):
        find_facts(f"made/limited-{limit}-v0")


@pytest.mark.parametrize(
    ("shown", "what"),
    [(np.zeros((8, 6, 3)), "float64 [8, 6, 3]"), (np.full((8, 6, 3), 300), "int64 [8, 6, 3]")],
)
def test_an_image_that_a_cast_would_wrap_is_refused(shown, what, monkeypatch):
    monkeypatch.setattr(made_envs.Spaced, "show", lambda self: shown)
    monkeypatch.setattr(made_envs.Spaced, "step", lambda self, action: (shown, 0.0, False, False, {}))
    with pytest.raises(EnvError, match=re.escape(f"{what} where its observation_space says uint8")):
        find_facts("made_envs:made/Pixels-v0")


def test_observations_of_any_number_type_are_accepted():
    """Lists, and ints or float64 where float32 was declared, lose nothing; large numbers are finite."""
    env = vector("made_envs:made/Lists-v0", [0, 1])
    assert [list(row) for row in play(env, 3)[-1].observation] == [[3.0, 1e9]] * 2


def test_a_replayed_episode_that_fails_gives_a_one_sentence_error(monkeypatch):
    env = vector("made_envs:made/Hidden-v0", [0])
    play(env, 5)
    state = env.get_state()

    def step(self, action):
        raise RuntimeError("gone")

    monkeypatch.setattr(made_envs.Hidden, "step", step)
    env = vector("made_envs:made/Hidden-v0", [0])
    with pytest.raises(EnvError, match="raised RuntimeError: gone, in step"):
        env.set_state(state)


def test_faults_in_a_separate_process_are_reported_equally(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    name = "made_envs:made/late-step-raises-v0"
    env = SubprocessVecEnv(GymnasiumVec, EnvSpec(name, num_envs=1, seed=1), [0])
    with pytest.raises(EnvError, match="the motor is on fire"):
        play(env, 80)
    env.close()
    with pytest.raises(EnvError, match="in reset"):
        SubprocessVecEnv(GymnasiumVec, EnvSpec("made_envs:made/reset-raises-v0", num_envs=1, seed=1), [0])


def test_a_signal_that_comes_in_a_step_is_no_fault_of_the_env(monkeypatch):
    monkeypatch.setattr(endings.OURS, "first", 15)
    with pytest.raises(SystemExit):
        find_facts("made_envs:made/step-quits-v0")


def test_spaces_that_are_missing_give_a_one_sentence_error():
    gymnasium.register("made/spaceless-v0", type("Spaceless", (gymnasium.Env,), {}))
    with pytest.raises(ValueError, match="made/spaceless-v0 shows a NoneType"):
        find_facts("made/spaceless-v0")


def test_a_run_ends_with_one_sentence_that_says_what_is_kept(tmp_path, monkeypatch):
    """The env fails in the second update; faults at the start are found before TensorFlow is imported."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    name = "made_envs:made/late-step-raises-v0"
    size = (
        "--num-envs",
        8,
        "--num-steps",
        16,
        "--num-minibatches",
        4,
        "--checkpoint-every",
        1,
        "--eval-every",
        0,
    )
    run = Training(tmp_path / "run", "--env", name, *size)
    code, _, stderr = run.end()
    assert code == 1 and stderr == (
        f"error: {name} raised RuntimeError: the motor is on fire, in step(action) "
        f"({line_of('the motor is on fire')}); the checkpoint of update 1 is kept\n"
    )
    answer = Answer("--env", "made_envs:made/reset-none-v0", *size, "--logdir", tmp_path)
    assert (answer.code, answer.stdout) == (2, "TensorFlow imported: False\n")
    assert answer.stderr.startswith("error: made_envs:made/reset-none-v0") and answer.stderr.count("\n") == 1
