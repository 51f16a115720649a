"""Whether a file stays in memory once it was read: only then does it pay to read more of it than was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

SHARE = 1 / 2
"""Of the memory that is there, what the files of one stream may take and still be left in it."""


def stays_cached(num_bytes: int, available_bytes: int) -> bool:
    """Whether the page cache can hold so much beside all else."""
    return num_bytes <= SHARE * available_bytes


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process and the page cache may take here; 0 where the system does not tell.

    Pages that hold files count as free, so that it is the same before and after a file was read.
    """
    room = [int(line.split()[1]) << 10 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    # The page cache counts as the job's or the container's that reads: its limit holds for both.
    for name in memory_limits(_lines(proc / "self/cgroup")):
        taken = _taken(_lines((groups / name).with_name("memory.stat")))
        room += [max(0, int(line) - taken) for line in _lines(groups / name) if line.isdigit()]
    return min(room, default=0)


def _taken(lines: list[str]) -> int:
    """Bytes of a group that no page cache can have, by its `memory.stat`; the older kind of groups calls them `rss`."""
    counts = dict(line.split(maxsplit=1) for line in lines)
    return int(counts.get("anon") or counts.get("total_rss") or 0)


def memory_limits(lines: list[str]) -> Iterator[PurePosixPath]:
    """The files that may hold a limit, by what `/proc/self/cgroup` says: of the group itself and of all around it."""
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        folder, name = ("memory", "memory.limit_in_bytes") if kinds else ("", "memory.max")
        group = PurePosixPath(path.lstrip("/"))
        for around in (group, *group.parents):
            yield folder / around / name


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
