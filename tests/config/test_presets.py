"""Presets: files that the package contains, that users copy, and that are read like their own files."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml
from processes import ROOT
from refusals import refusal

from tfrl.algorithms import ppo
from tfrl.algorithms.ppo import PPOAgent
from tfrl.algorithms.registry import ALGORITHMS, reader, reader_of
from tfrl.cli.settings import preset_files, read_preset

FILES = sorted((ROOT / "tfrl" / "presets").glob("*/*.yaml"))
IDS = [f"{file.parent.name}-{file.stem}" for file in FILES]
# The envs of presets that name none, where the command's default env is not for them.
ENVS = {
    **{"ppo-openai-easy": "coinrun", "ppo-openai-hard": "coinrun", "ppo-cookbook": "coinrun"},
    **{"drac-gymnasium": "made_envs:made/Pixels-v0", "daac-gymnasium": "CartPole-v1"},
    **{"ppg-gymnasium": "CartPole-v1", "impala-gymnasium": "CartPole-v1", "impact-gymnasium": "CartPole-v1"},
    **{"bc-default": "CartPole-v1", "bc-images": "catch", "iql-default": "Pendulum-v1"},
    **{"td3_bc-default": "Pendulum-v1", "cql-default": "Pendulum-v1", "cql-discrete": "CartPole-v1"},
}


def test_every_algorithm_has_presets():
    assert {file.parent.name for file in FILES} == {*ALGORITHMS, "resnet"}


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_copy_of_a_preset_given_as_config_is_the_preset(file, tmp_path):
    of, copy = reader(file.parent.name), shutil.copy(file, tmp_path / "mine.yaml")
    env = ENVS.get(f"{file.parent.name}-{file.stem}")
    where = [] if env is None else ["--env", env]
    assert of.parse([*where, "--config", str(copy)]) == of.parse([*where, "--preset", file.stem])


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_preset_has_a_summary_and_its_own_name(file):
    content = yaml.safe_load(file.read_text())
    assert (content["algorithm"], content["preset"]) == (file.parent.name, file.stem)
    found = read_preset(reader(file.parent.name).kind, file.stem)
    assert found.summary and not found.summary.startswith("algorithm")
    assert [*found.changes] == [name for name in content if name not in ("algorithm", "preset")]


def test_impalas_paper_settings_are_those_of_a_sum_over_its_batch():
    """Table G.1 (Espeholt et al. 2018): epsilon 0.01, norm 40; of a mean, both are smaller."""
    config = reader("impala").parse(["--env", "coinrun", "--preset", "paper"])
    rows = config.num_envs * config.num_steps
    assert config.adam_epsilon * rows**2 == pytest.approx(0.01)
    assert config.max_grad_norm * rows == pytest.approx(40.0)


def test_a_changed_copy_of_a_preset_wins_over_the_preset(tmp_path):
    """The rest stays that of the preset, also where a line is deleted."""
    text = (ROOT / "tfrl/presets/ppo/pendulum.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("lr: 0.001\n", "lr: 0.002\n").replace("num_steps: 64\n", ""))
    config = reader("ppo").parse(["--config", str(mine), "--num-envs", "8"])
    expected = reader("ppo").parse(["--preset", "pendulum", "--lr", "0.002", "--num-envs", "8"])
    assert config == expected and (config.lr, config.num_steps) == (0.002, 64)


class OwnPresets(PPOAgent):
    """Train PPO with presets of its own."""

    @dataclasses.dataclass(frozen=True)
    class settings(ppo.Config):  # noqa: N801
        """PPO's settings."""

        @classmethod
        def preset_folder(cls):
            return Path("presets")


def test_a_users_algorithm_may_have_presets_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("presets").mkdir()
    Path("presets/fast.yaml").write_text("# for a first try\nlr: 0.01\ntorso: auto\n")
    config = reader_of(OwnPresets).parse(["--env", "CartPole-v1"])
    assert (config.preset, config.lr, config.torso) == ("fast", 0.01, "mlp")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "# s\nalgorithm: ppo\npreset: wrong\nlrr: 0.1\n",
            "has an unknown setting 'lrr' (did you mean lr?).",
        ),
        ("# s\nalgorithm: ppo\npreset: wrong\nlr: fast\n", "must be a number; got 'fast'."),
    ],
)
def test_a_wrong_preset_file_is_refused(text, sentence, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)

    @dataclasses.dataclass(frozen=True)
    class Wrong(ppo.Config):
        @classmethod
        def preset_folder(cls):
            return tmp_path

    assert sentence in refusal(read_preset, Wrong, "wrong")


def test_the_presets_are_in_the_package():
    """Lists what setuptools takes into the wheel."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["tfrl"]
    packed = {path for pattern in patterns for path in (ROOT / "tfrl").glob(pattern)}
    assert {*FILES} <= packed
    assert {*preset_files(ppo.Config)} == {file.stem for file in FILES if file.parent.name == "ppo"}
