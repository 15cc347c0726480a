"""Workers meet over real sockets: threads of this process, and processes where one has to die or hang."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from meeting import Attempt, ask, configs, connect_to, hello, is_hung_up, quicken, until

from cluster.launch import free_ports
from tfrl.workers import rendezvous, tf_config


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quicken(monkeypatch)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_workers_meet_and_leave_their_ports_free(host):
    cluster = configs(3, host)
    attempts = [Attempt(config) for config in cluster]
    assert [attempt.result() for attempt in attempts] == [None] * 3
    for config in cluster:
        tf_config.reserve_port(config).close()


def test_the_chief_may_come_last_and_each_is_named_while_it_is_missing():
    cluster = configs(3)
    second = Attempt(cluster[2])
    until(lambda: second.lines)
    assert f"worker 0 ({cluster[0].workers[0]}), the chief (Connection refused)" in second.lines[0]
    chief = Attempt(cluster[0])
    line = f"waiting for worker 1 ({cluster[0].workers[1]}) ("
    for attempt in (chief, second):  # the chief passes on whom it misses, once worker 2 has spoken to it
        until(lambda attempt=attempt: attempt.lines and line in attempt.lines[-1])
        assert "of 10 s)" in attempt.lines[-1]
        assert not attempt.done
    assert [Attempt(cluster[1]).result(), chief.result(), second.result()] == [None] * 3


def test_a_missing_worker_is_named_by_everybody_when_the_time_is_up():
    cluster = configs(4)
    started = time.monotonic()
    attempts = [Attempt(cluster[index], timeout=1.0) for index in (0, 2)]
    for attempt in attempts:
        sentence = attempt.result()
        names = f"{cluster[0].name(1)}, {cluster[0].name(3)} did not start within 1 s"
        assert sentence.startswith(names) and attempt.again
    assert time.monotonic() - started < 4


def test_a_missing_chief_is_named_when_the_time_is_up():
    config = configs(2)[1]
    attempt = Attempt(config, timeout=0.8)
    sentence = attempt.result()
    assert attempt.again
    assert f"{config.name(0)}, the chief (Connection refused) did not start" in sentence


def test_a_missing_host_is_reported_with_the_reason():
    cluster = {"chief": ["no-such-host.invalid:2222"], "worker": [f"127.0.0.1:{free_ports(1)[0]}"]}
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    sentence = Attempt(tf_config.parse(text), timeout=0.5).result()
    assert "no-such-host.invalid:2222" in sentence
    assert "refused" not in sentence


def test_a_differing_worker_ends_all_with_the_difference():
    cluster = configs(3)
    attempts = [Attempt(cluster[index], {"lr": "0.1", "code": "abc", "seed": "1"}) for index in (0, 1)]
    until(lambda: attempts[1].lines)
    attempts.append(Attempt(cluster[2], {"lr": "0.2", "code": "abc"}))
    for attempt in attempts:
        sentence = attempt.result()
        assert not attempt.again
        lr = f"lr is 0.1 on worker 0 ({cluster[0].address}) and 0.2 on worker 2 ({cluster[2].address})"
        seed = f"seed is 1 on {cluster[0].name(0)} and missing on {cluster[0].name(2)}"
        end = "start all of them with the same settings and code"
        assert sentence == f"the workers differ: {lr}; {seed}; {end}"


def test_another_list_of_workers_is_named_as_a_difference():
    first, second = configs(2)
    other = json.loads(second.to_json())
    other["cluster"]["worker"].append("127.0.0.1:2222")
    chief, stray = Attempt(first, timeout=1.0), Attempt(tf_config.parse(json.dumps(other)))
    assert "TF_CONFIG cluster is" in stray.result() and not stray.again
    assert "did not start within" in chief.result() and chief.again  # its own may yet come


def test_an_index_that_the_chief_does_not_know_is_refused():
    first, second = configs(2)
    port = free_ports(1)[0]
    other = {
        "cluster": {"worker": [*first.workers, f"127.0.0.1:{port}"]},
        "task": {"type": "worker", "index": 2},
    }
    chief, stray = Attempt(first), Attempt(tf_config.parse(json.dumps(other)))
    assert "the chief's TF_CONFIG has workers 0 to 1" in stray.result() and not stray.again
    assert [Attempt(second).result(), chief.result()] == [None, None]


def test_a_second_process_with_the_same_port_gets_an_error():
    cluster = configs(2)
    chief = Attempt(cluster[0])
    until(lambda: chief.lines)
    second = Attempt(cluster[0])
    assert "already in use" in second.result() and not second.again and not second.lines
    third = Attempt(cluster[0], timeout=1.0, restarted=True)
    assert "already in use" in third.result() and third.again
    assert f"waiting for {cluster[0].address}, its own port, which another process has (" in third.lines[0]
    assert [Attempt(cluster[1]).result(), chief.result()] == [None, None]


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_that_a_predecessor_still_has_is_waited_for(count):
    cluster = configs(count)
    with tf_config.reserve_port(cluster[-1]):
        attempts = [Attempt(config, restarted=True) for config in cluster]
        until(lambda: any("its own port" in line for line in attempts[-1].lines))
    assert [attempt.result() for attempt in attempts] == [None] * count


def test_a_second_process_with_the_same_index_elsewhere_is_refused_and_harms_nobody():
    cluster = configs(3)
    chief, first = Attempt(cluster[0]), Attempt(cluster[1])
    until(lambda: any(cluster[0].name(2) in line for line in first.lines))
    until(lambda: "error" in ask(chief, cluster[0], hello(cluster[0], 1)))
    answer = ask(chief, cluster[0], hello(cluster[0], 1))
    assert f"process 7 on another-host says it is {cluster[0].name(1)}" in answer["error"]
    assert f"process {os.getpid()} on " in answer["error"]
    assert [Attempt(cluster[2]).result(), chief.result(), first.result()] == [None] * 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)),
        b"[1]\n",
        b'{"worker": 1}\n',
        b'{"tfrl": "rendezvous", "worker": "1", "who": "x", "fingerprint": {}}\n',
        b"[" * 100_000 + b"\n",
        b"x" * (rendezvous.LONGEST_LINE + 70_000),
    ],
    ids=["nothing", "http", "http2", "list", "half", "type", "deep", "long"],
)
def test_connections_of_other_programs_are_refused(garbage, monkeypatch):
    monkeypatch.setattr(rendezvous, "MESSAGE_WITHIN", 60.0 if garbage else 0.2)
    cluster = configs(2)
    chief = Attempt(cluster[0])
    until(lambda: chief.lines)
    with connect_to(cluster[0], garbage) as connection:
        assert is_hung_up(connection)
    assert not chief.done
    assert [Attempt(cluster[1]).result(), chief.result()] == [None, None]


def test_the_chief_frees_its_port_when_all_have_heard_the_go_ahead():
    cluster = configs(2)
    chief = Attempt(cluster[0])
    while "go" not in ask(chief, cluster[0], hello(cluster[0], 1)):
        pass
    assert chief.result() is None
    tf_config.reserve_port(cluster[0]).close()


def test_another_program_on_the_chiefs_port_is_not_accepted():
    cluster = configs(2)
    port = tf_config.split_address(cluster[0].workers[0])[1]
    with tf_config.listen(port) as other:
        other.settimeout(5)
        worker = Attempt(cluster[1])
        while not worker.lines:
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
        assert f"{cluster[0].name(0)}, the chief (another program answers on this port)" in worker.lines[0]
    assert [Attempt(cluster[0]).result(), worker.result()] == [None, None]


def test_a_silent_worker_counts_as_missing_and_its_successor_is_accepted(monkeypatch):
    monkeypatch.setattr(rendezvous, "SILENT_AFTER", 0.5)
    cluster = configs(3)
    chief = Attempt(cluster[0])
    assert ask(chief, cluster[0], hello(cluster[0], 1))["missing"] == [cluster[0].name(2)]
    second = Attempt(cluster[2])
    until(lambda: cluster[0].name(1) in chief.lines[-1])
    assert [attempt.result() for attempt in (Attempt(cluster[1]), second, chief)] == [None] * 3


def test_a_worker_that_pauses_before_it_hears_the_go_ahead_is_waited_for(monkeypatch):
    monkeypatch.setattr(rendezvous, "SILENT_AFTER", 0.5)
    cluster = configs(3)
    chief, second = Attempt(cluster[0]), Attempt(cluster[2])
    until(lambda: chief.lines and cluster[0].name(2) not in chief.lines[-1])
    for _ in range(2):  # it has to ask again, because it came last
        assert ask(chief, cluster[0], hello(cluster[0], 1))["missing"] == []
    until(lambda: second.done)  # it has heard "go"
    time.sleep(1.0)
    assert not chief.done
    assert "go" in ask(chief, cluster[0], hello(cluster[0], 1))
    assert [second.result(), chief.result()] == [None, None]


def test_a_worker_that_died_before_the_last_one_came_is_waited_for():
    cluster = configs(3)
    chief = Attempt(cluster[0])
    ask(chief, cluster[0], hello(cluster[0], 1))
    last = Attempt(cluster[2])
    until(lambda: "waiting for the answer of process 7 on another-host" in chief.lines[-1])
    assert not chief.done and not last.done
    assert [attempt.result() for attempt in (Attempt(cluster[1]), last, chief)] == [None] * 3


WORKER = """
import json, sys
from tfrl.workers import rendezvous
from tfrl.workers import tf_config
rendezvous.rendezvous(tf_config.read(), {"lr": "0.0005", "code": "abc"}, 20, print)
print("met", "tensorflow" in sys.modules)
"""


def start_process(config):
    environ = {**os.environ, "TF_CONFIG": config.to_json(), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, "-c", WORKER], env=environ, stdout=subprocess.PIPE, text=True)


def test_a_killed_workers_successor_takes_its_place():
    cluster = configs(3)
    chief = Attempt(cluster[0])
    victim = start_process(cluster[1])
    until(lambda: chief.lines and cluster[0].name(1) not in chief.lines[-1])
    victim.kill()
    victim.communicate()
    until(lambda: cluster[0].name(1) in chief.lines[-1])
    successor = start_process(cluster[1])
    last = Attempt(cluster[2])
    assert successor.communicate(timeout=20)[0].endswith("met False\n")
    assert [last.result(), chief.result()] == [None, None]


def test_a_killed_chiefs_successor_gathers_the_workers_again():
    cluster = configs(3)
    victim = start_process(cluster[0])
    worker = Attempt(cluster[1])
    until(lambda: worker.lines and cluster[0].name(2) in worker.lines[-1])
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    until(lambda: "the chief" in worker.lines[-1])
    attempts = [Attempt(cluster[0]), Attempt(cluster[2])]
    assert [attempt.result() for attempt in [*attempts, worker]] == [None] * 3


def test_many_workers_meet_at_once():
    attempts = [Attempt(config) for config in configs(24)]
    assert [attempt.result() for attempt in attempts] == [None] * 24
    assert threading.active_count() < 100


def test_one_worker_meets_nobody_but_its_port_must_be_free():
    (config,) = configs(1)
    assert Attempt(config).result() is None
    with tf_config.reserve_port(config):
        assert "already in use" in Attempt(config).result()
