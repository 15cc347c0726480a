"""A Ray of the run's own, on the loopback address alone and ended with the run; or one that runs already."""

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

from tfrl.cli import signals
from tfrl.cli.errors import PeerError, TrainingError, UserError
from tfrl.config.actors import LEARNER, DistributedSettings
from tfrl.envs import registry
from tfrl.envs.callables import search_path
from tfrl.experience.rollout import observation_bytes
from tfrl.remote import LOOPBACK

_OWN = {
    LOOPBACK: "0",  # but for `reach_other_machines`
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise: the actors would stand behind the learner
}
_QUIET = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
_STORE_BYTES = 128 * 2**20  # beside the rollouts: weights, and Ray's own least
_FREED_WITHIN = 5.0  # seconds in which the CPUs of processes that have just ended are free again
_CHECK_EVERY = 1.0  # seconds between two looks at whether Ray is alive
_HEAD_BACK_WITHIN = 20.0  # seconds in which the head of a Ray that was joined may be started again
_TOKEN = secrets.token_hex(32)  # one for all that this process starts: it remembers the first
_PR_SET_PDEATHSIG = 1

for _name, _value in (_OWN | _QUIET).items():  # read when ray is imported
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray.exceptions import RayError  # noqa: E402


class Cluster:
    """A connection to Ray.

    Args:
      address: of a Ray that runs, or auto; None: one is started here.
      needs: processes that it is to have room for, a CPU each, by the flag that asks for them.
      store_bytes: of what is in its object store at once.

    Raises:
      UserError: it has fewer CPUs, or cannot be reached.
      TrainingError: none could be started.
    """

    def __init__(self, address: str | None, needs: Mapping[str, int], store_bytes: int) -> None:
        self._folder: str | None = None
        self._token: str | None = None  # its file
        self._checked = time.monotonic()  # that Ray is alive
        wanted = sum(needs.values())
        quiet = {"logging_level": "ERROR", "log_to_driver": False}
        try:
            if address is not None:
                with _signals_kept():
                    self._join(address, quiet)
            else:
                # Whoever stops a run may signal all of its processes. Ray's would end before the driver has
                # saved, and Ray ends a driver, without a word, whose Ray has ended: they are kept from it.
                with signals.held_back(), _signals_kept():
                    self._folder = tempfile.mkdtemp(prefix="tfrl-ray-")
                    self._make_token(Path(self._folder) / "token")
                    self._start(wanted, store_bytes + _STORE_BYTES, quiet)
        except SystemExit:
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

    @property
    def is_shared(self) -> bool:
        """True if others may have processes on it."""
        return self._folder is None and LEARNER not in os.environ

    def check(self) -> None:
        """Raises an error if Ray itself has died: it will soon end this process, without a word.

        PeerError for one of the learners of `--learners`, who may all begin again; else TrainingError.
        """
        recently = time.monotonic() < self._checked + _CHECK_EVERY
        if (recently and self._is_on_this_machine()) or self.is_alive():
            return
        if LEARNER in os.environ:
            raise PeerError("the Ray of this run has died")
        whose = "the run's own Ray" if self._folder is not None else "the Ray that this run has joined"
        raise TrainingError(
            f"{whose} has died; run the same command again to continue from the last checkpoint"
        )

    def is_alive(self) -> bool:
        """True if Ray's processes run that this one cannot do without: this machine's, and the head's."""
        host, _, port = self.address.rpartition(":")
        end = time.monotonic() + (0 if self._folder is not None else _HEAD_BACK_WITHIN)
        while self._is_on_this_machine():
            try:
                socket.create_connection((host, int(port)), timeout=_CHECK_EVERY).close()
            except ConnectionRefusedError:
                if time.monotonic() >= end:
                    return False
                time.sleep(_CHECK_EVERY)
                continue
            except OSError:  # a slow network: Ray has time limits of its own
                pass
            self._checked = time.monotonic()
            return True
        return False

    def _is_on_this_machine(self) -> bool:
        """True if Ray's own process on this machine, the raylet, runs."""
        node: Any = ray._private.worker._global_node  # there is no public way to ask
        return node.raylet_socket_name in Path("/proc/net/unix").read_text().split()

    def _join(self, address: str, quiet: dict) -> None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            first = (str(error).splitlines() or ["no message"])[0]
            raise UserError(
                f"there is no Ray to join at --ray-address {address}, or it needs a token (set "
                f"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, see docs/distributed.md): {first}"
            ) from None

    def _make_token(self, path: Path) -> None:
        """Gives the run's Ray a token of its own: Ray would keep one in the home folder, open to all."""
        if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
            return
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_TOKEN)
        os.environ["RAY_AUTH_TOKEN_PATH"] = self._token = str(path)

    def _start(self, num_cpus: int, store_bytes: int, quiet: dict) -> None:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = search_path()  # of actors, which import functions of the user's program
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=num_cpus,
                object_store_memory=store_bytes,
                # Ray opens its folder to everybody (mode 777), so it gets one inside ours, which is 0700.
                _temp_dir=f"{self._folder}/ray",
                **quiet,
            )
        except Exception as error:  # Ray has no narrower one for a start that takes too long
            self.close()
            first = (str(error).splitlines() or ["no message"])[0]
            raise TrainingError(f"Ray could not be started: {first}") from error
        finally:
            del os.environ["PYTHONPATH"]
            os.environ.update({} if before is None else {"PYTHONPATH": before})

    def close(self) -> None:
        """Leaves Ray; ends it, and removes what it wrote, if it was started here."""
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
    """Leaves the Ray that was started here, then kills its processes, and those that its raylet has started.

    Ray by itself would send them SIGTERM, which they are kept from, and wait a second for each.
    """
    worker = ray._private.worker  # there is no public way
    node, worker._global_node = worker._global_node, None
    ray.shutdown()
    if node is None:
        return
    started = [pid for info in node.all_processes.get("raylet", ()) for pid in _children(info.process.pid)]
    node.kill_all_processes(check_alive=False)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """The process numbers of a process's children, by Linux's /proc."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def store_bytes(config: DistributedSettings, num_envs: int) -> int:
    """Bytes of an object store for the rollouts of so many envs of a run that are there at once."""
    observation, rows = registry.specs(config)[0], num_envs * (config.steps_per_env + 1)
    size = observation_bytes(observation, rows) + 4 * rows * getattr(config, "remembered_size", 0)
    return int(1.2 * ((config.lag or 0) + 2) * size)


def free_cpus(wanted: int, within: float = _FREED_WITHIN) -> int:
    """CPUs of this process's Ray that nobody has; if fewer than wanted, after so many seconds."""
    end = time.monotonic() + within
    while (free := int(ray.available_resources().get("CPU", 0))) < wanted and time.monotonic() < end:
        time.sleep(0.1)
    return free


def end_with_parent() -> None:
    """Kills this process as soon as Ray's own process on this machine has ended, however it did."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def leave_stopping_to_driver() -> None:
    """Ignores the signals that tell a run to stop, where all of its processes get them.

    The driver may want a rollout from here before it saves; then it ends this process.
    """
    if threading.current_thread() is threading.main_thread():
        for number in signals.STOP_CODES:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps the handlers of signals: Ray puts its own in the place of SIGTERM's, which exit with 15 or 1.

    Where one of those has run meanwhile, the process ends as one that was told to stop.
    """
    if threading.current_thread() is not threading.main_thread():  # Ray then leaves them alone
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except SystemExit:
        raise SystemExit(signals.STOP_CODES[signal.SIGTERM]) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
