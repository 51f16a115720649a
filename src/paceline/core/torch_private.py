"""Names that torch keeps private and that this library uses, each with a fallback of public names.

Everything private is reached through this module, so that a new version of torch is met in one file. The names are
bound once, at import: a call costs what torch's own costs. `FALLBACKS` stand in where torch has dropped a name, and
tests hold them to the same results. This is the only module of `core/` that imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Function = TypeVar("Function", bound=Callable[..., Any])
FALLBACKS: dict[str, Callable[..., Any]] = {}
"""By torch's name: the same of public names alone."""


def fallback(name: str) -> Callable[[Function], Function]:
    """Register a function as what stands in where torch has no function of that name."""

    def register(function: Function) -> Function:
        FALLBACKS[name] = function
        return function

    return register


def bind(owner: object, name: str) -> Any:
    """Return torch's own function of that name, or the fallback where torch has none."""
    return getattr(owner, name, FALLBACKS[name])


# -- one kernel over many tensors --------------------------------------------------------------------------------------


@fallback("_foreach_add_")
def _foreach_add_(tensors: Sequence[Tensor], others: Any, *, alpha: float = 1.0) -> None:
    for tensor, other in _paired(tensors, others):
        tensor.add_(other, alpha=alpha)


@fallback("_foreach_mul_")
def _foreach_mul_(tensors: Sequence[Tensor], others: Any) -> None:
    for tensor, other in _paired(tensors, others):
        tensor.mul_(other)


@fallback("_foreach_maximum_")
def _foreach_maximum_(tensors: Sequence[Tensor], others: Any) -> None:
    for tensor, other in _paired(tensors, others):
        torch.maximum(tensor, torch.as_tensor(other, dtype=tensor.dtype, device=tensor.device), out=tensor)


@fallback("_foreach_lerp_")
def _foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weights: Any) -> None:
    for (tensor, end), (_, weight) in zip(_paired(tensors, ends), _paired(tensors, weights), strict=True):
        tensor.lerp_(end, weight)


@fallback("_addmm_activation")
def _addmm_activation(bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.relu(torch.addmm(bias, first, second))


@fallback("_foreach_copy_")
def _foreach_copy_(tensors: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    for tensor, source in _paired(tensors, sources):
        tensor.copy_(source, non_blocking=non_blocking)


@fallback("_foreach_zero_")
def _foreach_zero_(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


@fallback("_foreach_norm")
def _foreach_norm(tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _paired(tensors: Sequence[Tensor], others: Any) -> Iterable[tuple[Tensor, Any]]:
    """Each tensor with its own operand, or all with the same one."""
    each = others if isinstance(others, Sequence) else [others] * len(tensors)
    return zip(tensors, each, strict=True)


# -- updates that the device may call off ------------------------------------------------------------------------------


@fallback("_fused_sgd_")
def _fused_sgd_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float | Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    found_inf: Tensor | None = None,
) -> None:
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        direction = weight_decay * parameter + (-gradient if maximize else gradient)
        if momentum:
            buffer = momenta[index]
            moved = direction if is_first_step else momentum * buffer + (1 - dampening) * direction
            direction = direction + momentum * moved if nesterov else moved
            _replace(buffer, moved, found_inf)
        _replace(parameter, parameter - lr * direction, found_inf)


@fallback("_fused_adam_")
def _fused_adam_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    largest_squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    assert not amsgrad, "no optimizer of this library asks for it"
    for parameter, gradient, mean, square, step in zip(parameters, gradients, means, squares, steps, strict=True):
        direction = -gradient if maximize else gradient
        direction = (direction if grad_scale is None else direction / grad_scale) + weight_decay * parameter
        new_mean = torch.lerp(mean, direction, 1 - beta1)
        new_square = beta2 * square + (1 - beta2) * direction * direction
        deviation = (new_square / (1 - beta2**step)).sqrt() + eps
        _replace(parameter, parameter - lr / (1 - beta1**step) * new_mean / deviation, found_inf)
        _replace(mean, new_mean, found_inf)
        _replace(square, new_square, found_inf)


def _replace(tensor: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Store a value, except where the device has found a number that is not finite."""
    tensor.copy_(value if found_inf is None else torch.where(found_inf > 0, tensor, value))


@fallback("_amp_foreach_non_finite_check_and_unscale_")
def _unscale_and_check_(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    for gradient in gradients:
        found_inf.copy_(torch.where(gradient.isfinite().all(), found_inf, 1.0))
        gradient.mul_(inverse_scale)


@fallback("_amp_update_scale_")
def _update_scale_(
    scale: Tensor, clean_steps: Tensor, found_inf: Tensor, growth: float, backoff: float, window_steps: int
) -> None:
    is_overflow, is_window_full = found_inf.reshape(()) > 0, clean_steps + 1 == window_steps
    grown = scale * growth
    grown = torch.where(is_window_full & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(is_overflow, scale * backoff, grown))
    clean_steps.copy_(torch.where(is_overflow | is_window_full, 0, clean_steps + 1))


foreach_add_ = bind(torch, "_foreach_add_")
foreach_mul_ = bind(torch, "_foreach_mul_")
foreach_maximum_ = bind(torch, "_foreach_maximum_")
foreach_lerp_ = bind(torch, "_foreach_lerp_")
relu_of_product = bind(torch, "_addmm_activation")
"""bias + a @ b, and a ReLU, on a GPU as one kernel."""
foreach_copy_ = bind(torch, "_foreach_copy_")
foreach_zero_ = bind(torch, "_foreach_zero_")
foreach_norm = bind(torch, "_foreach_norm")
fused_sgd_ = bind(torch, "_fused_sgd_")
fused_adam_ = bind(torch, "_fused_adam_")
unscale_and_check_ = bind(torch, "_amp_foreach_non_finite_check_and_unscale_")
update_scale_ = bind(torch, "_amp_update_scale_")

# -- optimizers --------------------------------------------------------------------------------------------------------

_is_profiling: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
_global_pre_hooks: Mapping[int, Any] = getattr(torch_optimizer, "_global_optimizer_pre_hooks", {})
_global_post_hooks: Mapping[int, Any] = getattr(torch_optimizer, "_global_optimizer_post_hooks", {})


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without torch's wrapper for profilers and hooks, where there are none.

    The wrapper's profiler annotation alone takes about 30 us on a CPU, as much as the update of a small network.
    """
    unwrapped = _unwrapped_step(optimizer)
    if unwrapped is None:
        optimizer.step()
    elif is_compiler_loaded() or getattr(getattr(unwrapped, "__code__", None), "co_name", "") != "_use_grad":
        unwrapped(optimizer)
    else:  # as torch's `_use_grad` does, which would load the compiler for this
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            unwrapped.__wrapped__(optimizer)  # type: ignore[attr-defined]


def _unwrapped_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any] | None:
    """The step inside torch's wrapper; None if something listens, or if it is not wrapped in the known way."""
    wrapped: Any = type(optimizer).step
    if not getattr(wrapped, "hooked", False) or "step" in optimizer.__dict__ or _is_profiling is None:
        return None
    values = optimizer.__dict__
    is_heard = (
        values.get("_optimizer_step_pre_hooks", True)
        or values.get("_optimizer_step_post_hooks", True)
        or _global_pre_hooks
        or _global_post_hooks
        or _is_profiling()
    )
    return None if is_heard else getattr(wrapped, "__wrapped__", None)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return what `register_step_pre_hook` has registered."""
    return list(optimizer.__dict__.get("_optimizer_step_pre_hooks", {}).values())


class TakesAmpScaling:
    """Mixin of an optimizer that reads `found_inf` and `grad_scale` on the device, as torch's fused ones do.

    torch's GradScaler asks for this attribute; without it the scaler would read `found_inf` on the host.
    """

    _step_supports_amp_scaling = True


def takes_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer skips a step by itself where the device has set `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# -- modules -----------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    BatchNorm = _BatchNorm
else:
    BatchNorm = nn.BatchNorm1d.__mro__[1]
    """The common base of all batch norms."""


@fallback("_is_view")
def _is_view(tensor: Tensor) -> bool:
    # Also true of a tensor that is larger than what it shows: a clone too many does no harm.
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


is_view: Callable[[Tensor], bool] = bind(Tensor, "_is_view")
"""Return True if the tensor shares the memory of another one that autograd knows of."""


@fallback("tree_map")
def _tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((name, _tree_map(function, value)) for name, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_tree_map(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_tree_map(function, value) for value in tree)
    return function(tree)


tree_map: Callable[[Callable[[Any], Any], Any], Any] = bind(getattr(torch.utils, "_pytree", None), "tree_map")
"""Apply a function to every leaf of nested tuples, named tuples, lists and dicts."""


def forget_forwards(module: FSDPModule) -> None:
    """Drop the order of forwards that backward would prefetch weights by, those without a backward too.

    Ranks that have made unequally many forwards would gather different weights. torch's `reset_iter_state` does it too,
    but since 2.13 only, and not on a rank that has not called the model yet.
    """
    group: Any = getattr(_optional_call(module, "_get_fsdp_state"), "_fsdp_param_group", None)
    if group is None:
        return
    if hasattr(group, "_post_forward_indices"):
        group._post_forward_indices.clear()
        getattr(group.comm_ctx, "post_forward_order", []).clear()
    else:
        _optional_call(module, "reset_iter_state")


def _optional_call(owner: object, name: str) -> Any:
    method = getattr(owner, name, None)
    return None if method is None else method()


# -- backward ----------------------------------------------------------------------------------------------------------


@fallback("_engine_run_backward")
def _engine_run_backward(totals: tuple[Tensor, ...], seeds: tuple[Tensor, ...], *_: Any, **__: Any) -> None:
    torch.autograd.backward(totals, seeds)


_run_backward = bind(torch.autograd.graph, "_engine_run_backward")


def backward(total: Tensor, seed: Tensor) -> None:
    """Add the gradients of `total` times `seed` to those of the leaves, as `torch.autograd.backward` does.

    Torch's own compares the two shapes first, and loads a library of algebra for it that takes seconds; `seed` must
    have the shape of `total`.
    """
    if type(total) is not Tensor:  # a subclass may have a backward of its own
        torch.autograd.backward((total,), (seed,))
    else:
        _run_backward((total,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


# -- the compiler ------------------------------------------------------------------------------------------------------


class CompileCounters(NamedTuple):
    """Counts of torch's compiler since the process began."""

    graphs: int = 0
    recompiles: int = 0
    """Times that code was compiled for other shapes or values than before; the first time of each is none."""
    seconds: float = 0.0


_WHOLE = ("entire_frame_compile", "entire_backward_compile")
"""Everything else that the compiler times is part of these."""


def compile_counters() -> CompileCounters:
    """Read the compiler's own counters; it is not imported for the sake of a zero, and without them all are 0."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counts: Mapping[Any, int] = getattr(frames, "FRAME_COMPILE_COUNTER", {})
    spent_ns: Mapping[str, float] = getattr(utils, "cumulative_time_spent_ns", {})
    stats: Mapping[str, Any] = getattr(utils, "counters", {}).get("stats", {})
    return CompileCounters(
        int(stats.get("unique_graphs", 0)),
        sum(count - 1 for count in counts.values() if count > 1),
        sum(spent_ns.get(name, 0.0) for name in _WHOLE) * 1e-9,
    )


def is_compiler_loaded() -> bool:
    """Return True if somebody has imported torch's compiler; that takes as long as importing torch."""
    return "torch._dynamo" in sys.modules


_DISABLED = "__dynamo_disable"
"""Where `torch._disable_dynamo` keeps the function that it has made, and finds it."""


def not_compiled(function: Function) -> Function:
    """Keep the compiler out of a function, as `torch.compiler.disable` does, but do not load it for that.

    Torch's own decorator for this loads the compiler at the first call. Until somebody has loaded it there is nothing
    to keep out, so that decorator is told to call the function itself.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        disabled: Function = torch.compiler.disable(function)
        return disabled
    guarded: Function = disable(function)
    _defer(function)
    return guarded


def _defer(function: Callable[..., Any]) -> None:
    """Let what `torch._disable_dynamo` has made of a function call it as it is until somebody loads the compiler."""

    made: list[Callable[..., Any]] = []

    def plain_or_disabled(*args: Any, **kwargs: Any) -> Any:
        if not is_compiler_loaded():
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))
        return made[0](*args, **kwargs)

    setattr(function, _DISABLED, plain_or_disabled)


def defer_compiler() -> None:
    """Let optimizers be made, saved and loaded without loading the compiler, which torch does to keep it out of there.

    Nothing else changes: once somebody has loaded the compiler, it is kept out as torch does it.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None and not is_compiler_loaded() and not hasattr(function, _DISABLED):
            _defer(function)


def mark_dynamic(tensor: Tensor, sizes: Iterable[int]) -> None:
    """Hint to the compiler that these sizes change from call to call; without it, it finds out by compiling again."""
    mark = getattr(sys.modules.get("torch._dynamo"), "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, sizes)


# -- devices -----------------------------------------------------------------------------------------------------------


def cpu_has_bf16() -> bool:
    """Return True if oneDNN computes bf16 on this CPU without falling back to fp32."""
    return _onednn_has("bf16", default="AVX512")


def cpu_has_fp16() -> bool:
    """Return True if oneDNN computes fp16 on this CPU without falling back to fp32."""
    return _onednn_has("fp16", default="AVX512_FP16")


def _onednn_has(dtype: str, *, default: str) -> bool:
    """Ask oneDNN; where a version of torch has no way to, a capability of the CPU that begins with `default`."""
    backends: Any = torch.backends
    if not backends.mkldnn.is_available():
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")())
    except (AttributeError, RuntimeError):
        return str(backends.cpu.get_cpu_capability()).startswith(default)


def record_allocations(most: int | None) -> None:
    """Let CUDA's allocator keep its last events, at most so many; None ends it."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is not None and most is None:
        record(enabled=None)
    elif record is not None:
        record(max_entries=most)


def allocations() -> Any:
    """Return the allocator's events, in the form of pytorch.org/memory_viz; without them its present blocks."""
    snapshot = getattr(torch.cuda.memory, "_snapshot", None)
    return {"segments": torch.cuda.memory_snapshot(), "device_traces": []} if snapshot is None else snapshot()


# -- process groups ----------------------------------------------------------------------------------------------------


def can_set_group_timeout() -> bool:
    """Return True if the time-out of the default process group can be changed once it is there."""
    return hasattr(torch.distributed.distributed_c10d, "_set_pg_timeout")


def set_group_timeout(timeout: timedelta) -> None:
    """Set how long collectives of the default process group wait from now on; see `can_set_group_timeout`."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout)


# -- kernels in CUDA's C++ ---------------------------------------------------------------------------------------------


def can_compile_cuda() -> bool:
    """Return True if torch compiles kernels from source (NVRTC, from 2.9 on), for NVIDIA's GPUs."""
    return torch.version.cuda is not None and hasattr(torch.cuda, "_compile_kernel")


def compile_cuda(source: str, name: str) -> Any:
    """Return a kernel for the current device: called with `grid`, `block` and tensors as `args`."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    try:
        # torch looks for CUDA's headers, which such a source does not need, and gives up where no toolkit is installed
        cpp_extension.CUDA_HOME = home or "/nowhere"
        return torch.cuda._compile_kernel(source, name)
    finally:
        cpp_extension.CUDA_HOME = home
