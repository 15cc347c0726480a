"""TF_CONFIG: what is read from it, and the sentence for every fault. Also `python -m cluster.tf_config`."""

import json
import os
import subprocess
import sys

import pytest

from tfrl.cli.errors import UserError
from tfrl.workers import tf_config


def config_text(cluster, role="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


TWO = {"worker": ["a:2222", "b:2222"]}
ALL_ROLES = {"worker": ["b:2222", "c:2222"], "evaluator": ["e:2222"], "chief": ["a:2222"]}


@pytest.fixture
def taken_port():
    with tf_config.listen(0) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}])
def test_an_unset_or_empty_tf_config_is_none(environ):
    assert tf_config.read(environ) is None


def test_the_chief_is_numbered_first_wherever_it_stands_in_the_json():
    numbers = {}
    for role, index in (("chief", 0), ("worker", 0), ("worker", 1)):
        config = tf_config.read({"TF_CONFIG": config_text(ALL_ROLES, role, index)})
        numbers[role, index] = config.worker
        assert config.workers == ("a:2222", "b:2222", "c:2222")
        assert config.workers[config.worker] == config.address
        assert config.is_chief == (role == "chief")
    assert numbers == {("chief", 0): 0, ("worker", 0): 1, ("worker", 1): 2}


def test_worker_0_is_the_chief_where_none_is_named():
    assert [tf_config.parse(config_text(TWO, index=index)).is_chief for index in (0, 1)] == [True, False]


@pytest.mark.parametrize(("cluster", "address"), [(ALL_ROLES, "e:2222"), (TWO, None)])
def test_an_evaluator_is_never_counted_as_a_worker(cluster, address):
    config = tf_config.parse(config_text(cluster, "evaluator"))
    assert config.is_evaluator
    assert not config.is_chief
    assert config.address == address
    assert "e:2222" not in config.workers
    assert config.worker is None


def test_to_json_round_trip_and_further_keys_are_ignored():
    text = json.dumps({**json.loads(config_text(ALL_ROLES, "worker", 1)), "environment": "cloud"})
    config = tf_config.parse(text)
    assert tf_config.parse(config.to_json()) == config
    assert json.loads(config.to_json())["task"] == {"type": "worker", "index": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"cluster": ', ["not JSON", '{"cluster": ']),
        ("a:2222,b:2222", ["not JSON", "a:2222,b:2222"]),
        ("[" * 100_000, ["not JSON"]),
        ("9" * 5000, ["not JSON"]),
        ("[1]", ["[1]", "object"]),
        ('{"task": {"type": "worker", "index": 0}}', ["{'task': ", '"cluster": ']),
        (json.dumps({"cluster": TWO}), ["{'cluster': ", '"task": ']),
        (json.dumps({"cluster": TWO, "task": {"index": 0}}), ["{'index': 0}", '"type": "worker"']),
        (json.dumps({"cluster": TWO, "task": "worker"}), ["'worker'"]),
        (config_text({}), ["{}", "by role"]),
        (config_text(["a:2222"]), ["['a:2222']", "by role"]),
        (config_text({"worker": "a:2222"}), ["'a:2222'", "list"]),
        (config_text({"worker": {"0": "a:2222"}}), ["list"]),
        (config_text({"worker": []}), ["no worker"]),
        (config_text({"evaluator": ["a:2222"]}, "evaluator"), ["no worker", "evaluator"]),
        (config_text(TWO, index=2), ["'index': 2", "worker with index 0 to 1"]),
        (config_text(TWO, index=-1), ["'index': -1", "worker with index 0 to 1"]),
        (config_text(TWO, index="1"), ["'index': '1'", '"index": 0']),
        (config_text(TWO, index=True), ["True", '"index": 0']),
        (config_text(TWO, role="chief"), ["'chief'", "has worker with index 0 to 1, evaluator with index 0"]),
        (config_text(TWO, role="trainer"), ["'trainer'"]),
        (config_text(TWO, role=["worker"]), ["['worker']"]),
        (config_text({**TWO, "ps": ["c:1"]}), ["'ps'", "chief, worker, evaluator"]),
        (config_text({**TWO, "chief": ["c:1", "d:1"]}), ["2 chiefs", "one"]),
        (config_text({**TWO, "evaluator": ["c:1", "d:1"]}), ["2 evaluators", "one"]),
        (config_text({"worker": ["a:2222", "A:2222"]}), ["'A:2222'", "worker 0", "worker 1"]),
        (config_text({"worker": ["localhost:1", "[::1]:1"]}), ["'[::1]:1'", "of its own"]),
        (config_text({**TWO, "evaluator": ["b:2222"]}), ["'b:2222'", "worker 1", "evaluator 0"]),
        (config_text({"worker": ["a"]}), ["'a'", "host:port"]),
        (config_text({"worker": [2222]}), ["2222", "host:port"]),
        (config_text({"worker": ["a:http"]}), ["'a:http'", "host:port"]),
        (config_text({"worker": ["grpc://a:2222"]}), ["'grpc://a:2222'", "host:port"]),
        (config_text({"worker": [" a:2222"]}), ["' a:2222'", "host:port"]),
        (config_text({"worker": ["a:0"]}), ["port 0", "65535"]),
        (config_text({"worker": ["a:65536"]}), ["port 65536", "65535"]),
        (config_text({"worker": ["::1:2222"]}), ["brackets", "[::1]:2222"]),
        (config_text({"worker": ["[::g]:2222"]}), ["'[::g]:2222'", "host:port"]),
        (config_text({"worker": ["[]:2222"]}), ["'[]:2222'", "host:port"]),
    ],
)
def test_each_fault_gives_a_one_sentence_error_with_the_value_and_what_would_be_right(text, words):
    with pytest.raises(UserError) as error:
        tf_config.parse(text)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert len(sentence) < 400
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("a:1", ("a", 1)),
        ("node-3.example.org:65535", ("node-3.example.org", 65535)),
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("[fe80::1]:2222", ("fe80::1", 2222)),
    ],
)
def test_an_address_is_split_into_host_and_port(address, parts):
    assert tf_config.split_address(address) == parts


def test_a_taken_port_is_found_and_a_free_one_is_left_free(taken_port):
    with pytest.raises(UserError, match=f"port {taken_port} .* already in use"):
        tf_config.reserve_port(tf_config.parse(config_text({"worker": [f"localhost:{taken_port}"]})))
    with tf_config.listen(0) as listener:
        free = listener.getsockname()[1]
    config = tf_config.parse(config_text({"worker": [f"localhost:{free}"]}))
    tf_config.reserve_port(config).close()
    tf_config.reserve_port(config).close()


@pytest.mark.parametrize(
    ("hosts", "bound"),
    [
        (("localhost", "127.0.0.1"), "127.0.0.1"),
        (("127.0.0.2", "127.0.0.1"), "127.0.0.2"),
        (("[::1]", "localhost"), "::1"),
        (("localhost", "a"), "::"),
    ],
)
def test_a_worker_listens_on_the_network_only_if_a_worker_is_on_another_machine(hosts, bound):
    with tf_config.listen(0) as listener:
        port = listener.getsockname()[1]
    config = tf_config.parse(config_text({"worker": [f"{hosts[0]}:{port}", f"{hosts[1]}:2222"]}))
    with tf_config.reserve_port(config) as listener:
        assert listener.getsockname()[:2] == (bound, port)


def run_command(*flags, **environ):
    environ = {**{k: v for k, v in os.environ.items() if k != "TF_CONFIG"}, **environ}
    command = [sys.executable, "-m", "cluster.tf_config", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)


def exported(*flags):
    """What a shell has in TF_CONFIG after it has run the line that the command prints."""
    line = run_command(*flags)
    assert line.returncode == 0, line.stderr
    shell = subprocess.run(
        ["bash", "-c", f'{line.stdout}printf %s "$TF_CONFIG"'], capture_output=True, text=True
    )
    return tf_config.parse(shell.stdout)


def test_the_command_prints_a_line_that_a_shell_takes():
    config = exported("--hosts", "a:2222,b:2222", "--index", "1")
    assert config.workers == ("a:2222", "b:2222")
    assert (config.worker, config.evaluator) == (1, None)


def test_the_command_makes_an_evaluator():
    flags = ("--hosts", "a:1,b:1,c:1", "--evaluator", "e:1", "--index")
    assert [exported(*flags, str(index)).worker for index in range(3)] == [0, 1, 2]
    evaluator = exported(*flags, "evaluator")
    assert evaluator.is_evaluator
    assert evaluator.address == "e:1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hosts", "a:1,b:1", "--index", "2"], ["--index is '2'; it must be 0 to 1, or 'evaluator'"]),
        (["--hosts", "a:1,b", "--index", "0"], ["'b'", "host:port"]),
        (["--hosts", "a:1,a:1", "--index", "0"], ["'a:1'", "of its own"]),
        (["--hosts", "a:1,b:1", "--index", "two"], ["'two'"]),
        (["--hosts", "a:1,b:1", "--index=--5"], ["'--5'"]),
        (["--hosts", "a:1,b:1"], ["--index"]),
        (["--check"], ["TF_CONFIG is not set"]),
        (["--hots", "a:1"], ["--hots"]),
        ([], ["--hosts"]),
    ],
)
def test_the_command_refuses_in_one_sentence(flags, words):
    done = run_command(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_check_tells_which_peers_answer(taken_port):
    cluster = {
        "worker": ["localhost:1027", f"127.0.0.1:{taken_port}", "no-such-host.invalid:2222", "a..b:2222"]
    }
    done = run_command("--check", TF_CONFIG=config_text(cluster))
    assert done.returncode == 0, done.stderr
    assert "worker 0 (localhost:1027)" in done.stdout
    lines = {line.split(" ", 2)[1]: line for line in done.stdout.splitlines() if line.startswith("worker ")}
    assert "answers" in lines["1"]
    assert "does not answer" in lines["2"]
    assert "does not answer: not the name of a host" in lines["3"]
    assert "not started" in done.stdout


def test_check_finds_a_taken_port_and_a_wrong_value(taken_port):
    done = run_command("--check", TF_CONFIG=config_text({"worker": [f"localhost:{taken_port}"]}))
    assert (done.returncode, "already in use" in done.stderr) == (2, True)
    done = run_command("--check", TF_CONFIG="{}")
    assert (done.returncode, "TF_CONFIG is {}; it must be" in done.stderr) == (2, True)
