"""Downloads of tensorflow-datasets, refused within seconds where there is no network."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

_RETRIES = 3  # of a download: tfds's own ten take four minutes to tell that there is no network
_CONNECT_SECONDS = 4.0
_DEADLINE_SECONDS = 6.0  # of the whole look: no time-out of a socket covers a name server that is silent
_GATEWAY_ERRORS = (502, 503, 504)


@contextlib.contextmanager
def quick_to_fail() -> Iterator[None]:
    """Within it, tfds looks whether a host answers before it downloads from there, and retries less.

    tfds itself sets no time-outs: where packets are lost it would wait for minutes. `_open_url` is its own
    function, called once a download and not for archives that it has already; a test guards it.
    """
    from tensorflow_datasets.core.download import downloader

    open_url, retries = downloader._open_url, downloader.MAX_RETRIES

    def look_first(url: str, **settings: Any) -> Any:
        check_reachable(url)
        return open_url(url, **settings)

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would report every attempt
    downloader._open_url, downloader.MAX_RETRIES = look_first, _RETRIES
    try:
        yield
    finally:
        downloader._open_url, downloader.MAX_RETRIES = open_url, retries


def check_reachable(url: str) -> None:
    """Raises ConnectionError if the host of an HTTP address gives no answer within seconds; proxies count."""
    if not url.startswith("http"):
        return
    found: list[str] = []  # why not, or "" if it answers

    def look() -> None:
        import requests

        try:
            answer = requests.head(url, timeout=_CONNECT_SECONDS)
            found.append(str(answer.reason) if answer.status_code in _GATEWAY_ERRORS else "")
        except requests.RequestException as error:
            found.append(type(error).__name__)

    thread = threading.Thread(target=look, name="network", daemon=True)
    thread.start()
    thread.join(_DEADLINE_SECONDS)
    reason = found[0] if found else "no answer"
    if reason:
        raise ConnectionError(f"{urlsplit(url).hostname} cannot be reached: {reason}")
