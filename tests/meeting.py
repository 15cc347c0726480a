"""Workers that meet, in threads of this process, and connections that speak to them by hand."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from cluster.launch import free_ports
from tfrl.cli.errors import PeerError, UserError
from tfrl.workers import rendezvous, tf_config

SAME = {"lr": "0.0005", "code": "abc"}


def quicken(monkeypatch):
    """Has the chief asked, and people told, several times a second."""
    for name, seconds in (("REPORT_AFTER", 0.2), ("REPORT_EVERY", 0.2), ("ASK_EVERY", 0.1)):
        monkeypatch.setattr(rendezvous, name, seconds)


def configs(count, host="127.0.0.1"):
    cluster = {"worker": [f"{host}:{port}" for port in free_ports(count)]}
    tasks = [{"type": "worker", "index": index} for index in range(count)]
    return [tf_config.parse(json.dumps({"cluster": cluster, "task": task})) for task in tasks]


class Attempt:
    """One worker's rendezvous in a thread."""

    def __init__(self, config, fingerprint=SAME, timeout=10.0, **options):
        self.lines = []
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(
            rendezvous.rendezvous, config, fingerprint, timeout, self.lines.append, **options
        )

    def result(self):
        """None, or the error's sentence."""
        self.again = False
        try:
            return self._future.result(20)
        except (UserError, PeerError) as error:
            self.again = isinstance(error, PeerError)  # a launcher is to start all again
            return str(error)

    @property
    def done(self):
        return self._future.done()


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def hello(config, worker):
    fingerprint = {rendezvous.CLUSTER_KEY: " ".join(config.workers), **SAME}
    return {
        "tfrl": "rendezvous",
        "worker": worker,
        "who": "process 7 on another-host",
        "fingerprint": fingerprint,
    }


def connect_to(config, line):
    """A connection to the chief, over which something has been sent."""
    connection = socket.create_connection(tf_config.split_address(config.workers[0]), timeout=5)
    with contextlib.suppress(ConnectionError):
        connection.sendall(line)
    return connection


def is_hung_up(connection):
    """Whether the other end closes, whatever it says before."""
    connection.settimeout(5)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def ask(chief, config, message):
    """The answer of the waiting chief to a worker on another machine, as it were."""
    until(lambda: chief.lines)
    with connect_to(config, json.dumps(message).encode() + b"\n") as connection:
        return json.loads(connection.makefile("rb").readline())
