"""TF_CONFIG: the workers, and which of them this process is, checked before TensorFlow starts.

With a wrong TF_CONFIG, TensorFlow raises an obscure error, waits silently or trains alone. Here each fault is
one sentence. Only the standard library is imported, so that a bad setting is found at once.
"""

import contextlib
import errno
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfrl.cli.errors import UserError

EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
ROLES = ("chief", "worker", "evaluator")
_ADDRESS = re.compile(r"(\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+)):(?P<port>[0-9]{1,5})")

RESTARTED = "TFRL_RESTARTED"
"""An environment variable of workers that a launcher has started again after a failure."""
LAUNCH = "TFRL_LAUNCH"
"""An environment variable of a launcher's workers: a text that is the same for all of its starts."""


class PortTakenError(UserError):
    """Another program, or an earlier worker that has not exited yet, has this process's port."""


@dataclass(frozen=True)
class TFConfig:
    """A checked TF_CONFIG. Make it with `read` or `parse`, which raise UserError for every fault."""

    workers: tuple[str, ...]
    """Addresses ("host:port") of the processes that train, the chief first."""
    worker: int | None
    """This process's place in `workers`; None for an evaluator, which only follows the run's checkpoints."""
    evaluator: str | None
    """The evaluator's address, if it is listed (a TFJob does not list it)."""

    @property
    def num_workers(self) -> int:
        """The number of processes that train together, without an evaluator."""
        return len(self.workers)

    @property
    def workers_here(self) -> int:
        """The number of processes that train on this machine, by their addresses."""
        host, _ = split_address(self.workers[self.worker or 0])
        return sum(split_address(address)[0] == host for address in self.workers)

    @property
    def is_evaluator(self) -> bool:
        """True if this process only follows the run's checkpoints."""
        return self.worker is None

    @property
    def is_chief(self) -> bool:
        """True if this process writes the run's files: the chief, or worker 0 where no chief is named."""
        return self.worker == 0

    @property
    def address(self) -> str | None:
        """This process's own "host:port"; None for an evaluator that is not listed."""
        return self.evaluator if self.worker is None else self.workers[self.worker]

    @property
    def is_local(self) -> bool:
        """True if all addresses are loopback addresses: no connection comes from another machine."""
        addresses = [*self.workers, self.evaluator] if self.evaluator else self.workers
        return all(_is_loopback(split_address(address)[0]) for address in addresses)

    def name(self, worker: int) -> str:
        """The name of a worker in messages: "worker 1 (b:2222)"."""
        return f"worker {worker} ({self.workers[worker]})"

    def to_json(self) -> str:
        """The value for the environment variable; `parse` takes it back."""
        evaluator = {"evaluator": [self.evaluator]} if self.evaluator else {}
        role = "evaluator" if self.worker is None else "worker"
        task = {"type": role, "index": self.worker or 0}
        return json.dumps({"cluster": {"worker": self.workers, **evaluator}, "task": task})


def read(environ: Mapping[str, str] = os.environ) -> TFConfig | None:
    """The TF_CONFIG of this process, or None if it is unset or empty. Raises the errors of `parse`."""
    text = environ.get("TF_CONFIG", "").strip()
    return parse(text) if text else None


def for_strategy(strategy: str) -> TFConfig | None:
    """The TF_CONFIG that a trainer uses with its --strategy; None: it trains alone.

    Raises the errors of `parse`, and UserError if --strategy multi-worker finds none.
    """
    cluster = read() if strategy in ("auto", "multi-worker") else None
    if strategy == "multi-worker" and cluster is None:
        raise UserError("--strategy multi-worker needs TF_CONFIG; docs/distributed.md shows how to set it.")
    return cluster


def parse(text: str) -> TFConfig:
    """Reads and checks TF_CONFIG's JSON. Raises UserError: one sentence with the value and what is right."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also: an integer of thousands of digits
        raise UserError(f"TF_CONFIG is not JSON ({error}): {_short(text)}; write {EXAMPLE}") from None
    if not isinstance(content, dict) or not {"cluster", "task"} <= content.keys():
        raise UserError(f"TF_CONFIG is {_short(content)}; it must be an object like {EXAMPLE}")
    cluster, task = _check_cluster(content["cluster"]), content["task"]
    # Kubeflow gives an evaluator the cluster that it follows, which does not list evaluators.
    counts = {role: len(addresses) for role, addresses in cluster.items()} | {"evaluator": 1}
    role, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    if not isinstance(role, str) or type(index) is not int or not 0 <= index < counts.get(role, 0):
        known = (f"{role} with index 0{f' to {n - 1}' if n > 1 else ''}" for role, n in counts.items())
        raise UserError(
            f'TF_CONFIG\'s task is {_short(task)}; it must be like {{"type": "worker", "index": 0}}, and '
            f"this cluster has {', '.join(known)}"
        )
    chief, workers, evaluator = (tuple(cluster.get(role, ())) for role in ROLES)
    worker = {"chief": 0, "worker": len(chief) + index, "evaluator": None}[role]
    return TFConfig(chief + workers, worker, evaluator[0] if evaluator else None)


def _check_cluster(cluster: Any) -> dict[str, list[str]]:
    if not isinstance(cluster, dict) or not cluster:
        raise UserError(
            f"TF_CONFIG's cluster is {_short(cluster)}; it must list addresses by role, like {EXAMPLE}"
        )
    owners: dict[tuple[str, int], str] = {}
    for role, addresses in cluster.items():
        if role not in ROLES:  # parameter servers take no part in synchronous training
            raise UserError(f"TF_CONFIG's cluster has the role {role!r}; the roles are {', '.join(ROLES)}")
        if not isinstance(addresses, list):
            raise UserError(
                f'TF_CONFIG\'s cluster has {role} {_short(addresses)}; it must be a list like ["a:2222"]'
            )
        if role != "worker" and len(addresses) > 1:
            raise UserError(f"TF_CONFIG's cluster has {len(addresses)} {role}s; at most one is allowed")
        for index, address in enumerate(addresses):
            try:
                host, port = split_address(address)
            except UserError as error:
                raise UserError(f"TF_CONFIG's cluster, {role}: {error}") from None
            place = ("loopback" if _is_loopback(host) else host.lower(), port)
            if place in owners:
                raise UserError(
                    f"TF_CONFIG gives {address!r} to {owners[place]} and to {role} {index}; "
                    "each needs an address of its own"
                )
            owners[place] = f"{role} {index}"
    if not cluster.get("chief") and not cluster.get("worker"):
        raise UserError(f"TF_CONFIG's cluster has no worker, only {sorted(cluster)}; write {EXAMPLE}")
    return {role: addresses for role, addresses in cluster.items() if addresses}


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[IPv6]:port". Raises UserError for another text."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        hint = "; an IPv6 address goes in brackets: [::1]:2222" if str(address).count(":") > 2 else ""
        raise UserError(f"the address {_short(address)} is not host:port, like a:2222{hint}")
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise UserError(f"the address {address!r} has port {port}; ports are 1 to 65535")
    return match["ip6"] or match["host"], port


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Ports


def listen(port: int, host: str = "") -> socket.socket:
    """A socket that listens on `port`, on all interfaces like TensorFlow's server, or only on `host`'s.

    Raises OSError.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("0.0.0.0", port), backlog=512)  # this machine has no IPv6


def reserve_port(config: TFConfig) -> socket.socket:
    """A listening socket on this process's own port, which reserves the port until it is closed.

    Raises PortTakenError if another process has it; UserError if it is not allowed.
    """
    host, port = split_address(config.address or "")
    own = "127.0.0.1" if host.lower() == "localhost" else host
    try:
        return listen(port, own if config.is_local else "")
    except OSError as error:
        whose = f"port {port} of {config.address}, this process's own in TF_CONFIG"
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"{whose}, is already in use on this machine; stop the program that has it "
                f"(ss -ltnp 'sport = :{port}') or choose another port"
            ) from None
        reason = error.strerror
        raise UserError(f"{whose}, cannot be opened ({reason}); choose a port above 1023") from None


def close_to_network(config: TFConfig) -> bool:
    """Closes this process's TensorFlow server to other machines. Returns False if that is not possible.

    TensorFlow's server listens on all interfaces, and there is no option for it. Linux from version 5.7 on
    can bind the listening socket to the loopback interface afterwards.
    """
    import psutil  # here, because a bad setting is to be found at once

    port, closed = split_address(config.address or "")[1], False
    for each in psutil.Process().net_connections():
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
                closed = True
    return closed
