"""Whatever comes in at a rendezvous, or answers there, those who belong together still meet."""

import contextlib
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from meeting import Attempt, ask, configs, connect_to, hello, is_hung_up, quicken, until

from tfrl.workers import rendezvous, tf_config

# As JSON that Python reads, and what no field may be.
WRONG = ["Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 4000, "-1", "0.5", "true", "null", '"x"', "[]"]
WRONG += ["{}", "[[1]]", '{"a": {}}', "[" * 90_000 + "]" * 90_000, '"\\ud800\\u001b[2J"']


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quicken(monkeypatch)
    monkeypatch.setattr(rendezvous, "ASK_EVERY", 0.01)


def with_field(message, name, value):
    """A line of a message in which a field has another value, given as JSON."""
    holds = json.dumps({**message, name: "VALUE"})
    return holds.replace('"VALUE"', value).encode() + b"\n"


def test_a_hello_with_anything_wrong_in_any_field_is_dropped():
    cluster = configs(2)
    chief = Attempt(cluster[0])
    until(lambda: chief.lines)
    valid = hello(cluster[0], 1)
    for name in valid:
        for value in WRONG:
            if name == "who" and value.startswith('"'):
                continue  # any text is a name
            if name == "fingerprint" and value == "{}":
                continue  # a worker of another cluster, whom the chief refuses
            with connect_to(cluster[0], with_field(valid, name, value)) as connection:
                assert is_hung_up(connection)
    for value in WRONG:
        if not value.startswith('"'):
            line = with_field(valid, "fingerprint", json.dumps({"lr": "VALUE"}).replace('"VALUE"', value))
            with connect_to(cluster[0], line) as connection:
                assert is_hung_up(connection)
    assert not chief.done
    assert [Attempt(cluster[1]).result(), chief.result()] == [None, None]


def test_wrong_messages_of_a_chief_are_ignored():
    cluster = configs(2)
    status = {"tfrl": "rendezvous", "missing": ["worker 2 (c:1)"]}
    lines = [with_field(status, "missing", value) for value in WRONG if not value.startswith("[")]
    lines += [b'{"go": true}\n', b'{"jsonrpc": "2.0", "error": {"code": -32600}}\n', b"\xff\xfe\n", b"{}\n"]
    with tf_config.listen(tf_config.split_address(cluster[0].workers[0])[1]) as impostor:
        impostor.settimeout(5)
        worker = Attempt(cluster[1], timeout=60)
        for line in lines:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(line)
                assert is_hung_up(connection)
        assert not worker.done
    assert [Attempt(cluster[0]).result(), worker.result()] == [None, None]


def mutated(source, message):
    """A line near a right one: a field changed, gone or doubled, bytes cut, swapped or put in."""
    wrong = source.choice([name for name in message if name != "who"])  # any text is a name
    line = bytearray(with_field(message, wrong, source.choice(WRONG[:14])))
    for _ in range(source.randrange(4)):
        at = source.randrange(len(line))
        kind = source.randrange(3)
        line[at : at + (kind > 0)] = bytes([source.randrange(256)]) if kind < 2 else b""
    return bytes(line) + b"\n" * source.randrange(2)


def test_random_lines_crash_no_worker():
    source = random.Random(1)
    cluster = configs(3)
    attempts = [Attempt(config, timeout=60) for config in cluster[:2]]
    until(lambda: all(attempt.lines for attempt in attempts))
    for _ in range(300):  # of another cluster, because a worker of this one with other settings ends all
        message = hello(cluster[0], source.choice((1, 2))) | {"fingerprint": {"lr": "0.0005"}}
        line = mutated(source, message)
        if source.randrange(2):
            line += mutated(source, {"round": 1})
        connect_to(cluster[0], line).close()
    assert not any(attempt.done for attempt in attempts)
    assert [attempt.result() for attempt in (Attempt(cluster[2]), *attempts)] == [None] * 3


@pytest.mark.parametrize("beginning", [b"", b'{"tfrl": "rendezvous", "worker": 1'])
def test_a_connection_without_a_line_end_is_closed(monkeypatch, beginning):
    """Tests both sides, also if a byte comes now and then."""
    monkeypatch.setattr(rendezvous, "MESSAGE_WITHIN", 0.5)
    cluster = configs(2)
    chief = Attempt(cluster[0])
    until(lambda: chief.lines)
    with connect_to(cluster[0], beginning) as connection:
        trickle(connection, beginning[:1])
    assert not chief.done
    other = configs(2)
    with tf_config.listen(tf_config.split_address(other[0].workers[0])[1]) as impostor:
        impostor.settimeout(5)
        worker = Attempt(other[1])
        connection, _ = impostor.accept()
        with connection:
            trickle(connection, beginning[:1])
    assert [Attempt(cluster[1]).result(), chief.result()] == [None, None]
    assert [Attempt(other[0]).result(), worker.result()] == [None, None]


def trickle(connection, byte):
    end = time.monotonic() + 5
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end:
            connection.sendall(byte)
            time.sleep(0.05)
            connection.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1 << 16):
                    return
        pytest.fail("it was not hung up on")


def test_a_blocked_connection_does_not_block_others():
    """A worker asks, and then does not read the answer, for example."""
    cluster = configs(3)
    chief, second = Attempt(cluster[0]), Attempt(cluster[2])
    until(lambda: chief.lines)
    line = json.dumps(hello(cluster[0], 2)).encode() + b"\n"
    with connect_to(cluster[0], line), connect_to(cluster[0], line[:9]), connect_to(cluster[0], b""):
        assert [attempt.result() for attempt in (Attempt(cluster[1]), second, chief)] == [None] * 3


def test_control_characters_of_strangers_are_not_printed():
    cluster = configs(2)
    chief = Attempt(cluster[0])
    until(lambda: chief.lines)
    stranger = hello(cluster[0], 1) | {"who": "\x1b[2J\n\ud800" + "x" * 10_000}
    stranger["fingerprint"] = {"\x07": "\x1b]0;title\x07" * 1000}
    answer = ask(chief, cluster[0], stranger)["error"]
    assert answer.startswith("the workers differ: ") and answer.isprintable() and len(answer) < 5000
    answer = ask(chief, cluster[0], stranger | {"worker": 9})["error"]
    assert "says it is worker 9" in answer and answer.isprintable() and len(answer) < 5000
    assert [Attempt(cluster[1]).result(), chief.result()] == [None, None]


def test_no_time_out_names_an_empty_list_of_workers(monkeypatch):
    """The last answer may come when the time is up, so answers are read before the clock."""
    waited_for, wait_for = [], rendezvous._Patience.wait_for
    monkeypatch.setattr(
        rendezvous._Patience,
        "wait_for",
        lambda self, missing, *fault: (waited_for.append(list(missing)), wait_for(self, missing, *fault)),
    )
    attempts = [Attempt(config) for config in configs(3)]
    assert [attempt.result() for attempt in attempts] == [None] * 3
    assert waited_for and all(waited_for)


def test_an_invalid_host_name_is_reported_with_the_reason():
    text = json.dumps({"cluster": {"worker": ["a..b:2222", "127.0.0.1:0"]}, "task": {}})
    text = text.replace("127.0.0.1:0", configs(1)[0].address)
    text = text.replace('"task": {}', '"task": {"type": "worker", "index": 1}')
    sentence = Attempt(tf_config.parse(text), timeout=0.5).result()
    assert "worker 0 (a..b:2222), the chief (not the name of a host) did not start" in sentence


def test_long_lists_of_workers_show_where_they_differ():
    config = configs(2)[0]
    lists = [" ".join(f"host-{number}:2222" for number in range(count)) for count in (20, 21)]
    (said,) = rendezvous.differences(config, 1, *({rendezvous.CLUSTER_KEY: text} for text in lists))
    assert all(text in said for text in lists)


def test_a_line_may_come_in_pieces():
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b'{"tfrl": "rendez')
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(rendezvous._receive, here)
            time.sleep(0.05)
            there.sendall(b'vous", "n": 1}\n{"tfrl"')
            assert received.result(5)["n"] == 1
