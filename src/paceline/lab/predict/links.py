"""Links between ranks as numbers: bandwidth and latency, as typed or as `paceline doctor` has measured them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.core.json_text import read_json

_LINK = re.compile(
    r"\s*(?P<speed>[0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*(?P<prefix>[kMGT]?)(?P<unit>bit|bps|b|B)(?:/s)?\s*(?:,(?P<latency>.*))?"
)
_LATENCY = re.compile(r"\s*(?P<number>[0-9]+\.?[0-9]*)\s*(?P<unit>ns|us|µs|ms|s)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
LATENCY_S = 5e-5
"""Latency of a link of which only the bandwidth is known."""
PAYLOAD = 0.958
"""Share of a link's bandwidth that carries numbers: the rest is headers of Ethernet, IP and TCP."""
LARGE = 1 << 20
"""Bytes from which on a measured reduction tells the bandwidth."""


class BadLink(PacelineError):
    """A link that cannot be read."""

    text: str
    why: str
    sentence = "`--link {text}`: {why}"
    hint = "give bandwidth and latency of one direction, such as `--link 10Gbit,50us`; the latency may be left out"


class BadLinkFile(PacelineError):
    """A file that holds no measured reductions."""

    path: Path
    why: str
    sentence = "`--link-file {path}`: {why}"
    hint = "make one on the machines themselves: `mpirun -np 2 paceline doctor --json > {path}`"


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of one class of links, in one direction."""

    bytes_per_s: float
    """Of numbers: what headers take is not in it."""
    latency_s: float = LATENCY_S
    """Of a message, from one machine to the other."""
    is_measured: bool = False

    def __str__(self) -> str:
        bits = 8 * self.bytes_per_s / (1.0 if self.is_measured else PAYLOAD)
        scale, unit = next((each for each in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if bits >= each[0]), (1e3, "kbit/s"))
        return f"{bits / scale:.3g} {unit}, {1e6 * self.latency_s:.3g} us"

    def scaled(self, factor: float) -> LinkSpeed:
        """Return a link that takes `factor` times as long for everything."""
        return replace(self, bytes_per_s=self.bytes_per_s / factor, latency_s=self.latency_s * factor)


def parse_link(text: str) -> LinkSpeed:
    """Return the link that `100Gbit,10us` means."""
    words = _LINK.fullmatch(text)
    if words is None:
        raise BadLink(text, "no bandwidth, such as 10Gbit or 1.2GB/s, at its beginning")
    speed = float(words["speed"]) * _PREFIXES[words["prefix"]] / (1.0 if words["unit"] == "B" else 8.0)
    latency_s = LATENCY_S
    if words["latency"] is not None:
        latency = _LATENCY.fullmatch(words["latency"])
        if latency is None:
            raise BadLink(text, f"{words['latency'].strip()!r} is no latency, such as 50us or 1ms")
        latency_s = float(latency["number"]) * _SECONDS[latency["unit"]]
    if not speed > 0:
        raise BadLink(text, "a link without bandwidth moves nothing")
    return LinkSpeed(PAYLOAD * speed, latency_s)


def read_link_file(path: Path) -> LinkSpeed:
    """Return the link that `paceline doctor --json` measured between its ranks."""
    try:
        findings = read_json(path)
    except ValueError as error:
        raise BadLinkFile(path, f"it is no JSON ({error})") from error
    except OSError as error:
        raise BadLinkFile(path, f"it cannot be read ({error.strerror})") from error
    rows = [row for each in _mappings(findings) for row in _mappings(each.get("reductions"))]
    known = [row for row in rows if all(isinstance(row.get(name), int | float) for name in _ROW)]
    if not known:
        raise BadLinkFile(path, "it has no reductions, which `paceline doctor` measures on two ranks or more")
    return fit_link([(int(row["num_bytes"]), float(row["seconds"]), int(row["ranks"])) for row in known])


_ROW = ("num_bytes", "seconds", "ranks")


def _mappings(values: object) -> list[Mapping[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def fit_link(reductions: Sequence[tuple[int, float, int]]) -> LinkSpeed:
    """Return the link of ring all-reduces, each (bytes, seconds, ranks): latency from the smallest, bandwidth from the
    large ones less their latencies."""
    _, smallest_s, ranks = min(reductions)
    latency_s = smallest_s / (2 * (ranks - 1))
    large = [each for each in reductions if each[0] >= LARGE] or [max(reductions)]
    speeds = [
        2 * (size - 1) / size * num_bytes / max(seconds - smallest_s, 1e-3 * seconds)
        for num_bytes, seconds, size in large
    ]
    return LinkSpeed(max(speeds), latency_s, is_measured=True)
