"""Messages between workers before TensorFlow starts: JSON objects, one a line, each checked on arrival.

Anything may connect to a port, or answer there. So every field of a message must be of its own type and of a
sane size before it counts, and text that may reach a terminal holds no control characters. All else is
`ForeignError`, for which a connection is closed and nothing more.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

LONGEST_LINE = 1 << 20  # bytes
_LONGEST_TEXT = 4000  # characters of a text that people are shown
_LONGEST_NAME = 200

Kind = TypeVar("Kind")


class ForeignError(ConnectionError):
    """The other end does not speak our protocol."""


class Channel:
    """A connection that carries messages, and what is known of its other end.

    Attributes:
      heard: when it was last of use, a time of `time.monotonic`; kept by whoever reads from it.
      hello: what a worker said of itself; None before.
      answered: the last of the chief's rounds that this worker answered.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(1.0)  # for sending; reading waits for select
        self._socket = connection
        self.heard = time.monotonic()
        self.hello: Hello | None = None
        self.answered = 0
        self._unread = b""

    def fileno(self) -> int:
        """The socket's number, for select; -1 once it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. OSError: the other end is gone, or takes nothing for a second."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. ConnectionError: the stream ended, or is not our protocol."""
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("it closed the connection")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > LONGEST_LINE:
            raise _foreign()
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise _foreign() from None
        if not all(isinstance(message, dict) for message in messages):
            raise _foreign()
        return messages


@dataclass(frozen=True)
class Hello:
    """A worker's first message: which one it is and what must be equal on all."""

    worker: int
    who: str
    fingerprint: dict[str, str]

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Hello:
        """Raises ForeignError where it is none."""
        if message.get("tfrl") != "hello":
            raise _foreign()
        fingerprint = _field(message, "fingerprint", dict)
        if not all(type(value) is str for value in fingerprint.values()):
            raise _foreign()
        return cls(_field(message, "worker", int), plain(_field(message, "who", str)), fingerprint)

    def message(self) -> dict[str, Any]:
        """The JSON object to send."""
        return {"tfrl": "hello", **vars(self)}


@dataclass(frozen=True)
class Status:
    """The chief's repeated message to its workers: who is missing. They answer with the round."""

    missing: list[str]
    round: int

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Status:
        """Raises ForeignError where it is none."""
        missing = _field(message, "missing", list)
        if not all(type(name) is str for name in missing):
            raise _foreign()
        return cls([plain(name, _LONGEST_TEXT) for name in missing], _field(message, "round", int))


def answered_round(message: Mapping[str, Any], newest: int) -> int:
    """The round that a worker answers, at most the newest one. Raises ForeignError for anything else."""
    answered = _field(message, "round", int)
    if not 0 < answered <= newest:
        raise _foreign()
    return answered


def refusal(message: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The chief's reason to send a worker away, and True if another start may help; None if it may stay."""
    if "error" not in message:
        return None
    again = _field(message, "again", bool) if "again" in message else False
    return plain(_field(message, "error", str), _LONGEST_TEXT), again


def is_go(message: Mapping[str, Any]) -> bool:
    """True if the chief lets a worker go."""
    return "go" in message and _field(message, "go", bool)


def plain(text: str, most: int = _LONGEST_NAME) -> str:
    """A stranger's text as a terminal may show it: on one line, without control characters, not too long."""
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(character if character.isprintable() else "?" for character in text)


def _field(message: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind:
    """A field of exactly that type: JSON's true is no number. Raises ForeignError."""
    value = message.get(name)
    if type(value) is not kind:
        raise _foreign()
    return value


def _foreign() -> ForeignError:
    return ForeignError("another program answers on this port")
