"""Sweeps on Ray Tune: run folders, interrupted and gone on with, failures, PBT; skipped without Ray Tune."""

import signal
import subprocess
import sys

import pytest
import yaml
from launching import alive, family, until
from processes import PATIENCE, ROOT, results, rows, steps_done, train

FLAGS = "--env catch --torso linear --precision float32 --num-levels 0 --gamma 0.9 --num-envs 8 --num-steps 9"
FLAGS += " --num-minibatches 1 --epochs 1 --eval-episodes 8 --checkpoint-every 5"
FLAGS = FLAGS.split()
UPDATE = 72

needs_tune = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import ray.tune"], capture_output=True).returncode != 0,
    reason="pip install -r requirements-ray.txt",
)


def start(logdir, *words):
    command = [sys.executable, "-m", "tfrl.tune", "--logdir", logdir, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, text=True, stdin=subprocess.DEVNULL, **pipes)


@needs_tune
def test_an_interrupted_sweep_goes_on_and_a_failed_trial_leaves_the_others_alone(tmp_path):
    logdir, total = tmp_path / "sweep", 300 * UPDATE
    words = (
        "--grid",
        "lr=1e-3,1e30,1e-2",
        "--parallel",
        2,
        "--",
        "ppo_procgen",
        *FLAGS,
        "--total-steps",
        total,
    )
    sweep = start(logdir, *words)
    until(lambda: steps_done(logdir / "trial-000") >= 10 * UPDATE, PATIENCE)
    everyone = family(sweep.pid)
    sweep.send_signal(signal.SIGTERM)
    stdout, stderr = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 143 and "the same command goes on" in stdout, stdout + stderr
    until(lambda: not any(map(alive, everyone)), 60)
    assert not (logdir / "trial-000" / "results.json").exists()
    sweep = start(logdir, *words)
    stdout, stderr = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, stdout + stderr
    assert "error: 1 of 3 trials failed: trial-001 (error: update" in stderr
    assert "best: python -m tfrl.ppo_procgen" in stdout and (logdir / "sweep.png").stat().st_size > 5000
    assert results(logdir / "trial-000")["resumed_at"]
    code, _, stderr = train(tmp_path / "alone", *FLAGS, "--total-steps", total, "--lr", "1e-3")
    assert (code, stderr) == (0, "")
    alone = results(tmp_path / "alone")["weights_sha256"]
    assert alone == results(logdir / "trial-000")["weights_sha256"]
    assert results(logdir / "trial-002")["weights_sha256"] != alone
    other = start(logdir, "--grid", "lr=1e-3", "--", "ppo_procgen", *FLAGS)
    assert "holds another sweep" in other.communicate(timeout=PATIENCE)[1]


@pytest.mark.long  # and what PBT does hangs on how fast trials are
@needs_tune
def test_pbt_goes_on_from_another_trials_weights_with_other_settings(tmp_path):
    logdir, total = tmp_path / "sweep", 60 * UPDATE
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
    sweep = start(logdir, *words, "ppo_procgen", *FLAGS, "--total-steps", total, "--eval-every", 20)
    stdout, stderr = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 0, stdout + stderr
    later = sorted(logdir.glob("trial-*-at-*"))
    assert later, stdout
    for run in later:
        settings = yaml.safe_load((run / "config.yaml").read_text())
        donor = logdir / settings["start_from"].rpartition("/")[2]
        assert donor.is_dir() and not donor.name.startswith(run.name[:9])
        offset = int(run.name.rpartition("-")[2])
        assert settings["total_steps"] == total - offset and 1e-6 <= settings["lr"] <= 1e-2
        if rows(run):
            assert int(rows(run)[0]["env_steps"]) == UPDATE
    finished = [run for run in later if (run / "results.json").exists()]
    assert all(results(run)["started_from"]["env_steps"] > 0 for run in finished)


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
