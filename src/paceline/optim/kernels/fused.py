"""NovoGrad, AdamW, LARC and clipping by a handful of Triton kernels over all tensors of one dtype: their launches.

The formulas are in `novograd.py`, `adamw.py` and `larc.py`, whose way through torch's own kernels is for everything
else. Nothing is read by the host and no memory is asked for, so that an update can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.optim.kernels import many_tensors as kernels
from paceline.optim.kernels.many_tensors import CHUNK
from paceline.optim.kernels.pointers import Table

if TYPE_CHECKING:
    from paceline.optim.larc import Rule

STAGE = 128
"""Chunks of a tensor that are added up side by side."""
WARPS = 4
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def novograd(
    table: Table, dtype: torch.dtype, group: dict[str, Any], found_inf: Tensor, grad_scale: Tensor | None
) -> None:
    """One step of weights and state. The columns: weights, gradients, momenta, second moments, counts of steps, and
    with `amsgrad` the largest second moments."""
    weights, gradients, momenta, seconds, steps, *tops = table.columns.unbind()
    lr, beta1 = _rate(group["lr"], found_inf.device), float(group["betas"][0])
    places, factors = (table.owners, table.numbers, table.sizes), table.factors(0)
    layout = {"DTYPE": DTYPES[dtype], "ALIGNED": table.is_aligned, "num_warps": WARPS}
    scale = found_inf if grad_scale is None else grad_scale
    scales = {"HAS_SCALE": grad_scale is not None, "CHUNK": CHUNK}
    each_chunk, each_tensor = (table.num_chunks, 1), (table.num_tensors,)
    kernels.squares_kernel[each_chunk](
        *places, gradients, table.partials(0), table.num_tensors, scale, **layout, **scales
    )
    kernels.moments_kernel[each_tensor](
        table.firsts,
        table.partials(0),
        seconds,
        tops[0] if tops else seconds,
        steps,
        factors,
        found_inf,
        float(group["betas"][1]),
        float(group["eps"]),
        AMSGRAD=group["amsgrad"],
        STAGE=STAGE,
    )
    kernels.novograd_kernel[each_chunk](
        *places,
        weights,
        gradients,
        momenta,
        factors,
        found_inf,
        scale,
        lr,
        beta1,
        1.0 - beta1 if group["grad_averaging"] else 1.0,
        float(group["weight_decay"]),
        **layout,
        **scales,
        LR_IS_TENSOR=isinstance(lr, Tensor),
        HAS_MOMENTUM=beta1 > 0.0,
        MOVES=not group["luc"],
    )
    if group["luc"]:
        norms = ((weights, dtype, table.partials(0)), (momenta, torch.float32, table.partials(1)))
        for addresses, kind, partials in norms:
            options = {**layout, "DTYPE": DTYPES[kind], "HAS_SCALE": False, "CHUNK": CHUNK}
            kernels.squares_kernel[each_chunk](*places, addresses, partials, table.num_tensors, scale, **options)
        kernels.control_kernel[each_tensor](
            table.firsts,
            table.partials(0),
            table.partials(1),
            factors,
            lr,
            float(group["luc_trust"]),
            float(group["luc_eps"]),
            LR_IS_TENSOR=isinstance(lr, Tensor),
            STAGE=STAGE,
        )
        kernels.descend_kernel[each_chunk](*places, weights, momenta, factors, found_inf, **layout, CHUNK=CHUNK)


def adamw(table: Table, group: dict[str, Any], found_inf: Tensor, grad_scale: Tensor | None) -> None:
    """One step of float32 weights and state. The columns: weights, gradients, both moments, counts of steps."""
    weights, gradients, firsts, seconds, steps = table.columns.unbind()
    beta1, beta2 = map(float, group["betas"])
    lr, factors = _rate(group["lr"], found_inf.device), table.room[2 * table.num_chunks :]
    kernels.corrections_kernel[(triton.cdiv(table.num_tensors, STAGE),)](
        steps,
        factors,
        found_inf,
        table.num_tensors,
        BETA1=beta1,
        BETA2=beta2,
        LOG_BETA1=math.log(beta1) if beta1 else 0.0,
        LOG_BETA2=math.log(beta2) if beta2 else 0.0,
        STAGE=STAGE,
    )
    kernels.adamw_kernel[(table.num_chunks,)](
        *(table.owners, table.numbers, table.sizes, weights, gradients, firsts, seconds, factors, found_inf),
        found_inf if grad_scale is None else grad_scale,
        table.num_tensors,
        lr,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        float(group["eps"]),
        float(group["weight_decay"]),
        ALIGNED=table.is_aligned,
        HAS_SCALE=grad_scale is not None,
        LR_IS_TENSOR=isinstance(lr, Tensor),
        CHUNK=CHUNK,
        num_warps=WARPS,
    )


def find_inf(table: Table, dtype: torch.dtype, found_inf: Tensor) -> None:
    """Set `found_inf` to 1 if a number of the one column is inf or nan, else leave it."""
    layout = {"DTYPE": DTYPES[dtype], "ALIGNED": table.is_aligned, "CHUNK": CHUNK, "num_warps": WARPS}
    places = (table.owners, table.numbers, table.sizes, table.columns)
    kernels.finite_kernel[(table.num_chunks,)](*places, found_inf, **layout)


def larc(table: Table, dtype: torch.dtype, rule: Rule, lr: float | Tensor, decay: float) -> Tensor:
    """Scale gradients in place; returns the ratios, one per tensor. The columns: weights, gradients."""
    places, ratios, pulls = (table.owners, table.numbers, table.sizes), table.factors(0), table.factors(1)
    layout = {"DTYPE": DTYPES[dtype], "ALIGNED": table.is_aligned, "CHUNK": CHUNK, "num_warps": WARPS}
    decay, lr = float(decay) if rule.decay_inside else 0.0, _rate(lr, ratios.device)
    kernels.squares_kernel[(table.num_chunks, 2)](
        *places, table.columns, table.partials(0), table.num_tensors, ratios, HAS_SCALE=False, **layout
    )
    kernels.ratio_kernel[(table.num_tensors,)](
        table.firsts,
        table.partials(0),
        table.partials(1),
        ratios,
        pulls,
        lr,
        float(rule.eta),
        float(rule.epsilon),
        float(rule.min_update),
        decay,
        LR_IS_TENSOR=isinstance(lr, Tensor),
        CLIPS=rule.mode == "clip",
        SKIPS=rule.zero == "skip",
        STAGE=STAGE,
    )
    limit = torch.finfo(dtype).max
    kernels.scale_kernel[(table.num_chunks,)](
        *places, *table.columns.unbind(), ratios, pulls, limit, PULLS=decay != 0.0, **layout
    )
    return ratios


def norm(table: Table, dtype: torch.dtype) -> Tensor:
    """The norm of all tensors of the one column together."""
    result = torch.empty((), dtype=torch.float32, device=table.room.device)
    layout = {"DTYPE": DTYPES[dtype], "ALIGNED": table.is_aligned, "CHUNK": CHUNK, "num_warps": WARPS}
    kernels.squares_kernel[(table.num_chunks, 1)](
        *(table.owners, table.numbers, table.sizes, table.columns, table.partials(0), table.num_tensors),
        result,
        HAS_SCALE=False,
        **layout,
    )
    kernels.norm_kernel[(1,)](table.partials(0), result, table.num_chunks, STAGE=1024)
    return result


def clip(table: Table, dtype: torch.dtype, norm: Tensor, max_norm: float) -> None:
    """Scale the tensors of the one column, in place, so that their norm, which is `norm`, becomes at most this."""
    layout = {"DTYPE": DTYPES[dtype], "ALIGNED": table.is_aligned, "CHUNK": CHUNK, "num_warps": WARPS}
    places = (table.owners, table.numbers, table.sizes, table.columns)
    kernels.clip_kernel[(table.num_chunks,)](*places, norm, float(max_norm), **layout)


def _rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """A rate that the kernels can read: one that lies on the host is a plain number."""
    return lr if isinstance(lr, Tensor) and lr.device == device else float(lr)
