"""The loss of CTC: minus the log-probability of a transcript, summed over all ways to place it on the frames.

Graves et al. 2006, "Connectionist temporal classification: labelling unsegmented sequence data with recurrent neural
networks".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def ctc_loss_sum(
    log_probs: Tensor, targets: Tensor, input_lengths: Sequence[int] | Tensor, target_lengths: Sequence[int] | Tensor
) -> Tensor:
    """The sum of the losses of a batch, in nats; the blank is the last class.

    `log_probs` is (batch, frames, classes), normalised over the classes; `targets` is (batch, labels), padded with
    anything. Lengths are numbers on the host. An utterance with fewer frames than `required_frames` of its transcript
    cannot be written at all: it adds exactly 0 to the loss and to every gradient, and so does one without frames.

    It is computed in float64, whatever autocast says, and given as float32. In float32 gradients over 300 frames are
    off by up to 1e-3, because they are differences of log-probabilities of whole paths, numbers around 1000; and
    on CUDA they differ from run to run, because torch adds them up in any order. For 64 utterances of 16.7 s on an H200
    (torch 2.11, 250 labels) forward and backward take 2.8 ms instead of 2.1.

    On CUDA, torch copies the lengths to the device itself and waits for that, in forward and in backward, in all forms
    of its `ctc_loss`: a step with it cannot be captured as one CUDA graph.
    """
    frames, labels = _numbers(input_lengths), _numbers(target_lengths)
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
            torch.tensor(frames),
            torch.tensor(labels),
            blank=log_probs.shape[-1] - 1,
            reduction="sum",
            zero_infinity=True,
        )
    return loss.to(result_dtype)


def _numbers(lengths: Sequence[int] | Tensor) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
