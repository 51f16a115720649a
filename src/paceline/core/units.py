"""Sizes and durations for people: about three digits, in a fitting unit."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB")


def size(num_bytes: float) -> str:
    """Return a size: `0 B`, `512 B`, `31.4 kB`, `1.2 TB`."""
    scaled, unit = float(num_bytes), _SIZES[0]
    for unit in _SIZES:
        # 999.95 would be shown as 1000.0: it is 1.0 of the next unit.
        if scaled < 999.95 or unit == _SIZES[-1]:
            break
        scaled /= 1000
    return f"{scaled:.0f} {unit}" if unit == _SIZES[0] else f"{scaled:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration: `0.4 s`, `31.0 s`, `5.2 min`, `960.41 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3597 else f"{seconds / 3600:,.2f} h"
