"""Recorder of `--profile`: the chosen steps of all ranks, our phases and torch's own events on one time axis.

Where it is off, the loop runs over its batches as it would without this file.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from paceline.observe.timeline import time_axis, trace
from paceline.world.link import Link

T = TypeVar("T")

AUTO_AFTER, AUTO_STEPS = 10, 5
"""`--profile auto`: steps that pass first (compilation, memory pools), and steps that are recorded."""
MOST_RANKS = 8
"""Ranks of which torch's events are recorded if the user names none: the first ones."""
MOST_ALLOCATIONS = 500_000
MANY_STEPS = 50
"""Beyond it a timeline is large: a warning."""
_MARK = "paceline: one moment on both clocks"
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Recording:
    """Recording of one rank, as it goes to the first one."""

    events: bytes
    snapshot: bytes | None = None
    """History of device memory."""


def window(setting: str, now: int) -> range:
    """Return the steps to record, for a run that goes on after `now` steps."""
    if setting == "auto":
        return range(now + AUTO_AFTER, now + AUTO_AFTER + AUTO_STEPS)
    return StepRange.parse(setting).steps


def build(
    settings: ObserveSettings,
    run: Path | None,
    link: Link,
    clock: Clock,
    num_steps: Callable[[], int],
    say: Callable[[str], None],
) -> Timeline | Off:
    """Build the recorder that the settings ask for; none without a file to write. `num_steps` returns those done."""
    file = settings.profile_file
    folder = run / TIMELINES if run is not None else None if file is None else file.parent
    if folder is None or (settings.profile == "no" and not settings.profile_memory and file is None):
        return Off()
    if file is not None:
        _require_writable(file, link)
    return Timeline(settings, link, clock, folder, num_steps, say, keeps=run is not None)


def _require_writable(file: Path, link: Link) -> None:
    """Raise `CannotWrite` on all ranks if the first could not write the timeline, which is long after the start."""
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


class Off:
    """Recorder of nothing: nothing stands between the loop and its batches."""

    def follow(self, batches: Iterator[T]) -> Iterator[T]:
        return batches

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Timeline:
    """Recorder of a window of steps on this rank; it writes one file of all ranks when the window is over."""

    def __init__(
        self,
        settings: ObserveSettings,
        link: Link,
        clock: Clock,
        folder: Path,
        num_steps: Callable[[], int],
        say: Callable[[str], None],
        *,
        keeps: bool = True,
    ) -> None:
        """`keeps`: `folder` is the run's, and keeps the timeline beside one that `profile_file` names."""
        ranks, now = settings.profile_ranks, num_steps()
        for rank in ranks:
            if rank >= link.world.size:
                last = link.world.size - 1
                raise InvalidSetting(
                    f"`profile_ranks` has {rank}, but the ranks of this run are 0 to {last}",
                    hint=f"`--profile-ranks {last}`, or leave it out for the first {MOST_RANKS}",
                )
        self.steps = window("auto" if settings.profile == "no" else settings.profile, now)
        self._with_torch = link.world.rank in (ranks or range(MOST_RANKS))
        self._with_memory = settings.profile_memory
        self._with_history = settings.profile_memory and self._with_torch and link.device.type == "cuda"
        self._link, self._clock, self._folder, self._say = link, clock, folder, say
        self._file, self._keeps = settings.profile_file, keeps
        self._num_steps = num_steps
        self._profiler: profile | None = None
        self._tape: trace.Tape | None = None
        self._is_over = False
        if self.steps.stop <= now:
            self._is_over = True
            say(f"`profile`: steps {_shown(self.steps)} are done already, nothing is recorded: `--profile auto`")
        elif len(self.steps) > MANY_STEPS:
            steps = counted(len(self.steps), "step")
            say(f"`profile`: torch's events of {steps} are kept in memory until the last is done")

    # -- along the run -------------------------------------------------------------------------------------------

    def follow(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the same batches; the time from asking for one to asking for the next is a step."""
        while True:
            self._between(self._num_steps())
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the recording, whether or not its steps were reached. All ranks must call it."""
        if self._tape is not None:
            self._note_step(self._num_steps())
            self._end()
        elif not self._is_over:
            short = f"the run ended before step {self.steps.start}"
            self._say(f"`profile`: {short}, nothing is recorded: `--profile 0:{AUTO_STEPS}`")

    def abandon(self) -> None:
        """Give up after a failure: nothing is written, and the next run of this process can record."""
        self._clock.follow(None)
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._tape is not None and self._with_history:
            record_allocations(None)

    def _between(self, num_steps: int) -> None:
        if self._is_over:
            return
        if self._tape is not None:
            self._note_step(num_steps)
            if num_steps >= self.steps.stop:
                self._end()
        elif num_steps in self.steps:
            self._begin(num_steps)

    # -- recording -----------------------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        self._clock.lap("other")
        if self._with_history:
            record_allocations(MOST_ALLOCATIONS)
        if self._with_torch:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._link.device.type == "cuda" else [])]
            self._profiler = profile(activities=kinds, profile_memory=self._with_memory)
            self._profiler.start()
            self._marks = [_mark() for _ in range(4)]  # the first one pays for what the others find ready
        self._link.barrier()  # starting takes ranks unequally long, which is not what a user wants to see
        self._clock.lap("logging")
        self._tape = trace.Tape()
        self._first = self._step = step
        self._began = self._step_began = perf_counter_ns()
        self._note_memory(self._began)
        self._clock.follow(self._note_lap)

    def _note_lap(self, phase: str, began_ns: int, ended_ns: int) -> None:
        assert self._tape is not None
        self._tape.laps.append((phase, began_ns, ended_ns))
        self._note_memory(ended_ns)

    def _note_memory(self, moment_ns: int) -> None:
        if self._with_memory and self._tape is not None:
            self._tape.memory.append((moment_ns, resident_bytes()))

    def _note_step(self, num_steps: int) -> None:
        assert self._tape is not None
        self._clock.lap("other")
        now = perf_counter_ns()
        if num_steps > self._step:  # else an epoch was over: what was between belongs to no step
            self._tape.steps.append((self._step, self._step_began, now))
        self._step, self._step_began = num_steps, now

    def _end(self) -> None:
        """Stop, bring the ranks together, and let the first one write."""
        tape, self._tape, self._is_over = self._tape, None, True
        profiler, self._profiler = self._profiler, None
        assert tape is not None
        self._clock.follow(None)
        if self._link.device.type == "cuda":
            torch.cuda.synchronize(self._link.device)  # what was launched in the window belongs to it
        if profiler is not None:
            profiler.stop()
        snapshot = self._device_memory()
        offset = time_axis.measure(self._link)
        began_ns = min([self._began, *(began for _, began, _ in tape.laps[:1])]) + offset.ns
        everyone = self._link.gather_objects((began_ns, offset.uncertainty_ns))
        origin_ns, uncertainty_ns = min(began for began, _ in everyone), max(unsure for _, unsure in everyone)
        events = self._events(tape, profiler, offset.ns - origin_ns)
        # torch has seen what came just before the window; readers of timelines drop what is before 0.
        first_us = min(self._link.gather_objects(trace.earliest_us(events)))
        part = Recording(trace.pack(trace.earlier(events, first_us)), snapshot)
        self._write(in_turn(self._link, part), uncertainty_ns)
        self._clock.lap("logging")

    def _events(self, tape: trace.Tape, profiler: profile | None, shift_ns: int) -> list[trace.Event]:
        rank, host = self._link.world.rank, self._link.hosts[self._link.world.rank]
        events = trace.rank_events(rank, f"{host}, {self._link.device}", tape, shift_ns)
        if profiler is not None:
            of_torch = exported(profiler)
            shift_us = shift_ns / 1e3 + _clock_difference_us(of_torch, self._marks)
            unmarked = [event for event in of_torch if event.get("name") != _MARK]
            events += trace.torch_events(rank, unmarked, shift_us, os.getpid())
        return events

    def _write(self, parts: Iterator[Recording], uncertainty_ns: int) -> None:
        """Write on the first rank. A full disk does not end a training run: there is a message."""
        name = f"steps-{self._first}-{max(self._first, self._step - 1)}"
        path = self._folder / f"{name}.json.gz"
        if self._link.is_first:
            about = {"ranks": self._link.world.size, "clocks_agree_to_us": uncertainty_ns / 1e3, "made_by": "paceline"}
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                trace.write(path, self._unpack(parts, name), about)
                if self._file is not None:
                    trace.copy(path, self._file)
                if not self._keeps:
                    path.unlink()
                self._tell(self._file or path, uncertainty_ns)
            except OSError as error:
                self._say(f"the timeline could not be written: {error}")
        for _ in parts:  # the rest, so that no rank waits for it
            pass

    def _unpack(self, parts: Iterator[Recording], name: str) -> Iterator[bytes]:
        """Yield events for the timeline; histories of memory go to files of their own."""
        for rank, part in enumerate(parts):
            if part.snapshot is not None:
                file = self._folder / f"{name}-memory-rank-{rank}.pickle"
                file.write_bytes(zlib.decompress(part.snapshot))
            yield part.events

    def _device_memory(self) -> bytes | None:
        if not self._with_history:
            return None
        history = zlib.compress(pickle.dumps(allocations()), 1)
        record_allocations(None)
        return history

    def _tell(self, path: Path, uncertainty_ns: int) -> None:
        ranks = self._link.world.size
        how = f"of {counted(ranks, 'rank')}" + (" on one time axis" if ranks > 1 else "")
        if uncertainty_ns:
            how += f" (to {uncertainty_ns / 1e3:.0f} us)"
        self._say(f"timeline {how} in {path}: open it in https://ui.perfetto.dev or chrome://tracing")
        if self._with_memory and self._link.device.type == "cuda":
            self._say("histories of device memory beside it: open them in https://pytorch.org/memory_viz")
        elif self._with_memory:
            self._say("memory is in the timeline: torch's allocations and the process's own (a CPU has no snapshots)")


def in_turn(link: Link, part: Recording) -> Iterator[Recording]:
    """Yield the ranks' recordings, one after the other, so that no rank holds all. All ranks must go through it."""
    for rank in range(link.world.size):
        yield link.broadcast_object(part if rank == link.world.rank else None, src=rank)


def exported(profiler: profile) -> list[trace.Event]:
    """Return the events of torch.profiler, as its own export has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[trace.Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def resident_bytes() -> int:
    """Return the memory that this process has now; 0 where the system does not say."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _mark() -> tuple[int, int]:
    """Make an event for torch.profiler; return our clock just before and after it."""
    before = perf_counter_ns()
    with record_function(_MARK):
        pass
    return before, perf_counter_ns()


def _clock_difference_us(events: list[trace.Event], marks: list[tuple[int, int]]) -> float:
    """Return what to add to torch's times to have ours, from the quickest of the marks."""
    marked = [event for event in events if event.get("name") == _MARK and event.get("ph") == "X"]
    began, ended = min(marks, key=lambda mark: mark[1] - mark[0])
    event = sorted(marked, key=lambda each: float(each["ts"]))[marks.index((began, ended))]
    return float((began + ended) / 2e3 - (event["ts"] + event["dur"] / 2))


def _shown(steps: range) -> str:
    return f"{steps.start} to {steps.stop - 1}"
