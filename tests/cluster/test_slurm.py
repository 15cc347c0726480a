"""The scripts for SLURM, with its programs made of shell; those of Kubernetes: test_cluster_templates.py."""

import re

import pytest
from recipes import CLUSTER, configs_of, run, write_tool

from cluster import launch

SLURM = (
    'case $1 in show) [ "$3" = "gpu[3-5]" ] && printf "gpu%s\\n" 3 4 5 ;; '
    'requeue) echo "requeued $2" ;; esac\n'
)
SRUN = (
    "while [[ $1 == --* ]]; do shift; done\n"
    "highest=0\n"
    'for SLURM_NODEID in 0 1 2; do export SLURM_NODEID; "$@"; code=$?; '
    "highest=$((code > highest ? code : highest)); done; exit $highest\n"
)
# One task in a process group of its own, which gets SIGTERM once its trainer runs.
STOPPING_SRUN = """while [[ $1 == --* ]]; do shift; done
set -m
SLURM_NODEID=0 "$@" &
until [ -e ready ]; do sleep 0.05; done
kill -TERM -- -$!
wait $!
code=$?
echo "TASK ENDED"
exit "$code"
"""
SAVING_PYTHON = """if [ "$2" = cluster.tf_config ]; then exit; fi
trap 'sleep 0.3; echo SAVED; exit 143' TERM
touch ready
while :; do sleep 0.05; done
"""


def run_sbatch(tools, srun=SRUN, **environ):
    write_tool(tools / "scontrol", SLURM)
    write_tool(tools / "srun", srun)
    environ = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[3-5]", **environ}
    command = ["bash", str(CLUSTER / "slurm" / "train.sbatch"), "--env", "big fish"]
    return run(command, tools, **environ)


def test_the_slurm_script_makes_tf_config_from_the_node_list(tools):
    done = run_sbatch(tools, SLURM_CPUS_PER_TASK="16")
    assert done.returncode == 0, done.stderr
    assert "CPUS 16" in done.stdout
    configs = configs_of(done.stdout)
    assert [config.worker for config in configs] == [0, 1, 2]
    assert {config.workers for config in configs} == {("gpu3:23456", "gpu4:23456", "gpu5:23456")}
    assert "ARGUMENTS -m tfrl.ppo_procgen --cluster-timeout 600 --env big fish" in done.stdout
    assert "requeued" not in done.stdout


@pytest.mark.parametrize(
    ("codes", "requeues"),
    [
        (["75", "137", "139", "75"], [True, True, True, False]),
        (["143"] * 5 + ["75"], [True] * 6),
        (["75", "143", "75", "143", "75", "143", "75"], [True] * 6 + [False]),
        (["75", "2"], [True, False]),
    ],
)
@pytest.mark.parametrize("script", ["train", "ray"])
def test_the_slurm_scripts_requeue_three_losses_and_each_stop(tools, script, codes, requeues):
    found = []
    for restarts, code in enumerate(codes):
        environ = {"EXIT_CODE": code, "SLURM_RESTART_COUNT": str(restarts)}
        done = run_sbatch(tools, **environ) if script == "train" else run_ray_sbatch(tools, **environ)[0]
        assert done.returncode == int(code)
        found.append("requeued 123456" in done.stdout)
    assert found == requeues
    assert (tools.parents[1] / "logs" / "slurm-123456.failures").exists() == requeues[-1]


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ("75 1 75", 1, False),
        ("2 75 75", 2, False),
        ("1 143 143", 1, False),
        ("75 0 0", 75, True),
        ("75 137 75", 137, True),
        ("143 143 143", 143, True),
    ],
)
def test_the_slurm_script_exits_with_the_code_of_the_worker_that_failed_first(tools, codes, code, requeued):
    done = run_sbatch(tools, EXIT_CODE=codes)
    assert done.returncode == code
    assert ("requeued 123456" in done.stdout) == requeued


def test_the_slurm_script_lets_a_stopped_worker_save(tools):
    write_tool(tools / "python", SAVING_PYTHON)
    done = run_sbatch(tools, srun=STOPPING_SRUN)
    assert done.returncode == 143, done.stderr
    assert "SAVED\nTASK ENDED\n" in done.stdout
    assert "requeued 123456" in done.stdout


def test_the_slurm_script_stops_without_a_node_list(tools):
    done = run_sbatch(tools, SLURM_JOB_NODELIST="unknown")
    assert done.returncode == 2
    assert "TRAIN" not in done.stdout


def test_the_slurm_script_asks_for_what_its_comments_say():
    text = (CLUSTER / "slurm" / "train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert options["signal"] == f"TERM@{launch.ORPHAN_GRACE:.0f}"
    assert options.keys() >= {"requeue", "nodes", "open-mode"}


RAY_PYTHON = """
if [ "$1" != -c ]; then echo "ARGUMENTS $*"; exit ${EXIT_CODE:-0}; fi
case $2 in *token_hex*) printf secret; exit ;; esac
echo "WAITS $3 $4"
until [ "$(grep -c . nodes)" = 3 ]; do sleep 0.1; done
"""


# The learner's step runs in a process group of its own. As SLURM's srun does it, SIGUSR1 goes on to the whole
# group, and SIGTERM becomes SIGKILL. Once the trainer runs, SIGTERM comes to the script, or to the group.
RAY_STOPPING_SRUN = f"""if [[ $* != *--nodes=1* ]]; then {SRUN}fi
while [[ $1 == --* ]]; do shift; done
set -m
"$@" & task=$!
trap 'kill -USR1 -- -$task' USR1
trap 'kill -KILL -- -$task' TERM
until [ -e ready ]; do sleep 0.05; done
if [ "$TOLD" = script ]; then kill -TERM $PPID; else kill -TERM -- -$task; fi
wait "$task"; code=$?
while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done
echo "TASK ENDED"
exit "$code"
"""


def run_ray_sbatch(tools, *flags, srun=SRUN, python=RAY_PYTHON, **environ):
    """How the script ended, and the nodes that were started."""
    write_tool(tools / "scontrol", SLURM)
    write_tool(tools / "srun", f"echo cpus-per-task $SRUN_CPUS_PER_TASK >>srun\n{srun}")
    write_tool(tools / "python", python)
    write_tool(tools / "ray", 'echo "RAY $RAY_AUTH_MODE $(cat "$RAY_AUTH_TOKEN_PATH") $*" >>nodes\n')
    (tools.parents[1] / "nodes").write_text("")
    environ |= {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[3-5]", "SLURM_JOB_NUM_NODES": "3"}
    command = ["bash", str(CLUSTER / "slurm" / "ray.sbatch"), *flags, "--env", "big fish"]
    done = run(command, tools, **environ, SLURM_CPUS_PER_TASK="16")
    return done, (tools.parents[1] / "nodes").read_text().splitlines()


@pytest.mark.parametrize(
    ("flags", "cpus", "total"),
    [
        (["--actors", "40"], [8, 16, 16], 40),
        (["--learners", "1"], [8, 16, 16], 40),
        (["--learners", "2", "--actors", "32"], [9, 9, 16], 34),  # a CPU for each learner
        (["--actors", "24", "--learners=3"], [9, 9, 9], 27),
    ],
)
def test_the_slurm_script_for_ray_keeps_cores_free_for_each_learner(tools, flags, cpus, total):
    done, started = run_ray_sbatch(tools, *flags)
    assert done.returncode == 0, done.stderr
    assert sorted(int(line.split()[-1]) for line in started) == cpus
    assert int(next(line for line in started if "--head" in line).split()[-1]) == cpus[0]
    assert f"WAITS gpu3:23456 {total}\n" in done.stdout
    assert set((tools.parents[1] / "srun").read_text().splitlines()) == {"cpus-per-task 16"}


def test_the_slurm_script_for_ray_refuses_more_learners_than_nodes(tools):
    done, started = run_ray_sbatch(tools, "--learners", "4")
    assert (done.returncode, started) == (2, [])
    assert done.stderr == "error: --learners 4 need as many nodes; the job has 3\n"


@pytest.mark.parametrize("told", ["script", "learner"])  # before the time is up; by scancel
def test_the_slurm_script_for_ray_lets_the_run_save(tools, told):
    python = f"if [ $1 = -c ]; then :{RAY_PYTHON}exit; fi\n{SAVING_PYTHON}"
    done, _ = run_ray_sbatch(tools, srun=RAY_STOPPING_SRUN, python=python, TOLD=told)
    assert done.returncode == 143 and "SAVED\nTASK ENDED" in done.stdout, (done.stdout, done.stderr)
    assert "requeued 123456" in done.stdout


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (2, False), (143, True)])
def test_the_slurm_script_for_ray_starts_a_head_and_nodes_and_the_learner_on_the_first(tools, code, requeued):
    done, started = run_ray_sbatch(tools, "--actors", "40", EXIT_CODE=str(code))
    assert done.returncode == code, done.stderr
    head = "RAY token secret start --block --head --port 23456 --include-dashboard false --num-cpus 8"
    node = "RAY token secret start --block --address gpu3:23456 --num-cpus 16"
    assert sorted(started) == sorted([head, node, node])
    assert "WAITS gpu3:23456 40\n" in done.stdout
    trains = "ARGUMENTS -m tfrl.impala --ray-address gpu3:23456 --actors 40 --env big fish"
    assert trains in done.stdout
    assert ("requeued 123456" in done.stdout) == requeued
    assert not list(tools.parents[1].glob(".ray-token*"))
