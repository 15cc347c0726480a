"""Places of the launcher's workers: addresses, and each one's share of a machine's cores and GPUs."""

import functools
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

# Below the ports of outgoing connections, and above Ray's. Only another launcher could take one before the
# worker opens it.
LOCAL_PORTS = range(20000, 32000)
_GPUS_WITHIN = 30.0  # seconds; a driver that hangs never answers


@dataclass(frozen=True)
class Place:
    """One worker's place: its host (None: this machine) and its own environment variables."""

    host: str | None
    environment: Mapping[str, str]
    start: Callable[[], Any] | None = None
    """Starts its agent there and returns an object like `subprocess.Popen`; None: by ssh, or here."""


def remote_places(hosts: Sequence[str], port: int) -> list[Place]:
    """One place on each host ("name", "user@name", "name:port"), whose worker has the whole machine."""
    targets, addresses = [], []
    for host in hosts:
        user, at, name = host.rpartition("@")
        has_port = "]:" in name if name.startswith("[") else name.count(":") == 1
        addresses.append(name if has_port else f"{name}:{port}")
        targets.append(user + at + tf_config.split_address(addresses[-1])[0])
    return [
        Place(target, {"TF_CONFIG": config})
        for target, config in zip(targets, _tf_configs(addresses), strict=True)
    ]


def local_places(
    workers: int, first_port: int | None, environ: Mapping[str, str] = os.environ
) -> list[Place]:
    """Places on this machine, each with an equal share of it. Raises the errors of `shares`."""
    mine = shares(workers, first_port, environ)
    return [Place(None, own) for own in environments(["127.0.0.1"] * workers, mine, environ)]


class Share(NamedTuple):
    """A worker's part of a machine: a free port, cores, and its CUDA_VISIBLE_DEVICES, if there are GPUs."""

    port: int
    cores: int
    gpus: str | None


def shares(
    workers: int, first_port: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[Share]:
    """Equal parts of this machine, with free ports, or ports from `first_port` on.

    Raises UserError for more workers than GPUs or free ports, and if the GPUs' driver hangs.
    """
    ports = free_ports(workers) if first_port is None else range(first_port, first_port + workers)
    cores = thread_shares(machine.cores(), workers)
    gpus: Sequence[str | None] = gpu_shares(visible_gpus(environ), workers) or [None] * workers
    return [Share(*share) for share in zip(ports, cores, gpus, strict=True)]


def environments(
    hosts: Sequence[str], mine: Sequence[Share], environ: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """The environment variables of workers on these hosts. Numbers of threads in `environ` win."""
    own = []
    configs = _tf_configs([f"{host}:{share.port}" for host, share in zip(hosts, mine, strict=True)])
    for share, config in zip(mine, configs, strict=True):
        threads = {
            "TF_NUM_INTRAOP_THREADS": share.cores,
            # Two at least: an operation that waits for a peer must not hold the only thread.
            "TF_NUM_INTEROP_THREADS": max(2, share.cores),
            "OMP_NUM_THREADS": share.cores,
        }
        environment = {name: environ.get(name) or str(count) for name, count in threads.items()}
        if share.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = share.gpus
        own.append({**environment, "TF_CONFIG": config})
    return own


def _tf_configs(addresses: Sequence[str]) -> list[str]:
    tasks = [{"type": "worker", "index": index} for index in range(len(addresses))]
    texts = [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]
    return [tf_config.parse(text).to_json() for text in texts]


def free_ports(count: int) -> list[int]:
    """Random free ports of this machine. Raises UserError if there are too few."""
    found = []
    for port in random.sample(LOCAL_PORTS, len(LOCAL_PORTS)):
        try:
            tf_config.listen(port).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise UserError(
        f"{count} workers need {count} free ports between {LOCAL_PORTS[0]} and {LOCAL_PORTS[-1]}; end a "
        "program that uses some of them"
    )


def thread_shares(cores: int, workers: int) -> list[int]:
    """The number of cores of each worker, at least one. If shares differ, the first workers have one more."""
    return [max(1, (cores + workers - 1 - index) // workers) for index in range(workers)]


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this process, as in CUDA_VISIBLE_DEVICES. Raises UserError if the driver hangs."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return []
    ask = functools.partial(subprocess.run, capture_output=True, text=True, env=dict(environ))
    try:
        listed = ask(["nvidia-smi", "-L"], timeout=_GPUS_WITHIN).stdout.splitlines()
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`nvidia-smi -L` has not answered for {_GPUS_WITHIN:g} s: a GPU or its driver hangs; "
            "restart this machine, or train on another"
        ) from None
    count = sum(line.startswith("GPU ") for line in listed)
    if count and "CUDA_VISIBLE_DEVICES" in environ:
        return [gpu for gpu in environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu not in ("", "-1")]
    return [str(index) for index in range(count)]


def gpu_shares(gpus: Sequence[str], workers: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker; empty without GPUs. Raises UserError for too few GPUs."""
    if gpus and workers > len(gpus):
        raise UserError(
            f"{workers} workers are more than the GPUs here ({','.join(gpus)}), and two cannot share one; "
            f"start {len(gpus)}, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU"
        )
    starts = [index * len(gpus) // workers for index in range(workers + 1)]
    return [",".join(gpus[start:end]) for start, end in zip(starts, starts[1:], strict=False)] if gpus else []
