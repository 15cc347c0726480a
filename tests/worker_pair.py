"""Several training processes, started together as TF_CONFIG says, and what they leave behind."""

import contextlib
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from cluster.launch import free_ports
from tfrl.run.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[1]
TRAIN = ["-m", "tfrl.ppo_procgen"]
FAULTY = [str(ROOT / "tests" / "faulty_worker.py")]
PATIENCE = 600  # seconds, on a machine that has much else to do
UPDATES, BATCH = 4, 8 * 16
FLAGS = [
    *("--env", "catch", "--torso", "cookbook", "--precision", "float32", "--run-name", "run"),
    *("--num-envs", "8", "--num-steps", "16", "--num-minibatches", "4", "--epochs", "2"),
    *("--eval-episodes", "2", "--checkpoint-every", "1", "--keep-checkpoints", "9"),
]
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}


def flags(logdir, *more, updates=UPDATES):
    return [*FLAGS, "--total-steps", str(updates * BATCH), "--logdir", str(logdir), *more]


def environment(**more):
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"  # as in pytest, for envs in files of tests
    return {**os.environ, **THREADS, "PYTHONPATH": path, **more}


def addresses(count):
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


@contextlib.contextmanager
def started(*workers, cluster=None, role="worker", places=None, **more):
    """One process for each of `workers`, which are arguments to Python; `cluster` may have more roles.

    `places` has for each the beginning of its command, which leads to another machine; `more` is added to
    their environment.
    """
    cluster = cluster or {"worker": addresses(len(workers))}
    processes = []
    try:
        for index, arguments in enumerate(workers):
            tf_config = {"cluster": cluster, "task": {"type": role, "index": index}}
            processes.append(
                subprocess.Popen(
                    [*(places[index] if places else []), sys.executable, *arguments],
                    env=environment(TF_CONFIG=json.dumps(tf_config), **more),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()  # a stopped one, too
            process.wait()


def ended(process):
    """Exit code and output of a process, once it has ended."""
    output = process.communicate(timeout=PATIENCE)[0]
    return process.returncode, output


def run_workers(*workers, **more):
    """Runs them to their end; their exit codes and outputs."""
    with started(*workers, **more) as processes:
        return [ended(process) for process in processes]


def run_alone(*arguments):
    """Exit code and stderr of a process that has two cores, where workers have one each."""
    env = environment(TF_NUM_INTRAOP_THREADS="2")
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stderr


def results(logdir):
    return json.loads((logdir / "run" / "results.json").read_text())


def phases(folder, worker):
    """What a worker that faulty_worker.py ran has noted: "UPDATE PHASE", in order."""
    return (folder / f"phases-{worker}").read_text().splitlines()


def env_steps(logdir):
    with (logdir / "run" / "progress.csv").open() as file:
        return [int(row["env_steps"]) for row in csv.DictReader(file)]


def evaluations(logdir):
    """Returns on training and unseen levels by env steps, of the updates that were evaluated."""
    with (logdir / "run" / "progress.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["eval_test/return"]]
    return {int(r["env_steps"]): (float(r["eval_train/return"]), float(r["eval_test/return"])) for r in rows}


def saved(logdir):
    return CheckpointStore(logdir / "run" / "checkpoints", keep=9).updates()
