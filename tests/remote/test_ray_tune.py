"""Sweeps on Ray Tune: run folders, interrupted and gone on with, failures, PBT; skipped without Ray Tune."""

import importlib.util
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import yaml
from launching import until
from processes import PATIENCE, ROOT, results, rows, steps_done

from benchmarks.process_tree import alive, family
from tfrl.run.folder import LEFT_FILE, is_held

FLAGS = "--env catch --torso linear --precision float32 --num-levels 0 --gamma 0.9 --num-envs 8 --num-steps 9"
FLAGS += " --num-minibatches 1 --epochs 1 --eval-episodes 8 --checkpoint-every 100"
FLAGS = FLAGS.split()
UPDATE = 72

needs_tune = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("ray", "pandas", "pyarrow"))),
    reason="pip install -r requirements-ray.txt",
)


def start(logdir, *words, **options):
    command = [sys.executable, "-m", "tfrl.tune", "--logdir", logdir, *words]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, text=True, stdin=subprocess.DEVNULL, **options)


def trainer_of(run):
    """The process that trains a run, by its lock."""
    return int((run / ".lock").read_text().split()[1])


@pytest.mark.promise
@pytest.mark.long
@needs_tune
def test_an_interrupted_sweep_resumes_and_a_failed_trial_affects_no_other(tmp_path):
    """The sweep gets three signals to stop while a run is held."""
    logdir, shown = tmp_path / "sweep", tmp_path / "shown"
    (logdir / "trial-001" / "export").mkdir(parents=True)  # which is no run, and never will be one
    words = ("--grid", "lr=1e-3,1e-2", "--parallel", 2, "--", "ppo_procgen", *FLAGS)
    words = (*words, "--total-steps", 400 * UPDATE)
    with shown.open("w") as file:
        sweep = start(logdir, *words, stdout=file)
    until(lambda: steps_done(logdir / "trial-000") >= 10 * UPDATE, PATIENCE)
    os.kill(trainer_of(logdir / "trial-000"), signal.SIGSTOP)
    until(lambda: "trial-001: failed" in shown.read_text(), PATIENCE)
    everyone = family(sweep.pid)
    second = start(logdir, *words)
    assert "is in use: process" in second.communicate(timeout=PATIENCE)[1] and second.returncode == 2
    sweep.send_signal(signal.SIGTERM)
    until(lambda: "waiting until the trials have saved" in shown.read_text(), PATIENCE)
    for again in (signal.SIGTERM, signal.SIGINT):
        sweep.send_signal(again)
        with pytest.raises(subprocess.TimeoutExpired):
            sweep.wait(1)
    os.kill(trainer_of(logdir / "trial-000"), signal.SIGCONT)
    assert sweep.communicate(timeout=PATIENCE)[1] == "" and sweep.returncode == 143
    assert shown.read_text().endswith("Stopped; the same command continues.\n")
    until(lambda: not any(map(alive, everyone)), 60)
    assert list((logdir / "trial-000" / "checkpoints").glob("update-*"))  # far from --checkpoint-every
    assert not (logdir / "trial-000" / "results.json").exists()

    sweep = start(logdir, *words)
    stdout, stderr = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, stdout + stderr
    assert stderr.startswith("error: 1 of 2 trials failed: trial-001 (error: ") and stderr.count("\n") == 1
    assert "trial-001 holds files that belong to no run (export" in stderr
    assert "trial-001: failed; the other trials continue" in stdout and "Trial trial" not in stdout
    assert "best: python -m tfrl.ppo_procgen" in stdout
    assert results(logdir / "trial-000")["resumed_at"]


@pytest.mark.promise
@pytest.mark.long
@needs_tune
def test_a_sweep_on_a_ray_that_runs_gives_each_trial_its_share(tmp_path, gpu_node):
    """Two trials at a time have two of the four CPUs each, and a GPU. A signal stops them, and they save."""
    logdir, shown = tmp_path / "sweep", tmp_path / "shown"
    (tmp_path / "seen.py").write_text(
        "import os\nfrom tfrl import Callback\n"
        "class Seen(Callback):\n"
        "    def on_start(self, run):\n"
        "        names = ('CUDA_VISIBLE_DEVICES', 'TF_NUM_INTRAOP_THREADS')\n"
        "        with open(os.path.join(run.folder, 'seen'), 'w') as file:\n"
        "            file.write(' '.join(os.environ[name] for name in names))\n"
    )
    environ = {**os.environ, **gpu_node.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    words = ["--grid", "lr=1e-3,1e-2", "--parallel", 2, "--ray-address", gpu_node.address]
    words += ["--gpus-per-trial", 1, "ppo_procgen", *FLAGS, "--callbacks", "seen:Seen"]
    words += ["--total-steps", 2000 * UPDATE]
    with shown.open("w") as file:
        sweep = start(logdir, *words, stdout=file, env=environ)
    runs = [logdir / "trial-000", logdir / "trial-001"]
    until(lambda: sweep.poll() is not None or all(steps_done(run) >= UPDATE for run in runs), PATIENCE)
    assert sweep.poll() is None, sweep.communicate()
    assert sorted((run / "seen").read_text() for run in runs) == ["0 2", "1 2"]
    of_node = {process.pid for process in psutil.Process(gpu_node.process.pid).children(recursive=True)}
    assert {trainer_of(run) for run in runs} <= of_node
    sweep.send_signal(signal.SIGTERM)
    assert sweep.communicate(timeout=PATIENCE)[1] == "" and sweep.returncode == 143
    assert all(list((run / "checkpoints").glob("update-*")) for run in runs), shown.read_text()
    assert not list(logdir.glob("tfrl-tune-*"))

    too_many = start(logdir, *(3 if word == 1 else word for word in words), env=environ)
    assert "--gpus-per-trial 3 needs a machine" in too_many.communicate(timeout=PATIENCE)[1]
    assert too_many.returncode == 2
    words[words.index(2000 * UPDATE)] = 20 * UPDATE
    other = start(tmp_path / "other", *words, env=environ)
    stdout, stderr = other.communicate(timeout=PATIENCE)
    assert other.returncode == 0, stdout + stderr
    assert "best: python -m tfrl.ppo_procgen" in stdout
    assert gpu_node.process.poll() is None  # the Ray of others goes on


@needs_tune
def test_asha_compares_with_trials_that_ended_earlier(tmp_path):
    from tfrl.remote import sweep as on_ray
    from tfrl.remote.trials import plan

    flags = [*FLAGS, "--eval-every", "20"]
    options = {"trials": 1, "seed": 1, "scheduler": "asha", "metric": "eval_test/return"}
    swept = plan("ppo_procgen", flags, grids=["lr=1e-3,1e-2,1e-1,1"], samples=[], **options)
    for index in range(3):
        run = tmp_path / f"trial-{index:03d}"
        run.mkdir()
        (run / "progress.csv").write_text(f"env_steps,eval_test/return\n1440,{index + 1}\n")
    scheduler = on_ray._scheduler(swept, tmp_path, [3])
    for value, decision in ((0.5, "STOP"), (4.0, "CONTINUE")):
        one = SimpleNamespace(trial_id=str(value))
        scheduler.on_trial_add(None, one)
        assert scheduler.on_trial_result(None, one, {"evaluations": 1, "value": value}) == decision


@pytest.mark.long
@needs_tune
def test_the_runs_that_asha_has_ended_are_marked(tmp_path):
    logdir = tmp_path / "sweep"
    words = ("--grid", "lr=1e-2,1e-6,1e-7", "--scheduler", "asha", "--", "ppo_procgen", *FLAGS)
    sweep = start(logdir, *words, "--total-steps", 400 * UPDATE, "--eval-every", 40, "--eval-episodes", 64)
    stdout, stderr = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 0, stdout + stderr
    assert stdout.count(": ended early, ") == 2
    until(lambda: not any(is_held(run) for run in logdir.glob("trial-*")), PATIENCE)
    assert len(list(logdir.glob(f"*/{LEFT_FILE}"))) == 2 and len(list(logdir.glob("*/results.json"))) == 1


@pytest.mark.long  # and what PBT does hangs on how fast trials are
@needs_tune
def test_pbt_continues_from_another_trials_weights_with_other_settings(tmp_path):
    logdir, total = tmp_path / "sweep", 1500 * UPDATE  # so that trials that start apart still meet
    words = (
        "--sample",
        "lr=loguniform:1e-6,1e-2",
        "--trials",
        2,
        "--parallel",
        2,
        "--scheduler",
        "pbt",
        "--",
    )
    sweep = start(logdir, *words, "ppo_procgen", *FLAGS, "--total-steps", total, "--eval-every", 300)
    stdout, stderr = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 0, stdout + stderr
    later = sorted(logdir.glob("trial-*-at-*"))
    assert later, stdout
    for run in later:
        if not (run / "config.yaml").exists():
            continue  # given up for another one before it began
        settings = yaml.safe_load((run / "config.yaml").read_text())
        donor = logdir / settings["start_from"].rpartition("weights-of-")[2]
        assert donor.is_dir() and not donor.name.startswith(run.name[:9])
        offset = int(run.name.split("-")[-2])
        assert settings["total_steps"] == total - offset and 1e-6 <= settings["lr"] <= 1e-2
        if rows(run):
            assert int(rows(run)[0]["env_steps"]) == UPDATE
    finished = [run for run in later if (run / "results.json").exists()]
    for run in finished:
        began = results(run)["started_from"]["env_steps"]
        assert began > 0 and began + results(run)["env_steps"] >= total
    assert len(list(logdir.glob("trial-*/results.json"))) >= 2 and stdout.count(f"│ {total:,}") == 2, stdout


@pytest.mark.parametrize("missing", ["ray", "pandas"])
def test_without_its_packages_the_command_says_what_to_install(tmp_path, missing):
    """In a process where one cannot be found; nothing is made before."""
    program = (
        "import importlib.util, sys\n"
        "find, missing = importlib.util.find_spec, sys.argv[1]\n"
        "importlib.util.find_spec = lambda name, *a: None if name == missing else find(name, *a)\n"
        "sys.modules[missing] = None\n"
        "from tfrl import tune\nfrom tfrl.cli import endings\n"
        "sys.argv[1:] = ['--logdir', sys.argv[2], '--grid', 'lr=1e-3', '--', 'ppo', '--env', 'catch']\n"
        "endings.run(tune.main)\n"
    )
    command = [sys.executable, "-c", program, missing, str(tmp_path / "sweep")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ") and "pip install -r requirements-ray.txt" in done.stderr
    assert not (tmp_path / "sweep").exists()
