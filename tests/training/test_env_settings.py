"""Settings of the env itself: a run with all of them, interrupted, and its evaluations."""

import json

import pytest
from learners import train
from made_envs import made

from tfrl.algorithms import registry as settings
from tfrl.algorithms.runs import of_run
from tfrl.cli.endings import Stopped
from tfrl.experience.episodes import level_spec
from tfrl.run.session import Session
from tfrl.training.learner import env_spec

COMMAND = [
    "--env",
    made("Sized"),
    "--env-kwargs",
    '{"size": 3}',
    "--frame-skip",
    "2",
    "--max-episode-steps",
    "9",
    "--action-masks",
    "never",  # which --frame-skip needs, for an env with a mask
]
SMALL = ["--num-envs", "8", "--num-steps", "16", "--num-minibatches", "4", "--minibatch-size", "0"]
SMALL += ["--eval-episodes", "4", "--checkpoint-every", "1"]
COMMAND += ["--max-episodes", "60", "--hidden", "8", *SMALL]


def stop_at(update):
    def raise_if_stopped(session):
        if session.step >= update:
            raise Stopped(0)

    return raise_if_stopped


@pytest.mark.promise
@pytest.mark.long
@pytest.mark.parametrize("env", ["catch", "bigfish"])
def test_a_time_limit_holds_for_envs_of_any_family_and_across_a_resume(env, tmp_path, monkeypatch):
    command = ["--env", env, "--max-episode-steps", "5", "--total-steps", "512", *SMALL]
    results = []
    for name in ("whole", "parts"):
        config = settings.reader("ppo").parse([*command, "--logdir", str(tmp_path), "--run-name", name])
        if name == "parts":
            with monkeypatch.context() as patch:
                patch.setattr(Session, "raise_if_stopped", stop_at(2))
                assert train(config) == 0
        assert train(config) == 0
        results.append(json.loads((config.run_dir / "results.json").read_text()))
    whole, parts = results
    assert len(parts["resumed_at"]) == 1 and whole["weights_sha256"] == parts["weights_sha256"]
    assert whole["episodes"] == parts["episodes"] == 8 * (64 // 5)
    assert whole["eval"]["test"]["episode_length"] == whole["eval"]["train"]["episode_length"] == 5


@pytest.mark.promise
@pytest.mark.long
def test_a_run_with_env_settings_and_max_episodes_resumes_exactly(tmp_path, monkeypatch, capfd):
    reader, found = settings.reader("ppo"), {}
    for name in ("whole", "parts"):
        config = reader.parse([*COMMAND, "--logdir", str(tmp_path), "--run-name", name])
        if name == "parts":
            with monkeypatch.context() as patch:
                patch.setattr(Session, "raise_if_stopped", stop_at(2))
                assert train(config) == 0
            capfd.readouterr()
        assert train(config) == 0
        found[name] = json.loads((config.run_dir / "results.json").read_text())
        told = capfd.readouterr()
    assert "observes      float32 [3]" in told.out
    assert "3 discrete actions, 0 to 2" in told.out
    assert "training episodes have reached --max-episodes 60." in told.out
    assert 'size": 3}, each action 2 times' in told.out and "truncated after 9 steps" in told.out
    whole, parts = found.values()
    assert whole["weights_sha256"] == parts["weights_sha256"]
    assert 60 <= whole["episodes"] == parts["episodes"] < 60 + 8  # 8 envs
    assert 0 <= whole["env_steps"] - 128 * whole["updates"] < 128 and whole["env_steps"] < config.run_steps
    assert whole["eval"]["test"]["episode_length"] <= 9
    for spec in (env_spec(of_run(config.run_dir)), level_spec(of_run(config.run_dir), "test", 4)):
        assert (spec.env_kwargs, spec.frame_skip, spec.max_episode_steps) == ({"size": 3}, 2, 9)
    assert train(config) == 0 and "with a higher --max-episodes, it would continue" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["env_kwargs: {size: 3}", "env_kwargs: '{\"size\": 3}'"])
def test_keyword_arguments_in_a_file_are_a_mapping_or_json(tmp_path, text):
    file = tmp_path / "settings.yaml"
    file.write_text(f"env: {made('Sized')}\n{text}\n")
    config = settings.reader("dqn").parse(["--config", str(file)])
    assert config.env_kwargs == {"size": 3} and config.torso == "mlp"
