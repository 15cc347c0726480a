"""Workers find each other, and compare their settings, before TensorFlow starts.

TensorFlow waits for a missing worker in silence and never notices that two workers have other settings. So
the workers first meet on the ports that TF_CONFIG gives them, which TensorFlow takes over afterwards:

1. Every worker opens its own port (the fault "port busy" is found here) and holds it. Where a launcher has
   started all again, it waits for one that is taken: a process of the last attempt may still save.
2. Worker 0, the chief, accepts connections; the others connect to it, again and again until it is there, and
   say who they are and what their settings are.
3. Each second the chief tells all of them who is still missing, and they answer. One that goes away or falls
   silent is missing again; it, or its successor, may come back.
4. When all are there, the chief compares the settings. They differ: everybody gets the sentence that says
   where. They agree: after one more answer from everybody the chief gives up its port, says "go", and all
   return.

Who has waited for too long ends with a PeerError, because a launcher that starts all again may help: whoever
was missing may be there then, and whoever had the port gone. Where workers differ, or one is not who it says,
no restart would: that is a UserError.

Messages are JSON objects, one a line. Whatever else connects (a port scanner, `cluster.tf_config --check`) is
shown out without harm. There is no authentication, as there is none in TensorFlow's own protocol on the same
ports.
"""

import contextlib
import json
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfrl.cli.errors import PeerError, UserError
from tfrl.workers.tf_config import PortTakenError, TFConfig, reserve_port, split_address

STATUS_EVERY = 1.0  # seconds between the chief's messages to all
SILENT_AFTER = 10.0  # seconds without a message after which the other side counts as gone
HELLO_WITHIN = 5.0  # seconds a new connection has to say who it is
REPORT_AFTER, REPORT_EVERY = 2.0, 5.0  # seconds until the first line about missing workers, and between lines
RETRY_EVERY = 0.3  # seconds between attempts to reach the chief
FAREWELL = 2.0  # seconds the chief waits for the others to hang up, so that its last message is read
LONGEST_LINE = 1 << 20
CLUSTER_KEY = "TF_CONFIG cluster"


def rendezvous(
    config: TFConfig,
    fingerprint: Mapping[str, str],
    timeout: float,
    report: Callable[[str], None],
    *,
    restarted: bool = False,
) -> None:
    """Returns when all workers of the cluster are there with the same fingerprint.

    Args:
        config: this process's TF_CONFIG. An evaluator has nobody to meet and returns at once.
        fingerprint: what must be equal on all workers, by name: settings, code version, device count.
        timeout: seconds to wait for all of them.
        report: gets a line every few seconds that names who is still missing.
        restarted: this process had predecessors, one of which may still have its port.

    Raises:
        PeerError: on every worker: a worker did not come, naming it. A predecessor keeps the port.
        UserError: on every worker: fingerprints differ, naming the keys and the workers; another process
            already is this worker; this worker's port is taken or not allowed.
    """
    if config.is_evaluator:
        return
    patience = _Patience(timeout, report)
    fingerprint = {CLUSTER_KEY: " ".join(config.workers), **fingerprint}
    with contextlib.closing(_own_port(config, patience if restarted else None)) as listener:
        if config.num_workers == 1:
            return
        if config.worker == 0:
            _lead(config, fingerprint, listener, patience)
        else:
            _follow(config, fingerprint, patience)


class _Patience:
    """How long to wait, and when to say for whom."""

    def __init__(self, timeout: float, report: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._report = report
        self._start = time.monotonic()
        self._next_report = self._start + REPORT_AFTER

    def wait_for(self, missing: Sequence[str]) -> None:
        """Reports those who are missing when it is time to; PeerError when the time is up."""
        self.wait(
            _listed(missing),
            f"{_listed(missing)} did not come up within {self._timeout:g} s; check that each worker runs the "
            "same command with its own task index in TF_CONFIG, and that its port can be reached from here",
        )

    def wait(self, what: str, fault: str) -> None:
        """Reports what is waited for when it is time to; PeerError with `fault` when the time is up."""
        now = time.monotonic()
        if now - self._start >= self._timeout:
            raise PeerError(fault)
        if now >= self._next_report:
            self._next_report = now + REPORT_EVERY
            self._report(f"waiting for {what} ({now - self._start:.0f} of {self._timeout:g} s)")


def _own_port(config: TFConfig, patience: _Patience | None) -> socket.socket:
    """This worker's port, listening, as soon as nobody else has it; at once or never without patience."""
    while True:
        try:
            return reserve_port(config)
        except PortTakenError as taken:
            if patience is None:
                raise
            patience.wait(f"{config.address}, its own port, which another process has", str(taken))
        time.sleep(RETRY_EVERY)


class _Channel:
    """A connection that carries JSON objects, one a line, and what is known of its other end."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(1.0)  # for sending; reading waits for select
        self.socket = connection
        self.heard = time.monotonic()
        self.worker: int | None = None
        self.who = ""
        self.fingerprint: dict[str, str] = {}
        self.answered = 0  # the last of the chief's rounds that this worker answered
        self._unread = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. ConnectionError: the stream ended, or is not our protocol."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("it closed the connection")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > LONGEST_LINE:
            raise ConnectionError("another program answers on this port")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ConnectionError("another program answers on this port") from None
        if not all(isinstance(message, dict) for message in messages):
            raise ConnectionError("another program answers on this port")
        if messages:
            self.heard = time.monotonic()
        return messages


def _follow(config: TFConfig, fingerprint: Mapping[str, str], patience: _Patience) -> None:
    """What the workers other than the chief do: come to the chief until it lets them go."""
    hello = {
        "tfrl": "hello",
        "worker": config.worker,
        "who": f"process {os.getpid()} on {socket.gethostname()}",
        "fingerprint": dict(fingerprint),
    }
    why = "not tried yet"
    while True:
        patience.wait_for([f"{config.name(0)}, the chief ({why})"])
        try:
            with contextlib.closing(_connect(config.workers[0])) as chief:
                chief.send(hello)
                _obey(chief, config.name(0), patience)
                return
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(RETRY_EVERY)


def _connect(address: str) -> _Channel:
    connection = socket.create_connection(split_address(address), timeout=2.0)
    # On one machine a connection to a port that nobody listens on can get that very port and meet itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("Connection refused")
    return _Channel(connection)


def _obey(chief: _Channel, name: str, patience: _Patience) -> None:
    """Answers the chief until it says "go". UserError, PeerError: the chief's; OSError: find it again."""
    missing = [f"{name}, the chief (no answer yet)"]
    while True:
        patience.wait_for(missing)
        if not select.select([chief], [], [], 0.2)[0]:
            if time.monotonic() - chief.heard > SILENT_AFTER:
                raise ConnectionError("it fell silent")
            continue
        for message in chief.receive():
            if "error" in message:
                raise (PeerError if message.get("again") else UserError)(str(message["error"]))
            if "go" in message:
                return
            missing = [str(worker) for worker in message.get("missing", ())] or [f"the go-ahead of {name}"]
            chief.send({"round": message.get("round", 0)})


def _lead(
    config: TFConfig, fingerprint: Mapping[str, str], listener: socket.socket, patience: _Patience
) -> None:
    """What the chief does: gather all, then let all go or tell all why not."""
    gathering = _Gathering(config, fingerprint, listener)
    try:
        gathering.wait(patience)
    except (UserError, PeerError) as error:
        gathering.dismiss({"error": str(error), "again": isinstance(error, PeerError)})
        raise
    # TensorFlow's servers may knock on this port as soon as a worker goes: none of them shall meet us here.
    listener.close()
    gathering.dismiss({"go": True})


class _Gathering:
    """The chief's view: who is there, and what they said."""

    def __init__(self, config: TFConfig, fingerprint: Mapping[str, str], listener: socket.socket) -> None:
        self._config = config
        self._fingerprint = dict(fingerprint)
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: set[_Channel] = set()
        self._workers: dict[int, _Channel] = {}
        self._round = 0
        self._complete_since: int | None = None  # the first round in which all were there

    def wait(self, patience: _Patience) -> None:
        """Returns when all are there, agree and answered. PeerError: time is up; UserError: they differ."""
        next_status = 0.0
        while not self._all_ready():
            for key, _ in self._selector.select(0.1):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)
            now = time.monotonic()
            self._drop_silent(now)
            missing = [self._config.name(worker) for worker in self._missing()]
            patience.wait_for(missing or [f"the answer of {channel.who}" for channel in self._unanswered()])
            just_complete = not missing and self._complete_since is None
            if just_complete or now >= next_status:
                next_status = now + STATUS_EVERY
                self._tell_all(missing)

    def dismiss(self, message: Mapping[str, Any]) -> None:
        """Sends all workers the last message and waits shortly until they hang up.

        They close first, because the side that closes first keeps the port in TIME_WAIT; and a message that
        is still on its way when its sender closes can be lost.
        """
        for channel in list(self._workers.values()):
            self._send(channel, message)
        end = time.monotonic() + FAREWELL
        waiting = set(self._workers.values())
        while waiting and time.monotonic() < end:
            for channel in select.select(list(waiting), [], [], 0.1)[0]:
                try:
                    channel.receive()
                except OSError:
                    waiting.discard(channel)
        for channel in [*self._strangers, *self._workers.values()]:
            channel.close()
        self._selector.close()

    def _missing(self) -> list[int]:
        return [worker for worker in range(1, self._config.num_workers) if worker not in self._workers]

    def _unanswered(self) -> list[_Channel]:
        return [c for c in self._workers.values() if c.answered < (self._complete_since or self._round + 1)]

    def _all_ready(self) -> bool:
        return not self._missing() and not self._unanswered()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have gone again
            channel = _Channel(self._listener.accept()[0])
            self._strangers.add(channel)
            self._selector.register(channel, selectors.EVENT_READ)

    def _hear(self, channel: _Channel) -> None:
        if channel.fileno() < 0:  # dropped since select returned it
            return
        try:
            for message in channel.receive():
                if channel.worker is None:
                    self._welcome(channel, message)
                else:
                    channel.answered = int(message.get("round", 0))
        except (OSError, ValueError, TypeError):
            self._drop(channel)

    def _welcome(self, channel: _Channel, hello: Mapping[str, Any]) -> None:
        """Takes in a worker that says who it is. ConnectionError: it is none, or cannot be taken in."""
        worker, fingerprint = hello.get("worker"), hello.get("fingerprint")
        if hello.get("tfrl") != "hello" or not isinstance(worker, int) or not isinstance(fingerprint, dict):
            raise ConnectionError("not a worker of ours")
        who, count = str(hello.get("who", "")), self._config.num_workers
        if not 1 <= worker < count:
            self._refuse(
                channel,
                f"{who} says it is worker {worker}, but the chief's TF_CONFIG has workers 0 to {count - 1}",
            )
        present = self._workers.get(worker)
        if present is not None:
            if time.monotonic() - present.heard < 3 * STATUS_EVERY:
                self._refuse(
                    channel,
                    f"{who} says it is {self._config.name(worker)}, but {present.who} already is; "
                    "give each worker its own task index in TF_CONFIG",
                )
            self._drop(present)
        channel.worker, channel.who, channel.fingerprint = worker, who, fingerprint
        self._strangers.discard(channel)
        self._workers[worker] = channel
        self._complete_since = None

    def _refuse(self, channel: _Channel, sentence: str) -> None:
        channel.send({"error": sentence})
        raise ConnectionError(sentence)

    def _tell_all(self, missing: list[str]) -> None:
        if not missing and self._complete_since is None:
            all_fingerprints = {worker: channel.fingerprint for worker, channel in self._workers.items()}
            check_agreement(self._config, {0: self._fingerprint, **all_fingerprints})
            self._complete_since = self._round + 1
        self._round += 1
        for channel in list(self._workers.values()):
            self._send(channel, {"missing": missing, "round": self._round})

    def _send(self, channel: _Channel, message: Mapping[str, Any]) -> None:
        try:
            channel.send(message)
        except OSError:
            self._drop(channel)

    def _drop_silent(self, now: float) -> None:
        for channel in [c for c in self._strangers if now - c.heard > HELLO_WITHIN]:
            self._drop(channel)
        for channel in [c for c in self._workers.values() if now - c.heard > SILENT_AFTER]:
            self._drop(channel)

    def _drop(self, channel: _Channel) -> None:
        self._selector.unregister(channel)
        channel.close()
        self._strangers.discard(channel)
        if channel.worker is not None:
            del self._workers[channel.worker]
            self._complete_since = None


def check_agreement(config: TFConfig, fingerprints: Mapping[int, Mapping[str, str]]) -> None:
    """Raises UserError naming the keys that differ, their values and the workers that have them."""
    keys = sorted({key for fingerprint in fingerprints.values() for key in fingerprint})
    differing = []
    for key in keys:
        workers_of: dict[str, list[int]] = {}
        for worker in sorted(fingerprints):
            workers_of.setdefault(str(fingerprints[worker].get(key, "missing")), []).append(worker)
        if len(workers_of) > 1:
            values = (f"{value} on {_named(config, workers)}" for value, workers in workers_of.items())
            differing.append(f"{key} is {' and '.join(values)}")
    if differing:
        raise UserError(
            f"the workers differ: {_listed(differing, '; ')}; "
            "start all of them with the same settings and code"
        )


def _named(config: TFConfig, workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return config.name(workers[0])
    return f"workers {_listed([str(worker) for worker in workers])}"


def _listed(items: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])
