"""The settings of actors and learners: the processes that step the envs, those that learn, and the lag."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeGuard

from tfrl.cli.errors import UserError, how_to_install
from tfrl.cli.flags import TIMEOUT, Range
from tfrl.cli.settings import NoResult
from tfrl.config.run import Hardware, RLSettings, RunSettings, ScheduledLearning

if TYPE_CHECKING:
    from typing_extensions import Self

_ANSWERS_WITHIN = 10.0  # seconds
_HTTP2 = b"\x04"  # the type of a frame of settings


LEARNER = "TFRL_LEARNER"
"""An environment variable of learners that a run has started: the address of their Ray, if there is one."""


@dataclass(frozen=True)
class Lag:
    """Step the envs while the learner trains."""

    lag: Annotated[int | None, Range(0, 64)] = None
    """Collect each rollout with weights that are this many updates old, so that envs are stepped while the
    network learns. 0: envs and network take turns. None: 1 for IMPALA, IMPACT and with --actors, otherwise
    0; a resumed run keeps its lag."""
    free_running: bool = False
    """Collect each rollout with the newest weights at its beginning, at most --lag (2) updates old. This is
    faster, but no two runs are the same."""


@dataclass(frozen=True)
class Actors(NoResult):
    """The processes that step the envs. The result does not depend on them."""

    actors: Annotated[int, Range(0, 1024)] = 0
    """Processes on Ray that step the envs; each has its share of the envs. 0: this process."""
    actor_timeout: Annotated[float, TIMEOUT] = 600.0
    """Replace an actor that takes more seconds than this for a rollout."""


@dataclass(frozen=True)
class Learners(NoResult):
    """The processes that learn. The result does not depend on them."""

    learners: Annotated[int, Range(1, 256)] = 1
    """Processes that learn, each from its share of the envs and actors; their gradients are summed. Two or
    more are workers of MultiWorkerMirroredStrategy, on the nodes of --ray-address or on this machine."""


DISTRIBUTED_SECTIONS = (Hardware, Lag, Actors, Learners, RunSettings)
"""The last sections of algorithms whose settings extend `DistributedSettings`."""


@dataclass(frozen=True)
class DistributedSettings(Actors, Learners, Lag, ScheduledLearning, RLSettings):
    """The settings of algorithms whose envs actors may step, with several learners.

    Attributes:
      default_lag: the lag of a run without actors.
    """

    default_lag: ClassVar[int] = 0
    inherit_from_run: ClassVar[tuple[str, ...]] = ("lag", "num_envs")

    @property
    def is_ahead(self) -> bool:
        """True if a thread or actors make the rollouts."""
        return bool(self.lag or self.actors)

    @property
    def rollouts_held(self) -> int:
        """The number of rollouts in memory: one that the learner uses, and the next ones."""
        return (self.lag or 0) + 1

    def complete(self) -> Self:
        """These settings with derived values filled in, also the lag."""
        config = super().complete()
        if config.lag is not None:
            return config
        lag = 2 if config.free_running else 1 if config.actors else config.default_lag
        return dataclasses.replace(config, lag=lag)

    def check(self) -> None:
        """Raises UserError for the first setting that cannot work on any machine."""
        super().check()
        if self.actors and self.num_envs % self.actors:
            raise UserError(f"--num-envs must be divisible by --actors {self.actors}; got {self.num_envs}.")
        if self.ray_address is not None and not self.actors and self.learners == 1:
            raise UserError("--ray-address needs --actors or --learners: without these nothing runs on Ray.")
        if self.learners > 1 and self.strategy not in ("auto", "multi-worker"):
            raise UserError(
                f"--learners {self.learners} needs --strategy multi-worker or auto; got {self.strategy}."
            )
        if self.free_running and not self.lag:
            raise UserError(
                "--free-running needs a --lag of 1 or more: the number of updates that a rollout may be "
                "behind."
            )

    def check_topology(self, workers: int, replicas_per_worker: int) -> None:
        """Raises UserError if replicas cannot share the envs, or learners (one a worker) the actors."""
        replicas = workers * replicas_per_worker
        if self.num_envs % replicas:
            made_of = f" ({workers} workers x {replicas_per_worker})" if workers > 1 else ""
            raise UserError(
                f"--num-envs must be divisible by the number of replicas, {replicas}{made_of}; "
                f"got {self.num_envs}."
            )
        if self.actors % workers:
            raise UserError(
                f"--actors must be divisible by the number of learners, {workers}; got {self.actors}."
            )

    @property
    def depends_on_length(self) -> bool:
        """True if --total-steps changes the training, for example by a falling learning rate."""
        return self.lr_schedule != "constant"

    @property
    def may_change(self) -> frozenset[str]:
        """The settings that a resumed run may change; not its length if the training depends on it."""
        fixed = {"total_steps"} if self.depends_on_length else set()
        return super().may_change - fixed


def leads(config: RLSettings) -> TypeGuard[DistributedSettings]:
    """True if this process must start the learners of --learners, and is no learner itself.

    Raises UserError if TF_CONFIG makes it a worker.
    """
    learners = getattr(config, "learners", 1)
    if learners == 1 or LEARNER in os.environ:
        return False
    if os.environ.get("TF_CONFIG", "").strip():
        raise UserError(
            f"--learners {learners} starts its own workers, but TF_CONFIG makes this process a worker "
            "already: leave one of the two out."
        )
    return True


def ray_address(config: RLSettings) -> str | None:
    """The address of the Ray to join; None: this process starts one."""
    return os.environ.get(LEARNER) or config.ray_address


def check_ray(config: RLSettings) -> None:
    """Raises UserError if the settings need Ray, and it is not installed or does not answer."""
    wanted = [f"--{name} {n}" for name in ("actors", "observers") if (n := getattr(config, name, 0))]
    wanted += ["--ray-address"] if config.ray_address else []
    if not wanted:
        return
    if importlib.util.find_spec("ray") is None:
        instead = ", or give --observers 0" if wanted[0].startswith("--observers") else ""
        raise UserError(f"{wanted[0]} needs Ray, which is not installed: {how_to_install('ray')}{instead}")
    check_address(config.ray_address)


def check_address(address: str | None) -> None:
    """Raises UserError if no Ray answers at --ray-address. Ray itself would try for half a minute."""
    if address in (None, "auto"):
        return
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
