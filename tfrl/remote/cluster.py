"""The run's own Ray, on the loopback address only, which ends with the run; or a Ray that already runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tfrl.cli import endings
from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.cli.streams import quiet_start
from tfrl.config.distributed import LEARNER, DistributedSettings
from tfrl.envs import registry
from tfrl.envs.callables import search_path
from tfrl.experience.rollout import observation_bytes
from tfrl.remote import LOOPBACK

_OWN = {
    LOOPBACK: "0",  # unless `reach_other_machines` was called
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would give actors less CPU time than the learner
}
_QUIET = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
_SILENT: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
_STORE_BYTES = 128 * 2**20  # for weights, and Ray's own minimum
_FREED_WITHIN = 5.0  # seconds until the CPUs of processes that have just ended are free again
_ANSWER_WITHIN = 1.0  # seconds for the head of Ray to take a connection
_TOKEN = secrets.token_hex(32)  # one for each Ray of this process, because Ray remembers the first
_PR_SET_PDEATHSIG = 1

for _name, _value in (_OWN | _QUIET).items():  # read when ray is imported
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray.exceptions import RayError  # noqa: E402


class Cluster:
    """A connection to Ray.

    Args:
      address: the address of a Ray that runs, or auto; None: starts one here.
      needs: the number of processes, with a CPU each, by the flag that asks for them.
      store_bytes: the most bytes in its object store at once.
      variables: environment variables of the processes on a Ray that runs.

    Raises:
      UserError: this process already uses Ray, or Ray has too few CPUs or cannot be reached.
      TrainingError: Ray could not be started.
    """

    def __init__(
        self,
        address: str | None,
        needs: Mapping[str, int],
        store_bytes: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._folder: str | None = None  # of a Ray that is started here
        self._token: str | None = None  # its file
        wanted = sum(needs.values())
        if ray.is_initialized():
            raise UserError(
                "this process already uses Ray, and it can use only one: call ray.shutdown() first, or train "
                "in another process."
            )
        try:
            if address is not None:
                with _signals_kept():
                    self._join(address, variables or {})
            else:
                # A signal may reach all processes of a run. Ray's processes ignore it: otherwise they would
                # end, and Ray would then end this process before it has saved.
                with endings.held_back(), _signals_kept():
                    self._folder = tempfile.mkdtemp(prefix="tfrl-ray-")
                    self._make_token(Path(self._folder) / "token")
                    self._start(wanted, store_bytes + _STORE_BYTES)
        except BaseException:
            self.close()
            raise
        if address is None:
            return
        cpus, free = int(ray.cluster_resources().get("CPU", 0)), free_cpus(wanted)
        if free < wanted:
            self.close()
            who = " and ".join(f"{flag} {count}" for flag, count in needs.items())
            raise UserError(
                f"{who} need {wanted} CPUs, and the Ray at {address} has {free} of its {cpus} CPUs free: "
                "start fewer processes, or add nodes to Ray."
            )

    @property
    def address(self) -> str:
        """The address by which other processes join it."""
        return ray.get_runtime_context().gcs_address

    def check(self) -> None:
        """Raises an error if Ray itself has died. Ray will soon end this process, without a message.

        It is a PeerError in a learner of `--learners`, because all learners may begin again; else a
        TrainingError.
        """
        if self.is_alive():
            return
        if LEARNER in os.environ:
            raise PeerError("the Ray of this run has died")
        whose = "the run's own Ray" if self._folder is not None else "the Ray that this run has joined"
        raise TrainingError(
            f"{whose} has died; run the same command again to continue from the last checkpoint"
        )

    def is_alive(self) -> bool:
        """True if Ray's process on this machine, the raylet, runs, and Ray's head takes connections."""
        node: Any = ray._private.worker._global_node  # there is no public way to ask
        if node.raylet_socket_name not in Path("/proc/net/unix").read_text().split():
            return False
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER_WITHIN).close()
        except ConnectionRefusedError:
            return False
        except OSError:  # a slow network: Ray has time limits of its own
            pass
        return True

    def _join(self, address: str, variables: Mapping[str, str]) -> None:
        more: dict[str, Any] = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        try:
            with quiet_start():
                ray.init(address=address, **more, **_SILENT)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            first = (str(error).splitlines() or ["no message"])[0]
            raise UserError(
                f"there is no Ray to join at --ray-address {address}, or it needs a token (set "
                f"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, see docs/distributed.md): {first.rstrip('.')}."
            ) from None

    def _make_token(self, path: Path) -> None:
        """Gives the run's Ray a token of its own. Ray would put one into the home folder, readable by all."""
        if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
            return
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_TOKEN)
        os.environ["RAY_AUTH_TOKEN_PATH"] = self._token = str(path)

    def _start(self, num_cpus: int, store_bytes: int) -> None:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = search_path()  # actors import functions of the user's program
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=num_cpus,
                object_store_memory=store_bytes,
                # Ray's folder has mode 777, so it lies inside ours, which has 700.
                _temp_dir=f"{self._folder}/ray",
                **_SILENT,
            )
        except Exception as error:  # Ray has no narrower error for a start that takes too long
            first = (str(error).splitlines() or ["no message"])[0]
            raise TrainingError(f"Ray could not be started: {first}") from error
        finally:
            del os.environ["PYTHONPATH"]
            os.environ.update({} if before is None else {"PYTHONPATH": before})

    def close(self) -> None:
        """Leaves Ray. If it was started here, ends it and removes its files."""
        with _signals_kept():
            if self._folder is None:
                ray.shutdown()
            else:
                _end_own()
        if self._token is not None and os.environ.get("RAY_AUTH_TOKEN_PATH") == self._token:
            del os.environ["RAY_AUTH_TOKEN_PATH"]
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _end_own() -> None:
    """Leaves the Ray that was started here, and kills its processes and those that its raylet has started.

    Ray itself would send SIGTERM, which they ignore, and wait a second for each.
    """
    worker = ray._private.worker  # there is no public way
    node, worker._global_node = worker._global_node, None
    ray.shutdown()
    if node is None:
        return
    raylets = node.all_processes.get("raylet", ())
    started: list[psutil.Process] = []
    for raylet in raylets:
        with contextlib.suppress(psutil.NoSuchProcess):
            started += psutil.Process(raylet.process.pid).children()
    node.kill_all_processes(check_alive=False)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def store_bytes(config: DistributedSettings, num_envs: int) -> int:
    """Bytes of the rollouts of `num_envs` envs that are in the object store at once."""
    observation, rows = registry.specs(config)[0], num_envs * (config.steps_per_env + 1)
    size = observation_bytes(observation, rows) + 4 * rows * getattr(config, "remembered_size", 0)
    return int(1.2 * ((config.lag or 0) + 2) * size)


def free_cpus(wanted: int, within: float = _FREED_WITHIN) -> int:
    """The number of Ray's free CPUs. Waits `within` seconds if fewer than `wanted` are free."""
    end = time.monotonic() + within
    while (free := int(ray.available_resources().get("CPU", 0))) < wanted and time.monotonic() < end:
        time.sleep(0.1)
    return free


def check_gpus(asked: str, gpus: float) -> None:
    """Raises UserError if no node of Ray has so many GPUs: Ray would wait for ever. `asked` is the flag."""
    most = max(node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"])
    if gpus > most:
        raise UserError(
            f"{asked} {gpus:g} needs a machine with so many GPUs, and Ray's have at most {most:g}."
        )


def end_with_parent() -> None:
    """Has Linux kill this process as soon as its parent, Ray's process on this machine, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def serve_driver() -> None:
    """Called first in a process of a run: it ends with its parent, and leaves stopping to the driver.

    The driver may need it after a signal that tells a run to stop, before it saves.
    """
    end_with_parent()
    if threading.current_thread() is threading.main_thread():
        for number in endings.STOP_CODES:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restores the handlers of signals, because Ray installs its own for SIGTERM, which exits with 15 or 1.

    If Ray's handler ran inside, the process ends like one that was told to stop.
    """
    if threading.current_thread() is not threading.main_thread():  # then Ray installs none
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except SystemExit:
        raise SystemExit(endings.STOP_CODES[signal.SIGTERM]) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
