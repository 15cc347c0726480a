"""Runs a trainer, and something bad happens to one worker at one moment: for test_multi_worker.py.

FAULT WORKER UPDATE MARKER FLAGS...: the fault (a signal's name, or HANG) comes between the rollout and the
learning of that update, once: the file MARKER is made then. With --dataset among the flags it is the
supervised trainer, and the fault comes before that gradient step. With "evaluation" as UPDATE it comes in the
first evaluation (or test), with "connecting" when TensorFlow has just connected the workers. HANG:SECONDS is
one that is found after so many seconds without a sign of life, instead of minutes, where no update has been
measured yet. SLOW holds for the whole run, whatever UPDATE is: the worker, or each one where WORKER is -1,
waits for a random time before each compiled call.
COMMAND in the environment is the module of another trainer than PPO's.
Where PHASES in the environment names a folder, the worker notes there each phase as it begins it
(workers.phases reads that).
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tfrl.cli import endings
from tfrl.workers import watchdog


def main(arguments):
    fault, _, lifeless = arguments[0].partition(":")
    worker, marker = int(arguments[1]), Path(arguments[3])
    if "PHASES" in os.environ:
        note_phases(Path(os.environ["PHASES"]))
    moment = arguments[2]
    evaluates = moment == "evaluation"
    update = int(moment) if moment.isdecimal() else 0
    if lifeless:
        watchdog.LIFELESS = float(lifeless)
    flags = arguments[4:]
    if "--dataset" in flags:
        from resnet import learner
        from resnet import train as command

        owner, method = learner.Classifier, "test" if evaluates else "step"
    else:
        from tfrl.training import on_policy

        command = importlib.import_module(os.environ.get("COMMAND", "tfrl.ppo_procgen"))
        owner, method = on_policy.OnPolicyLearner, "act" if evaluates else "learn"
    if moment == "connecting":
        from tfrl.workers import strategy as owner

        method = "make"
    learn, calls = getattr(owner, method), []
    mine = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    if fault == "SLOW":
        if worker in (mine, -1):
            make_slow(mine, "--dataset" in flags)
        return command.main(flags)

    def fail():
        if mine == worker and len(calls) == update and not marker.exists():
            marker.touch()
            if fault == "HANG":
                time.sleep(3600)
            os.kill(os.getpid(), getattr(signal, fault))
        calls.append(None)

    def faulty_learn(*inputs):
        if moment != "connecting":
            fail()
        done = learn(*inputs)
        if moment == "connecting":
            fail()
        return done

    setattr(owner, method, faulty_learn)
    return command.main(flags)


def make_slow(seed, supervised):
    """Has this worker wait before each call of gradient steps."""
    if supervised:
        from resnet import learner

        owner, method = learner.Classifier, "step"
    else:
        from tfrl.algorithms.ppo import PPOAgent

        owner, method = PPOAgent, "_minibatches_a_call"
    call, seconds = getattr(owner, method), random.Random(seed)

    def slow(*inputs):
        time.sleep(0.4 * seconds.random())
        return call(*inputs)

    setattr(owner, method, slow)


def note_phases(folder):
    """Has a line `UPDATE PHASE` appended to `phases-N` of worker N whenever one begins."""
    beat = watchdog.Watchdog.beat

    def noted(self, phase=None, update=None):
        beat(self, phase, update)
        if phase is not None:
            with (folder / f"phases-{self._worker}").open("a") as file:
                file.write(f"{self._own.update} {phase}\n")

    watchdog.Watchdog.beat = noted


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    endings.run(main)
