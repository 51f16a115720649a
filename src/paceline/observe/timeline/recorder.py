"""Recorder of `--profile`: phases of all ranks and events of torch.profiler for a few steps, in one file."""

from __future__ import annotations

import json
import os
import pickle
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.config.settings import ObserveSettings
from paceline.config.step_range import StepRange
from paceline.core.disk import CannotWrite, check_writable
from paceline.core.errors import InvalidSetting
from paceline.core.run_folder import TIMELINES
from paceline.core.torch_private import allocations, record_allocations
from paceline.core.units import counted
from paceline.observe.clock import Clock
from paceline.observe.timeline import trace
from paceline.world.link import Link

T = TypeVar("T")

AUTO_AFTER, AUTO_STEPS = 10, 5
"""`--profile auto`: steps that pass first (compilation, memory pools), and steps that are recorded."""
MAX_TORCH_RANKS = 8
"""Number of ranks that record torch's events unless `--profile-ranks` names them."""
MAX_ALLOCATIONS = 500_000
MANY_STEPS = 50
"""Number of steps above which a warning is printed."""
NUM_BARRIERS, NUM_MARKS = 16, 4
_MARK = "paceline: mark "
_BOOT, _STATM = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/statm")


def window(setting: str, now: int) -> range:
    """Return the steps to record, for a run that continues after `now` steps."""
    if setting in ("auto", "no"):  # `--profile-memory` and `--profile-file` alone mean `auto`
        return range(now + AUTO_AFTER, now + AUTO_AFTER + AUTO_STEPS)
    return StepRange.parse(setting).steps


def _require_writable(file: Path, link: Link) -> None:
    """Raise `CannotWrite` on all ranks if the first one could not write the file, before any step is trained."""
    problem: tuple[int | None, str] | None = None
    if link.is_first:
        try:
            check_writable(file)
        except OSError as error:
            problem = error.errno, error.strerror or str(error)
    problem = link.broadcast_object(problem)
    if problem is not None:
        advice = "choose another `--profile-file` (or HOROVOD_TIMELINE), in a folder that you may write to"
        raise CannotWrite(file, OSError(*problem), advice)


class Timeline:
    """Recorder of a window of steps on this rank; the first rank writes the file of all ranks when it is over.

    Without a setting that asks for it, or without a file to write, it records nothing.
    """

    def __init__(
        self,
        settings: ObserveSettings,
        run: Path | None,
        link: Link,
        clock: Clock,
        num_steps: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        ranks, now, last = settings.profile_ranks, num_steps(), link.world.size - 1
        if ranks and max(ranks) > last:
            raise InvalidSetting(
                f"`profile_ranks` has {max(ranks)}, but the ranks of this run are 0 to {last}",
                hint=f"`--profile-ranks {last}`, or leave it out for the first {MAX_TORCH_RANKS}",
            )
        self._with_torch = link.world.rank in (ranks or range(MAX_TORCH_RANKS))
        self._with_memory = settings.profile_memory
        self._on_gpu = link.device.type == "cuda"
        self._with_history = self._with_memory and self._with_torch and self._on_gpu
        self._link, self._clock, self._num_steps, self._say = link, clock, num_steps, say
        self._run, self._file = run, settings.profile_file
        self._profiler: profile | None = None
        self._marks: list[tuple[int, int]] = []
        self._events: list[trace.Event] = []
        is_wanted = settings.profile != "no" or self._with_memory or self._file is not None
        self._is_recording, self._is_over = False, not is_wanted or (run is None and self._file is None)
        self.steps = range(0) if self._is_over else window(settings.profile, now)
        if self._is_over:
            return
        if self._file is not None:
            _require_writable(self._file, link)
        if self.steps.stop <= now:
            self._is_over = True
            steps = f"steps {self.steps.start} to {self.steps.stop - 1}"
            say(f"`profile`: {steps} are done already, nothing is recorded: `--profile auto`")
        elif len(self.steps) > MANY_STEPS:
            steps = counted(len(self.steps), "step")
            say(f"`profile`: torch's events of {steps} are kept in memory until the last is done")

    def follow(self, batches: Iterator[T]) -> Iterator[T]:
        """Return the same batches; a step lasts from the request for its batch to the request for the next one."""
        return batches if self._is_over else self._follow(batches)

    def _follow(self, batches: Iterator[T]) -> Iterator[T]:
        while True:
            num_steps = self._num_steps()
            if self._is_recording:
                self._end_step(num_steps)
                if num_steps >= self.steps.stop:
                    self._finish()
            elif num_steps in self.steps and not self._is_over:
                self._begin(num_steps)
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the recording, whether or not its steps were reached. All ranks must call it."""
        if self._is_recording:
            self._end_step(self._num_steps())
            self._finish()
        elif not self._is_over:
            short = f"the run ended before step {self.steps.start}"
            self._say(f"`profile`: {short}, nothing is recorded: `--profile 0:{AUTO_STEPS}`")

    def abandon(self) -> None:
        """Stop after a failure without writing, so that the next run of this process can record."""
        self._clock.follow(None)
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._is_recording and self._with_history:
            record_allocations(None)

    def _begin(self, step: int) -> None:
        self._clock.lap("other")
        if self._with_history:
            record_allocations(MAX_ALLOCATIONS)
        if self._with_torch:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profiler = profile(activities=kinds, profile_memory=self._with_memory)
            self._profiler.start()
            self._marks = [_mark(number) for number in range(NUM_MARKS)]
        self._link.barrier()  # ranks take unequally long to start, which is not part of the first step
        self._clock.lap("logging")
        self._is_recording, self._first, self._step, self._step_began = True, step, step, perf_counter_ns()
        self._clock.follow(self._note_lap)

    def _note_lap(self, phase: str, began_ns: int, ended_ns: int) -> None:
        rank = self._link.world.rank
        self._events.append(trace.span(phase, trace.PHASE, rank, began_ns, ended_ns))
        if self._with_memory:
            self._events.append(trace.counter("host memory", rank, ended_ns / 1e3, resident_bytes()))

    def _end_step(self, num_steps: int) -> None:
        self._clock.lap("other")
        now = perf_counter_ns()
        if num_steps > self._step:  # otherwise an epoch has ended: its validation belongs to no step
            rank = self._link.world.rank
            self._events.append(trace.span(f"step {self._step}", trace.STEP, rank, self._step_began, now))
        self._step, self._step_began = num_steps, now

    def _finish(self) -> None:
        """Stop recording, and write the events of all ranks on the first one."""
        self._clock.follow(None)
        if self._on_gpu:
            torch.cuda.synchronize(self._link.device)  # kernels that were launched in the window belong to it
        snapshot, events = None, self._events
        if self._profiler is not None:
            self._profiler.stop()
            events += self._torch_events(self._profiler)
        if self._with_history:
            snapshot = zlib.compress(pickle.dumps(allocations()), 1)
            record_allocations(None)
        self._profiler, self._events, self._is_recording, self._is_over = None, [], False, True
        offset_ns, uncertainty_ns = clock_offset(self._link)
        earliest_us = min(trace.moments(events)) + offset_ns / 1e3
        everyone = self._link.gather_objects((earliest_us, uncertainty_ns))
        origin_us = min(earliest for earliest, _ in everyone)  # viewers drop events before 0
        rank = self._link.world.rank
        events += trace.names(rank, f"{self._link.hosts[rank]}, {self._link.device}")
        packed = trace.pack(events, offset_ns / 1e3 - origin_us)
        parts: list[bytes] = []
        snapshots: dict[int, bytes] = {}
        for number in range(self._link.world.size):  # one at a time: a gather would bring all to every rank
            events_of_rank, history = self._link.broadcast_object(
                (packed, snapshot) if number == rank else None, number
            )
            if self._link.is_first:
                parts.append(events_of_rank)
                snapshots.update({number: history} if history is not None else {})
        if self._link.is_first:
            self._write(parts, snapshots, max(uncertain for _, uncertain in everyone))
        self._clock.lap("logging")

    def _torch_events(self, profiler: profile) -> list[trace.Event]:
        """Return the events of torch.profiler by our clock: the shortest of the marks has the same middle in both."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            events: list[trace.Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        shortest = min(range(NUM_MARKS), key=lambda number: self._marks[number][1] - self._marks[number][0])
        mark = next(event for event in events if event.get("name") == f"{_MARK}{shortest}" and event["ph"] == "X")
        shift_us = sum(self._marks[shortest]) / 2e3 - (mark["ts"] + mark["dur"] / 2)
        unmarked = (event for event in events if not event["name"].startswith(_MARK))
        return trace.torch_events(self._link.world.rank, unmarked, shift_us, os.getpid())

    def _write(self, parts: Sequence[bytes], snapshots: Mapping[int, bytes], uncertainty_ns: int) -> None:
        """Write the files. A full disk does not end a training run: it is reported."""
        name = f"steps-{self._first}-{max(self._first, self._step - 1)}"
        in_run = [] if self._run is None else [self._run / TIMELINES / f"{name}.json.gz"]
        paths = in_run if self._file is None else [*in_run, self._file]
        about = {"ranks": len(parts), "clocks_agree_to_us": uncertainty_ns / 1e3, "made_by": "paceline"}
        try:
            for path in paths:
                trace.write(path, parts, about)
            for rank, snapshot in snapshots.items():
                paths[0].with_name(f"{name}-memory-rank-{rank}.pickle").write_bytes(zlib.decompress(snapshot))
        except OSError as error:
            self._say(f"the timeline could not be written: {error}")
            return
        how = f"of {counted(len(parts), 'rank')}" + (" on one time axis" if len(parts) > 1 else "")
        how += f" (to {uncertainty_ns / 1e3:.0f} us)" if uncertainty_ns else ""
        self._say(f"timeline {how} in {paths[-1]}: open it in https://ui.perfetto.dev or chrome://tracing")
        if snapshots:
            self._say("histories of device memory beside it: open them in https://pytorch.org/memory_viz")


def clock_offset(
    link: Link, machine: str | None = None, now_ns: Callable[[], int] = perf_counter_ns
) -> tuple[int, int]:
    """Return what to add to this rank's clock to have the first rank's, and the uncertainty. All ranks must call it.

    Ranks of one machine read one clock. No rank leaves a barrier before the last one has entered it: that moment lies
    between entry and exit by the clock of each rank, so that each barrier bounds the difference of two clocks.
    """
    barriers = []
    for _ in range(NUM_BARRIERS):
        entered = now_ns()
        link.barrier()
        barriers.append((entered, now_ns()))
    everyone = link.gather_objects((_machine() if machine is None else machine, barriers))
    machines = [machine for machine, _ in everyone]
    clock = machines.index(machines[link.world.rank])  # by the first rank of this machine
    return (0, 0) if clock == 0 else offset(everyone[0][1], everyone[clock][1])


def offset(first: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the difference between two clocks and its uncertainty, from entry to and exit from the same barriers."""
    low = max(entered - exited for (entered, _), (_, exited) in zip(first, other, strict=True))
    high = min(exited - entered for (_, exited), (entered, _) in zip(first, other, strict=True))
    return (low + high) // 2, (high - low) // 2 + 1


def _machine() -> str:
    """Return a name that only processes with the same clock share."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not report it."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _mark(number: int) -> tuple[int, int]:
    """Make an event for torch.profiler; return our clock just before and after it."""
    before = perf_counter_ns()
    with record_function(f"{_MARK}{number}"):
        pass
    return before, perf_counter_ns()
