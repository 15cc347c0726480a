"""A run whose loop is the user's: the same bits as a run of `tfrl.train`, left and resumed at will."""

import os
import signal
import sys
import threading

import pytest

import tfrl
from tfrl.cli import endings
from tfrl.training.command import Command

SMALL = {"env": "CartPole-v1", "num_envs": 4, "num_steps": 64, "epochs": 1, "eval_episodes": 2, "hidden": "8"}
SMALL |= {"total_steps": 1024, "seed": 3, "num_minibatches": 1, "eager": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The results of a run of `tfrl.train`."""
    return tfrl.train("ppo", logdir=tmp_path_factory.mktemp("logs"), run_name="plain", **SMALL)


def ended(trainer):
    """Takes all updates that are left; the metrics of the last one."""
    while not trainer.done:
        metrics = trainer.update()
    return metrics


def test_an_own_loop_that_is_left_and_resumed_has_the_bits_of_train(plain, tmp_path):
    same = SMALL | {"logdir": tmp_path, "run_name": "own"}
    paths = []

    def leave():
        """In a thread; evaluates and saves within the run; an exception of the user ends the block."""
        with tfrl.trainer("ppo", **same) as trainer:
            trainer.update()
            assert trainer.evaluate()["eval_test/return"] >= 1
            paths.append(trainer.save())
            metrics = trainer.update()
            assert metrics["rollout/episodes"] >= 1 and (trainer.updates, trainer.env_steps) == (2, 512)
            raise ZeroDivisionError

    thread = threading.Thread(target=lambda: pytest.raises(ZeroDivisionError, leave))
    thread.start()
    thread.join()
    assert paths == [tmp_path / "own" / "checkpoints" / "update-00000001"] and paths[0].is_dir()
    with pytest.raises(SystemExit), tfrl.trainer("ppo", **same) as trainer:
        trainer.update()
        sys.exit()
    with tfrl.trainer("ppo", **same) as trainer:
        assert (trainer.updates, trainer.done) == (3, False)
        last = ended(trainer)
        assert trainer.run.results == {}
        with pytest.raises(tfrl.SettingsError, match=r"the run is done.*trainer\.done"):
            trainer.update()
    assert last["eval_test/return"] == plain.results["eval"]["test"]["return"]
    for name in ("weights_sha256", "eval", "episode_return", "env_steps"):
        assert trainer.run.results[name] == plain.results[name], name
    assert trainer.run.results["resumed_at"] == [512, 768]
    with tfrl.trainer("ppo", **same) as trainer:  # complete: not trained again
        assert trainer.done


@pytest.mark.long
def test_ctrl_c_in_an_own_loop_saves_after_the_update_and_raises(plain, tmp_path):
    same = SMALL | {"logdir": tmp_path, "run_name": "own"}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), tfrl.trainer("ppo", **same) as trainer:
        trainer.update()
        os.kill(os.getpid(), signal.SIGINT)
        assert trainer.updates == 1  # the user's code goes on
        trainer.update()
    assert signal.getsignal(signal.SIGINT) is before and trainer.done
    with tfrl.trainer("ppo", **same) as trainer:
        assert trainer.updates == 1
        ended(trainer)
    assert trainer.run.results["weights_sha256"] == plain.results["weights_sha256"]


def test_a_signal_while_actors_start_reaches_the_program(tmp_path, monkeypatch):
    """Ray's actors then end the command with SystemExit."""

    def learner_of(self, config):
        def make_learner(session):
            os.kill(os.getpid(), number)
            raise SystemExit(endings.STOP_CODES[number])

        return make_learner

    def own_loop():
        with tfrl.trainer("ppo", logdir=tmp_path, **SMALL):
            pass

    monkeypatch.setattr(Command, "learner_of", learner_of)
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        for call in (own_loop, lambda: tfrl.train("ppo", logdir=tmp_path, **SMALL)):
            number = signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                call()
            number = signal.SIGTERM
            with pytest.raises(tfrl.TrainingError, match=r"^a signal stopped the run before its training"):
                call()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM] * 2


def test_a_run_that_this_process_has_open_is_not_trained_again_in_it(tmp_path):
    same = SMALL | {"logdir": tmp_path, "run_name": "own"}
    told = r"own is in use: this process has it open already; close it first, or choose another run_name\.$"
    with tfrl.trainer("ppo", **same) as trainer:
        with pytest.raises(tfrl.SettingsError, match=told):
            tfrl.train("ppo", **same)
        trainer.update()


def test_wrong_settings_and_wrong_use_are_named(tmp_path):
    with pytest.raises(tfrl.SettingsError, match=r"ppo has no setting num_env "):
        tfrl.trainer("ppo", env="CartPole-v1", num_env=4)
    trainer = tfrl.trainer("ppo", logdir=tmp_path, **SMALL)
    with pytest.raises(tfrl.SettingsError, match="the run has not begun"):
        trainer.update()
    two = tfrl.trainer("impala", env="CartPole-v1", logdir=tmp_path, learners=2, num_envs=2)
    with pytest.raises(tfrl.SettingsError, match=r"use tfrl\.train"):
        two.__enter__()
