"""Connection of this rank to all others: the collectives that we need; no-ops for a single process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.world import group_sockets, values
from paceline.world.discover.environment import World
from paceline.world.failure.flight_recorder import trail
from paceline.world.failure.together import is_guarded
from paceline.world.failure.watchdog import FailureWatch
from paceline.world.guest import Guest
from paceline.world.store import Store, answer_within, poll

Reduction = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# How long the rank that serves the store stays for others that have not closed yet; without it they would end.
_LINGER_S = 60.0
# How long a rank that is done waits for the store to take note of it.
_GOODBYE_S = 10.0


class Link:
    """The process group of a run. Tensors travel by gloo on the CPU and by NCCL on GPUs, Python values by gloo.

    `with link:` closes at the end. When an exception passes, `fail_together` tells the others, who may be inside a
    collective; without it the group is given up, so that another `start` may follow in this process.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        threads: int,
        hosts: tuple[str, ...],
        store: Store | None = None,
        watch: FailureWatch | None = None,
        guest: Guest | None = None,
        threads_by: str = "",
        *,
        owns_group: bool = True,
    ) -> None:
        self.world = world
        self.device = device
        self.threads = threads
        """CPU threads of this rank."""
        self.threads_by = threads_by
        """The variable of the environment that said so, if one did."""
        self.hosts = hosts
        """The machine of each rank."""
        self.store = store
        """Keys shared by all ranks, before and beside the process group; None where there is no group."""
        self._watch = watch
        self._guest = guest  # knows the process as the user had it
        self._owns_group = owns_group
        self.has_group = store is not None
        """True if there is a process group: always with several ranks, with one if it was asked for."""

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    @property
    def is_closed(self) -> bool:
        """True once the ranks of a group have parted; a rank that has no group is never without it."""
        return self.has_group and self.store is None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks, for code that has collectives of its own; there must be one."""
        group = dist.group.WORLD
        assert group is not None, "no process group"
        return group

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", async_op: bool = False) -> dist.Work | None:
        """Reduce `tensor` over all ranks, in place. With `async_op`, wait on what is returned (None: already done)."""
        if not self.has_group:
            return None
        trail.note("all_reduce", tensor)
        work: dist.Work | None = dist.all_reduce(tensor, op=_OPERATIONS[op], async_op=async_op)
        return work

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Overwrite `tensor` on all ranks with that of rank `src`."""
        if self.has_group:
            trail.note("broadcast", tensor)
            # Bytes in order: gloo knows few dtypes, and no strides.
            flat = tensor.detach().reshape(-1).contiguous()
            dist.broadcast(flat.view(torch.uint8), src=src)
            tensor.detach().copy_(flat.view(tensor.shape))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the small Python values of all ranks, in order, on every rank. They travel as JSON and arrays."""
        if not self.has_group:
            return [value] * self.world.size
        trail.note("gather of values")
        data = _to_tensor(values.encode(value))
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world.size)]
        dist.all_gather(lengths, torch.tensor([len(data)], device="cpu"))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = data
        received = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.world.size)]
        dist.all_gather(received, padded)
        return [values.decode(_to_bytes(each[: int(length)])) for each, length in zip(received, lengths, strict=True)]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the small Python value of rank `src`, on every rank."""
        if not self.has_group:
            return value
        trail.note("broadcast of a value")
        is_source = self.world.rank == src
        data = _to_tensor(values.encode(value)) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
        length = torch.tensor([len(data)], device="cpu")
        dist.broadcast(length, src=src)
        if not is_source:
            data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        dist.broadcast(data, src=src)
        return value if is_source else values.decode(_to_bytes(data))

    def exchange(self, sent: Sequence[torch.Tensor], to: int, received: Sequence[torch.Tensor], source: int) -> None:
        """Send tensors of the main memory to one rank while others come from another; sizes must be known there."""
        if not self.has_group or to == self.world.rank:
            return
        trail.note("exchange of tensors")
        works = [dist.isend(tensor, to) for tensor in sent] + [dist.irecv(tensor, source) for tensor in received]
        for work in works:
            assert work is not None
            work.wait()

    @torch.no_grad()
    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return the named tensors of all ranks, by rank, in main memory of rank 0; an empty list on other ranks.

        Names and shapes may differ between ranks. Ranks send one after the other: rank 0 holds all of them anyway.
        """
        local = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        if self.world.size == 1:
            return [local]
        layouts = self.gather_objects([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in local.items()])
        if not self.is_first:
            if local:
                dist.send(torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in local.values()]), dst=0)
            return []
        ranks = [local]
        for rank, layout in enumerate(layouts[1:], start=1):
            sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in layout]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            if layout:
                dist.recv(flat, src=rank)
            pieces = flat.split(sizes) if sizes else ()
            ranks.append(
                {
                    # Copied, because a piece may start at an address that its dtype does not allow.
                    name: piece.clone().view(dtype).view(shape)
                    for (name, shape, dtype), piece in zip(layout, pieces, strict=True)
                }
            )
        return ranks

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.has_group:
            trail.note("barrier")
            # A CPU tensor goes through gloo, so that no GPU is waited for.
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))

    def close(self) -> None:
        """Leave the group; another `start` may follow in this process. For the end of a run that went well."""
        self._give_back()
        store, self.store = self.store, None
        if store is None:
            return
        if self._watch is not None:
            self._watch.stop()
        if self._owns_group:
            dist.destroy_process_group()
            group_sockets.forget()
        answer_within(self.world, _GOODBYE_S)
        with suppress(dist.DistError):  # who served the store may be gone, or frozen
            store.add("left", 1)
            if self.is_first and not self.world.launcher_hosts_store:
                poll(lambda: store.add("left", 0) >= self.world.size, _LINGER_S)

    def abandon(self) -> None:
        """Leave the group after a failure, without waiting: collectives of ranks that are still inside one break."""
        self._give_back()
        store, self.store = self.store, None
        if store is None:
            return
        if self._watch is not None:
            self._watch.stop()
        if not self._owns_group:
            return
        if self.device.type == "cuda" and dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # NCCL would wait for the others
        dist.destroy_process_group()
        group_sockets.forget()

    def _give_back(self) -> None:
        if self._guest is not None:
            self._guest.leave()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not is_guarded():
            self.abandon()


def break_off() -> None:
    """Make collectives that the main thread is in fail now: for another thread, which knows that a rank is lost.

    Afterwards the groups are of no use, and are to be abandoned; one that is just being made, too.
    """
    group = dist.group.WORLD
    if group is not None and "nccl" in str(dist.get_backend_config()):
        group.abort()
    group_sockets.shut_down()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.numpy().tobytes()
    return data
