"""Quantities in words, the same wherever they are shown."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds in the two largest units, rounded down: "35 s", "48 min", "2 h 05 min", "3 d 04 h"."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86_400))
    if seconds < 60:
        return f"{int(seconds)} s"
    if seconds < 3600:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02d} min" if days == 0 else f"{days} d {hours % 24:02d} h"


def size(num_bytes: float) -> str:
    """A number of bytes, three digits of it: "2.8 GB"."""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes, _ = num_bytes / 1000, units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"
