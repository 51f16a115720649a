"""What of its machine one rank may use: which device, how many CPU threads. Pure functions."""

from __future__ import annotations

from typing import Literal

from paceline.core.errors import PacelineError

DeviceChoice = Literal["auto", "cpu", "cuda"]


class NoCudaDevice(PacelineError):
    """CUDA was asked for where this process sees no GPU."""

    sentence = "--device cuda: torch sees no CUDA device on this machine"
    hint = "use --device cpu (or auto), or check CUDA_VISIBLE_DEVICES and `nvidia-smi`"


class MoreRanksThanDevices(PacelineError):
    """Two ranks on one GPU cannot talk through NCCL and would only slow each other down."""

    local_size: int
    num_devices: int
    sentence = "{local_size} ranks on this machine, but torch sees {num_devices} CUDA device(s)"
    hint = "start at most {num_devices} ranks on this machine, or use --device cpu"


def device_name(
    asked: DeviceChoice, local_rank: int, local_size: int, num_devices: int, share_devices: bool = False
) -> str:
    """The device of a rank, as torch names it. A launcher may show each rank only its own GPU: that is `cuda:0`."""
    if asked == "cpu" or (asked == "auto" and num_devices == 0):
        return "cpu"
    if num_devices == 0:
        raise NoCudaDevice
    if num_devices == 1 or share_devices:
        # With one visible GPU and several ranks, whether it is the same GPU is known only once they meet.
        return f"cuda:{local_rank % num_devices}"
    if local_size > num_devices:
        raise MoreRanksThanDevices(local_size, num_devices)
    return f"cuda:{local_rank}"


def threads_per_rank(cores: int, sharers: int, asked: int | None = None) -> int:
    """CPU threads for a rank that shares `cores` evenly with others, `sharers` in all; or just what was asked."""
    return asked if asked is not None else max(1, cores // sharers)
