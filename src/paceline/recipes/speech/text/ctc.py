"""CTC loss: minus the log-probability of a transcript, summed over all ways to place it on the frames.

Graves et al. 2006, "Connectionist temporal classification: labelling unsegmented sequence data with recurrent neural
networks".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.world.installed import has_triton

Lengths = Sequence[int] | Tensor


def ctc_loss_sum(log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths) -> Tensor:
    """Return the sum of the losses of a batch, in nats; the blank is the last class.

    `log_probs` is (batch, frames, classes), normalised over the classes; `targets` is (batch, labels), padded with
    anything. An utterance with fewer frames than `required_frames` of its transcript cannot be written at all: it
    adds exactly 0 to the loss and to every gradient, and so does one without frames.

    Gradients are within 1e-5 of float64's, whatever autocast says, and the same in every run; torch's own in float32
    are off by up to 1e-3, because they are differences of log-probabilities of whole paths, numbers around 1000, and
    on CUDA it adds them up in any order. So on CUDA the loss is a kernel of ours (`recipes.speech.kernels.ctc`), where
    Triton is installed; elsewhere it is torch's in float64. The result is float32.

    Lengths are numbers on the host or a tensor. The kernel reads them on the device: given as tensors there, nothing
    waits and a step can be captured as one CUDA graph. torch's loss needs them on the host and waits for them.
    """
    if is_by_kernel(log_probs):
        from paceline.recipes.speech.kernels.ctc import ctc_losses  # Triton may be missing where this is not reached

        device = log_probs.device
        frames, labels = _on_device(input_lengths, device), _on_device(target_lengths, device)
        return ctc_losses(log_probs, targets.to(device, non_blocking=True), frames, labels).sum().float()
    return _by_torch(log_probs, targets, _numbers(input_lengths), _numbers(target_lengths))


def is_by_kernel(log_probs: Tensor) -> bool:
    """Return True if their loss is computed by our kernel; not in float64, where torch's has more digits."""
    return log_probs.is_cuda and log_probs.dtype != torch.float64 and has_triton()


def _by_torch(log_probs: Tensor, targets: Tensor, frames: list[int], labels: list[int]) -> Tensor:
    # torch's CUDA kernels look at the frame before the first one of an utterance without frames
    kept = [number for number, length in enumerate(frames) if length > 0]
    if len(kept) < len(frames):
        chosen = torch.tensor(kept, dtype=torch.int64, device=log_probs.device)
        log_probs, targets = log_probs[chosen], targets[chosen.to(targets.device)]
        frames, labels = [frames[number] for number in kept], [labels[number] for number in kept]
    result_dtype = torch.promote_types(log_probs.dtype, torch.float32)
    if not kept:
        return log_probs.sum(dtype=result_dtype)
    with torch.autocast(log_probs.device.type, enabled=False):
        loss = F.ctc_loss(
            log_probs.double().transpose(0, 1),
            targets.to(log_probs.device, non_blocking=True),
            torch.tensor(frames, device="cpu"),
            torch.tensor(labels, device="cpu"),
            blank=log_probs.shape[-1] - 1,
            reduction="sum",
            zero_infinity=True,
        )
    return loss.to(result_dtype)


def _numbers(lengths: Lengths) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _on_device(lengths: Lengths, device: torch.device) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    if lengths.device != device:
        lengths = lengths.pin_memory().to(device, non_blocking=True)
    return lengths
