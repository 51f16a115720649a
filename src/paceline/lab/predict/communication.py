"""Links between ranks, and seconds of the collectives of a step over them. Pure.

With W ranks, S bytes, and the latency a and bytes per second B of the slowest link that takes part:

    all-reduce, ring        2 (W - 1) a + 2 (W - 1) / W S / B
    all-reduce, tree        2 log2(W) a + 2 S / B               NCCL takes the faster of the two
    all-gather              (W - 1) a + (W - 1) / W S / B
    exchange                a + (W - 1) / W rows S / B          all messages at once
    reduce-scatter          NCCL: as an all-gather; gloo: an all-reduce of which a rank keeps its piece
    exact sum               exchange of all partial sums, then exchange of the sums; an all-reduce where no rank has
                            more than one partial sum and at most two ranks have any

gloo takes longer by the factors in `GLOO`. A ring crosses each machine once; in an exchange, all ranks of a machine
send through its one link.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import InvalidSetting, Unreadable
from paceline.core.json_text import read_json
from paceline.core.sum_tree import Layout

_LINK = re.compile(
    r"\s*(?P<speed>[0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*(?P<prefix>[kMGT]?)(?P<unit>bit|bps|b|B)(?:/s)?\s*(?:,(?P<latency>.*))?"
)
_LATENCY = re.compile(r"\s*(?P<number>[0-9]+\.?[0-9]*)\s*(?P<unit>ns|us|µs|ms|s)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
LATENCY_S = 5e-5
"""Latency of a link of which only the bandwidth is known."""
PAYLOAD = 0.958
"""Share of a link's bandwidth that carries numbers; the rest is headers of Ethernet, IP and TCP."""
LARGE = 1 << 20
"""Minimum bytes of a measured reduction that determines the bandwidth."""
GLOO = {"all_reduce": (1.06, 1.06), "all_gather": (1.35, 1.08), "exchange": (1.11, 1.33)}
"""Factors on the bytes of collectives over gloo, on two ranks and on more (measured by benchmarks/collectives.py)."""
_HINT = "give bandwidth and latency of one direction, such as `--link 10Gbit,50us`; the latency may be left out"


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of one class of links, in one direction."""

    bytes_per_s: float
    """Without headers."""
    latency_s: float = LATENCY_S
    is_measured: bool = False

    def __str__(self) -> str:
        bits = 8 * self.bytes_per_s / (1.0 if self.is_measured else PAYLOAD)
        scale, unit = next((each for each in ((1e9, "Gbit/s"), (1e6, "Mbit/s")) if bits >= each[0]), (1e3, "kbit/s"))
        return f"{bits / scale:.3g} {unit}, {1e6 * self.latency_s:.3g} us"

    def scaled(self, factor: float) -> LinkSpeed:
        """Return a link on which everything takes `factor` times as long."""
        return replace(self, bytes_per_s=self.bytes_per_s / factor, latency_s=self.latency_s * factor)


def parse_link(text: str) -> LinkSpeed:
    """Return the link that `100Gbit,10us` means."""
    words = _LINK.fullmatch(text)
    if words is None:
        raise InvalidSetting(f"`--link {text}` has no bandwidth, such as 10Gbit or 1.2GB/s, at its start", hint=_HINT)
    speed = float(words["speed"]) * _PREFIXES[words["prefix"]] / (1.0 if words["unit"] == "B" else 8.0)
    if not speed > 0:
        raise InvalidSetting(f"`--link {text}`: the bandwidth must be above 0", hint=_HINT)
    if words["latency"] is None:
        return LinkSpeed(PAYLOAD * speed)
    latency = _LATENCY.fullmatch(words["latency"])
    if latency is None:
        raise InvalidSetting(
            f"`--link {text}`: {words['latency'].strip()!r} is not a latency, such as 50us or 1ms", hint=_HINT
        )
    return LinkSpeed(PAYLOAD * speed, float(latency["number"]) * _SECONDS[latency["unit"]])


def read_link_file(path: Path) -> LinkSpeed:
    """Return the link that `paceline doctor --json` measured between its ranks."""
    hint = f"make one on the machines themselves: `mpirun -np 2 paceline doctor --json > {path}`"
    try:
        findings = read_json(path)
    except ValueError as error:
        raise Unreadable(f"`--link-file {path}` is not JSON ({error})", hint=hint) from error
    except OSError as error:
        raise Unreadable(f"`--link-file {path}` cannot be read ({error.strerror})", hint=hint) from error
    parts = [part for part in findings if isinstance(part, dict)] if isinstance(findings, list) else []
    rows = [row for part in parts for row in part.get("reductions") or ()]
    if not rows:
        text = f"`--link-file {path}` has no reductions, which `paceline doctor` measures on two ranks or more"
        raise Unreadable(text, hint=hint)
    return fit_link([(int(row["num_bytes"]), float(row["seconds"]), int(row["ranks"])) for row in rows])


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


# -- collectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Ranks on machines, and the links between them."""

    ranks: int
    nodes: int
    inside: LinkSpeed
    """Between two ranks of one machine."""
    between: LinkSpeed
    """From a machine to the others."""
    is_nccl: bool = False

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def slowest(self) -> LinkSpeed:
        """Link that limits a ring over all ranks."""
        links = [self.inside] * (self.per_node > 1) + [self.between] * (self.nodes > 1)
        return min(links, key=lambda link: link.bytes_per_s)

    def _factor(self, name: str) -> float:
        return 1.0 if self.is_nccl else GLOO[name][self.ranks > 2]

    def all_reduce(self, num_bytes: float) -> float:
        link, ranks = self.slowest, self.ranks
        ring_s = 2 * (ranks - 1) * (link.latency_s + self._factor("all_reduce") * num_bytes / ranks / link.bytes_per_s)
        if not self.is_nccl:
            return ring_s
        return min(ring_s, 2 * (math.ceil(math.log2(ranks)) * link.latency_s + num_bytes / link.bytes_per_s))

    def all_gather(self, num_bytes: float) -> float:
        """Return the seconds of a gather of `num_bytes` in all."""
        link, piece = self.slowest, self._factor("all_gather") * num_bytes / self.ranks
        return (self.ranks - 1) * (link.latency_s + piece / link.bytes_per_s)

    def exchange(self, num_bytes: float, rows: int = 1) -> float:
        """Return the seconds in which each rank sends a piece of its `rows` of `num_bytes` to every other rank."""
        piece, inside_s, outside_s = rows * self._factor("exchange") * num_bytes / self.ranks, 0.0, 0.0
        if self.per_node > 1:
            inside_s = (self.ranks - 1) * piece / self.inside.bytes_per_s
        if self.nodes > 1:
            outside_s = self.per_node * (self.ranks - self.per_node) * piece / self.between.bytes_per_s
        return self.slowest.latency_s + max(inside_s, outside_s)

    def reduce_scatter(self, num_bytes: float) -> float:
        return self.all_gather(num_bytes) if self.is_nccl else self.all_reduce(num_bytes)

    def exact_sum(self, num_bytes: float, layout: Layout) -> float:
        if layout.is_plain:
            return self.all_reduce(num_bytes)
        return self.exact_scatter(num_bytes, layout) + self.exchange(num_bytes)

    def exact_scatter(self, num_bytes: float, layout: Layout) -> float:
        """Return the seconds of an exact sum of which each rank gets its piece."""
        return self.reduce_scatter(num_bytes) if layout.is_plain else self.exchange(num_bytes, max(layout.rows))
