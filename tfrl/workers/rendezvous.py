"""Workers find each other, and compare their settings, before TensorFlow starts.

TensorFlow waits for a missing worker in silence and never notices that two workers have other settings. So
the workers first meet on the ports that TF_CONFIG gives them, which TensorFlow takes over afterwards:

1. Every worker opens its own port (the fault "port busy" is found here) and holds it. Where a launcher has
   started all again, it waits for one that is taken: a process of the last attempt may still save.
2. Worker 0, the chief, accepts connections; the others connect to it, again and again until it is there, and
   say who they are and what their settings are.
3. Each second the chief tells all of them who is still missing, and they answer. One that goes away or falls
   silent is missing again; it, or its successor, may come back.
4. A worker whose settings are not the chief's is told where they differ, and ends; the others are told who
   it was, and wait on for one that agrees.
5. When all are there, and everybody has answered once more, the chief gives up its port, says "go", and all
   return.

Who has waited for too long ends with a PeerError, because a launcher that starts all again may help: whoever
was missing may be there then, and whoever had the port gone. Where all came and some differ, or one is not
who it says, no restart would: that is a UserError.

What the messages hold is in `channel.py`. Whatever else connects (a port scanner, a worker of another
cluster, `cluster.tf_config --check`) is shown out, and ends nobody's start. There is no authentication, as
there is none in TensorFlow's own protocol on the same ports.
"""

import contextlib
import errno
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tfrl.cli.errors import PeerError, UserError
from tfrl.workers import disagreement
from tfrl.workers.channel import Channel, Hello, Status, answered_round, is_go, refusal
from tfrl.workers.disagreement import listed
from tfrl.workers.tf_config import PortTakenError, TFConfig, reserve_port, split_address

STATUS_EVERY = 1.0  # seconds between the chief's messages to all
SILENT_AFTER = 10.0  # seconds without a message of any use after which the other side counts as gone
HELLO_WITHIN = 5.0  # seconds a new connection has to say who it is
REPORT_AFTER, REPORT_EVERY = 2.0, 5.0  # seconds until the first line about missing workers, and between lines
RETRY_EVERY = 0.3  # seconds between attempts to reach the chief
FAREWELL = 2.0  # seconds the chief waits for the others to hang up, so that its last message is read
MOST_STRANGERS = 64  # connections at a time of which it is not known who they are, besides one a worker
CLUSTER_KEY = "TF_CONFIG cluster"


def rendezvous(
    config: TFConfig,
    fingerprint: Mapping[str, str],
    timeout: float,
    report: Callable[[str], None],
    *,
    restarted: bool = False,
    chosen: bool = False,
) -> None:
    """Returns when all workers of the cluster are there with the same fingerprint.

    Args:
        config: this process's TF_CONFIG. An evaluator has nobody to meet and returns at once.
        fingerprint: what must be equal on all workers, by name: settings, code version, device count.
        timeout: seconds to wait for all of them.
        report: gets a line every few seconds that names who is still missing.
        restarted: this process had predecessors, one of which may still have its port.
        chosen: its port was chosen for this start; the next one has another.

    Raises:
        PeerError: on every worker: a worker did not come, naming it. A predecessor keeps the port, or another
            program has come before us to one that was chosen.
        UserError: this worker's fingerprint is not the chief's, naming the keys; another process already is
            this worker; its port is taken or not allowed. On every worker, when the time is up: all came,
            and some differ.
    """
    if config.is_evaluator:
        return
    patience = _Patience(timeout, report)
    fingerprint = {CLUSTER_KEY: " ".join(config.workers), **fingerprint}
    with contextlib.closing(_own_port(config, patience if restarted else None, chosen)) as listener:
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
            listed(missing),
            f"{listed(missing)} did not come up within {self._timeout:g} s; check that each worker runs the "
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


def _own_port(config: TFConfig, patience: _Patience | None, chosen: bool) -> socket.socket:
    """This worker's port, listening, as soon as nobody else has it; at once or never without patience."""
    while True:
        try:
            return reserve_port(config)
        except PortTakenError as taken:
            if chosen:
                raise PeerError(str(taken)) from None
            if patience is None:
                raise
            patience.wait(f"{config.address}, its own port, which another process has", str(taken))
        time.sleep(RETRY_EVERY)


def _follow(config: TFConfig, fingerprint: Mapping[str, str], patience: _Patience) -> None:
    """What the workers other than the chief do: come to the chief until it lets them go."""
    hello = Hello(config.worker, f"process {os.getpid()} on {socket.gethostname()}", dict(fingerprint))
    why = "not tried yet"
    while True:
        patience.wait_for([f"{config.name(0)}, the chief ({why})"])
        try:
            with contextlib.closing(_connect(config.workers[0])) as chief:
                chief.send(hello.message())
                _obey(chief, config.name(0), patience)
                return
        except OSError as error:
            why = error.strerror or str(error)
        except UnicodeError:  # a host that no name server could be asked for
            why = "not the name of a host"
        time.sleep(RETRY_EVERY)


def _connect(address: str) -> Channel:
    connection = socket.create_connection(split_address(address), timeout=2.0)
    # On one machine a connection to a port that nobody listens on can get that very port and meet itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("Connection refused")
    return Channel(connection)


def _obey(chief: Channel, name: str, patience: _Patience) -> None:
    """Answers the chief until it says "go". UserError, PeerError: the chief's; OSError: find it again."""
    missing = [f"{name}, the chief (no answer yet)"]
    complete = False  # the chief's last word was that nobody is missing: only then may it say "go"
    while True:
        for message in chief.receive() if select.select([chief], [], [], 0.2)[0] else ():
            sent_away = refusal(message)
            if sent_away is not None:
                sentence, again = sent_away
                raise (PeerError if again else UserError)(sentence)
            if complete and is_go(message):
                return
            status = Status.read(message)
            complete, chief.heard = not status.missing, time.monotonic()
            missing = status.missing or [f"the go-ahead of {name}"]
            chief.send({"round": status.round})
        patience.wait_for(missing)
        if time.monotonic() - chief.heard > SILENT_AFTER:
            raise ConnectionError("it fell silent")


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
    gathering.dismiss({"go": True})


@dataclass(frozen=True)
class _Differing:
    """A process that came as one of the workers, but with another fingerprint."""

    fingerprint: Mapping[str, str]
    why: str
    """Who it was and where it differs."""


class _Gathering:
    """The chief's view: who is there, and what they said."""

    def __init__(self, config: TFConfig, fingerprint: Mapping[str, str], listener: socket.socket) -> None:
        self._config = config
        self._fingerprint = dict(fingerprint)
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[Channel, None] = {}  # in the order in which they came
        self._workers: dict[int, Channel] = {}
        self._differing: dict[int, _Differing] = {}  # who came last for a worker that is not there
        self._round = 0
        self._complete_since: int | None = None  # the first round in which all were there

    def wait(self, patience: _Patience) -> None:
        """Returns when all are there and answered. PeerError: time is up; UserError: for they differ."""
        next_status = 0.0
        while True:
            for key, _ in self._selector.select(0.1):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)
            now = time.monotonic()
            self._drop_silent(now)
            if self._all_ready():
                return
            missing = [self._described(worker) for worker in self._missing()]
            try:
                patience.wait_for(missing or [f"the answer of {c.hello.who}" for c in self._unanswered()])
            except PeerError:
                self._check_those_who_came()
                raise
            just_complete = not missing and self._complete_since is None
            if just_complete or now >= next_status:
                next_status = now + STATUS_EVERY
                self._tell_all(missing)

    def dismiss(self, message: Mapping[str, Any]) -> None:
        """Sends all workers the last message and waits shortly until they hang up.

        They close first, because the side that closes first keeps the port in TIME_WAIT; and a message that
        is still on its way when its sender closes can be lost.
        """
        # TensorFlow's servers may knock on this port as soon as a worker goes: none of them shall meet us.
        self._selector.unregister(self._listener)
        self._listener.close()
        for channel in list(self._strangers):
            self._drop(channel)
        for channel in list(self._workers.values()):
            self._send(channel, message)
        end = time.monotonic() + FAREWELL
        while self._workers and time.monotonic() < end:
            for key, _ in self._selector.select(0.1):
                try:
                    key.fileobj.receive()
                except OSError:
                    self._drop(key.fileobj)
        for channel in list(self._workers.values()):
            self._drop(channel)
        self._selector.close()

    def _missing(self) -> list[int]:
        return [worker for worker in range(1, self._config.num_workers) if worker not in self._workers]

    def _described(self, worker: int) -> str:
        """A missing worker's name, and who came in its place."""
        name = self._config.name(worker)
        return f"{name} ({self._differing[worker].why})" if worker in self._differing else name

    def _unanswered(self) -> list[Channel]:
        return [c for c in self._workers.values() if c.answered < (self._complete_since or self._round + 1)]

    def _all_ready(self) -> bool:
        return not self._missing() and not self._unanswered()

    def _check_those_who_came(self) -> None:
        """UserError, when time is up, where all came and some differ: to start again would not help.

        But a process of another cluster is a stranger: the worker whose place it took may yet come.
        """
        fingerprints = {worker: channel.hello.fingerprint for worker, channel in self._workers.items()}
        fingerprints |= {worker: other.fingerprint for worker, other in self._differing.items()}
        fingerprints[0] = self._fingerprint
        ours = [f.get(CLUSTER_KEY) == self._fingerprint[CLUSTER_KEY] for f in fingerprints.values()]
        differing = disagreement.differences(self._config, fingerprints)
        if all(ours) and len(ours) == self._config.num_workers and differing:
            raise UserError(disagreement.sentence(differing))

    def _accept(self) -> None:
        """Takes in new connections: a few, for those who wait are to be heard, too.

        Of too many that say nothing the oldest go: a worker says who it is as soon as it comes.
        """
        for _ in range(MOST_STRANGERS):
            try:
                channel = Channel(self._listener.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:  # it may have gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._drop_oldest_stranger()
                return
            self._strangers[channel] = None
            self._selector.register(channel, selectors.EVENT_READ)
            if len(self._strangers) > MOST_STRANGERS + self._config.num_workers:
                self._drop_oldest_stranger()

    def _drop_oldest_stranger(self) -> None:
        if self._strangers:
            self._drop(next(iter(self._strangers)))
        else:
            time.sleep(0.1)  # this process's files are used up by something else

    def _hear(self, channel: Channel) -> None:
        if channel.fileno() < 0:  # dropped since select returned it
            return
        try:
            for message in channel.receive():
                if channel.hello is None:
                    self._welcome(channel, Hello.read(message))
                    continue
                answered = answered_round(message, self._round)
                if answered > channel.answered:
                    channel.answered, channel.heard = answered, time.monotonic()
        except OSError:
            self._drop(channel)

    def _welcome(self, channel: Channel, hello: Hello) -> None:
        """Takes in a worker that says who it is. ConnectionError: it cannot be taken in, and was told why."""
        worker, who, count = hello.worker, hello.who, self._config.num_workers
        if not 1 <= worker < count:
            self._refuse(
                channel,
                f"{who} says it is worker {worker}, but the chief's TF_CONFIG has workers 0 to {count - 1}",
            )
        differing = disagreement.differences(self._config, {0: self._fingerprint, worker: hello.fingerprint})
        present = self._workers.get(worker)
        if differing:
            if present is None:
                why = f"{who} came for it, but {listed(differing, '; ', 3)}"
                self._differing[worker] = _Differing(hello.fingerprint, why)
            self._refuse(channel, disagreement.sentence(differing))
        if present is not None:
            # One whose connection broke may come again before that is noticed here.
            if present.hello.who != who and time.monotonic() - present.heard < 3 * STATUS_EVERY:
                self._refuse(
                    channel,
                    f"{who} says it is {self._config.name(worker)}, but {present.hello.who} already is; "
                    "give each worker its own task index in TF_CONFIG",
                )
            self._drop(present)
        channel.hello, channel.heard = hello, time.monotonic()
        del self._strangers[channel]
        self._differing.pop(worker, None)
        self._workers[worker] = channel
        self._complete_since = None

    def _refuse(self, channel: Channel, sentence: str) -> NoReturn:
        channel.send({"error": sentence})
        raise ConnectionError(sentence)

    def _tell_all(self, missing: list[str]) -> None:
        if not missing and self._complete_since is None:
            self._complete_since = self._round + 1
        self._round += 1
        for channel in list(self._workers.values()):
            self._send(channel, {"missing": missing, "round": self._round})

    def _send(self, channel: Channel, message: Mapping[str, Any]) -> None:
        try:
            channel.send(message)
        except OSError:
            self._drop(channel)

    def _drop_silent(self, now: float) -> None:
        for channel in [c for c in self._strangers if now - c.heard > HELLO_WITHIN]:
            self._drop(channel)
        for channel in [c for c in self._workers.values() if now - c.heard > SILENT_AFTER]:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()
        self._strangers.pop(channel, None)
        if channel.hello is not None:
            del self._workers[channel.hello.worker]
            self._complete_since = None
