"""The settings of actors and learners: who steps the training envs, how far ahead, and who learns."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tfrl.cli.errors import UserError
from tfrl.cli.settings import TIMEOUT, Range
from tfrl.config import algorithm_of, from_yaml, run
from tfrl.run.folder import SETTINGS_FILE

_ANSWERS_WITHIN = 10.0  # seconds
_HTTP2 = b"\x04"  # the type of a frame of settings


LEARNER = "TFRL_LEARNER"
"""An environment variable of learners that a run has started: the address of their Ray, if there is one."""


@dataclass(frozen=True)
class Ahead:
    """The lead of the envs over the learner."""

    lag: Annotated[int | None, Range(0, 64)] = None
    """The rollout of an update is acted by the weights of so many updates before, so that envs are stepped
    while the network learns; 0: they take turns. None: 1 for IMPALA and with --actors, otherwise 0; a run
    that goes on keeps its own."""
    free_running: bool = False
    """Each rollout is acted by the newest weights that there are as it begins, --lag updates old at the most
    (2): faster, but no two runs are the same."""

    @property
    def is_ahead(self) -> bool:
        """True where rollouts are made apart from the learner: in a thread or by actors."""
        return bool(self.lag or getattr(self, "actors", 0))

    @property
    def rollouts_held(self) -> int:
        """Rollouts that are in memory at once: the one that is learned from, and those ahead of it."""
        return (self.lag or 0) + 1


@dataclass(frozen=True)
class Actors:
    """The processes that step the envs. The result does not depend on them."""

    actors: Annotated[int, Range(0, 1024)] = 0
    """Processes on Ray that step the envs, each its share of them; 0: this process."""
    actor_timeout: Annotated[float, TIMEOUT] = 600.0
    """Seconds that an actor may take for a rollout before it is replaced."""


@dataclass(frozen=True)
class Learners:
    """The processes that learn. The result does not depend on them."""

    learners: Annotated[int, Range(1, 256)] = 1
    """Processes that learn, each from its share of the envs and actors; their gradients are summed. More than
    one are workers of MultiWorkerMirroredStrategy, on the nodes of --ray-address or on this machine."""
    ray_address: str | None = None
    """The address of a Ray that runs, or auto; None: one is started for the run, and ended with it."""


MAY_CHANGE = frozenset(("actors", "learners", "ray_address", "actor_timeout"))
"""Names of the settings that a resumed run may change."""


def complete(config: Any, *, alone: int = 0) -> Any:
    """The settings with what follows from others filled in; `alone` is the lag of a run without actors."""
    config = run.complete(config)
    if config.lag is not None:
        return config
    lag = 2 if config.free_running else 1 if config.actors else alone
    return dataclasses.replace(config, lag=lag)


def kept(config: Any) -> dict[str, Any]:
    """The settings that may be left open, of the run in their folder, if there is one of this algorithm."""
    file = config.run_dir / SETTINGS_FILE
    if config.resume in ("never", "restart") or not file.is_file() or algorithm_of(file) != config.algorithm:
        return {}
    try:
        there = from_yaml(file)
    except UserError:  # it is told where the run is looked at
        return {}
    return {name: getattr(there, name) for name in ("lag", "num_envs")}


def check(config: Any) -> None:
    """Raises UserError if actors cannot share the envs, or settings ask for actors that there are not."""
    if config.actors and config.num_envs % config.actors:
        below = config.num_envs // config.actors * config.actors
        near = f"{below} or {below + config.actors}" if below else f"{config.actors}"
        raise UserError(
            f"--num-envs must be divisible by --actors {config.actors}; got {config.num_envs}; "
            f"{near} would do."
        )
    if config.ray_address is not None and not config.actors and config.learners == 1:
        raise UserError("--ray-address needs --actors or --learners: without them nothing runs on Ray.")
    if config.learners > 1 and config.strategy not in ("auto", "multi-worker"):
        raise UserError(
            f"--learners {config.learners} are workers of --strategy multi-worker; got {config.strategy}."
        )
    if config.free_running and not config.lag:
        raise UserError("--free-running needs a --lag of 1 or more, the most that rollouts may be behind.")


def check_topology(config: Any, workers: int) -> None:
    """Raises UserError if learners, as many as there are workers, cannot share the actors."""
    if config.actors % workers:
        below = config.actors // workers * workers
        near = f"{below} or {below + workers}" if below else f"{workers}"
        raise UserError(
            f"--actors must be divisible by the number of learners, {workers}; got {config.actors}; "
            f"{near} would do."
        )


def leads(config: Any) -> bool:
    """True if this process is to start the learners of --learners, and is none of them itself.

    Raises UserError where TF_CONFIG has made it a worker of a run already.
    """
    learners = getattr(config, "learners", 1)
    if learners == 1 or LEARNER in os.environ:
        return False
    if os.environ.get("TF_CONFIG", "").strip():
        raise UserError(
            f"--learners {learners} starts workers of its own, and TF_CONFIG has made this process one of a "
            "run's already: leave one of the two out."
        )
    return True


def ray_address(config: Any) -> str | None:
    """The address of the Ray that this process is to join; None: it starts one."""
    return os.environ.get(LEARNER) or config.ray_address


def check_ray(config: Any) -> None:
    """Raises UserError if anything is to run on Ray, and that is not there or does not answer."""
    wanted = [f"--{name} {n}" for name in ("actors", "observers") if (n := getattr(config, name, 0))]
    wanted += ["--ray-address"] if getattr(config, "ray_address", None) else []
    if not wanted:
        return
    if importlib.util.find_spec("ray") is None:
        instead = ", or give --observers 0" if wanted[0].startswith("--observers") else ""
        raise UserError(f"{wanted[0]} needs Ray, which is not installed: {how_to_install_ray()}{instead}")
    if config.ray_address not in (None, "auto"):
        _check_answers(config.ray_address)


def how_to_install_ray() -> str:
    """The command that installs Ray beside this copy of tfrl: a checkout, or an installed package."""
    in_checkout = Path(__file__).parents[2].joinpath("requirements-ray.txt").is_file()
    return "pip install -r requirements-ray.txt" if in_checkout else "pip install 'tfrl[ray]'"


def _check_answers(address: str) -> None:
    """Ray itself would try for half a minute."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--ray-address must be HOST:PORT, as `ray start` prints it, or auto; got {address}.")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN) as connection:
            found = _HTTP2 if os.environ.get("RAY_USE_TLS") == "1" else _first_frame(connection)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", "not the name of a host") or "no answer"
        raise UserError(f"there is no Ray to join at --ray-address {address}: {reason}.") from None
    if not found.startswith(_HTTP2):
        raise UserError(
            f"there is no Ray to join at --ray-address {address}: another program answers on this port."
        )


def _first_frame(connection: socket.socket) -> bytes:
    """The type of the first frame that a server of HTTP/2 sends (RFC 9113, 3.4); Ray talks in gRPC."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    with connection.makefile("rb") as answer:
        return answer.read(4)[3:]
