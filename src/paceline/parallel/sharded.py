"""Sharded training (torch's FSDP2): every rank keeps its piece of weights, gradients and optimizer state.

With `shard: full` a model is cut over all ranks. With `shard: node` (hybrid sharding, HSDP) it is cut over the ranks of
each machine: weights are gathered inside of a machine, and only the sums of gradients travel between machines.

`fully_shard` cuts every parameter along its first axis, one piece per rank, and brings the parameters of a block
together while the block computes. What is kept (weights, gradients, optimizer state, their average) is this rank's
pieces. The optimizer holds them as plain tensors: a rule that looks at each element alone is exact on pieces, one that
needs the norms of whole tensors is given them (`join_norms`), and one that needs whole tensors gets each of them on one
rank (`join_matrices`).

Collectives happen inside the model's forward and backward, so all ranks must call it equally often: a rank with fewer
grains than another runs one again, and one without any borrows another's, with a loss that counts for nothing.
Gradients of a rank's grains are added up whole and reduced once, in the last backward of the step; `wire` is the form
in which they travel then. fp16 weights with fp32 masters are fp32 pieces that are gathered as fp16; a batch norm, which
stays fp32, is gathered on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.core.errors import PacelineError
from paceline.core.torch_private import BatchNorm, foreach_norm, forget_forwards, is_view, step_pre_hooks, tree_map
from paceline.observe.clock import Clock
from paceline.parallel.cut import CannotShard, Cut, check, is_norm
from paceline.parallel.step import RankNumbers, Sums, Tally
from paceline.parallel.strategy import GlobalBatch, Strategy
from paceline.parallel.tree_scatter import TreeReduceScatter, TreeSteps, TreeSumAcross, whole_norms
from paceline.parallel.tree_sum import TreeSum
from paceline.parallel.whole_tensors import WholeTensors
from paceline.parallel.wire import all_gather_flat, goes_by_host, half_of, reduce_scatter_flat
from paceline.world import group_sockets
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link
from paceline.world.machines import machines_of

_STEPS = "_paceline_tree_steps"
"""Attribute of a sharded model whose sums have one order."""


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, link: Link, cut: Cut) -> Shards:
    """Shard a model in place, and give the optimizer this rank's shards; all ranks must call it.

    A model that is sharded already, with a new optimizer, stays as it is.
    """
    named = dict(model.named_parameters())
    if isinstance(model, FSDPModule):
        new = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
        if new:
            raise CannotShard(f"a stage changed the model: {new[0]!r} is new")
        check(model, optimizer, ())
        mesh = next(parameter.device_mesh for parameter in named.values() if isinstance(parameter, DTensor))
    else:
        names = cut.units(model)
        check(model, optimizer, names)
        mesh = _cut(model, names, link, cut)
    assert isinstance(model, FSDPModule)
    shards = Shards(model, mesh, optimizer, named, vars(model).get(_STEPS))
    _join_norms(optimizer, shards)
    return shards


def _cut(model: nn.Module, names: Sequence[str], link: Link, cut: Cut) -> DeviceMesh:
    """Apply `fully_shard` to modules of a model, then to the model; return the ranks that share its pieces."""
    mesh, across = _meshes(link, cut)
    for name in sorted({*names, ""}, key=lambda name: -(name.count(".") + 1 if name else 0)):
        module = model.get_submodule(name)
        is_apart = cut.computed_in is not None and is_norm(module)
        module.register_forward_hook(_without_views)  # before the hooks of `fully_shard`, so that it comes before them
        policy = MixedPrecisionPolicy(None if is_apart else cut.computed_in, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, reshard_after_forward=not is_apart if name else None, mp_policy=policy)
    half, by_host = half_of(cut.wire), goes_by_host(mesh.get_group(), link.device)
    steps = None
    if cut.in_tree:
        machines = machines_of(link) if across is not None else [list(range(link.world.size))]
        tree_sum = None if across is None else TreeSum(across, link.device, cut.timeout)
        steps = TreeSteps(machines, link.world.rank, tree_sum)
        vars(model)[_STEPS] = steps  # for the strategy, also when the model is prepared again
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Losses are divided by the count over all ranks already: gradients are sums.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if steps is not None:
            scatter = TreeReduceScatter(steps, by_host, cut.timeout)
            module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
            if across is not None or mesh.size() == 1:
                module.set_all_reduce_hook(TreeSumAcross(steps, scatter, is_only=mesh.size() == 1))
        elif half is not None or by_host:
            module.set_custom_reduce_scatter(_ReduceScatter(half, by_host))  # type: ignore[arg-type]
        if by_host:
            module.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]
        if across is not None and steps is None:
            module.set_all_reduce_hook(_SumAcross(across, half))
    return mesh


def _meshes(link: Link, cut: Cut) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return (the ranks that share a model's pieces, those on other machines that have the same piece as this one)."""
    machines = machines_of(link) if cut.per_machine else [list(range(link.world.size))]
    if len(machines) == 1:
        return init_device_mesh(link.device.type, (link.world.size,)), None
    with group_sockets.noted():
        inside = {tuple(ranks): dist.new_group(ranks, timeout=cut.timeout) for ranks in machines}
        across = {ranks: dist.new_group(ranks, timeout=cut.timeout) for ranks in zip(*machines, strict=True)}
    here, there = (
        [group for ranks, group in groups.items() if link.world.rank in ranks] for groups in (inside, across)
    )
    return DeviceMesh.from_group(here[0], link.device.type), there[0]


class _Comm:
    """Base of collectives that take the place of those of `fully_shard`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Comm):
    """Sum of gradients in the form of `wire`, of which each rank gets its piece.

    torch's own `reduce_dtype` is no `wire`: it would add up a rank's grains in that dtype, too.
    """

    def __init__(self, half: torch.dtype | None, by_host: bool) -> None:
        """`by_host`: by way of main memory, since gloo does not do it on a GPU."""
        self._half, self._by_host = half, by_host

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        sent = _sent(input_tensor, self._half)
        sent = sent.cpu() if self._by_host else sent
        received = torch.empty(output_tensor.shape, dtype=sent.dtype, device=sent.device)
        trail.note("reduce_scatter of gradients", sent)
        reduce_scatter_flat(received, sent, group=group, op=op)
        output_tensor.copy_(received)


class _AllGather(_Comm):
    """Gathered weights by way of main memory, since gloo does not do it on a GPU."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        received = torch.empty(output_tensor.shape, dtype=output_tensor.dtype, device="cpu")
        trail.note("all_gather of weights", received)
        all_gather_flat(received, input_tensor.cpu(), group=group)
        output_tensor.copy_(received)


class _SumAcross:
    """Sum of a machine's gradients over the machines, of the piece that a rank has; called in the last backward."""

    def __init__(self, group: dist.ProcessGroup, half: torch.dtype | None) -> None:
        self._group, self._half = group, half

    def __call__(self, gradients: Tensor) -> None:
        sent = _sent(gradients, self._half)
        trail.note("all_reduce of gradients", sent)
        dist.all_reduce(sent, group=self._group)
        if sent is not gradients:
            gradients.copy_(sent)
        if gradients.is_cuda:
            # It was made on the stream of the reduce-scatter, which must not give its memory away before this is done.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))


def _sent(gradients: Tensor, half: torch.dtype | None) -> Tensor:
    """Return gradients in the form in which they travel; what is no longer than that stays as it is."""
    return gradients if half is None or gradients.element_size() <= half.itemsize else gradients.to(half)


class _NormJoin:
    """Norms of whole tensors, for optimizers, and hooks around them (LARC), that scale by norms of tensors."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __call__(self, norms: Tensor) -> Tensor:
        """Return them from the norms of this rank's pieces: one all-reduce of one number per tensor."""
        return self._shards.whole_norm(norms)

    def of(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return them from this rank's pieces."""
        return self._shards.whole_norms(tensors, dtype)


def _join_norms(optimizer: torch.optim.Optimizer, shards: Shards) -> None:
    hooks = [getattr(hook, "__self__", None) for hook in step_pre_hooks(optimizer)]
    for owner in (optimizer, *hooks):
        if hasattr(type(owner), "join_norms"):
            owner.join_norms = _NormJoin(shards)  # type: ignore[union-attr]
        if hasattr(type(owner), "join_matrices"):
            owner.join_matrices = shards.whole_tensors()  # type: ignore[union-attr]


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy outputs that are views: changed in place later, they would make backward go on without the weights."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and value.requires_grad and is_view(value) else value

    return tree_map(copied, output)


class Shards:
    """This rank's piece of every parameter, by name, which an optimizer now holds in place of the parameters."""

    def __init__(
        self,
        model: FSDPModule,
        mesh: DeviceMesh,
        optimizer: torch.optim.Optimizer,
        before: Mapping[str, Tensor],
        steps: TreeSteps | None = None,
    ) -> None:
        assert isinstance(model, nn.Module)
        self.model: FSDPModule = model
        self.steps = steps
        """What the strategy tells the collectives of the blocks, where sums have one order."""
        self._mesh = mesh
        self._parameters: dict[str, DTensor] = {
            name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)
        }
        self.tensors: dict[str, Tensor] = {
            name: parameter.to_local().detach() for name, parameter in self._parameters.items()
        }
        """Plain tensors in the memory of the sharded parameters."""
        exchange = {id(before[name]): tensor for name, tensor in self.tensors.items()}
        for group in optimizer.param_groups:
            group["params"] = [exchange[id(parameter)] for parameter in group["params"]]

    @property
    def place(self) -> tuple[int, int]:
        """(number of this rank's piece of every parameter, number of pieces)"""
        return self._mesh.get_local_rank(), self._mesh.size()

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the whole parameters."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def pull_gradients(self) -> list[bool]:
        """Make the parameters' gradients those of the shards; return which parameters have one."""
        for name, parameter in self._parameters.items():
            gradient: Any = parameter.grad
            self.tensors[name].grad = None if gradient is None else gradient.to_local()
        return [parameter.grad is not None for parameter in self._parameters.values()]

    def forget_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = self.tensors[name].grad = None

    def whole_norm(self, norms: Tensor) -> Tensor:
        """Return norms of whole tensors from those of this rank's pieces: the square of one is the sum of its pieces'.

        All ranks must call it.
        """
        squares = norms.double().square()
        trail.note("all_reduce of norms", squares)
        dist.all_reduce(squares, group=self._mesh.get_group())
        return squares.sqrt().to(norms.dtype)

    def whole_norms(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return norms of whole tensors from this rank's pieces; in one order, if sums have one.

        All ranks must call it.
        """
        if self.steps is None:
            return self.whole_norm(torch.stack(foreach_norm(list(tensors), 2, dtype)))
        return whole_norms(tensors, dtype, self._mesh.get_group())

    def whole_tensors(self) -> WholeTensors:
        """Return the exchange of pieces for an optimizer that needs whole tensors."""
        shapes = {id(self.tensors[name]): parameter.shape for name, parameter in self._parameters.items()}
        return WholeTensors(self._mesh.get_group(), shapes)

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor], name_of: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Return all ranks' pieces joined, in the first rank's main memory; elsewhere what was no piece.

        All ranks must call it. `name_of` gives the parameter of an entry. Numbers (counts of steps) and what belongs to
        no parameter is whole already.
        """
        whole: dict[str, Tensor] = {}
        is_first = self._mesh.get_rank() == 0
        has_first = 0 in self._mesh.mesh.tolist()  # elsewhere nobody needs them
        for key, tensor in tensors.items():
            parameter = self._parameters.get(name_of(key))
            if parameter is None or tensor.ndim == 0:
                whole[key] = tensor
            elif has_first:
                joined = self._joined(tensor.detach(), parameter.shape)
                if is_first:
                    whole[key] = joined.cpu()
        return whole

    def _joined(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """Return the whole of which every rank has a piece: as many rows each, fewer or none on the last ranks.

        Not by `DTensor.full_tensor`: its collective hands gloo the addresses of a GPU's memory, which ends the process.
        """
        group = self._mesh.get_group()
        num_rows = -(-shape[0] // self._mesh.size())
        road = torch.device("cpu") if goes_by_host(group, piece.device) else piece.device
        sent = torch.zeros(num_rows, *shape[1:], dtype=piece.dtype, device=road)
        sent[: len(piece)] = piece
        joined = torch.empty(num_rows * self._mesh.size(), *shape[1:], dtype=piece.dtype, device=road)
        trail.note("all_gather of pieces", joined)
        all_gather_flat(joined.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)
        return joined if len(joined) == shape[0] else joined[: shape[0]].clone()

    def pieces(self, tensors: Mapping[str, Tensor], name_of: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Return this rank's piece of each: the counterpart of `whole`."""
        rank, size = self.place
        pieces: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            if name_of(key) in self._parameters and tensor.ndim > 0:
                parts = tensor.chunk(size)
                # Copied, so that the other ranks' pieces are freed.
                pieces[key] = (parts[rank] if rank < len(parts) else tensor[:0]).clone()
            else:
                pieces[key] = tensor
        return pieces


class UnevenUse(PacelineError):
    """Ranks used different parts of the model in one step, so their collectives were not of the same things."""

    names: list[str]
    sentence = "`shard` is set, but only some ranks had gradients for {shown}"
    hint = "let the loss use the same layers for every grain of a step, or train with `--shard none`"

    @property
    def shown(self) -> str:
        return ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")


class Sharded(Strategy):
    """`reduce: grad` with `shard: full` or `node`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], link: Link, shards: Shards, clock: Clock | None = None
    ) -> None:
        super().__init__(parameters)
        self._link, self._shards, self._clock = link, shards, clock
        self._modules = [module for module in _modules(shards.model) if isinstance(module, FSDPModule)]

    def makeup(self, grains: Sequence[Any]) -> list[Any]:
        num_grains, rank, ranks = len(grains), self._link.world.rank, self._link.world.size
        # On the CPU: the host does not wait for a device.
        numbers = torch.tensor([num_grains, -num_grains, -(rank if num_grains else ranks)], device="cpu")
        self._link.all_reduce(numbers, "max")
        most, fewest, lender = int(numbers[0]), -int(numbers[1]), -int(numbers[2])
        if most == 0:
            return []
        lent = grains[-1] if grains else None
        if fewest == 0:
            lent = grains[0].to(torch.device("cpu")) if rank == lender else None
            lent = self._link.broadcast_object(lent, src=lender).to(self._link.device)
        return [lent] * (most - num_grains)

    def begin(self, batch: GlobalBatch) -> None:
        self._shards.forget_gradients()
        self._shards.model.set_requires_gradient_sync(False)

    def last_backward(self) -> None:
        self._shards.model.set_requires_gradient_sync(True)

    def reduce(self, numbers: RankNumbers) -> Sums:
        tally = numbers.in_turn()
        sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=self._link.device) for number in tally])
        work = self._link.all_reduce(sums, async_op=True)
        self._check_use()
        if work is not None:
            work.wait()
        if self._clock is not None:
            self._clock.meet()
        return Sums(Tally(*sums.unbind()))

    def _check_use(self) -> None:
        """Take over the gradients; raise `UnevenUse` unless all ranks have those of the same parameters."""
        marks = torch.tensor(self._shards.pull_gradients(), device="cpu").int()  # on the CPU, too
        self._link.all_reduce(marks)
        names = list(self._shards.tensors)
        uneven = [name for name, mark in zip(names, marks.tolist(), strict=True) if 0 < mark < self._link.world.size]
        if uneven:
            raise UnevenUse(uneven)

    def pull_gradients(self) -> None:
        self._shards.pull_gradients()

    def total_norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        return self._shards.whole_norm(norm(gradients))

    def agree(self, number: torch.Tensor) -> None:
        self._link.all_reduce(number, "max")

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathered once, so that ranks may then call the model as often as each likes."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                is_kept = module is self._shards.model or isinstance(module, BatchNorm)
                module.set_reshard_after_forward(not is_kept, recurse=False)
                module.reshard()
            _forget_forwards(self._shards.model)

    def detach(self) -> None:
        self._shards.forget_gradients()


def _forget_forwards(model: FSDPModule) -> None:
    """Forget forwards without a backward: ranks that made unequally many would gather different weights next time."""
    for module in _modules(model):
        if isinstance(module, FSDPModule):
            forget_forwards(module)


def _modules(model: FSDPModule) -> Iterator[nn.Module]:
    assert isinstance(model, nn.Module)
    return model.modules()
