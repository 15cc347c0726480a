"""Learners on the nodes of a Ray: each behind an agent of `cluster.launch`, with Ray as the connection."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cluster.launch import LOST, Place, environment_for, shares, start_agent, tf_configs
from tfrl.cli.errors import TrainingError, UserError
from tfrl.config.distributed import LEARNER, DistributedSettings
from tfrl.envs.callables import search_path
from tfrl.remote.cluster import Cluster, RayError, free_cpus, ray, serve_driver

_LISTEN = 0.2  # seconds that a host waits for output of its agent before it answers
_MAX_FAILURES = 3  # failed starts in a row
_LOOK_EVERY = 1.0  # seconds between two checks for a stop of the run


class Node(NamedTuple):
    """A machine of Ray: its id in Ray, its address and its name."""

    id: str
    address: str
    name: str


class LearnerHost:
    """A process on Ray that has a learner's agent as its child; `Nodes` makes them.

    Repeated calls of `exchange` carry input and output of the agent, so the connection needs no port.
    """

    def __init__(self) -> None:
        serve_driver()
        self._agent: Any = None  # a `subprocess.Popen`, once it has begun
        self._selector = selectors.DefaultSelector()

    def where(self) -> Node:
        """The machine of this process."""
        return Node(
            ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), socket.gethostname()
        )

    def shares(self, learners: int, path: str, device: str) -> list[tuple[int, dict[str, str]]]:
        """Equal parts of this machine for so many learners on --device, with `path` in PYTHONPATH."""
        mine = shares(learners, environ=environment_for(device))
        places = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
        return [(port, {**own, "PYTHONPATH": places}) for port, own in mine]

    def begin(self) -> None:
        """Starts the agent."""
        self._agent = start_agent(None, live=False)
        for stream in (self._agent.stdout, self._agent.stderr):
            self._selector.register(stream, selectors.EVENT_READ)

    def exchange(self, words: bytes, last: bool) -> tuple[bytes, bytes, int | None]:
        """Writes `words` to the agent's stdin, and closes it if they are the `last`.

        Returns the agent's new stdout and stderr, and its exit code once it has ended.
        """
        with contextlib.suppress(OSError, ValueError):  # it has ended, or its stdin is closed already
            self._agent.stdin.write(words)
            if last:
                self._agent.stdin.close()
        said = {self._agent.stdout: b"", self._agent.stderr: b""}
        code = self._agent.poll()
        for key, _ in self._selector.select(0.0 if code is not None else _LISTEN):
            data = os.read(key.fd, 1 << 16)
            said[key.fileobj] = data
            if not data:
                self._selector.unregister(key.fileobj)
        ended = code if code is not None and not any(said.values()) else None
        return said[self._agent.stdout], said[self._agent.stderr], ended


class RemoteAgent:
    """An agent behind a `LearnerHost`, with the part of `subprocess.Popen` that `cluster.launch` uses."""

    def __init__(self, host: Any) -> None:
        self._host, self._lock = host, threading.Lock()
        self._words, self._last = b"", False
        self.returncode: int | None = None
        self.stdin = self
        ends = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (open(reader, "rb", buffering=0) for reader, _ in ends)  # noqa: SIM115, PTH123
        self._writers = [writer for _, writer in ends]
        self._code: int | None = None
        self._thread = threading.Thread(target=self._carry, name="learner", daemon=True)
        self._thread.start()

    def write(self, words: bytes) -> None:
        """Writes to the agent's stdin."""
        with self._lock:
            self._words += words

    def close(self) -> None:
        """Closes the agent's stdin: it then tells its learner to stop."""
        self._last = True

    def poll(self) -> int | None:
        """The exit code, once the agent has ended and all of its output can be read."""
        if self.returncode is None and not self._thread.is_alive():
            self.returncode = LOST if self._code is None else self._code
        return self.returncode

    def kill(self) -> None:
        """Kills the host, and with it the agent and its learner."""
        with contextlib.suppress(RayError):
            ray.kill(self._host)

    def _carry(self) -> None:
        try:
            ray.get(self._host.begin.remote())
            while self._code is None:
                with self._lock:
                    words, self._words = self._words, b""
                *said, self._code = ray.get(self._host.exchange.remote(words, self._last))
                for writer, data in zip(self._writers, said, strict=True):
                    while data:
                        data = data[os.write(writer, data) :]
        except (RayError, OSError):  # the host is gone, or nobody reads the output
            pass
        finally:
            for writer in self._writers:
                os.close(writer)


class Nodes:
    """Places for learners on the nodes of a Ray that runs, spread over as many nodes as possible."""

    def __init__(self, config: DistributedSettings) -> None:
        self._config = config
        self._needs: Mapping[str, int] = {"--learners": config.learners}
        if config.actors:
            self._needs |= {"--actors": config.actors}
        self._cluster: Cluster | None = None
        self._hosts: list[Any] = []

    def find(self, told: Callable[[], bool], tell: Callable[[str], None]) -> list[Place]:
        """Makes a host for each learner, once Ray has room; returns no places if the run is `told` to stop.

        Raises UserError if there is no Ray, or it has too few CPUs or GPUs, and TrainingError if no node can
        have a learner.
        """
        self._end_hosts()
        if self._cluster is None:
            self._cluster = Cluster(self._config.ray_address, self._needs, 0)
        failures = 0
        while self._has_room(told, tell):
            try:
                return self._make_places(told, self._cluster.address)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise TrainingError(f"a node of Ray has no place for a learner: {error.cause!r}") from error
            except RayError as error:  # a node was lost just now
                self._end_hosts()
                failures += 1
                if failures > _MAX_FAILURES:
                    first = str(error).strip().splitlines()[0]
                    raise TrainingError(f"no learner could be started on Ray: {first}") from error
        return []

    def _has_room(self, told: Callable[[], bool], tell: Callable[[str], None]) -> bool:
        """Waits until Ray has a CPU for each learner and actor; False if the run was told to stop."""
        wanted, said = sum(self._needs.values()), False
        while (free := free_cpus(wanted)) < wanted and not told():
            if not said:
                tell(f"waiting until Ray has {wanted} free CPUs; it has {free}")
                said = True
            time.sleep(_LOOK_EVERY)
        return not told()

    def _make_places(self, told: Callable[[], bool], address: str) -> list[Place]:
        kind = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(LearnerHost)
        self._hosts = [kind.remote() for _ in range(self._config.learners)]
        waiting = [host.where.remote() for host in self._hosts]
        while len(ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_EVERY)[0]) < len(waiting):
            if told():
                return []
        nodes: list[Node] = ray.get(waiting)
        left = {
            node: ray.get(
                self._hosts[nodes.index(node)].shares.remote(count, search_path(), self._config.device)
            )
            for node, count in Counter(nodes).items()
        }
        mine = [left[node].pop(0) for node in nodes]
        configs = tf_configs([f"{node.address}:{port}" for node, (port, _) in zip(nodes, mine, strict=True)])
        return [
            Place(
                node.name,
                {**own, "TF_CONFIG": config, LEARNER: address},
                functools.partial(RemoteAgent, host),
            )
            for node, (_, own), config, host in zip(nodes, mine, configs, self._hosts, strict=True)
        ]

    def _end_hosts(self) -> None:
        for host in self._hosts:
            with contextlib.suppress(RayError):
                ray.kill(host)
        self._hosts = []

    def close(self) -> None:
        """Ends the hosts, and leaves Ray."""
        self._end_hosts()
        if self._cluster is not None:
            self._cluster.close()
