"""How much memory there is: what plainly cannot fit is refused before it is tried."""

from __future__ import annotations

import os


def physical() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_words(size: float) -> str:
    """A number of bytes for people: 2.8 GB."""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size, _ = size / 1000, units.pop(0)
    return f"{size:.3g} {units[0]}"
