"""Places of the launcher's workers: addresses, and each one's share of a machine's cores and GPUs."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tfrl.cli.errors import UserError
from tfrl.workers import machine, tf_config

# Below the range from which systems give ports to outgoing connections, above Ray's processes': but
# for another launcher, nothing takes one between our looking and TensorFlow's opening it.
LOCAL_PORTS = range(20000, 32000)
_GPUS_WITHIN = 30.0  # seconds; a driver that hangs would never say how many there are


@dataclass(frozen=True)
class Place:
    """One worker's place: its host (None: this machine) and what its environment has of its own."""

    host: str | None
    environment: Mapping[str, str]
    start: Callable[[], Any] | None = None
    """Starts its agent there, which is used as a `subprocess.Popen`; None: by ssh."""


class Share(NamedTuple):
    """A worker's part of a machine: a free port, cores, and GPUs as CUDA_VISIBLE_DEVICES has them, if any."""

    port: int
    cores: int
    gpus: str | None


def local_places(
    workers: int, first_port: int | None, environ: Mapping[str, str] = os.environ
) -> list[Place]:
    """Places on this machine: ports (free ones, or `first_port` and on) and a fair share of its hardware.

    Raises:
        UserError: more workers than GPUs.
    """
    mine = shares(workers, first_port, environ)
    own = environments(["127.0.0.1"] * workers, mine, environ, chosen=first_port is None)
    return [Place(None, each) for each in own]


def shares(
    workers: int, first_port: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[Share]:
    """Equal parts of this machine; the ports are free ones, or `first_port` and on. UserError as above."""
    ports = free_ports(workers) if first_port is None else range(first_port, first_port + workers)
    cores = thread_shares(machine.cores(), workers)
    gpus = gpu_shares(visible_gpus(environ), workers) or [None] * workers
    return [Share(*share) for share in zip(ports, cores, gpus, strict=True)]


def environments(
    hosts: Sequence[str],
    mine: Sequence[Share],
    environ: Mapping[str, str] = os.environ,
    *,
    chosen: bool = True,
) -> list[dict[str, str]]:
    """The environments of workers on these hosts, each with its share; threads that `environ` sets win.

    `chosen`: the ports are free ones of this moment, and others the next time.
    """
    again = {tf_config.CHOSEN_PORT: "1"} if chosen else {}
    configs = _tf_configs([f"{host}:{share.port}" for host, share in zip(hosts, mine, strict=True)])
    own = []
    for share, config in zip(mine, configs, strict=True):
        gpus = {} if share.gpus is None else {"CUDA_VISIBLE_DEVICES": share.gpus}
        own.append({**_threads(share.cores, environ), "TF_CONFIG": config, **gpus, **again})
    return own


def remote_places(hosts: Sequence[str], port: int) -> list[Place]:
    """One place on each host ("name", "user@name", "name:port"): the worker there has the whole machine."""
    targets, addresses = [], []
    for host in hosts:
        user, at, name = host.rpartition("@")
        address = name if name.rpartition(":")[2].isdecimal() and name.count(":") == 1 else f"{name}:{port}"
        address = name if name.startswith("[") and "]:" in name else address
        targets.append(user + at + tf_config.split_address(address)[0])
        addresses.append(address)
    return [
        Place(target, {"TF_CONFIG": config})
        for target, config in zip(targets, _tf_configs(addresses), strict=True)
    ]


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens on this machine, another choice each time. UserError: there are none."""
    found = []
    for port in random.sample(LOCAL_PORTS, len(LOCAL_PORTS)):
        try:
            tf_config.listen(port).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise UserError(f"{count} workers need as many free ports from {LOCAL_PORTS[0]} to {LOCAL_PORTS[-1]}")


def thread_shares(cores: int, workers: int) -> list[int]:
    """Cores for each worker: they differ by one at most, the first have more, and each has at least one."""
    return [max(1, (cores + workers - 1 - index) // workers) for index in range(workers)]


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. UserError: the driver hangs."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return []
    command = ["nvidia-smi", "-L"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, env=dict(environ), timeout=_GPUS_WITHIN
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{' '.join(command)}` has not answered for {_GPUS_WITHIN:g} s: a GPU or its driver hangs; "
            "restart this machine, or train on another"
        ) from None
    gpus = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    if gpus and "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu not in ("", "-1")]
    return [str(index) for index in range(len(gpus))]


def gpu_shares(gpus: Sequence[str], workers: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each worker; empty without GPUs. UserError: fewer GPUs than workers."""
    if not gpus:
        return []
    if workers > len(gpus):
        raise UserError(
            f"{workers} workers are more than the GPUs here ({','.join(gpus)}), and two cannot share one; "
            f"start {len(gpus)}, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU"
        )
    starts = [index * len(gpus) // workers for index in range(workers + 1)]
    return [",".join(gpus[start:end]) for start, end in zip(starts, starts[1:], strict=False)]


def _threads(cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    shares = {
        "TF_NUM_INTRAOP_THREADS": cores,
        # Two at least, so that an operation that waits for a peer never holds the only thread.
        "TF_NUM_INTEROP_THREADS": max(2, cores),
        "OMP_NUM_THREADS": cores,
    }
    return {name: environ.get(name) or str(share) for name, share in shares.items()}


def _tf_configs(addresses: Sequence[str]) -> list[str]:
    tasks = [{"type": "worker", "index": index} for index in range(len(addresses))]
    texts = [json.dumps({"cluster": {"worker": list(addresses)}, "task": task}) for task in tasks]
    return [tf_config.parse(text).to_json() for text in texts]
