"""The loss of CTC and its gradient on a GPU: two kernels, no word to the host, the same bits in every run.

The recurrences of Graves et al. 2006 walk forward and, at the same time in other programs, backward through the frames
of every utterance. A state's probability is kept as mantissa * 2 ** exponent with an exponent of its own: that holds
paths of any improbability, and an addition costs one rounding of 6e-8, where float32 log-probabilities around 1000
would lose 6e-5. Blanks and labels are two vectors, so that a step needs one neighbour only:

    blank[i] = (blank[i] + label[i - 1]) * p(blank)
    label[i] = (label[i] + blank[i] + label[i - 1] if it differs) * p(label[i])

The backward walk is the same on reversed frames and labels. What a frame owes to its labels is the product of both
walks over the total; what is left of 1 is the blank's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.speed.operators import operator

NEVER = tl.constexpr(-(1 << 30))
"""The exponent of probability 0."""
LEAST = tl.constexpr(-262144.0)
"""A log2 of a probability below this counts as 0."""
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding it leaves no digit behind the point, and the whole number in the lowest bits."""
FRAMES, CLASSES, LABELS = 16, 32, 16
"""The tile of a program that collects gradients."""


@triton.jit
def _power_of_two(exponent):
    """2 ** exponent up to 127; 0 where it is -127 or less."""
    return (tl.maximum(exponent, -127) * 8388608 + 1065353216).to(tl.float32, bitcast=True)


@triton.jit
def _probability(log_probs):
    """(mantissa from 0.7 to 1.5, exponent) of exp(log_probs); mantissa 0 for one too small to be kept, nan for nan."""
    log2 = log_probs * 1.4426950408889634
    is_kept = log2 > LEAST
    rounded = tl.where(is_kept, log2, 0.0) + ROUNDING
    exponent = rounded - ROUNDING
    # ln 2 in two parts: the first product is exact, so that the rest has all its digits
    rest = (log_probs - exponent * 0.693359375) + exponent * 2.1219444005469057e-4
    shift = rounded.to(tl.int32, bitcast=True) - 1262485504
    return tl.exp(rest), tl.where(is_kept, shift, NEVER // 2)


@triton.jit
def _normalised(value, exponent):
    """The same number with a mantissa from 1 to 2; nan stays nan."""
    bits = value.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    is_plain = (value > 0.0) & (value < float("inf"))
    exponent = tl.where(value == 0.0, NEVER, exponent + tl.where(is_plain, (bits >> 23) - 127, 0))
    return tl.where(is_plain, mantissa, value), exponent


@triton.jit
def _packed(mantissa, exponent):
    """Both in one number: the exponent above, the mantissa's bits below."""
    return (exponent.to(tl.int64) << 32) | mantissa.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _unpacked(packed):
    return packed.to(tl.int32).to(tl.float32, bitcast=True), (packed >> 32).to(tl.int32)


@triton.jit
def _seen(row, label, blank, is_label, is_frame):
    """Log-probabilities of the labels and of the blank in one frame."""
    of_label = tl.load(row + label, mask=is_label & is_frame, other=float("-inf"))
    return of_label.to(tl.float32), tl.load(row + blank, mask=is_frame, other=float("-inf")).to(tl.float32)


@triton.jit
def _sum(mantissa, exponent, other, other_exponent):
    top = tl.maximum(exponent, other_exponent)
    total = mantissa * _power_of_two(exponent - top) + other * _power_of_two(other_exponent - top)
    return total, top


@triton.jit
def walk_kernel(
    log_probs,  # (batch, frames, classes)
    targets,  # (batch, labels)
    frames,  # (batch,)
    labels,  # (batch,)
    states,  # (2, batch, frames, labels) int64: of labels, forward with their frame, backward without
    totals,  # (batch,) int64: of the whole transcript; nan where the input has no meaning
    losses,  # (batch,) float64
    num_frames,
    num_classes,
    num_labels,
    stride_batch,
    stride_frame,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One utterance in one direction: program 1 of the second axis walks backward."""
    utterance, goes_back = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, size = tl.load(frames + utterance).to(tl.int32), tl.load(labels + utterance).to(tl.int32)
    is_broken = (length > num_frames) | (size > num_labels) | (length < 0) | (size < 0)
    length, size = tl.minimum(length, num_frames), tl.minimum(size, num_labels)
    place = tl.arange(0, BLOCK)
    is_label = place < size
    sign = 1 - 2 * goes_back
    position = tl.where(goes_back == 1, size - 1 - place, place)
    text = targets + utterance * num_labels
    label = tl.load(text + position, mask=is_label, other=0).to(tl.int32)
    neighbour = tl.load(text + position - sign, mask=is_label & (place > 0), other=0).to(tl.int32)
    may_skip = is_label & (place > 0) & (label != neighbour)
    blank = num_classes - 1
    is_wrong = is_label & ((label < 0) | (label >= blank))
    is_broken = is_broken | (tl.max(is_wrong.to(tl.int32), 0) > 0)
    is_label = is_label & (is_wrong == 0)

    first = tl.where(goes_back == 1, length - 1, 0).to(tl.int64)
    row, next_row = log_probs + utterance * stride_batch + first * stride_frame, sign.to(tl.int64) * stride_frame
    kept = ((goes_back.to(tl.int64) * tl.num_programs(0) + utterance) * num_frames + first) * num_labels
    kept, next_kept = states + kept + position, sign.to(tl.int64) * num_labels
    # The last place never holds a label: the first one finds nothing on its left.
    left = (place - 1) & (BLOCK - 1)

    label_mantissa = tl.zeros([BLOCK], tl.float32)
    label_exponent = tl.full([BLOCK], NEVER, tl.int32)
    blank_mantissa = tl.where(place == 0, 1.0, 0.0)
    blank_exponent = tl.where(place == 0, 0, NEVER)
    # Asked for three frames ahead of their use: a step is shorter than the way to memory.
    of_label, of_blank = _seen(row, label, blank, is_label, length > 0)
    second_label, second_blank = _seen(row + next_row, label, blank, is_label, length > 1)
    third_label, third_blank = _seen(row + 2 * next_row, label, blank, is_label, length > 2)
    row += 3 * next_row
    frame = 0
    while frame < length:  # Triton's interpreter cannot count to a number that it has loaded
        fourth_label, fourth_blank = _seen(row, label, blank, is_label, frame + 3 < length)
        row += next_row
        frame += 1
        label_factor, label_shift = _probability(of_label)
        blank_factor, blank_shift = _probability(of_blank)

        packed = tl.gather(_packed(label_mantissa, label_exponent), left, 0)
        left_mantissa, left_exponent = _unpacked(packed)
        total, top = _sum(blank_mantissa, blank_exponent, left_mantissa, left_exponent)
        inward, inward_exponent = _sum(
            label_mantissa,
            label_exponent,
            tl.where(may_skip, total, blank_mantissa),
            tl.where(may_skip, top, blank_exponent),
        )
        label_mantissa = inward * label_factor
        label_exponent = tl.maximum(inward_exponent + label_shift, NEVER)
        blank_mantissa = total * blank_factor
        blank_exponent = tl.maximum(top + blank_shift, NEVER)
        if KEEPS:
            # far more than the cache holds: it must not drive out the log-probabilities
            if goes_back == 1:
                tl.store(kept, _packed(inward, inward_exponent), mask=is_label, eviction_policy="evict_first")
            else:
                state = _packed(label_mantissa, label_exponent)
                tl.store(kept, state, mask=is_label, eviction_policy="evict_first")
            kept += next_kept
        if (frame & 7) == 0:
            # A step multiplies a mantissa by 0.7 to 4.3: eight of them are far from what float32 can hold.
            label_mantissa, label_exponent = _normalised(label_mantissa, label_exponent)
            blank_mantissa, blank_exponent = _normalised(blank_mantissa, blank_exponent)
        of_label, second_label, third_label = second_label, third_label, fourth_label
        of_blank, second_blank, third_blank = second_blank, third_blank, fourth_blank

    if goes_back == 0:
        ends_in_label, ends_in_blank = is_label & (place == size - 1), place == size
        label_exponent = tl.where(ends_in_label, label_exponent, NEVER)
        blank_exponent = tl.where(ends_in_blank, blank_exponent, NEVER)
        top = tl.max(tl.maximum(label_exponent, blank_exponent), 0)
        total = tl.where(ends_in_label, label_mantissa * _power_of_two(label_exponent - top), 0.0)
        total += tl.where(ends_in_blank, blank_mantissa * _power_of_two(blank_exponent - top), 0.0)
        total = tl.where(length > 0, tl.sum(total, 0), 0.0)
        total = tl.where(is_broken, float("nan"), total)
        is_never = total == 0.0
        logarithm = tl.log2(tl.where(is_never, 1.0, total).to(tl.float64)) + tl.where(is_never, 0, top)
        tl.store(losses + utterance, 0.0 - logarithm * 0.6931471805599453)
        tl.store(totals + utterance, _packed(total, top))


@triton.jit
def collect_kernel(
    log_probs,
    targets,
    frames,
    labels,
    states,
    totals,
    gradient,  # (batch, frames, classes) float32
    num_frames,
    num_classes,
    num_labels,
    stride_batch,
    stride_frame,
    FRAMES: tl.constexpr,
    CLASSES: tl.constexpr,
    LABELS: tl.constexpr,
):
    """p - (share of the paths through a class), of some frames and classes of one utterance."""
    utterance = tl.program_id(0).to(tl.int64)
    frame = tl.program_id(1) * FRAMES + tl.arange(0, FRAMES)
    classes = tl.program_id(2) * CLASSES + tl.arange(0, CLASSES)
    length, size = tl.load(frames + utterance).to(tl.int32), tl.load(labels + utterance).to(tl.int32)
    length, size = tl.minimum(length, num_frames), tl.minimum(size, num_labels)
    total, total_exponent = _unpacked(tl.load(totals + utterance))
    size = tl.where(total > 0.0, size, 0)  # else there is nothing to add up
    counts = (total == 0.0) == 0  # nan does
    scale = tl.where(counts, 1.0 / tl.where(counts, total, 1.0), 0.0)
    is_inside = frame < length
    forward = (utterance * num_frames + frame) * num_labels
    backward = forward + tl.num_programs(0).to(tl.int64) * num_frames * num_labels
    shares = tl.zeros([FRAMES, CLASSES], tl.float32)
    of_labels = tl.zeros([FRAMES], tl.float32)
    first = 0
    while first < size:
        place = first + tl.arange(0, LABELS)
        is_label = place < size
        mask = is_inside[:, None] & is_label[None, :]
        there, exponent = _unpacked(tl.load(states + forward[:, None] + place[None, :], mask=mask, other=0))
        back, back_exponent = _unpacked(tl.load(states + backward[:, None] + place[None, :], mask=mask, other=0))
        # exponents of 0 may go round, but what they belong to is 0
        exponent = tl.minimum(exponent + back_exponent - total_exponent, 126)
        share = there * back * scale * _power_of_two(exponent)
        label = tl.load(targets + utterance * num_labels + place, mask=is_label, other=-1).to(tl.int32)
        is_of_class = (label[:, None] == classes[None, :]).to(tl.float32)
        shares += tl.dot(share, is_of_class, input_precision="ieee")
        of_labels += tl.sum(share, 1)
        first += LABELS
    shares = tl.where(classes[None, :] == num_classes - 1, 1.0 - of_labels[:, None], shares)
    is_class = classes[None, :] < num_classes
    place = utterance * stride_batch + frame.to(tl.int64)[:, None] * stride_frame + classes[None, :]
    mask = is_inside[:, None] & is_class
    found = tl.exp(tl.load(log_probs + place, mask=mask, other=0.0).to(tl.float32)) - shares
    found = tl.where(mask & counts, tl.where(total == total, found, float("nan")), 0.0)
    out = (utterance * num_frames + frame.to(tl.int64))[:, None] * num_classes + classes[None, :]
    tl.store(gradient + out, found, mask=(frame < num_frames)[:, None] & is_class)


@operator("ctc")
def _ctc(
    log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """(losses (batch,) float64, their gradients as `log_probs`, float32; empty where not wanted)"""
    batch, num_frames, num_classes = log_probs.shape
    num_labels = targets.shape[1]
    log_probs = log_probs if log_probs.stride(2) == 1 else log_probs.contiguous()
    targets, device = targets.contiguous(), log_probs.device
    losses = torch.empty(batch, dtype=torch.float64, device=device)
    gradient = torch.empty(log_probs.shape if with_gradient else (0,), dtype=torch.float32, device=device)
    if not batch:
        return losses, gradient
    totals = torch.empty(batch, dtype=torch.int64, device=device)
    states_shape = (2, batch, num_frames, num_labels) if with_gradient else (0,)
    states = torch.empty(states_shape, dtype=torch.int64, device=device)
    # one place more than labels: a blank comes behind the last
    block = max(32, triton.next_power_of_2(num_labels + 1))
    sizes = (num_frames, num_classes, num_labels, log_probs.stride(0), log_probs.stride(1))
    inputs = (log_probs, targets, frames, labels, states, totals)
    walk_kernel[(batch, 2 if with_gradient else 1)](
        *inputs, losses, *sizes, KEEPS=with_gradient, BLOCK=block, num_warps=min(max(block // 64, 1), 8)
    )
    if gradient.numel():
        grid = (batch, triton.cdiv(num_frames, FRAMES), triton.cdiv(num_classes, CLASSES))
        tile = {"FRAMES": FRAMES, "CLASSES": CLASSES, "LABELS": LABELS}
        collect_kernel[grid](*inputs, gradient, *sizes, **tile)
    return losses, gradient


@_ctc.register_fake
def _(log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    losses = log_probs.new_empty(log_probs.shape[0], dtype=torch.float64)
    return losses, log_probs.new_empty(log_probs.shape if with_gradient else (0,), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, of_losses: Tensor, _of_gradient: Tensor) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return (gradient * of_losses.float()[:, None, None]).to(ctx.dtype), None, None, None, None


_ctc.register_autograd(_backward, setup_context=_keep)


def ctc_losses(log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    """The loss of each utterance in nats, float64; the blank is the last class.

    `log_probs` is (batch, frames, classes), normalised, of at most 32 bits; `targets` is (batch, labels), padded with
    anything; the lengths are whole numbers on the device, where they stay. A transcript that cannot be written on
    its frames has a loss and a gradient of exactly 0. A label that is no class, a length beyond the padding and a
    log-probability that is nan give a loss of nan.
    """
    losses: Tensor = _ctc(log_probs, targets, frames, labels, torch.is_grad_enabled() and log_probs.requires_grad)[0]
    return losses
