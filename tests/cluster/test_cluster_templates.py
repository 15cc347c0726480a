"""Every template under cluster/: the TF_CONFIG that comes out of it, and what schedulers read in it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from recipes import CLUSTER, ROOT, configs_of, run, write_tool

from cluster import launch
from cluster import tf_config as tf_config_command
from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.workers import tf_config

pytestmark = pytest.mark.promise

MANIFESTS = sorted((CLUSTER / "kubernetes").glob("*.yaml"))


TEMPLATES = {path.stem: json.loads(path.read_text()) for path in (CLUSTER / "templates").glob("*.json")}
LOCAL = "one-machine-two-processes"


def test_the_templates_have_these_processes():
    counts = {
        name: {role: len(addresses) for role, addresses in content["cluster"].items()}
        for name, content in TEMPLATES.items()
    }
    assert counts == {
        LOCAL: {"worker": 2},
        "two-machines": {"worker": 2},
        "four-machines": {"worker": 4},
        "chief-workers-evaluator": {"chief": 1, "worker": 3, "evaluator": 1},
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_passes_the_check_and_the_default_envs_divide_by_its_workers(name, monkeypatch, capsys):
    """With its hosts replaced by this machine; each process in turn is the one that is checked."""
    cluster = dict(TEMPLATES[name]["cluster"])
    ports = iter(launch.free_ports(sum(map(len, cluster.values()))))
    here = {role: [f"127.0.0.1:{next(ports)}" for _ in addresses] for role, addresses in cluster.items()}
    evaluator = here.pop("evaluator", [])
    hosts = [address for addresses in here.values() for address in addresses]
    reader("ppo_procgen").parse([]).check_topology(len(hosts), 1)
    for index in (*range(len(hosts)), *["evaluator"] * len(evaluator)):
        flags = ["--template", name, "--hosts", ",".join(hosts), "--index", str(index)]
        flags += ["--evaluator", evaluator[0]] if evaluator else []
        assert tf_config_command.main(flags) == 0
        text = shlex.split(capsys.readouterr().out)[1].removeprefix("TF_CONFIG=")
        monkeypatch.setenv("TF_CONFIG", text)
        assert tf_config_command.main(["--check"]) == 0
        said = capsys.readouterr().out
        own = evaluator[0] if index == "evaluator" else hosts[index]
        assert f"{len(hosts)} workers train, worker 0 ({hosts[0]}) is the chief." in said
        assert f"Its own port, {own}, is free on this machine." in said


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_tf_config_itself_with_any_of_its_tasks(name):
    content, seen = TEMPLATES[name], []
    for role, addresses in content["cluster"].items():
        for index in range(len(addresses)):
            config = tf_config.parse(json.dumps({**content, "task": {"type": role, "index": index}}))
            seen.append("evaluator" if config.is_evaluator else config.worker)
    assert tf_config.parse(json.dumps(content)).is_chief
    workers = sum(map(len, content["cluster"].values())) - len(content["cluster"].get("evaluator", ()))
    assert seen[:workers] == list(range(workers))


@pytest.mark.long
def test_two_workers_train_from_the_template_of_one_machine(tmp_path):
    """By the documented commands, with the default number of envs."""
    made = f"{sys.executable} -m cluster.tf_config --template {LOCAL}"
    try:  # another program may have its ports
        for address in TEMPLATES[LOCAL]["cluster"]["worker"]:
            tf_config.listen(tf_config.split_address(address)[1], "127.0.0.1").close()
    except OSError:
        made += " --hosts " + ",".join(f"localhost:{port}" for port in launch.free_ports(2))
    train = (
        f"{sys.executable} -m tfrl.ppo_procgen --env catch --torso cookbook --num-steps 8 --total-steps 1024"
    )
    train += f" --eval-episodes 1 --logdir {tmp_path} --run-name run"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            ["bash", "-c", f'eval "$({made} --index {index})" && exec {train}'],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (0, 1)
    ]
    try:
        for process in processes:
            said = process.communicate(timeout=600)[0]
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["workers"], results["env_steps"]) == (2, 1024)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--template", "tree-machines", "--index", "0"], "four-machines"),
        (["--template", "two-machines", "--hosts", "a:1", "--index", "0"], "2 training processes"),
        (["--template", "two-machines"], "--index"),
        (["--template", "four-machines", "--index", "4"], "--index is '4'; it must be 0 to 3, or"),
    ],
)
def test_wrong_flags_of_a_template_are_refused(flags, part):
    with pytest.raises(UserError) as caught:
        tf_config_command.main(flags)
    assert part in str(caught.value)


def test_the_wheel_has_every_file_of_cluster():
    """Setuptools packs Python's files, and the others that pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text()
    patterns = yaml.safe_load(re.search(r'^"cluster" = (\[.*\])$', text, re.M)[1])
    named = {path for pattern in (*patterns, "*.py", "py.typed") for path in CLUSTER.glob(pattern)}
    there = {path for path in CLUSTER.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert named == there


def resources():
    found = {}
    for path in MANIFESTS:
        for resource in yaml.safe_load_all(path.read_text()):
            assert resource.keys() >= {"apiVersion", "kind", "metadata", "spec"}
            found[resource["kind"]] = resource
    return found


def pods():
    """Every pod template of the manifests, by the name of its role."""
    found = resources()
    replicas = found["TFJob"]["spec"]["tfReplicaSpecs"]
    return {"job": found["Job"]["spec"]["template"], **{r: spec["template"] for r, spec in replicas.items()}}


def test_the_job_makes_a_tf_config_for_each_pod(tools):
    found = resources()
    spec, service = found["Job"]["spec"], found["Service"]
    container = spec["template"]["spec"]["containers"][0]
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    configs = []
    for index in range(spec["completions"]):
        command = [*container["command"], *container["args"]]
        done = run(command, tools, **environ, JOB_COMPLETION_INDEX=str(index))
        assert done.returncode == 0, done.stderr
        configs += configs_of(done.stdout)
    assert [config.worker for config in configs] == list(range(spec["parallelism"]))
    # The names that an indexed Job's pods have: job-index.subdomain, resolved by the service of that name.
    name, subdomain = found["Job"]["metadata"]["name"], spec["template"]["spec"]["subdomain"]
    port = container["ports"][0]["containerPort"]
    names = tuple(f"{name}-{index}.{subdomain}:{port}" for index in range(4))
    assert {config.workers for config in configs} == {names}
    assert service["metadata"]["name"] == subdomain
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]


def test_the_job_does_not_train_without_a_tf_config(tools):
    container = resources()["Job"]["spec"]["template"]["spec"]["containers"][0]
    command = [*container["command"], *container["args"]]
    done = run(command, tools, WORKERS="4", JOB_COMPLETION_INDEX="4")
    assert (done.returncode, "TRAIN" in done.stdout) == (2, False)
    assert "--index is '4'; it must be 0 to 3" in done.stderr


def test_the_trainer_is_not_the_first_process_of_a_job_and_gets_sigterm_at_once(tools):
    """The kernel drops signals for a first process without a handler, for example while it imports
    TensorFlow.
    """
    write_tool(
        tools / "python",
        f'if [ "$2" = cluster.tf_config ]; then exec {sys.executable} "$@"; fi\necho $$; exec sleep 60\n',
    )
    container = resources()["Job"]["spec"]["template"]["spec"]["containers"][0]
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "WORKERS": "4"}
    process = subprocess.Popen(
        [*container["command"], *container["args"]],
        env={**os.environ, **environ, "JOB_COMPLETION_INDEX": "0"},
        cwd=tools.parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    trainer = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert (process.wait(timeout=30), trainer == process.pid) == (143, False)


def test_the_job_restarts_only_runs_that_can_continue():
    spec = resources()["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # the only one that podFailurePolicy allows
    name = spec["template"]["spec"]["containers"][0]["name"]

    def action(code):
        for rule in spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes:
                assert codes["containerName"] == name
                if (code in codes["values"]) == (codes["operator"] == "In"):
                    return rule["action"]
        return None

    assert {code: action(code) for code in (1, 2, 137, 143, 203)} == {
        1: "FailJob",
        2: "FailJob",
        137: "Count",
        143: "Count",
        203: "Count",  # 75 of the trainer
    }


TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def faults(value, schema, path="TFJob"):
    """What the API server would say of a value and a schema as in tfjob_schema.yaml."""
    if isinstance(schema, str):
        right = isinstance(value, TYPES[schema]) and (schema == "boolean" or not isinstance(value, bool))
        return [] if right else [f"{path} is no {schema}"]
    if type(value) is not type(schema):
        return [f"{path} is {value!r}"]
    if isinstance(schema, list):
        return [fault for i, item in enumerate(value) for fault in faults(item, schema[0], f"{path}[{i}]")]
    fields = {name.rstrip("!"): theirs for name, theirs in schema.items()}
    found = [
        f"{path}.{name[:-1]} is missing" for name in schema if name[-1] == "!" and name[:-1] not in value
    ]
    for name, item in value.items():
        theirs = fields.get(name, fields.get("*"))
        where = f"{path}.{name}"
        found += [f"{where} is unknown"] if theirs is None else faults(item, theirs, where)
    return found


def tfjob_faults(job):
    """What keeps the operator from running it: by its schema, and by what it says of the values beside it.

    The values are from the comments of common_types.go and tensorflow_types.go in pkg/apis/kubeflow.org/v1,
    the rules from the admission webhook, pkg/webhooks/tensorflow/tfjob_webhook.go (training-operator v1.9.0).
    """
    schema = yaml.safe_load((ROOT / "tests" / "tfjob_schema.yaml").read_text())
    found = faults(job, schema)
    spec = job["spec"]
    found += [] if (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob") else ["another kind"]
    found += [] if re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"]) else ["a bad name"]
    if spec.get("runPolicy", {}).get("cleanPodPolicy", "None") not in ("All", "Running", "None"):
        found.append("cleanPodPolicy")
    roles = set(spec["tfReplicaSpecs"])
    found += [f"role {role}" for role in roles - {"PS", "Worker", "Chief", "Master", "Evaluator"}]
    found += ["two chiefs"] if {"Chief", "Master"} <= roles else []
    for role, replica in spec["tfReplicaSpecs"].items():
        if replica.get("restartPolicy", "Never") not in ("Always", "OnFailure", "Never", "ExitCode"):
            found.append(f"{role}: restartPolicy")
        containers = replica["template"]["spec"]["containers"]
        found += [f"{role}: image" for container in containers if not container.get("image")]
        ours = [container for container in containers if container["name"] == "tensorflow"]
        found += [] if ours else [f"{role}: no container of the name tensorflow"]
        # The operator writes this port into TF_CONFIG; of another name, it adds 2222 by itself.
        found += [f"{role}: port" for c in ours if c["ports"][0].get("name") != "tfjob-port"]
    return found


def test_the_tfjob_is_what_the_operator_expects():
    assert tfjob_faults(resources()["TFJob"]) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("replicas: 3", "replicas: three", "TFJob.spec.tfReplicaSpecs.Worker.replicas is no integer"),
        ("  tfReplicaSpecs:", "  replicaSpecs:", "TFJob.spec.tfReplicaSpecs is missing"),
        ("cleanPodPolicy: R", "cleanupPolicy: R", "TFJob.spec.runPolicy.cleanupPolicy is unknown"),
        ("cleanPodPolicy: R", "cleanPodPolicy: r", "cleanPodPolicy"),
        ("    Evaluator:", "    Watcher:", "role Watcher"),
        ("restartPolicy: ExitCode ", "restartPolicy: OnExitCode ", "Chief: restartPolicy"),
        ("name: tensorflow", "name: trainer", "Worker: no container of the name tensorflow"),
        ("name: tfjob-port", "name: tensorflow", "Worker: port"),
        ("claimName:", "claim:", "persistentVolumeClaim.claimName is missing"),
    ],
)
def test_a_tfjob_that_the_operator_would_refuse_is_found(old, new, fault):
    text = (CLUSTER / "kubernetes" / "tfjob.yaml").read_text()
    assert old in text
    job = yaml.safe_load(text.replace(old, new))
    if "tfReplicaSpecs" not in job["spec"]:
        schema = yaml.safe_load((ROOT / "tests" / "tfjob_schema.yaml").read_text())
        assert fault in faults(job, schema)
    else:
        assert any(found.endswith(fault) for found in tfjob_faults(job)), tfjob_faults(job)


def rayjob_faults(job):
    """What the API server would say of a RayJob, and what keeps KubeRay from running it.

    The rules are those of ray-operator/controllers/ray/utils/validation.go (KubeRay v1.7.0).
    """
    found = faults(job, yaml.safe_load((ROOT / "tests" / "rayjob_schema.yaml").read_text()), "RayJob")
    if found:
        return found
    spec = job["spec"]
    found += [] if (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") else ["another kind"]
    if spec.get("submissionMode", "K8sJobMode") not in ("K8sJobMode", "HTTPMode", "InteractiveMode"):
        found.append("submissionMode")
    if spec.get("ttlSecondsAfterFinished", 0) and not spec.get("shutdownAfterJobFinishes"):
        found.append("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            found.append("replicas")
    return found


def test_the_rayjob_is_what_the_operator_expects_and_has_a_cpu_for_each_actor():
    job = resources()["RayJob"]
    assert rayjob_faults(job) == []
    spec = job["spec"]
    python, module, command, *flags = shlex.split(spec["entrypoint"])
    assert (python, module, command) == ("python", "-m", "tfrl.impala")
    config = reader("impala").parse(flags)
    groups = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert config.actors == sum(int(g["rayStartParams"]["num-cpus"]) * g["replicas"] for g in groups)
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert spec["entrypointNumCpus"] == int(head["rayStartParams"]["num-cpus"])  # no actor beside the learner
    allowed = resources()["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    submitter = spec["submitterPodTemplate"]
    for template in (head["template"], submitter, *(group["template"] for group in groups)):
        assert template["metadata"]["labels"] == allowed
        assert template["spec"]["containers"][0]["image"] == submitter["spec"]["containers"][0]["image"]
    assert submitter["spec"]["restartPolicy"] == "Never"  # a Job's pod must say it
    assert spec["rayClusterSpec"]["authOptions"]["mode"] == "token"
    pins = (ROOT / "requirements-ray.txt").read_text()
    assert f"ray=={spec['rayClusterSpec']['rayVersion'].rpartition('.')[0]}.*" in pins


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("groupName: actors", "name: actors", "workerGroupSpecs[0].groupName is missing"),
        ('num-cpus: "8"', "num-cpus: 8", "headGroupSpec.rayStartParams.num-cpus is no string"),
        ("shutdownAfterJobFinishes: true", "suspend: false", "needs shutdownAfterJobFinishes"),
        ("maxReplicas: 2", "maxReplicas: 1", "replicas"),
        ("mountPath:", "path:", "volumeMounts[0].mountPath is missing"),
    ],
)
def test_a_rayjob_that_the_operator_would_refuse_is_found(old, new, fault):
    text = (CLUSTER / "kubernetes" / "rayjob.yaml").read_text()
    assert old in text
    found = rayjob_faults(yaml.safe_load(text.replace(old, new)))
    assert any(one.endswith(fault) for one in found), found


@pytest.mark.parametrize("lists_evaluator", [True, False], ids=["training-operator 1.9", "tf-operator 1.0"])
def test_the_tf_config_made_by_the_operator_is_valid(lists_evaluator):
    replicas = resources()["TFJob"]["spec"]["tfReplicaSpecs"]
    cluster = {
        role.lower(): [f"tfrl-{role.lower()}-{index}.default.svc:2222" for index in range(spec["replicas"])]
        for role, spec in replicas.items()
        if lists_evaluator or role != "Evaluator"
    }
    seen = []
    for role, spec in replicas.items():
        for index in range(spec["replicas"]):
            task = {"type": role.lower(), "index": index}
            config = tf_config.parse(json.dumps({"cluster": cluster, "task": task, "environment": "cloud"}))
            assert config.num_workers == 4
            seen.append(None if config.is_evaluator else config.worker)
    assert seen == [0, 1, 2, 3, None]


RETRY = ["bash", str(CLUSTER / "kubernetes" / "retry-stalled.sh")]


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (2, 2), (75, 203), (137, 137), (143, 143)])
def test_a_tfjob_tries_a_stalled_worker_again(code, told):
    assert subprocess.run([*RETRY, "bash", "-c", f"exit {code}"]).returncode == told


def test_sigterm_goes_through_to_the_trainer_which_may_take_its_time():
    trainer = "trap 'sleep 0.3; echo saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen([*RETRY, "bash", "-c", trainer], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=10)[0], process.returncode) == ("saved\n", 143)


def test_only_the_workers_reach_each_other_and_the_operator_of_ray_the_page_of_jobs():
    policy = resources()["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    rule, of_operator = policy["ingress"]
    assert of_operator["ports"] == [{"port": 8265}]
    (operator,) = of_operator["from"]  # of one entry: a pod of this name, in any namespace
    assert operator == {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    assert rule.keys() == {"from"}  # on any port
    (source,) = rule["from"]
    assert source == {"podSelector": policy["podSelector"]}
    for role, pod in pods().items():
        assert pod["metadata"]["labels"].items() >= policy["podSelector"]["matchLabels"].items(), role


@pytest.mark.parametrize("role", ["job", "Chief", "Worker", "Evaluator"])
def test_pods_share_the_log_folder_and_have_time_to_save(role):
    spec = pods()[role]["spec"]
    claim = resources()["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    container = spec["containers"][0]
    mount = container["volumeMounts"][0]
    assert mount["name"] == spec["volumes"][0]["name"]
    assert f"--logdir {mount['mountPath']}" in " ".join(container["args"])
    assert "--run-name" in " ".join(container["args"])
    assert spec["terminationGracePeriodSeconds"] == launch.ORPHAN_GRACE


@pytest.mark.parametrize("role", ["job", "Chief", "Worker", "Evaluator"])
def test_the_images_user_may_write_on_the_volume(role):
    """A volume belongs to root until it is given to a group of the container's user."""
    user, group = re.search(
        r"^USER (\d+):(\d+)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE
    ).groups()
    assert user != "0"
    assert pods()[role]["spec"]["securityContext"]["fsGroup"] == int(group)


def test_the_dockerfile_copies_what_exists_and_what_runs_there():
    text = (CLUSTER / "Dockerfile").read_text()
    copied = [
        source for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for source in line.split()[:-1]
    ]
    for source in copied:
        assert list(ROOT.glob(source)), source
    assert {"tfrl", "resnet", "cluster", "requirements*.txt"} <= set(copied)
    assert text.rindex("USER ") > text.rindex("RUN ")
    for package in ("libgl1", "libglib2.0-0"):  # without which procgen cannot be imported
        assert re.search(rf"^RUN .*install .*{re.escape(package)} ", text, re.MULTILINE)
