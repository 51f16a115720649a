"""Links between ranks as numbers: bandwidth, latency of a message and cost of a call, typed or measured. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.core.errors import PacelineError

_LINK = re.compile(
    r"\s*(?P<speed>[0-9.]+(?:e[0-9+-]+)?)\s*(?P<prefix>[kMGT]?)(?P<unit>bit|bps|b/s|B/s|B)(?:/s)?\s*(?:,(?P<latency>.*))?"
)
_LATENCY = re.compile(r"\s*(?P<number>[0-9.]+)\s*(?P<unit>ns|us|µs|ms|s)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
CALL_S = 2e-4
"""Cost of a collective of gloo beside its messages, where it was not measured."""
LATENCY_S = 5e-5
"""Latency of a link that only a bandwidth was given of."""


class BadLink(PacelineError):
    """A link that cannot be read."""

    text: str
    why: str
    sentence = "`--link {text}`: {why}"
    hint = "give bandwidth and latency of one direction, such as `--link 10Gbit,50us`; the latency may be left out"


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of one class of links, in one direction."""

    bytes_per_s: float
    latency_s: float = LATENCY_S
    """Of a message, from the memory of one rank to that of another."""
    call_s: float = CALL_S
    """Of a collective, beside its messages: threads that are woken, and the library itself."""
    is_measured: bool = False

    def __str__(self) -> str:
        bits = 8 * self.bytes_per_s
        scale, unit = next((each for each in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if bits >= each[0]), (1e3, "kbit/s"))
        return f"{bits / scale:.3g} {unit}, {1e6 * self.latency_s:.3g} us"


def parse_link(text: str) -> LinkSpeed:
    """Return the link that `100Gbit,10us` means."""
    words = _LINK.fullmatch(text)
    if words is None:
        raise BadLink(text, "no bandwidth, such as 10Gbit or 1.2GB/s, at its beginning")
    speed = float(words["speed"]) * _PREFIXES[words["prefix"]] / (1.0 if words["unit"].startswith("B") else 8.0)
    latency_s = LATENCY_S
    if words["latency"] is not None:
        latency = _LATENCY.fullmatch(words["latency"])
        if latency is None:
            raise BadLink(text, f"{words['latency'].strip()!r} is no latency, such as 50us or 1ms")
        latency_s = float(latency["number"]) * _SECONDS[latency["unit"]]
    if not speed > 0:
        raise BadLink(text, "a link without bandwidth moves nothing")
    return LinkSpeed(speed, latency_s)
