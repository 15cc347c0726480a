"""A run that began from another one's torso: its checkpoints hold all that it needs to go on."""

import numpy as np
import pytest
from learners import build_actor_critic, initial_arrays
from processes import results

from tfrl import ppo_procgen
from tfrl.cli.errors import UserError
from tfrl.envs.spec import ArraySpec, Discrete

CATCH = "--env catch --torso cookbook --precision float32 --num-levels 0 --num-envs 8 --num-steps 16"
CATCH += " --epochs 1 --num-minibatches 1 --eval-episodes 2 --checkpoint-every 1"


def torso(seed):
    """The weights of a torso for catch."""
    network = build_actor_critic(
        torso="cookbook",
        observation_spec=ArraySpec((10, 5, 1), "uint8"),
        action_spec=Discrete(3),
        share_torso=True,
        precision="float32",
        seed=seed,
    )
    return {name: value for name, value in initial_arrays(network).items() if name.startswith("torso/")}


@pytest.fixture
def command(tmp_path):
    """Trains a run from a pretrained torso to a number of env steps; the exit code."""
    (tmp_path / "pretrained" / "export").mkdir(parents=True)
    np.savez(tmp_path / "pretrained" / "export" / "weights.npz", **torso(seed=5))

    def train(name, total, *flags):
        flags = [*CATCH.split(), "--torso-weights", str(tmp_path / "pretrained"), *flags]
        return ppo_procgen.main(
            [*flags, "--logdir", str(tmp_path), "--run-name", name, "--total-steps", str(total)]
        )

    return train


def exported(run):
    """The torso that a run ends with."""
    with np.load(run / "export" / "weights.npz") as weights:
        return {name: weights[name] for name in weights.files if name.startswith("torso/")}


@pytest.mark.promise
@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--freeze-torso"]])
def test_a_run_resumes_without_the_folder_of_its_torso_weights(command, tmp_path, flags):
    assert command("whole", 256, *flags) == 0
    assert command("moved", 128, *flags) == 0
    (tmp_path / "pretrained").rename(tmp_path / "elsewhere")
    assert command("moved", 256, *flags) == 0
    whole, moved = (results(tmp_path / name) for name in ("whole", "moved"))
    assert moved["weights_sha256"] == whole["weights_sha256"] and moved["resumed_at"] == [128]
    for name, weights in torso(seed=5).items():
        kept = np.array_equal(exported(tmp_path / "moved")[name], weights)
        assert kept == bool(flags), "a frozen torso stays, another one learns"


def test_a_new_run_needs_the_folder_of_its_torso_weights(command, tmp_path):
    (tmp_path / "pretrained").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="holds no finished run of resnet.train"):
        command("new", 256)
    (tmp_path / "pretrained" / "export").mkdir(parents=True)
    (tmp_path / "pretrained" / "export" / "weights.npz").touch()
    with pytest.raises(UserError, match="weights.npz cannot be read"):
        command("new", 256)
    assert not (tmp_path / "new").exists()
