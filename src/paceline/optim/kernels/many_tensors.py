"""Triton kernels over many tensors at once: norms, NovoGrad, AdamW and LARC in a handful of launches, whatever the
number of tensors.

A tensor is cut into chunks, one program each; which chunk is of which tensor, and where the tensors lie, is in a table
on the device (`pointers.py`). Norms have two stages, so that every run adds in the same order. What changes from step
to step is read from the device where it is a tensor: a captured CUDA graph sees the rate of the day.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 2048
"""Weights per program."""


@triton.jit
def _pointer(addresses, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the first element of a tensor of the table."""
    pointer = tl.load(addresses + index).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(pointer, offsets, size, is_whole):
    """A chunk as float32; without a mask where it is a whole one, so that loads are wide."""
    if is_whole:
        values = tl.load(pointer + offsets).to(tl.float32)
    else:
        values = tl.load(pointer + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    return values


@triton.jit
def _write(pointer, offsets, size, is_whole, values):
    if is_whole:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < size)


@triton.jit
def _number(value, IS_TENSOR: tl.constexpr):
    """A number that the host knows, or one that only the device does."""
    return tl.load(value).to(tl.float32) if IS_TENSOR else value


@triton.jit
def _total(partials, firsts, tensor, STAGE: tl.constexpr):
    """The sum of what the chunks of a tensor have found, in one order."""
    place, end = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    sums = tl.zeros([STAGE], tl.float32)
    while place < end:
        each = place + tl.arange(0, STAGE)
        sums += tl.load(partials + each, mask=each < end, other=0.0)
        place += STAGE
    return tl.sum(sums, 0)


@triton.jit
def squares_kernel(
    owners,  # (chunks,) int64: the tensor of a chunk
    numbers,  # (chunks,) int64: which chunk of it this is
    sizes,  # (tensors,) int64
    addresses,  # (columns, tensors) int64: of the tensors to measure
    partials,  # (columns, chunks) float32
    num_tensors,
    grad_scale,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The sum of squares of each chunk."""
    chunk, column = tl.program_id(0), tl.program_id(1)
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    pointer = _pointer(addresses, column * num_tensors + tensor, DTYPE, ALIGNED)
    values = _read(pointer, offsets, size, (number + 1) * CHUNK <= size)
    if HAS_SCALE:
        values = values / tl.load(grad_scale)
    tl.store(partials + column * tl.num_programs(0) + chunk, tl.sum(values * values, 0))


@triton.jit
def moments_kernel(
    firsts,  # (tensors + 1,) int64: the first chunk of each tensor
    partials,  # (chunks,)
    seconds,  # (tensors,) addresses of the second moments
    tops,  # (tensors,) addresses of the largest so far
    steps,  # (tensors,) addresses of the counts of steps
    factors,  # (tensors,) float32: what gradients are multiplied by
    found_inf,
    beta2,
    eps,
    AMSGRAD: tl.constexpr,
    STAGE: tl.constexpr,
):
    """NovoGrad's second moment of one tensor; no state changes in a step that is skipped."""
    tensor = tl.program_id(0)
    is_taken = (tl.load(found_inf) > 0.0) == 0
    now = _total(partials, firsts, tensor, STAGE)
    second = tl.load(seconds + tensor).to(tl.pointer_type(tl.float32))
    before = tl.load(second)
    # 0 until a gradient was seen: the first step, and those before it whose gradient was 0
    after = tl.where(before == 0.0, now, beta2 * before + (1.0 - beta2) * now)
    tl.store(second, after, mask=is_taken)
    step = tl.load(steps + tensor).to(tl.pointer_type(tl.float32))
    tl.store(step, tl.load(step) + 1.0, mask=is_taken)
    if AMSGRAD:
        top = tl.load(tops + tensor).to(tl.pointer_type(tl.float32))
        after = tl.maximum(tl.load(top), after)
        tl.store(top, after, mask=is_taken)
    tl.store(factors + tensor, 1.0 / (tl.sqrt_rn(after) + eps))


@triton.jit
def novograd_kernel(
    owners,
    numbers,
    sizes,
    weights,  # (tensors,) addresses
    gradients,
    momenta,
    factors,
    found_inf,
    grad_scale,
    lr,
    beta1,
    share,  # of the new direction in the momentum
    weight_decay,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    MOVES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """d = g * factor + weight_decay * w; m = beta1 * m + share * d; w -= lr * m, if it moves already."""
    chunk = tl.program_id(0)
    if tl.load(found_inf) > 0.0:
        return
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    is_whole = (number + 1) * CHUNK <= size
    weight = _pointer(weights, tensor, DTYPE, ALIGNED)
    direction = _read(_pointer(gradients, tensor, DTYPE, ALIGNED), offsets, size, is_whole)
    if HAS_SCALE:
        direction = direction / tl.load(grad_scale)
    values = _read(weight, offsets, size, is_whole)
    direction = direction * tl.load(factors + tensor) + weight_decay * values
    if HAS_MOMENTUM:
        momentum = _pointer(momenta, tensor, tl.float32, ALIGNED)
        direction = beta1 * _read(momentum, offsets, size, is_whole) + share * direction
        _write(momentum, offsets, size, is_whole, direction)
    if MOVES:
        values -= _number(lr, LR_IS_TENSOR) * direction
        _write(weight, offsets, size, is_whole, values.to(DTYPE))


@triton.jit
def control_kernel(
    firsts,
    weight_partials,
    momentum_partials,
    rates,  # (tensors,) float32
    lr,
    trust,
    eps,
    LR_IS_TENSOR: tl.constexpr,
    STAGE: tl.constexpr,
):
    """NovoGrad's layer-wise update control: min(lr, trust * |w| / (|m| + eps))."""
    tensor = tl.program_id(0)
    weight = tl.sqrt_rn(_total(weight_partials, firsts, tensor, STAGE))
    momentum = tl.sqrt_rn(_total(momentum_partials, firsts, tensor, STAGE))
    tl.store(rates + tensor, tl.minimum(trust * weight / (momentum + eps), _number(lr, LR_IS_TENSOR)))


@triton.jit
def descend_kernel(
    owners,
    numbers,
    sizes,
    weights,
    momenta,
    rates,
    found_inf,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """w -= rate of its tensor * m"""
    chunk = tl.program_id(0)
    if tl.load(found_inf) > 0.0:
        return
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    is_whole = (number + 1) * CHUNK <= size
    weight = _pointer(weights, tensor, DTYPE, ALIGNED)
    values = _read(weight, offsets, size, is_whole)
    values -= tl.load(rates + tensor) * _read(_pointer(momenta, tensor, tl.float32, ALIGNED), offsets, size, is_whole)
    _write(weight, offsets, size, is_whole, values.to(DTYPE))


@triton.jit
def ratio_kernel(
    firsts,
    weight_partials,
    gradient_partials,
    ratios,  # (tensors,) float32: what gradients are multiplied by
    pulls,  # (tensors,) float32: how much of the weights is added to them before
    lr,
    eta,
    epsilon,
    min_update,
    decay,  # 0 where it is the optimizer's own
    LR_IS_TENSOR: tl.constexpr,
    CLIPS: tl.constexpr,
    SKIPS: tl.constexpr,
    STAGE: tl.constexpr,
):
    """LARC's ratio of one tensor: the formulas are in `larc.py`."""
    tensor = tl.program_id(0)
    weight = tl.sqrt_rn(_total(weight_partials, firsts, tensor, STAGE))
    gradient = tl.sqrt_rn(_total(gradient_partials, firsts, tensor, STAGE))
    ratio = eta * weight / (gradient + decay * weight + epsilon)
    if CLIPS:
        ratio = ratio / _number(lr, LR_IS_TENSOR)
    ratio = tl.where(ratio < min_update, min_update, ratio)  # nan stays nan
    if CLIPS:
        ratio = tl.where(ratio > 1.0, 1.0, ratio)
    pull = decay
    if SKIPS:
        is_scaled = (weight > 0.0) & (gradient > 0.0)
        ratio, pull = tl.where(is_scaled, ratio, 1.0), tl.where(is_scaled, pull, 0.0)
    tl.store(ratios + tensor, ratio)
    tl.store(pulls + tensor, pull)


@triton.jit
def scale_kernel(
    owners,
    numbers,
    sizes,
    weights,
    gradients,
    ratios,
    pulls,
    limit,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PULLS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """g = ratio * (g + pull * w), within what the gradient's dtype can hold; nan stays nan."""
    chunk = tl.program_id(0)
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    is_whole = (number + 1) * CHUNK <= size
    gradient = _pointer(gradients, tensor, DTYPE, ALIGNED)
    values = _read(gradient, offsets, size, is_whole)
    if PULLS:
        weight = _read(_pointer(weights, tensor, DTYPE, ALIGNED), offsets, size, is_whole)
        values += tl.load(pulls + tensor) * weight
    values = values * tl.load(ratios + tensor)
    if tl.float32 != DTYPE:
        values = tl.where(values > limit, limit, tl.where(values < -limit, -limit, values))
    _write(gradient, offsets, size, is_whole, values.to(DTYPE))


@triton.jit
def norm_kernel(partials, norm, num_chunks, STAGE: tl.constexpr):
    """The norm of all tensors together."""
    place = tl.arange(0, STAGE)
    sums = tl.zeros([STAGE], tl.float32)
    first = 0
    while first < num_chunks:
        sums += tl.load(partials + first + place, mask=first + place < num_chunks, other=0.0)
        first += STAGE
    tl.store(norm, tl.sqrt_rn(tl.sum(sums, 0)))


@triton.jit
def clip_kernel(
    owners, numbers, sizes, gradients, norm, max_norm, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr
):
    """g *= min(max_norm / (norm + 1e-6), 1), as torch clips."""
    factor = max_norm / (tl.load(norm).to(tl.float32) + 1e-6)
    if factor >= 1.0:
        return
    chunk = tl.program_id(0)
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    is_whole = (number + 1) * CHUNK <= size
    gradient = _pointer(gradients, tensor, DTYPE, ALIGNED)
    _write(gradient, offsets, size, is_whole, (factor * _read(gradient, offsets, size, is_whole)).to(DTYPE))


@triton.jit
def corrections_kernel(
    steps,  # (tensors,) addresses of the counts of steps
    factors,  # (2, tensors) float32: 1 / (1 - beta1 ** step), 1 / sqrt(1 - beta2 ** step)
    found_inf,
    num_tensors,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    STAGE: tl.constexpr,
):
    """Count a step of AdamW for each tensor, unless it is skipped, and correct for moments that began at zero.

    In float64: of 1 - 0.999, float32 keeps four digits.
    """
    tensor = tl.program_id(0) * STAGE + tl.arange(0, STAGE)
    there = tensor < num_tensors
    is_taken = (tl.load(found_inf) > 0.0) == 0
    step = tl.load(steps + tensor, mask=there, other=0).to(tl.pointer_type(tl.float32))
    now = tl.load(step, mask=there, other=0.0) + 1.0
    tl.store(step, now, mask=there & is_taken)
    number = now.to(tl.float64)
    first = tl.full([STAGE], 1.0, tl.float64)
    second = tl.full([STAGE], 1.0, tl.float64)
    if BETA1 > 0.0:
        first -= tl.exp(number * LOG_BETA1)
    if BETA2 > 0.0:
        second -= tl.exp(number * LOG_BETA2)
    tl.store(factors + tensor, (1.0 / first).to(tl.float32), mask=there)
    tl.store(factors + num_tensors + tensor, (1.0 / tl.sqrt(second)).to(tl.float32), mask=there)


@triton.jit
def adamw_kernel(
    owners,
    numbers,
    sizes,
    weights,  # (tensors,) addresses
    gradients,
    firsts,
    seconds,
    factors,  # as `corrections_kernel` leaves them
    found_inf,
    grad_scale,
    num_tensors,
    lr,
    beta1,
    share1,  # 1 - beta1
    beta2,
    share2,
    eps,
    weight_decay,
    ALIGNED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """w -= lr * weight_decay * w; m = beta1 * m + share1 * g; v = beta2 * v + share2 * g * g; with both corrected,
    w -= lr * m / (sqrt(v) + eps)."""
    chunk = tl.program_id(0)
    if tl.load(found_inf) > 0.0:
        return
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    is_whole = (number + 1) * CHUNK <= size
    weight = _pointer(weights, tensor, tl.float32, ALIGNED)
    first = _pointer(firsts, tensor, tl.float32, ALIGNED)
    second = _pointer(seconds, tensor, tl.float32, ALIGNED)
    gradient = _read(_pointer(gradients, tensor, tl.float32, ALIGNED), offsets, size, is_whole)
    values = _read(weight, offsets, size, is_whole)
    mean = _read(first, offsets, size, is_whole)
    square = _read(second, offsets, size, is_whole)
    rate = _number(lr, LR_IS_TENSOR)
    if HAS_SCALE:
        gradient = gradient / tl.load(grad_scale)
    values -= rate * weight_decay * values
    mean = beta1 * mean + share1 * gradient
    square = beta2 * square + share2 * gradient * gradient
    divisor = tl.sqrt_rn(square) * tl.load(factors + num_tensors + tensor) + eps
    values -= tl.div_rn(rate * tl.load(factors + tensor) * mean, divisor)
    _write(weight, offsets, size, is_whole, values)
    _write(first, offsets, size, is_whole, mean)
    _write(second, offsets, size, is_whole, square)


@triton.jit
def finite_kernel(
    owners, numbers, sizes, gradients, found_inf, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr
):
    """Set `found_inf` to 1 if a number is inf or nan; nothing is written otherwise."""
    chunk = tl.program_id(0)
    tensor, number = tl.load(owners + chunk), tl.load(numbers + chunk)
    size = tl.load(sizes + tensor)
    offsets = number * CHUNK + tl.arange(0, CHUNK)
    values = _read(_pointer(gradients, tensor, DTYPE, ALIGNED), offsets, size, (number + 1) * CHUNK <= size)
    is_finite = tl.abs(values) <= 3.4028234663852886e38  # False for nan
    if tl.min(is_finite.to(tl.int32), 0) == 0:
        tl.store(found_inf, 1.0)
