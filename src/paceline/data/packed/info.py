"""What a packed file holds, for a reader."""

from __future__ import annotations

import numpy as np

from paceline.core.paths import near
from paceline.core.units import duration, size
from paceline.data.manifest.bad_line import MOST_SHOWN
from paceline.data.packed.reader import Packed, Stream


def info(packed: Packed) -> list[str]:
    """Lines about a packed file, its shards and its streams."""
    first = packed.files[0]
    shards = f", {len(packed.files)} shards" if len(packed.files) > 1 else ""
    whose = "" if "version" in first.about else ", written by another program"
    told = [f"{near(packed.path)}: {len(packed):,} rows, layout {first.layout}{shards}{whose}"]
    if packed.sample_rate is not None:
        told.append(f"  sample rate: {packed.sample_rate} Hz")
    if "lengths" in packed.columns and packed.sample_rate is not None:
        told.append(f"  length: {duration(float(packed.columns['lengths'].sum()))}")
    told += [f"  {_stream(packed.stream(name))}" for name in packed.names]
    if len(packed):
        told.append(f"  tags: {packed.tags[0]} ... {packed.tags[len(packed) - 1]}")
    return told + _left_out(packed)


def _left_out(packed: Packed) -> list[str]:
    """Lines and recordings that could not be used when it was packed: how many, and the first of them."""
    lines = packed.about.get("bad_lines", {"number": 0, "first": []})  # in all shards the same
    number = int(lines["number"]) + len(packed.skipped)
    if not number:
        return []
    named = [*lines["first"], *packed.skipped][:MOST_SHOWN]
    more = [f"    ... and {number - len(named):,} more"] if number > len(named) else []
    return [f"  left out when it was packed: {number:,}", *(f"    {line}" for line in named), *more]


def _stream(stream: Stream) -> str:
    steps = stream.lengths
    nbytes = int(steps.sum()) * stream.dtype.itemsize * int(np.prod(stream.shape, dtype=np.int64))
    kind = "" if stream.kind == "values" else f"{stream.kind}, "
    shape = f" ({', '.join(map(str, stream.shape))} each)" if stream.shape else ""
    span = f"{steps.min(initial=2**62):,} to {steps.max(initial=0):,} steps" if len(steps) else "no rows"
    slow = "" if stream.is_mapped else ", in chunks: `paceline pack` it again to read it at memory speed"
    return f"{stream.name}: {kind}{stream.dtype}{shape}, {span}, {size(nbytes)}{slow}"
