"""Roll call before the process group exists: every rank describes itself, and missing ranks are named.

Rank 0 collects. Its verdict is one key of the store, written once, so that all ranks go on together or fail alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from paceline.core.errors import PacelineError
from paceline.core.units import ranges
from paceline.world.store import Store, poll

# How long the serving rank stays after a refusal, so that the others can read it.
_LINGER_S = 3.0
# Seconds that the other ranks grant rank 0 beyond its own time-out.
_MARGIN_S = 5.0


@dataclass(frozen=True)
class Present:
    """A rank that has arrived, as it describes itself."""

    rank: int
    host: str
    pid: int
    device: str
    cores: tuple[int, ...]
    """The CPU cores it may run on: launchers bind ranks to cores, or do not."""
    gpu: str | None = None
    """Identity of its GPU, the same for all ranks that share it."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid}, {self.device})"


class RanksMissing(PacelineError):
    """Some ranks did not arrive in time."""

    missing: Sequence[int]
    present: Sequence[Present]
    size: int
    waited_s: float
    sentence = (
        "{num_missing} of {size} ranks did not arrive in {waited_s:g} s: rank {numbers}\n"
        "  present: {hosts}\n"
        "  likely: they ended with an error, were not started, or cannot reach the meeting point"
    )
    hint = (
        "look for the missing ranks' own messages; if they are only slow to start, raise --start-timeout-s; "
        "if they were never started, check the launcher's number of processes and nodes"
    )

    @property
    def num_missing(self) -> int:
        return len(self.missing)

    @property
    def numbers(self) -> str:
        return ranges(self.missing)

    @property
    def hosts(self) -> str:
        """Ranks that arrived, by host."""
        by_host: dict[str, list[int]] = {}
        for entry in self.present:
            by_host.setdefault(entry.host, []).append(entry.rank)
        return "; ".join(f"{host}: {ranges(ranks)}" for host, ranks in sorted(by_host.items())) or "none"


class DuplicateRank(PacelineError):
    """Two processes claim the same rank."""

    first: Present
    second: Present
    sentence = "two processes say they are rank {first.rank}:\n  {first}\n  {second}"
    hint = (
        "another job may use the same meeting point: export another MASTER_PORT; "
        "after an elastic change of nodes, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    )


@dataclass(frozen=True)
class Claim:
    """Number of ranks that a rank was started with."""

    rank: int
    host: str
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} is one of {self.size}"


class SizesDiffer(PacelineError):
    """Ranks of one job were told different numbers of ranks."""

    first: Claim
    second: Claim
    sentence = "the ranks were started with different numbers of ranks (WORLD_SIZE): {first}, {second}"
    hint = (
        "give all ranks the same WORLD_SIZE, or let one launcher set it (--procs N, torchrun, mpirun, srun); "
        "two jobs at one meeting point need different MASTER_PORT"
    )


def roll_call(
    store: Store, mine: Present, size: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> list[Present]:
    """Return all ranks, in order; raise `RanksMissing`, `SizesDiffer` or `DuplicateRank` on every rank alike.

    `check` is called while others are waited for; what it raises ends the wait.
    """

    def waits_for(keys: list[str]) -> bool:
        check()
        return store.check(keys)

    _compare_sizes(store, Claim(mine.rank, mine.host, size))
    text = json.dumps(asdict(mine))
    first = store.compare_set(_key(mine.rank), "", text)
    if first.decode() != text:
        raise DuplicateRank(_present(first), mine)
    if mine.rank == 0:
        keys = [_key(rank) for rank in range(size)]
        poll(lambda: waits_for(keys) or store.check(["verdict"]), timeout_s)
        _publish(store, size, timeout_s)
    elif not poll(lambda: waits_for([_key(0)]), timeout_s) or not poll(
        lambda: waits_for(["verdict"]), timeout_s + _MARGIN_S
    ):
        # Rank 0 never came, or died while collecting; any rank can name who is missing.
        _publish(store, size, timeout_s, gone=0)
    return _obey(store, mine, size)


def _compare_sizes(store: Store, mine: Claim) -> None:
    """Compare the number of ranks with that of the rank that came first; where they differ, all ranks are told."""
    first = Claim(**json.loads(store.compare_set("size", "", json.dumps(asdict(mine)))))
    if first.size != mine.size:
        store.compare_set("verdict", "", json.dumps({"sizes": [asdict(first), asdict(mine)]}))
        store.add("heard", 1)
        raise SizesDiffer(first, mine)


def _publish(store: Store, size: int, timeout_s: float, gone: int | None = None) -> None:
    arrived = [rank for rank in range(size) if rank != gone and store.check([_key(rank)])]
    verdict = {
        "missing": [rank for rank in range(size) if rank not in arrived],
        "waited_s": timeout_s,
        "present": [asdict(_present(store.get(_key(rank)))) for rank in arrived],
    }
    store.compare_set("verdict", "", json.dumps(verdict))


def _obey(store: Store, mine: Present, size: int) -> list[Present]:
    verdict = json.loads(store.get("verdict"))
    if "sizes" in verdict:
        store.add("heard", 1)
        raise SizesDiffer(*(Claim(**claim) for claim in verdict["sizes"]))
    present = [_from_json(entry) for entry in verdict["present"]]
    if not verdict["missing"]:
        return present
    store.add("heard", 1)
    if mine.rank == 0:
        poll(lambda: store.add("heard", 0) >= len(present), _LINGER_S)
    raise RanksMissing(tuple(verdict["missing"]), present, size, verdict["waited_s"])


def _key(rank: int) -> str:
    return f"present/{rank}"


def _present(text: bytes) -> Present:
    return _from_json(json.loads(text))


def _from_json(entry: dict[str, object]) -> Present:
    return Present(**{**entry, "cores": tuple(entry["cores"])})  # type: ignore[arg-type]
