"""Measurements of all ranks together for `paceline doctor`: clocks, the shared folder, the speed of a reduction."""

from __future__ import annotations

import fcntl
import os
import statistics
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.world.doctor.facts import existing
from paceline.world.link import Link
from paceline.world.store import poll

SIZES = (4, 4096, 262_144, 4_194_304, 67_108_864)
"""Bytes of the reductions that are timed."""
_ROUNDS_S = 1.5
# How long a file that one rank wrote may take until others see it: network file systems cache what a folder holds.
_SEEN_S = 10.0


@dataclass(frozen=True)
class Reduction:
    """An all-reduce of so many bytes."""

    num_bytes: int
    seconds: float
    ranks: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second through the slowest link: a ring sends 2 (n - 1) / n of the tensor from each rank."""
        return 2 * (self.ranks - 1) / self.ranks * self.num_bytes / self.seconds


@dataclass(frozen=True)
class SharedFolder:
    """Results of the ranks in the folder of runs."""

    folder: str
    problem: str | None
    """Reason why nothing could be written."""
    blind: tuple[int, ...] = ()
    """Ranks that do not see a file of rank 0."""
    unseen: tuple[int, ...] = ()
    """Ranks whose files rank 0 does not see."""
    fsync_s: float = 0.0
    has_locks: bool = True
    """True if a lock of rank 0 keeps another rank out."""


def clock_offsets(link: Link, rounds: int = 9) -> list[float]:
    """Seconds by which each rank's clock is before that of rank 0, exact to about the time of a barrier."""
    offsets: list[list[float]] = []
    for _ in range(rounds):
        link.barrier()
        times = link.gather_objects(time.time())
        offsets.append([moment - times[0] for moment in times])
    return [statistics.median(of_rank) for of_rank in zip(*offsets, strict=True)]


def reductions(link: Link, device: torch.device, sizes: tuple[int, ...] = SIZES) -> list[Reduction]:
    """Return the median time of an all-reduce of each size; all ranks do as many rounds as fit in a moment."""
    measured = []
    for num_bytes in sizes:
        tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
        first = max(link.gather_objects(_timed(link, tensor)))
        rounds = max(3, min(30, int(_ROUNDS_S / max(first, 1e-6))))
        times = [_timed(link, tensor) for _ in range(rounds)]
        slowest = max(link.gather_objects(statistics.median(times)))
        measured.append(Reduction(num_bytes, slowest, link.world.size))
    return measured


def _timed(link: Link, tensor: torch.Tensor) -> float:
    link.barrier()
    begun = time.perf_counter()
    link.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begun


def shared_folder(link: Link, folder: Path) -> SharedFolder:
    """Write and read files of all ranks in `folder`, or in what is there of its path, and lock one; none is left."""
    folder = link.broadcast_object(existing(folder))
    token = link.broadcast_object(f".paceline-doctor-{uuid.uuid4().hex}")
    own_file = folder / f"{token}-{link.world.rank}"
    problem, fsync_s = _write(own_file)
    problems = link.gather_objects(problem)
    try:
        if any(problems):
            rank = next(rank for rank, text in enumerate(problems) if text)
            return SharedFolder(str(folder), f"rank {rank}: {problems[rank]}")
        files = [folder / f"{token}-{rank}" for rank in range(link.world.size)]
        blind = link.gather_objects(not poll(files[0].exists, _SEEN_S))
        visible = [poll(file.exists, _SEEN_S if index == 0 else 1.0) for index, file in enumerate(files)]
        unseen = link.broadcast_object([rank for rank, is_seen in enumerate(visible) if not is_seen])
        locks = True if any(blind) else _locks(link, files[0])
        return SharedFolder(
            str(folder),
            None,
            tuple(rank for rank, is_blind in enumerate(blind) if is_blind),
            tuple(unseen),
            max(link.gather_objects(fsync_s)),
            locks,
        )
    finally:
        link.barrier()
        with suppress(OSError):  # it may never have been written
            own_file.unlink()


def _write(path: Path) -> tuple[str | None, float]:
    try:
        with path.open("wb") as file:
            file.write(os.urandom(1 << 20))
            begun = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            return None, time.perf_counter() - begun
    except OSError as error:
        return str(error), 0.0


def _locks(link: Link, path: Path) -> bool:
    """Return True if a lock that rank 0 holds is refused to the last rank; with one rank, if there are locks at all."""
    with path.open("rb+") as file:
        mine = _lock(file.fileno()) if link.is_first else False
        link.barrier()
        last = link.world.size - 1
        second = _lock(file.fileno()) if link.world.rank == last and last > 0 else False
        answers = link.gather_objects((mine, second))
        return bool(answers[0][0]) and not answers[last][1]


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
