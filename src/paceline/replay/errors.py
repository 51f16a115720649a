"""What can go wrong with a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import PacelineError


class BufferTooSmall(PacelineError):
    """More is to be replayed than can ever be stored."""

    def __init__(self, capacity: int, size: int) -> None:
        super().__init__(f"a replay batch of {size} cannot come from a buffer of {capacity}")
        self.capacity, self.size = capacity, size
        self.hint = f"set `--buffer-size` to {size} or more, or `--minibatch-size` to {capacity} or less"


class Needed(PacelineError):
    """A strategy decides by something that was not given."""

    def __init__(self, strategy: str, name: str, what: str) -> None:
        super().__init__(f"{strategy} admission needs `{name}`: {what}")
        self.hint = f"pass `{name}=...` to `observe`, or choose the strategy 'reservoir'"


class BufferDiverged(PacelineError):
    """The ranks' buffers are not the same any more."""

    hint = (
        "every rank must observe the same steps with the same labels: is the data, its order or the seed another on"
        " some rank, or was the buffer changed on one of them alone?"
    )

    def __init__(self, step: int, digests: Sequence[int]) -> None:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        super().__init__(
            f"the replay buffers of ranks {', '.join(map(str, others))} differ from that of rank 0 after step {step}"
        )
        self.step, self.digests = step, list(digests)


class StateMisfit(PacelineError):
    """A checkpoint's buffer is of another kind."""

    hint = "resume with the buffer settings and the method of the run"

    def __init__(self, num_items: int, fields: Sequence[str], capacity: int, wanted: Sequence[str]) -> None:
        super().__init__(
            f"the checkpoint's replay buffer has {num_items} items of {', '.join(fields)}; this one has room for"
            f" {capacity} of {', '.join(wanted)}"
        )
