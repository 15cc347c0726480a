"""Rendezvous of the workers: they find each other and compare their settings before TensorFlow starts.

TensorFlow waits for a missing worker without a message, and does not notice different settings. So the
workers first meet on the ports of TF_CONFIG, which TensorFlow uses afterwards:

1. Each worker opens its own port and holds it. A worker that a launcher has started again waits for a port
   that is taken: a process of the last attempt may still save.
2. Worker 0, the chief, accepts connections. Each other worker connects to it, repeatedly until it answers,
   and sends its index and its settings (its fingerprint).
3. Each second the chief sends the names of the missing workers, and the workers answer. A worker that goes
   away or falls silent is missing again, until it or its successor connects.
4. The chief refuses a worker with another fingerprint and names the difference. That worker ends. The others
   hear of it, and wait for a worker that agrees.
5. When all workers are there, and each has answered since the last one came, the chief closes its port, says
   "go", and all return.

A worker that has waited too long ends with PeerError, because a restart of all workers may help. If all
workers came and some differ, a restart would not help, so this is a UserError.

Messages are JSON objects, one a line. Anything may connect to a port, or answer there: a port scanner, a
worker of another cluster, `cluster.tf_config --check`. A connection with other messages is closed, and the
start continues. There is no authentication, because TensorFlow's own protocol has none on the same ports.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfrl.cli.errors import PeerError, UserError
from tfrl.workers.tf_config import PortTakenError, TFConfig, reserve_port, split_address

STATUS_EVERY = 1.0  # seconds between the chief's messages to a worker
SILENT_AFTER = 10.0  # after so many seconds without a message the other side counts as gone
HELLO_WITHIN = 5.0  # seconds for the first message of a new connection
REPORT_AFTER, REPORT_EVERY = 2.0, 5.0  # seconds until the first line about missing workers, and between lines
RETRY_EVERY = 0.3  # seconds between attempts to reach the chief
FAREWELL = 2.0  # seconds for the other workers to read the chief's last message and hang up
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
        UserError: this worker's fingerprint differs from the chief's; another process already is this worker;
            its port is taken or not allowed; all came, and some differ (on every worker, when time is up).
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
        time.sleep(RETRY_EVERY)


# Messages


class _Channel:
    """A connection that carries JSON objects, one a line. One thread sends and receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Raises OSError if the other end is gone, or reads nothing for a second."""
        self._socket.settimeout(1.0)
        self._socket.sendall(json.dumps({"tfrl": "rendezvous", **message}).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None if it has not come within `seconds`.

        Raises OSError if the connection is lost, or the other end does not use this protocol.
        """
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            if not data:
                raise ConnectionError("it closed the connection")
            self._unread += data
            if len(self._unread) > LONGEST_LINE:
                raise ConnectionError(_FOREIGN)
            if time.monotonic() > end and b"\n" not in self._unread:
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionError(_FOREIGN) from None
        if not isinstance(message, dict) or message.get("tfrl") != "rendezvous":
            raise ConnectionError(_FOREIGN)
        return message

    def hang_up(self) -> None:
        """Ends the connection, from any thread. A thread in `receive` gets ConnectionError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the socket."""
        self._socket.close()


def _printable(text: str, most: int = 200) -> str:
    """A text of another process, safe for a terminal: one line, not too long."""
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(character if character.isprintable() else "?" for character in text)


# The workers other than the chief


def _follow(config: TFConfig, fingerprint: Mapping[str, str], patience: _Patience) -> None:
    """Connects to the chief, repeatedly, until it says "go". Raises the chief's UserError or PeerError."""
    who = f"process {os.getpid()} on {socket.gethostname()}"
    chief_name = f"{config.name(0)}, the chief"
    why = "not tried yet"
    while True:
        patience.wait_for([f"{chief_name} ({why})"])
        try:
            address = split_address(config.workers[0])
            with contextlib.closing(_Channel(socket.create_connection(address, timeout=2.0))) as chief:
                chief.send({"worker": config.worker, "who": who, "fingerprint": fingerprint})
                missing, heard = [f"{chief_name} (no answer yet)"], time.monotonic()
                while time.monotonic() - heard < SILENT_AFTER:
                    patience.wait_for(missing)
                    message = chief.receive(0.2)
                    if message is None:
                        continue
                    if "error" in message:
                        sentence = _printable(str(message["error"]), 4000)
                        raise (PeerError if message.get("again") else UserError)(sentence)
                    if "go" in message:
                        return
                    names, heard = message.get("missing"), time.monotonic()
                    if not isinstance(names, list):
                        raise ConnectionError(_FOREIGN)
                    missing = [_printable(str(name), 4000) for name in names]
                    missing = missing or [f"the go-ahead of {config.name(0)}"]
                    chief.send({"here": True})
            why = "it fell silent"
        except OSError as error:
            why = error.strerror or str(error)
        except UnicodeError:
            why = "not the name of a host"
        time.sleep(RETRY_EVERY)


# The chief


@dataclass
class _Guest:
    """A connected worker."""

    who: str
    fingerprint: Mapping[str, str]
    channel: _Channel
    asked: float = -math.inf  # when the last message that it has answered was sent


class _Chief:
    """Worker 0's part. Each connection has its own thread, in `_converse`."""

    def __init__(self, config: TFConfig, fingerprint: Mapping[str, str], listener: socket.socket) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._listener = listener
        self._changed = threading.Condition()  # guards the attributes below
        self._conversations: dict[_Channel, threading.Thread] = {}
        self._here: dict[int, _Guest] = {}
        self._refused: dict[int, _Guest] = {}  # the last process that came for a missing worker, but differed
        self._last_came = time.monotonic()
        self._last_word: Mapping[str, Any] | None = None

    def gather(self, patience: _Patience) -> None:
        """Releases all workers when all are connected, or tells them the reason. Raises like `rendezvous`."""
        self._listener.settimeout(0.1)
        while True:
            try:
                channel = _Channel(self._listener.accept()[0])
            except TimeoutError:
                pass
            except OSError:  # the connection is gone again, or this process has too many open files
                time.sleep(0.1)
            else:
                thread = threading.Thread(target=self._converse, args=(channel,), daemon=True)
                self._conversations[channel] = thread
                thread.start()
            with self._changed:
                unanswered = (g for g in self._here.values() if g.asked < self._last_came)
                waited_for = self._missing() or [f"the answer of {guest.who}" for guest in unanswered]
            if not waited_for:
                return self._dismiss({"go": True})
            try:
                patience.wait_for(waited_for)
            except PeerError as late:
                error = self._disagreement() or late
                self._dismiss({"error": str(error), "again": isinstance(error, PeerError)})
                raise error from None

    def _converse(self, channel: _Channel) -> None:
        """Handles one connection until it ends."""
        worker, guest = -1, None
        try:
            worker, who, fingerprint = _introduction(channel.receive(HELLO_WITHIN))
            guest = _Guest(who, fingerprint, channel)
            with self._changed:
                refusal = self._admit(worker, guest)
            if refusal is not None:
                channel.send({"error": refusal})
                return
            while self._last_word is None:
                with self._changed:
                    missing, asked = self._missing(), time.monotonic()
                channel.send({"missing": missing})
                if not (channel.receive(SILENT_AFTER) or {}).get("here"):
                    return
                with self._changed:
                    guest.asked = asked
                    # Waits until the next message is due.
                    self._changed.wait_for(
                        lambda: self._last_word or (self._last_came > guest.asked and not self._missing()),
                        STATUS_EVERY,
                    )
            channel.send(self._last_word)
            channel.receive(FAREWELL)  # the side that closes first keeps the port busy, so the other closes
        except OSError:
            pass
        finally:
            with self._changed:
                channel.close()
                self._conversations.pop(channel, None)
                if guest is not None and self._here.get(worker) is guest:
                    del self._here[worker]

    def _admit(self, worker: int, guest: _Guest) -> str | None:
        """Accepts a process as this worker, or returns the reason for its refusal."""
        count, present = self._config.num_workers, self._here.get(worker)
        if not 1 <= worker < count:
            known = f"the chief's TF_CONFIG has workers 0 to {count - 1}"
            return f"{guest.who} says it is worker {worker}, but {known}"
        if differing := self._differences_of(worker, guest):
            if present is None:
                self._refused[worker] = guest
            return _sentence(differing)
        if present is not None:
            # A worker whose connection broke may come again before the chief notices it.
            if present.who != guest.who and time.monotonic() - present.asked < 3 * STATUS_EVERY:
                return (
                    f"{guest.who} says it is {self._config.name(worker)}, but {present.who} already is; "
                    "give each worker its own task index in TF_CONFIG"
                )
            present.channel.hang_up()
        self._here[worker] = guest
        self._refused.pop(worker, None)
        self._last_came = time.monotonic()
        self._changed.notify_all()
        return None

    def _differences_of(self, worker: int, guest: _Guest) -> list[str]:
        return differences(self._config, {0: self._fingerprint, worker: guest.fingerprint})

    def _missing(self) -> list[str]:
        """The names of the missing workers, each with the process that came in its place."""
        missing = []
        for worker in range(1, self._config.num_workers):
            name, other = self._config.name(worker), self._refused.get(worker)
            if other is not None:
                name += (
                    f" ({other.who} came for it, but {listed(self._differences_of(worker, other), '; ', 3)})"
                )
            if worker not in self._here:
                missing.append(name)
        return missing

    def _disagreement(self) -> UserError | None:
        """The error if all came and some differ: a restart would not help.

        A process of another cluster does not count: the right worker may still come.
        """
        with self._changed:
            came = {worker: guest.fingerprint for worker, guest in (self._refused | self._here).items()}
        came[0] = self._fingerprint
        ours = all(prints.get(CLUSTER_KEY) == self._fingerprint[CLUSTER_KEY] for prints in came.values())
        differing = differences(self._config, came)
        complete = ours and len(came) == self._config.num_workers
        return UserError(_sentence(differing)) if complete and differing else None

    def _dismiss(self, last_word: Mapping[str, Any]) -> None:
        """Sends all workers the last message, and waits a moment until they hang up."""
        # TensorFlow's servers may connect to this port as soon as the first worker goes.
        self._listener.close()
        with self._changed:
            self._last_word = last_word
            self._changed.notify_all()
            conversations = dict(self._conversations)
            guests = {guest.channel for guest in self._here.values()}
        for channel in conversations.keys() - guests:
            channel.hang_up()
        end = time.monotonic() + FAREWELL
        for thread in conversations.values():
            thread.join(max(0.0, end - time.monotonic()))
        for channel in conversations:
            channel.hang_up()


def _introduction(message: Mapping[str, Any] | None) -> tuple[int, str, dict[str, str]]:
    """The index, process and fingerprint in a worker's first message, or ConnectionError."""
    hello = message or {}
    worker, who, fingerprint = hello.get("worker"), hello.get("who"), hello.get("fingerprint")
    if type(worker) is not int or type(who) is not str or type(fingerprint) is not dict:
        raise ConnectionError(_FOREIGN)
    if not all(type(value) is str for value in fingerprint.values()):
        raise ConnectionError(_FOREIGN)
    return worker, _printable(who), fingerprint


# Differences in words


def differences(config: TFConfig, fingerprints: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A text for each key in which workers differ, with its values and their workers."""
    differing = []
    for key in sorted({key for fingerprint in fingerprints.values() for key in fingerprint}):
        workers_of: dict[str, list[int]] = {}
        for worker in sorted(fingerprints):
            workers_of.setdefault(fingerprints[worker].get(key, "missing"), []).append(worker)
        if len(workers_of) > 1:
            values = (
                f"{_printable(value, 1000)} on "
                + (config.name(workers[0]) if len(workers) == 1 else f"workers {listed(workers)}")
                for value, workers in workers_of.items()
            )
            differing.append(f"{_printable(key)} is {' and '.join(values)}")
    return differing


def _sentence(differing: Sequence[str]) -> str:
    return f"the workers differ: {listed(differing, '; ')}; start all of them with the same settings and code"


def listed(items: Sequence[object], separator: str = ", ", most: int = 8) -> str:
    """The first items, and the number of the others."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return separator.join([*map(str, items[:most]), *more])
