"""Names of settings in stable-baselines3, CleanRL, RLlib, TorchRL, TF-Agents, JoyRL and others get a hint."""

import pytest
from refusals import refusal

import tfrl
from tfrl.algorithms.registry import ALGORITHMS, reader
from tfrl.cli import other_systems

JOYRL = """
general_cfg:
  algo_name: DQN
  env_name: gym
  device: cpu
  mode: train
  load_checkpoint: false
  max_steps: 200
  seed: 1
algo_cfg:
  value_layers:
    - layer_type: linear
      layer_size: [256]
      activation: relu
  batch_size: 64
  buffer_size: 100000
  epsilon_decay: 500
  gamma: 0.95
  lr: 0.0001
  target_update: 4
env_cfg:
  id: CartPole-v1
  new_step_api: true
"""


@pytest.mark.parametrize(
    ("algorithm", "given", "hint"),
    [
        ("ppo", "--timesteps", "(did you mean --total-steps?)"),
        ("ppo", "--total_timesteps", "(did you mean --total-steps?)"),
        ("ppo", "--clip-epsilon", "(did you mean --clip-ratio?)"),
        ("ppo", "--num_workers", "(did you mean --actors?)"),
        ("reinforce", "--num_workers", "(did you mean --observers?)"),
        ("ppo", "--gpu-id", "(did you mean --device gpu:NUMBER?)"),
        ("ppo", "--thread_num", "(did you mean --threads?)"),
        ("ppo", "--ent-coef", "(did you mean --entropy-coef?)"),
        ("sac", "--ent-coef", "(did you mean --alpha?)"),
        ("ppo", "--vf_coef", "(did you mean --value-coef?)"),
        ("ppo", "--n-steps", "(did you mean --num-steps?)"),
        ("ppo", "--batch-size", "(did you mean --minibatch-size?)"),
        ("sac", "--buffer-size", "(did you mean --replay-size?)"),
        ("dqn", "--epsilon-decay", "(did you mean --exploration-steps?)"),
        ("ppo", "--buffer-size", "(other commands have --replay-size)"),
        ("ppo", "--learning-starts", "(other commands have --learning-starts)"),
        ("ppo", "--lambda-value", "(did you mean --gae-lambda?)"),
        ("dqn", "--target_update_period", "(did you mean --target-every?)"),
        ("sac", "--use-sde", "(leave it out: tfrl has no such setting)"),
        ("sac", "--render", "(use python -m tfrl.record RUN --window)"),
        ("sac", "--is-remove", "(did you mean --resume restart?)"),
        ("sac", "--collect-traj", "(use python -m tfrl.collect RUN)"),
        ("ppo", "--kl_lambda", "(leave it out: tfrl has no such setting)"),
        ("sac", "--initial-alpha", "(did you mean --alpha-start?)"),
        ("ppo", "--loss_critic_type", "(did you mean --value-loss?)"),
        ("dqn", "--loss_critic_type", "(did you mean --huber-delta?)"),
        ("ppo", "--visible_gpu", "(did you mean --device gpu:NUMBER?)"),
        ("sac", "--exploration-noise", "(other commands have --exploration-noise)"),
        ("ppo", "--observers", "(other commands have --observers)"),
    ],
)
def test_a_flag_of_another_system_gets_a_hint(algorithm, given, hint):
    assert f"there is no flag {given} {hint};" in refusal(reader(algorithm).parse, [given, "1"])


def test_a_file_of_joyrl_gets_a_sentence_for_each_unknown_name(tmp_path):
    path = tmp_path / "joyrl.yaml"
    path.write_text(JOYRL)
    with pytest.raises(tfrl.SettingsError) as caught:
        tfrl.train("dqn", config=str(path))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} has {len(lines)} unknown settings:"
    hints = {
        "algo_name": "use the command itself, such as python -m tfrl.dqn",
        "env_name": "did you mean env?",
        "max_steps": "did you mean max_episode_steps?",
        "value_layers": "did you mean hidden?",
        "buffer_size": "did you mean replay_size?",
        "epsilon_decay": "did you mean exploration_steps?",
        "target_update": "did you mean target_every?",
        "id": "did you mean env?",
        "new_step_api": "leave it out: tfrl has no such setting",
    }
    for name, hint in hints.items():
        assert f"  '{name}' ({hint})." in lines
    assert not any(
        f"'{name}'" in str(caught.value) for name in ("seed", "batch_size", "gamma", "lr", "device")
    )


def test_sections_and_lists_in_a_file_are_read(tmp_path):
    path = tmp_path / "sections.yaml"
    path.write_text("task: {env: CartPole-v1}\nnetwork:\n  hidden: [32, 16]\n  activation: [relu, tanh]\n")
    config = reader("ppo").parse(["--config", str(path)])
    assert (config.env, config.hidden, config.activation) == ("CartPole-v1", "32,16", "relu,tanh")


def test_a_flag_of_another_command_gets_a_hint():
    for algorithm in ALGORITHMS:
        known = reader(algorithm).flag_kinds.keys()
        for name in all_kinds() - known:
            assert other_systems.other_name(f"--{name}", known), name


def all_kinds():
    """The settings of all commands."""
    from resnet.config import READER

    return {
        name for algorithm in ALGORITHMS for name in reader(algorithm).flag_kinds
    } | READER.flag_kinds.keys()


def test_every_hint_names_a_setting_of_some_command():
    kinds = all_kinds()
    hints = {name: choices for name, choices in other_systems.names().items() if choices}
    for choices in hints.values():
        for choice in choices:
            assert {*other_systems.fields_in(choice)} <= kinds, choice
    elsewhere = [
        name for line in other_systems._TABLE.splitlines() for name in line.partition("=")[2].split()
    ]
    assert len(elsewhere) == len({*elsewhere}), "a name stands twice in the table"
    # A setting that every command has needs no hint.
    common = set.intersection(*({*reader(algorithm).flag_kinds} for algorithm in ALGORITHMS))
    assert not common & {*elsewhere}
