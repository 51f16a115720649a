"""Device, backend and CPU threads of a rank: pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.world.roll_call import Present

DeviceChoice = Literal["auto", "cpu", "cuda"]
OMP = "OMP_NUM_THREADS"


class NoCudaDevice(PacelineError):
    """CUDA was asked for where this process sees no GPU."""

    sentence = "--device cuda: torch sees no CUDA device on this machine"
    hint = "use --device cpu (or auto), or check CUDA_VISIBLE_DEVICES and `nvidia-smi`"


class MoreRanksThanDevices(PacelineError):
    """Two ranks on one GPU cannot talk through NCCL and would only slow each other down."""

    local_size: int
    num_devices: int
    sentence = "{local_size:#rank} on this machine, but torch sees {num_devices:#CUDA device}"
    hint = "start at most {num_devices:#rank} on this machine, or use --device cpu"


def device_name(
    asked: DeviceChoice, local_rank: int, local_size: int, num_devices: int, share_devices: bool = False
) -> str:
    """Return torch's name of a rank's device. A launcher may show each rank only its own GPU: that is `cuda:0`."""
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


def backend_of(roll: Sequence[Present], share_devices: bool) -> str:
    """Return torch's backend: gloo for CPU tensors and Python values, NCCL for tensors on GPUs that nobody shares."""
    gpus = Counter((entry.host, entry.gpu) for entry in roll if entry.gpu is not None)
    if not gpus:
        return "gloo"
    if max(gpus.values()) == 1:
        return "cpu:gloo,cuda:nccl"
    if not share_devices:
        (host, _), _ = gpus.most_common(1)[0]
        ranks = sum(entry.host == host for entry in roll)
        raise MoreRanksThanDevices(ranks, sum(gpu_host == host for gpu_host, _ in gpus))
    return "cpu:gloo,cuda:gloo"


def threads_by_environment(env: Mapping[str, str], launcher: str, local_size: int) -> int | None:
    """Return the CPU threads that the user's `OMP_NUM_THREADS` asks for; None if it does not.

    torchrun sets it to 1 for several ranks where the user has not: that says nothing, and cores are shared out.
    """
    word = env.get(OMP, "").partition(",")[0].strip()
    if not word.isdigit() or int(word) == 0 or (launcher == "torchrun" and local_size > 1 and int(word) == 1):
        return None
    return int(word)


def threads_of(mine: Present, roll: Sequence[Present], asked: int | None = None) -> int:
    """Return the CPU threads of a rank: as asked, else its cores, shared evenly with the ranks that may run on them.

    mpirun gives each rank cores of its own, torchrun does not.
    """
    sharers = sum(entry.host == mine.host and not set(entry.cores).isdisjoint(mine.cores) for entry in roll)
    return threads_per_rank(len(mine.cores), sharers, asked)


def threads_per_rank(cores: int, sharers: int, asked: int | None = None) -> int:
    """Return the CPU threads of one of `sharers` ranks on `cores`, or what was asked for."""
    return asked if asked is not None else max(1, cores // sharers)
