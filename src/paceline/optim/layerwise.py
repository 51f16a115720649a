"""Base of optimizers with one factor per tensor: many tensors at once, and no word from the device to the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.errors import InvalidData, PacelineError
from paceline.core.torch_private import TakesAmpScaling, foreach_add_, foreach_copy_, foreach_norm, fused_sgd_
from paceline.optim.kernels.pointers import Table, Tables, fit, has_kernels
from paceline.optim.whole_vectors import cuts_matter, update_by_vectors


class JoinNorms(Protocol):
    """Function that computes norms of whole tensors. All ranks must call it."""

    def __call__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return the norms from this rank's pieces of the tensors."""
        ...


class JoinMatrices(Protocol):
    """Function that computes on whole tensors. All ranks must call it."""

    def __call__(
        self, parameters: Sequence[Tensor], pieces: Sequence[Tensor], compute: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Return this rank's pieces of the results that `compute` returns for the whole tensors, in the same dtype.

        `parameters` are this rank's pieces of the weights, `pieces` are tensors with the same rows.
        """
        ...

    def shapes(self, parameters: Sequence[Tensor]) -> list[torch.Size]:
        """Return the shapes of the whole tensors."""
        ...


class OutOfRange(PacelineError):
    """A number with which the update has no meaning."""

    optimizer: str
    name: str
    value: Any
    allowed: str
    sentence = "{optimizer}: {name} is {value!r}"
    hint = "{name} must be {allowed}"


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group, device and dtype that have a gradient, those of equal size side by side."""

    parameters: list[Tensor]
    weights: list[Tensor]
    """Tensors that are computed on: the parameters themselves, or fp32 and contiguous copies."""
    state: dict[str, list[Tensor]]
    skip: Tensor
    """1 on the device where nothing may change, else 0."""
    flat: Tensor
    """Room for one number per weight, to work in."""
    views: list[Tensor]
    """`flat`, cut into the shapes of the weights."""
    whole_vectors: bool
    """Fused updates compute all numbers of a tensor alike (`whole_vectors.py`)."""

    def scale(self, factors: Tensor) -> None:
        """Multiply each of the views by its own factor."""
        scale(self.flat, [weight.numel() for weight in self.weights], factors)

    def count_step(self) -> None:
        # As a list: a single tensor would be read by the host where there is no kernel for many.
        foreach_add_(self.state["step"], [1.0 - self.skip] * len(self.weights))

    def descend(
        self,
        lr: float | Tensor,
        *,
        momenta: Sequence[Tensor] = (),
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        """With d of the views: d += weight_decay * w; m = momentum * m + (1 - dampening) * d; w -= lr * m.

        torch's fused SGD: the one kernel that leaves everything bitwise alone when the device says so.
        """

        def update(columns: list[list[Tensor]], _: list[int]) -> None:
            fused_sgd_(
                columns[0],
                columns[1],
                columns[2] if momenta else [],
                weight_decay=weight_decay,
                momentum=momentum,
                lr=lr,
                dampening=dampening,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # momenta start at 0 here
                found_inf=self.skip,
            )

        self.update([self.weights, self.views, *([list(momenta)] if momenta else [])], update)

    def update(self, columns: list[list[Tensor]], update: Callable[[list[list[Tensor]], list[int]], None]) -> None:
        """Call a fused update with these columns, one tensor per weight each, and the positions of the weights."""
        if self.whole_vectors:
            update_by_vectors(update, columns)
        else:
            update(columns, list(range(len(self.weights))))


class Layerwise(TakesAmpScaling, torch.optim.Optimizer):
    """Base of optimizers with one factor per tensor: many tensors at once, and no word from the device to the host.

    State is kept in at least fp32: squared fp16 gradients overflow and underflow. A step whose `found_inf` (set by an
    engine or a GradScaler) is above 0 leaves weights and state bitwise as they are; `grad_scale` divides gradients.

    `fused`: None is by kernels of our own on CUDA (`has_kernels`), False by torch's. State is the same for both.
    """

    _has_kernels = False
    _join_norms: JoinNorms | None = None
    _join_matrices: JoinMatrices | None = None
    _whole_vectors = True

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], fused: bool | None = None) -> None:
        super().__init__(params, defaults)
        self._settle(fused)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "fused": self.fused}  # torch copies groups and state, and nothing else

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_tables" not in self.__dict__:
            self._settle(state.get("fused"))

    def _settle(self, fused: bool | None) -> None:
        self.fused = fused
        self._kept: dict[torch.dtype, Tensor] = {}
        self._tables = Tables()

    def use_shards(self, join_norms: JoinNorms, join_matrices: JoinMatrices) -> None:
        """Compute norms and matrices with these functions: the parameters are pieces of tensors (`shard: full`)."""
        self._join_norms, self._join_matrices = join_norms, join_matrices

    def use_whole_vectors(self, is_used: bool) -> None:
        """Give a piece of a tensor the bits that it would have in the whole tensor (the default; `sums: exact`)."""
        self._whole_vectors = is_used

    @property
    def way(self) -> str:
        """By whose kernels the weights are updated; a group of another dtype or layout may go through torch's."""
        first = self.param_groups[0]["params"][0]
        return "Triton" if self._may_fuse(first.dtype, first.device) else "torch foreach"

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nkernels: {self.way}"

    @abstractmethod
    def _start(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first step, beside the count of its steps."""

    @abstractmethod
    def _update(self, group: dict[str, Any], bucket: Bucket, gradients: list[Tensor]) -> None:
        """One step of the bucket's weights and state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = with_gradient(group, type(self).__name__, with_empty=self._join_norms is not None)
            for parameters in alike(trained):
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                if self._join_norms is None:
                    if self._update_fused(group, parameters, gradients):
                        continue
                    # Not so with pieces of tensors: their sizes differ from rank to rank, their order must not.
                    parameters = by_size(parameters)
                    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                bucket = self._bucket(group, parameters)
                self._update(group, bucket, gradients)
                copies = [pair for pair in zip(parameters, bucket.weights, strict=True) if pair[0] is not pair[1]]
                if copies:
                    foreach_copy_([parameter for parameter, _ in copies], [copy for _, copy in copies])
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps its dtype; torch would round it to that of the weight."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                restored = value.to(parameter.device, memory_format=torch.contiguous_format, copy=True)
                self.state[parameter][name] = restored

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each of a bucket's tensors, of the whole tensor where this rank has a piece."""
        return norms(tensors) if self._join_norms is None else self._join_norms(tensors)

    def _bucket(self, group: dict[str, Any], parameters: list[Tensor]) -> Bucket:
        device, dtype = parameters[0].device, torch.promote_types(parameters[0].dtype, torch.float32)
        # A parameter that is laid out otherwise (channels last) is computed on as a copy, too.
        weights = [parameter.to(dtype).contiguous() for parameter in parameters]
        state = self._state_of(group, parameters)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            skip = torch.zeros((), dtype=torch.float32, device=device)
        else:
            skip = (found_inf.reshape(()) > 0).to(device, torch.float32)
        flat = self._room(sum(weight.numel() for weight in weights), dtype, device)
        views = unflatten(flat, weights)
        return Bucket(parameters, weights, state, skip, flat, views, self._whole_vectors and cuts_matter(device))

    def _state_of(self, group: dict[str, Any], parameters: list[Tensor]) -> dict[str, list[Tensor]]:
        """By name of the entry, in the order of the parameters; begun where there is none."""
        entries = [self.state[parameter] for parameter in parameters]
        if not all(entries):
            for parameter, entry in zip(parameters, entries, strict=True):
                if not entry:
                    like = parameter.to(torch.promote_types(parameter.dtype, torch.float32)).contiguous()
                    entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    entry.update(self._start(group, like))
        return {name: [entry[name] for entry in entries] for name in entries[0]}

    def _update_fused(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> bool:
        """One step by kernels of our own; False, and nothing done, where that is not possible."""
        dtype, device = parameters[0].dtype, parameters[0].device
        if not self._may_fuse(dtype, device) or not fit(gradients, dtype, device):
            return False
        from paceline.optim.kernels.many_tensors import CHUNK  # Triton may be missing where this is not reached

        columns = [parameters, gradients, *self._columns(self._state_of(group, parameters))]
        dtypes = [dtype, dtype, *[torch.float32] * (len(columns) - 2)]
        table = self._tables.of(columns, CHUNK, dtypes)
        if table is None:
            return False
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            found_inf = self._room(1, torch.float32, device).zero_()
        self._launch(group, table, dtype, found_inf)
        return True

    def _may_fuse(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self._has_kernels and has_kernels(dtype, device, self.fused)

    def _columns(self, state: dict[str, list[Tensor]]) -> list[list[Tensor]]:
        """Return the state that the kernels read and write, in their order."""
        raise NotImplementedError

    def _launch(self, group: dict[str, Any], table: Table, dtype: torch.dtype, found_inf: Tensor) -> None:
        """The kernels of a step, for optimizers that have them."""
        raise NotImplementedError

    def _room(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        # Kept: touching fresh memory takes longer than the update. A GPU's memory is kept by torch itself.
        if dtype not in self._kept or self._kept[dtype].numel() < size:
            self._kept[dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return self._kept[dtype][:size]


def scale(flat: Tensor, sizes: Sequence[int], factors: Tensor) -> None:
    """Multiply the pieces of `flat`, in place, each by its own factor: one kernel per run of equal sizes, not per
    piece."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    pieces = flat.split([size * count for size, count in runs])
    run_factors = factors.split([count for _, count in runs])
    for (size, count), piece, each in zip(runs, pieces, run_factors, strict=True):
        piece.view(count, size).mul_(each.unsqueeze(1))


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat`, cut into these shapes, which may be of no elements."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The Euclidean norm of each tensor, as one vector."""
    return torch.stack(foreach_norm(list(tensors), 2, dtype))


def check(
    optimizer: torch.optim.Optimizer, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Refuse what would train on without a meaning."""
    name = type(optimizer).__name__
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise OutOfRange(name, f"betas[{index}]", beta, "at least 0 and below 1")
    # A rate that is a tensor may be on the device, and is not read.
    for setting, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if not isinstance(value, Tensor) and not value >= 0.0:
            raise OutOfRange(name, setting, value, "at least 0")


def with_gradient(group: dict[str, Any], optimizer: str, with_empty: bool = False) -> list[Tensor]:
    """The parameters of a group that are updated, with a gradient for each element.

    `with_empty`: this rank may have no piece of a tensor where others have one, and all must join their norms.
    """
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not with_empty:
        trained = [parameter for parameter in trained if parameter.numel()]
    for parameter in trained:
        if parameter.grad.layout != torch.strided:
            raise InvalidData(
                f"{optimizer} needs dense gradients, but that of a weight of shape {[*parameter.shape]} is sparse",
                hint="make the layer (nn.Embedding, nn.EmbeddingBag) with `sparse=False`",
            )
    return trained


def alike(parameters: list[Tensor]) -> list[list[Tensor]]:
    """By device and dtype, as kernels over many tensors need it."""
    if len({parameter.dtype for parameter in parameters}) == len({parameter.device for parameter in parameters}) == 1:
        return [parameters]
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(groups.values())


def by_size(parameters: list[Tensor]) -> list[Tensor]:
    """Return the parameters with those of equal size side by side, as `scale` needs it."""
    return sorted(parameters, key=Tensor.numel)
