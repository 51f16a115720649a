"""Sharding of a model by torch's FSDP2 (`fully_shard`), with collectives of our own where they are needed.

With `shard: full` a model is sharded over all ranks. With `shard: node` (hybrid sharding, HSDP) it is sharded over the
ranks of each machine: weights are gathered inside a machine, and only sums of gradients travel between machines.

`fully_shard` divides every parameter along its first axis, one piece per rank, and gathers the parameters of a block
while the block computes. fp16 weights with fp32 masters are fp32 pieces that are gathered as fp16; a batch norm, which
stays fp32, is gathered separately. `wire` is the format in which gradients travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.core.torch_private import is_view, step_pre_hooks, tree_map
from paceline.parallel.sharded.blocks import CannotShard, Sharding, check, is_norm
from paceline.parallel.sharded.shards import Shards
from paceline.parallel.tree.all_reduce import TreeAllReduce
from paceline.parallel.tree.reduce_scatter import TreeReduceScatter, TreeSteps, TreeSumAcross
from paceline.parallel.wire import all_gather_flat, goes_by_host, half_of, reduce_scatter_flat
from paceline.world import group_sockets
from paceline.world.failure.flight_recorder import trail
from paceline.world.link import Link
from paceline.world.machines import machines_of

_STEPS = "_paceline_tree_steps"
"""Attribute of a sharded model with `sums: exact`."""
_MESH = "_paceline_mesh"
"""Attribute of a sharded model: torch's caches may give its parameters an equal mesh of an earlier process group."""


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, link: Link, sharding: Sharding) -> Shards:
    """Shard a model in place, and give the optimizer this rank's shards; all ranks must call it.

    A model that is sharded already is only given to the new optimizer.
    """
    named = dict(model.named_parameters())
    if isinstance(model, FSDPModule):
        new = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
        if new:
            raise CannotShard(f"a stage changed the model: {new[0]!r} is new")
        check(model, optimizer, ())
        mesh = vars(model)[_MESH]
    else:
        names = sharding.units(model)
        check(model, optimizer, names)
        mesh = vars(model)[_MESH] = _fully_shard(model, names, link, sharding)
    assert isinstance(model, FSDPModule)
    shards = Shards(model, mesh, optimizer, named, vars(model).get(_STEPS))
    for owner in (optimizer, *(getattr(hook, "__self__", None) for hook in step_pre_hooks(optimizer))):
        if hasattr(type(owner), "use_shards"):  # optimizers that need more than single elements, and LARC
            owner.use_shards(shards.whole_norms, shards.whole_tensors())  # type: ignore[union-attr]
    return shards


def _fully_shard(model: nn.Module, names: Sequence[str], link: Link, sharding: Sharding) -> DeviceMesh:
    """Apply `fully_shard` to modules of a model, then to the model; return the mesh of ranks that share its pieces."""
    mesh, across = _meshes(link, sharding)
    for name in sorted({*names, ""}, key=lambda name: -(name.count(".") + 1 if name else 0)):
        module = model.get_submodule(name)
        is_apart = sharding.computed_in is not None and is_norm(module)
        module.register_forward_hook(_without_views)  # runs before the hooks that `fully_shard` registers
        policy = MixedPrecisionPolicy(None if is_apart else sharding.computed_in, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, reshard_after_forward=not is_apart if name else None, mp_policy=policy)
    half, by_host = half_of(sharding.wire), goes_by_host(mesh.get_group(), link.device)
    steps = None
    if sharding.is_exact:
        machines = machines_of(link) if across is not None else [list(range(link.world.size))]
        tree_sum = None if across is None else TreeAllReduce(across, link.device, sharding.timeout)
        steps = TreeSteps(machines, link.world.rank, tree_sum)
        vars(model)[_STEPS] = steps  # kept for strategies of later stages
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Losses are divided by the count over all ranks already: gradients are sums.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if steps is not None:
            scatter = TreeReduceScatter(steps, by_host, sharding.timeout)
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


def _meshes(link: Link, sharding: Sharding) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return (mesh of ranks that share a model's pieces, group of ranks with the same piece on all machines)."""
    machines = machines_of(link) if sharding.per_machine else [list(range(link.world.size))]
    if len(machines) == 1:
        return init_device_mesh(link.device.type, (link.world.size,)), None
    with group_sockets.noted():
        inside = {tuple(ranks): dist.new_group(ranks, timeout=sharding.timeout) for ranks in machines}
        across = {ranks: dist.new_group(ranks, timeout=sharding.timeout) for ranks in zip(*machines, strict=True)}
    here, there = (
        [group for ranks, group in groups.items() if link.world.rank in ranks] for groups in (inside, across)
    )
    return DeviceMesh.from_group(here[0], link.device.type), there[0]


class _Comm:
    """Base of collectives that replace those of `fully_shard`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Comm):
    """Reduce-scatter of gradients in the format of `wire`.

    torch's `reduce_dtype` is not used: it would also add the grains of a rank in that dtype.
    """

    def __init__(self, half: torch.dtype | None, by_host: bool) -> None:
        """`by_host`: copy through main memory, because gloo has no reduce-scatter of GPU tensors."""
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
    """All-gather of weights through main memory, because gloo has none of GPU tensors."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        received = torch.empty(output_tensor.shape, dtype=output_tensor.dtype, device="cpu")
        trail.note("all_gather of weights", received)
        all_gather_flat(received, input_tensor.cpu(), group=group)
        output_tensor.copy_(received)


class _SumAcross:
    """Sum of this rank's piece of the gradients over the machines; called in the last backward."""

    def __init__(self, group: dist.ProcessGroup, half: torch.dtype | None) -> None:
        self._group, self._half = group, half

    def __call__(self, gradients: Tensor) -> None:
        sent = _sent(gradients, self._half)
        trail.note("all_reduce of gradients", sent)
        dist.all_reduce(sent, group=self._group)
        if sent is not gradients:
            gradients.copy_(sent)
        if gradients.is_cuda:
            # Allocated on the stream of the reduce-scatter, which must not reuse the memory before this is done.
            gradients.record_stream(torch.cuda.current_stream(gradients.device))


def _sent(gradients: Tensor, half: torch.dtype | None) -> Tensor:
    """Return gradients in the dtype in which they travel; those that are not wider stay as they are."""
    return gradients if half is None or gradients.element_size() <= half.itemsize else gradients.to(half)


def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy outputs that are views: backward of a view that is changed in place would run without gathered weights."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and value.requires_grad and is_view(value) else value

    return tree_map(copied, output)
