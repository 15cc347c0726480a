"""Rendezvous of the workers: they find each other and compare their settings before TensorFlow starts.

TensorFlow waits for a missing worker without a message, and does not notice different settings. So the
workers first meet on the ports of TF_CONFIG, which TensorFlow uses afterwards:

1. Each worker opens its own port and holds it. A worker that a launcher has started again waits for a port
   that is taken: a process of the last attempt may still save.
2. Each worker asks worker 0, the chief, several times a second. It connects, sends its index and its settings
   (its fingerprint), and reads one answer.
3. The chief answers with the names of the missing workers. A worker that stops asking is missing again, until
   it or its successor asks.
4. When a worker has another fingerprint, the chief ends the start: all workers end and name the difference.
   But it only refuses a process that has another list of workers: the right one may still come.
5. When all workers are there, and each has asked again since the last one came, the chief answers "go",
   closes its port when all have heard it, and all return.

A worker that has waited too long ends with PeerError, because a restart of all workers may help. It would not
help against a difference, so this is a UserError.

Messages are JSON objects, one a line. Anything may connect to a port, or answer there: a port scanner, a
worker of another cluster, `cluster.tf_config --check`. A connection with other messages is closed, and the
start continues. There is no authentication, because TensorFlow's own protocol has none on the same ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfrl.cli.errors import PeerError, UserError
from tfrl.workers.tf_config import PortTakenError, TFConfig, reserve_port, split_address

ASK_EVERY = 0.3  # seconds between two questions of a worker
SILENT_AFTER = 3.0  # a worker that has asked nothing for so many seconds counts as missing
MESSAGE_WITHIN = 2.0  # seconds for a message to arrive
GO_WITHIN = 30.0  # seconds for every worker to hear "go", also one that has no time on a busy machine
FAREWELL = 2.0  # seconds for the workers that still ask to hear why the start fails
REPORT_AFTER, REPORT_EVERY = 2.0, 5.0  # seconds until the first line about missing workers, and between lines
LONGEST_LINE = 1 << 20  # bytes
CLUSTER_KEY = "TF_CONFIG cluster"
_FOREIGN = "another program answers on this port"


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
        config: this process's TF_CONFIG, not an evaluator's.
        fingerprint: values that must be equal on all workers, by name: settings, code version, device count.
        timeout: seconds to wait for all workers.
        report: gets a line every few seconds that names the missing workers.
        restarted: this process had predecessors, one of which may still have its port.

    Raises:
        PeerError: a worker did not come (on every worker); a predecessor keeps the port.
        UserError: a worker's fingerprint differs from the chief's (on every worker); another process already
            is this worker; its port is taken or not allowed.
    """
    patience = _Patience(timeout, report)
    fingerprint = {CLUSTER_KEY: " ".join(config.workers), **fingerprint}
    with contextlib.closing(_own_port(config, patience if restarted else None)) as listener:
        if config.num_workers == 1:
            return
        if config.worker == 0:
            _Chief(config, fingerprint, listener).gather(patience)
        else:
            _follow(config, fingerprint, patience)


class _Patience:
    """The time that this worker waits, and the moments of its reports."""

    def __init__(self, timeout: float, report: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._report = report
        self._start = time.monotonic()
        self._next_report = REPORT_AFTER

    def wait_for(self, missing: Sequence[str], fault: str = "") -> None:
        """Reports every few seconds what is missing. Raises PeerError, with any `fault`, after `timeout`."""
        waited = time.monotonic() - self._start
        if waited >= self._timeout:
            raise PeerError(
                fault
                or f"{listed(missing)} did not start within {self._timeout:g} s; check that each worker "
                "runs the same command with its own task index in TF_CONFIG, and that its port can be "
                "reached from here"
            )
        if waited >= self._next_report:
            self._next_report = waited + REPORT_EVERY
            self._report(f"waiting for {listed(missing)} ({waited:.0f} of {self._timeout:g} s)")


def _own_port(config: TFConfig, patience: _Patience | None) -> socket.socket:
    """This worker's port, listening. With patience, waits while another process has it."""
    while True:
        try:
            return reserve_port(config)
        except PortTakenError as taken:
            if patience is None:
                raise
            patience.wait_for([f"{config.address}, its own port, which another process has"], str(taken))
        time.sleep(ASK_EVERY)


# Messages


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a message. Raises OSError if the other end is gone, or does not read."""
    connection.settimeout(1.0)
    connection.sendall(json.dumps({"tfrl": "rendezvous", **message}).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """The message that arrives. Raises OSError if none does, or if the other end is another program."""
    end, data = time.monotonic() + MESSAGE_WITHIN, b""
    while b"\n" not in data:
        connection.settimeout(max(0.001, end - time.monotonic()))
        more = connection.recv(1 << 16)
        data += more
        if not more or len(data) > LONGEST_LINE:
            raise ConnectionError(_FOREIGN if data else "it closed the connection")
    try:
        message = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        raise ConnectionError(_FOREIGN) from None
    if not isinstance(message, dict) or message.get("tfrl") != "rendezvous":
        raise ConnectionError(_FOREIGN)
    return message


def _printable(text: str, most: int = 200) -> str:
    """A text of another process, safe for a terminal: one line, not too long."""
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(character if character.isprintable() else "?" for character in text)


# The workers other than the chief


def _follow(config: TFConfig, fingerprint: Mapping[str, str], patience: _Patience) -> None:
    """Asks the chief until it says "go". Raises the chief's UserError or PeerError."""
    chief = f"{config.name(0)}, the chief"
    who = f"process {os.getpid()} on {socket.gethostname()}"
    while True:
        try:
            with socket.create_connection(split_address(config.workers[0]), timeout=2.0) as connection:
                _send(connection, {"worker": config.worker, "who": who, "fingerprint": fingerprint})
                answer = _receive(connection)
            if "error" in answer:
                sentence = _printable(str(answer["error"]), 4000)
                raise (PeerError if answer.get("again") else UserError)(sentence)
            if "go" in answer:
                return
            names = answer.get("missing")
            if not isinstance(names, list):
                raise ConnectionError(_FOREIGN)
            missing = [_printable(str(name), 4000) for name in names] or [f"the go-ahead of {chief}"]
        except OSError as error:
            missing = [f"{chief} ({error.strerror or error})"]
        except UnicodeError:
            missing = [f"{chief} (not the name of a host)"]
        patience.wait_for(missing)
        time.sleep(ASK_EVERY)


# The chief


@dataclass
class _Guest:
    """A process that has asked."""

    who: str
    fingerprint: Mapping[str, str]
    asked: float  # when it last did


class _Chief:
    """Worker 0's part. A thread answers each connection, because a stranger may say nothing."""

    def __init__(self, config: TFConfig, fingerprint: Mapping[str, str], listener: socket.socket) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._listener = listener
        self._lock = threading.Lock()  # guards the attributes below
        self._came: dict[int, _Guest] = {}
        # When a process first asked as a worker who was there.
        self._rivals: dict[tuple[int, str], float] = {}
        self._last_came = 0.0
        self._difference: UserError | None = None  # of the first worker that differed
        self._last_word: Mapping[str, Any] | None = None
        self._told: set[int] = set()  # the workers that have heard it

    def gather(self, patience: _Patience) -> None:
        """Releases all workers when all are there, or tells them the reason. Raises like `rendezvous`."""
        self._listener.settimeout(0.1)
        error: UserError | PeerError | None = None
        try:
            while waited_for := self._waited_for():
                patience.wait_for(waited_for)
                self._serve()
                if self._difference is not None:
                    raise self._difference
            self._last_word, listeners, seconds = {"go": True}, set(self._came), GO_WITHIN
        except (UserError, PeerError) as failed:
            error = failed
            self._last_word = {"error": str(error), "again": isinstance(error, PeerError)}
            listeners, seconds = set(self._here()), FAREWELL
        end = time.monotonic() + seconds
        while not self._told >= listeners and time.monotonic() < end:
            self._serve()
        if error is not None:
            raise error

    def _serve(self) -> None:
        """Accepts the connection that comes within a moment, if one comes."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        except OSError:  # the connection is gone again, or this process has too many open files
            time.sleep(0.1)
            return
        threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            worker, guest = _introduction(_receive(connection))
            with self._lock:
                refusal = self._admit(worker, guest)
                last_word = self._last_word if self._came.get(worker) is guest else None
                answer = {"error": refusal} if refusal else last_word or {"missing": self._missing()}
            _send(connection, answer)
            if last_word:
                self._told.add(worker)
            connection.recv(1)  # the side that closes first keeps the port busy, so the other closes

    def _admit(self, worker: int, guest: _Guest) -> str | None:
        """Notes that a process asks as this worker, or returns the reason for its refusal.

        A process that asks as a worker who is there has to wait until that worker is silent.
        """
        count, present = self._config.num_workers, self._here().get(worker)
        if not 1 <= worker < count:
            known = f"the chief's TF_CONFIG has workers 0 to {count - 1}"
            return f"{guest.who} says it is worker {worker}, but {known}"
        if differing := differences(self._config, worker, self._fingerprint, guest.fingerprint):
            sentence = (
                f"the workers differ: {listed(differing, '; ')}; start all of them with the same settings "
                "and code"
            )
            if guest.fingerprint.get(CLUSTER_KEY) == self._fingerprint[CLUSTER_KEY]:
                self._difference = self._difference or UserError(sentence)
            return sentence
        if present is not None and present.who != guest.who:
            # The present one may have died. It lives if it asks again.
            if present.asked < self._rivals.setdefault((worker, guest.who), guest.asked):
                return None
            return (
                f"{guest.who} says it is {self._config.name(worker)}, but {present.who} already is; "
                "give each worker its own task index in TF_CONFIG"
            )
        if present is None:
            self._last_came = guest.asked
        self._came[worker] = guest
        return None

    def _here(self) -> dict[int, _Guest]:
        """The workers that still ask."""
        now = time.monotonic()
        return {worker: guest for worker, guest in self._came.items() if now - guest.asked < SILENT_AFTER}

    def _waited_for(self) -> list[str]:
        """The missing workers; or if all came, those that have not asked again since."""
        with self._lock:
            late = (guest for guest in self._came.values() if guest.asked <= self._last_came)
            return self._missing() or [f"the answer of {guest.who}" for guest in late]

    def _missing(self) -> list[str]:
        """The names of the missing workers."""
        here = self._here()
        return [self._config.name(w) for w in range(1, self._config.num_workers) if w not in here]


def _introduction(hello: Mapping[str, Any]) -> tuple[int, _Guest]:
    """The index, process and fingerprint in a worker's message, or ConnectionError."""
    worker, who, fingerprint = hello.get("worker"), hello.get("who"), hello.get("fingerprint")
    if type(worker) is not int or type(who) is not str or type(fingerprint) is not dict:
        raise ConnectionError(_FOREIGN)
    if not all(type(value) is str for value in fingerprint.values()):
        raise ConnectionError(_FOREIGN)
    return worker, _Guest(_printable(who), fingerprint, time.monotonic())


def differences(
    config: TFConfig, worker: int, chiefs: Mapping[str, str], workers: Mapping[str, str]
) -> list[str]:
    """A text for each key in which the fingerprints of the chief and of a worker differ."""
    keys = sorted(key for key in {*chiefs, *workers} if chiefs.get(key) != workers.get(key))
    pairs = [[_printable(each.get(key, "missing"), 1000) for each in (chiefs, workers)] for key in keys]
    return [
        f"{_printable(key)} is {mine} on {config.name(0)} and {theirs} on {config.name(worker)}"
        for key, (mine, theirs) in zip(keys, pairs, strict=True)
    ]


def listed(items: Sequence[object], separator: str = ", ", most: int = 8) -> str:
    """The first items, and the number of the others."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return separator.join([*map(str, items[:most]), *more])
