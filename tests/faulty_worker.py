"""Runs the trainer, and something bad happens to one worker at one moment: for test_multi_worker.py.

FAULT WORKER UPDATE MARKER FLAGS...: the fault (a signal's name, or HANG) comes between the rollout and the
learning of that update, once: the file MARKER is made then.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tfrl import commands, learner, ppo_procgen


def main(arguments):
    fault, worker, update, marker = arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3])
    learn = learner.Learner._learn

    def faulty_learn(self, rollout):
        mine = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
        if mine == worker and self._session.step == update and not marker.exists():
            marker.touch()
            if fault == "HANG":
                time.sleep(3600)
            os.kill(os.getpid(), getattr(signal, fault))
        return learn(self, rollout)

    learner.Learner._learn = faulty_learn
    return ppo_procgen.main(arguments[4:])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    commands.run(main)
