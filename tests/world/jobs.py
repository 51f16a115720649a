"""Small jobs that are run as real ranks: `python -m tests.world.jobs NAME`. What they do is their name."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from paceline.core.errors import PacelineError
from paceline.world.discover.environment import World, discover
from paceline.world.failure import together
from paceline.world.failure import watchdog as watch
from paceline.world.failure.together import fail_together
from paceline.world.link import Link
from paceline.world.start import start


class NoSuchFile(PacelineError):
    hint = "give a file that exists"


def meet(world: World) -> Link:
    return start(world, device="cpu", threads=1, start_timeout_s=float(os.environ.get("START_S", "60")), timeout_s=60)


def say(text: str) -> None:
    """One write, so that the lines of two ranks do not mix."""
    os.write(1, f"{text}\n".encode())


def add_up(world: World) -> None:
    with meet(world) as link:
        total = torch.tensor([float(world.rank)])
        link.all_reduce(total)
        if link.is_first:
            say(f"sum {total.item():g} of {world.size} by {world.launcher}, attempt {world.attempt}")


def start_twice(world: World) -> None:
    add_up(world)
    add_up(world)


def one_crashes(world: World) -> None:
    with meet(world) as link:
        link.barrier()
        if world.rank == 1:
            raise RuntimeError("rank one has a bug")
        link.barrier()


def one_crashes_while_others_compute(world: World) -> None:
    watch._GRACE_S = 0.1
    with meet(world):
        if world.rank == 1:
            raise RuntimeError("rank one has a bug")
        while True:
            torch.ones(10).sum()


def compute_forever(world: World) -> None:
    watch._GRACE_S, watch._MOST_REFUSED = 0.1, 2
    with meet(world) as link:
        link.barrier()
        say("ready")
        while True:
            torch.ones(10).sum()


def one_is_mistaken(world: World) -> None:
    with meet(world) as link:
        if world.rank == 1:
            raise NoSuchFile("train.json is not there")
        link.barrier()


def the_first_is_mistaken_before_it_meets(world: World) -> None:
    """Nobody waits for rank 1 once it knows, and it knows while it still waits for the others."""
    if world.rank == 0:
        raise NoSuchFile("train.json is not there")
    add_up(world)


def all_are_mistaken_before_they_meet(world: World) -> None:
    raise NoSuchFile("train.json is not there")


def one_is_killed(world: World) -> None:
    """Rank 1 of the first attempt dies without a word."""
    with meet(world) as link:
        link.barrier()
        if world.rank == 1 and world.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        link.barrier()
        if link.is_first:
            say(f"finished in attempt {world.attempt}")


def one_is_killed_and_the_other_listens(world: World) -> None:
    """As in training, SIGTERM does not end the other: it finds out why its collective broke.

    By itself it would look for longer than the launcher lets it.
    """
    signal.signal(signal.SIGTERM, lambda received, _: None)
    together._LOOK_S = 100.0
    with start(world, device="cpu", threads=1, start_timeout_s=60, timeout_s=400) as link:
        link.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        link.barrier()


def save_when_told(world: World) -> None:
    """Like a training: leave cleanly on SIGTERM and SIGUSR1."""
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: told.append(received))
    with meet(world) as link:
        if link.is_first:
            say("ready")
        stop = torch.zeros(1)
        while not stop.item():
            stop.fill_(float(bool(told)))
            link.all_reduce(stop, op="max")
        link.barrier()
        say(f"rank {world.rank} saved")


def one_is_stuck_on_a_device(world: World) -> None:
    """As with NCCL: the collective itself ends nothing in time; rank 1 does something else."""
    watch._GRACE_S = 0.1
    with meet(world) as link:
        assert link._watch is not None
        link._watch._timeout_s = 3.0
        link._watch.follow_group(link.hosts, is_on_device=True)
        link.barrier()
        if world.rank == 1:
            signal.pause()
        link.barrier()


def come_or_not(world: World) -> None:
    say("here")
    add_up(world)


def wait_for_interrupt(world: World) -> None:
    with meet(world) as link:
        link.barrier()
        say("ready")
        signal.pause()


def show_arguments(world: World) -> None:
    Path(sys.argv[2]).joinpath(str(world.rank)).write_text(" ".join(sys.argv[3:]))


def main() -> int:
    here = discover(os.environ)
    return fail_together(here, lambda: globals()[sys.argv[1]](here))


if __name__ == "__main__":
    sys.exit(main())
