"""How a training run computes its steps, where that is left open: with `-O4` candidates are measured before the first
step; with `auto`, on a GPU, the fastest known one is taken. The choice is stored with the run.

The autotuner gets values and returns a `Tuned`; `Stages` applies it.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.config.settings import TrainConfig
from paceline.core.provenance import version_of
from paceline.core.units import counted
from paceline.data.grain import Grain
from paceline.observe.progress import Progress
from paceline.speed import layers, precision
from paceline.speed.autotune.cache import Cache, cache_folder
from paceline.speed.autotune.candidates import Candidate, candidates
from paceline.speed.autotune.choice import CannotRun, Choice, choose
from paceline.speed.autotune.known import Kind, known_ways
from paceline.speed.compile_kernels import load_early
from paceline.speed.graphs import MOST_GRAPHS, CudaRecorder
from paceline.speed.precision import Precision
from paceline.train.autotune import timing
from paceline.train.autotune.limits import why_no_graphs, why_no_kernels
from paceline.train.autotune.shapes import FitsShapes, Padding, Pick, costly_shapes, shapes_ahead
from paceline.train.feed import Feed
from paceline.train.loss import OutOfMemory
from paceline.train.scalars import Scalars
from paceline.train.stepper import Stepper
from paceline.train.task import Task, accelerate, recordable_of
from paceline.world.link import Link

MEASURED_SHAPES = 2
"""Shapes of grains that candidates are compared on: those that an epoch spends most time on."""
RECORDED_SHARE = 0.98
"""Of a long run, shapes are recorded before the first step until they are so much of its cost, rarer ones when they are
seen for the second time; of a short one those that come more than once. In fp16, where a new shape takes seconds to
plan for, all of them are, and so are shapes that were chosen to be few: a grain that runs without a graph takes as long
as recording it."""
MATTERS = {
    "optimizer",
    "momentum",
    "groups",
    "larc",
    "larc_decay",
    "larc_zero",
    "larc_exclude",
    "precision",
    "compile_mode",
    "loss_scale",
    "checkpoint_activations",
}
"""Settings that a choice depends on by their value, ..."""
MATTERS_IF_SET = ("clip_norm", "clip_value", "ema", "swa_start", "weight_decay")
"""... and those by whether they are set."""


class ContestStopped(Exception):
    """The run was asked to stop while candidates were measured; it never leaves this module."""


@dataclass(frozen=True)
class Tuned:
    """Result of the autotuner: `choice` is stored with the run, `precision` is what the stepper computes in."""

    choice: Choice
    precision: Precision


def is_asked(config: TrainConfig, capabilities: precision.Capabilities) -> bool:
    """Return True if the way to compute a step is to be chosen: at `-O4`, and where no level is typed on a GPU that has
    more than one."""
    if config.level != "auto":
        return config.level == 4
    if capabilities.device != "cuda" or config.precision == "fp64" or config.shard != "none":
        return False
    return capabilities.bf16 if config.precision is None else capabilities.fp16


class Autotuner:
    """Chooses the fastest candidate for a task on this device. It changes neither model nor stepper.

    All ranks get the choice of the first one.
    """

    def __init__(
        self, task: Task, config: TrainConfig, link: Link, progress: Progress, wants_stop: Callable[[], bool]
    ) -> None:
        """`wants_stop` is asked between two candidates of a contest."""
        self._task, self._config, self._link, self._progress = task, config, link, progress
        self._wants_stop = wants_stop
        self._say = progress.say
        self._asked: Literal["auto", 4] = "auto" if config.level == "auto" else 4
        self._capabilities = precision.capabilities(link.device)
        self._levels = precision.levels(config.precision, self._capabilities)
        self._no_kernels = why_no_kernels(task, config, self._capabilities)
        self._no_graphs = why_no_graphs(task, config, self._capabilities, link.has_group)
        if self._no_kernels is None and link.device.type == "cuda":
            load_early(link.device)

    @property
    def initial(self) -> Precision:
        """Precision until there is a choice: nothing is compiled in vain."""
        return replace(self._precision(self._plain), is_open=True)

    def recall(self, record: Mapping[str, Any]) -> Tuned | None:
        """Return what the run chose before it was interrupted, without measuring; None where this device lacks it."""
        choice = Choice.read(record)
        chosen = choice.candidate
        # Recording changes no number: a run may go on without it, and with it again later. Kernels round differently.
        possible = replace(chosen, graphs=chosen.graphs and self._no_graphs is None)
        if possible.level not in self._levels or (possible.kernels and self._no_kernels is not None):
            self._say(f"the run computed as {chosen.name}, which cannot be done here: {self._word} chooses anew")
            return None
        return self._tuned(choice, "as before", possible)

    def choose(self, model: torch.nn.Module, feed: Feed) -> Tuned | None:
        """Take what the cache has, or what is known, or measure candidates on copies of the model; None if the first
        rank was asked to stop meanwhile.

        All ranks must call it: what one of them cannot do is done by none.
        """
        if feed.is_stream:
            unmeasured = Choice(Candidate(self._levels[-1]) if self._asked == 4 else self._plain)
            return self._tuned(unmeasured, "not measured, since nobody knows the shapes of iterable data")
        self._agree()
        answer: tuple[dict[str, Any] | None, str] | None = None
        choice: Choice | None
        if self._link.is_first:
            try:
                choice, source = self._find(model, feed)
            except (torch.OutOfMemoryError, OutOfMemory):
                if self._config.shard == "none" or not self._link.has_group:
                    raise
                choice = Choice(Candidate(self._levels[-1]) if self._asked == 4 else self._plain)
                source = "not measured, since there is no room for a whole copy of a model that is sharded"
            except ContestStopped:
                choice, source = None, ""
            answer = None if choice is None else choice.record(), source
        record, source = self._link.broadcast_object(answer)
        return None if record is None else self._tuned(Choice.read(record), source)

    # -- how it is done ------------------------------------------------------------------------------------------

    @property
    def _word(self) -> str:
        return "-O4" if self._asked == 4 else "auto"

    @property
    def _plain(self) -> Candidate:
        """The level that needs neither measuring nor compiling."""
        return Candidate(min(self._levels[-1], 2))

    def _agree(self) -> None:
        """Leave out what any rank cannot do; GPUs of several generations count as none that is known."""
        own = self._no_kernels, self._no_graphs, self._capabilities.generation
        everyone = self._link.gather_objects(own)
        self._no_kernels, self._no_graphs = (
            next((why for why in reasons if why is not None), None) for reasons in list(zip(*everyone, strict=True))[:2]
        )
        generations = {each[2] for each in everyone}
        self._generation = generations.pop() if len(generations) == 1 else None

    def _find(self, model: torch.nn.Module, feed: Feed) -> tuple[Choice, str]:
        cache, kind = Cache(cache_folder(os.environ)), self._kind(model)
        can_graph = self._no_graphs is None
        if self._asked == "auto" and kind == "plain" and not can_graph and cache.is_empty:
            return self._known(self._plain, "nothing faster is known for this task", ())
        picks = costly_shapes(feed.plan(0), MEASURED_SHAPES, feed.collate)
        grains = list(feed.read((pick.step, pick.number) for pick in picks))
        to_try = self._candidates(kind)
        facts = self._facts(model, grains, to_try)
        cached = cache.find(facts)
        if cached is not None:
            return cached, "measured by an earlier run on this machine"
        workload = timing.Workload(self._task, self._config, self._link, model, grains)
        if self._asked == "auto":
            return self._take_known(kind, workload, cache, {**facts, "asked": "auto"})
        return self._contest(to_try, workload, cache, facts), "measured"

    def _take_known(
        self, kind: Kind, workload: timing.Workload, cache: Cache, facts: Mapping[str, Any]
    ) -> tuple[Choice, str]:
        """Return the fastest way that is known and runs here; what was tried once is remembered."""
        earlier = cache.find(facts)
        if earlier is not None:
            return earlier, "the fastest known that runs here, as an earlier run has found"
        known = known_ways(self._generation, kind, can_graph=self._no_graphs is None)
        failures: list[str] = []
        for way in known.ways[:-1]:
            try:
                self._compile([way], workload)
                timing.try_out(way, workload=workload)
            except CannotRun as error:
                failures.append(f"{way.name} cannot run here: {error}")
                self._say(f"  {failures[-1]}")
                continue
            break
        else:
            way = known.ways[-1]  # the plainest: if it does not run either, the run itself says why
        reason = known.reason if not failures else "the fastest known that runs here"
        choice, source = self._known(way, reason, (*failures, *known.notes))
        if not any(each.endswith(timing.FULL) for each in failures):  # memory may be free another time
            cache.keep(facts, choice)
        return choice, source

    def _known(self, way: Candidate, reason: str, notes: Sequence[str]) -> tuple[Choice, str]:
        lacking = [why for why in (self._no_kernels, self._no_graphs) if why is not None]
        return Choice(way, notes=(*notes, *lacking)), f"{reason}, not measured for this run (`-O4` measures)"

    def _contest(
        self, to_try: Sequence[Candidate], workload: timing.Workload, cache: Cache, facts: Mapping[str, Any]
    ) -> Choice:
        self._say(f"-O4: timing {len(to_try)} ways to compute a step, once on this machine")
        self._compile(to_try, workload)
        choice = self._measure(to_try, workload)
        self._check_stop()  # the last candidates may have been timed beside whatever ends this run
        reasons = [why for why in (self._no_kernels, self._no_graphs) if why is not None]
        choice = replace(choice, notes=(*choice.notes, *reasons))
        if any("-O3" in name for name in choice.step_ms):
            torch.compiler.reset()  # code that was compiled for copies of the model is of no more use
        problem = cache.keep(facts, choice)
        if problem is not None:
            self._say(problem)
        return choice

    def _compile(self, ways: Sequence[Candidate], workload: timing.Workload) -> None:
        """Compile the kernels of the first way that has some, on all cores."""
        for way in ways:
            if way.kernels:
                shown = self._progress.countdown("compiling kernels")
                timing.compile_kernels(way, shown, workload=workload)
                return

    def _measure(self, to_try: Sequence[Candidate], workload: timing.Workload) -> Choice:
        steps, began = len(workload.grains), time.perf_counter()
        shown, places = self._progress.countdown("timing ways"), {way: place for place, way in enumerate(to_try)}

        def measure(candidate: Candidate, limit_s: float) -> float:
            self._check_stop()
            shown(places[candidate], len(to_try))
            seconds = timing.step_seconds(candidate, limit_s * steps, workload=workload) / steps
            self._say(f"  {candidate.name}: {1e3 * seconds:.4g} ms")
            return seconds

        def in_turns(last: Sequence[Candidate]) -> dict[Candidate, float]:
            self._check_stop()
            rounds = timing.in_turns(last, workload=workload)
            seconds = {candidate: each / steps for candidate, each in rounds.items()}
            line = ", ".join(f"{candidate.name} {1e3 * each:.4g} ms" for candidate, each in seconds.items())
            self._say(f"  in turns: {line}")
            return seconds

        try:
            return choose(to_try, measure, in_turns, lambda: time.perf_counter() - began)
        finally:
            shown(len(to_try), len(to_try))

    def _check_stop(self) -> None:
        if self._wants_stop():
            raise ContestStopped

    def _kind(self, model: torch.nn.Module) -> Kind:
        """Return how much of the network the task's kernels compute."""
        if self._no_kernels is not None:
            return "plain"
        try:
            return "partly" if accelerate(self._task, copy.deepcopy(model)) else "covered"
        except Exception:  # measuring, or trying out, will report whatever it runs into
            return "covered"

    def _candidates(self, kind: Kind) -> list[Candidate]:
        levels = precision.distinct(self._levels, self._config.precision, self._capabilities)
        return candidates(
            levels,
            has_kernels=self._no_kernels is None,
            can_graph=self._no_graphs is None,
            leaves_some=kind == "partly",
        )

    def _tuned(self, choice: Choice, source: str, possible: Candidate | None = None) -> Tuned:
        """`possible` is the part of the choice that this device has, where that is not all of it."""
        used = choice
        if possible not in (None, choice.candidate):
            used = replace(choice, candidate=possible, notes=(*choice.notes, *filter(None, [self._no_graphs])))
        resolved = self._precision(used.candidate)
        return Tuned(choice, replace(resolved, notes=(used.line(source, self._word), *used.notes, *resolved.notes)))

    def _precision(self, candidate: Candidate) -> Precision:
        return precision.resolve_candidate(candidate, self._config.precision, self._capabilities, self._asked)

    def _facts(self, model: torch.nn.Module, grains: list[Grain], to_try: list[Candidate]) -> dict[str, Any]:
        """Return everything that a choice depends on."""
        config = self._config
        named = [f"{name} {tuple(value.shape)} {value.requires_grad}" for name, value in model.named_parameters()]
        network = hashlib.sha256("\n".join([repr(model), *named]).encode()).hexdigest()
        return {
            "device": self._capabilities.name,
            "threads": torch.get_num_threads() if self._capabilities.device == "cpu" else None,
            "versions": {name: version_of(name) for name in ("torch", "triton", "paceline")},
            "kernels": _digest_of(_kernel_folders(self._task)),
            "ways": [candidate.name for candidate in to_try],
            "cuda": torch.version.cuda,
            "network": network,
            "settings": config.model_dump(mode="json", include=MATTERS),
            "is set": {name: bool(getattr(config, name)) for name in MATTERS_IF_SET},
            "shapes": [grain.shapes() for grain in grains],
            "without": [self._no_kernels, self._no_graphs],
        }


def put_kernels(task: Task, model: torch.nn.Module, chosen: Precision, say: Callable[[str], None]) -> None:
    """Put the task's kernels into a model that is about to be prepared, if they were chosen."""
    if chosen.kernels:
        for line in accelerate(task, model):
            say(f"without a kernel: {line}")


def record_shapes(stepper: Stepper, task: Task, feed: Feed, progress: Progress, epochs: range, logged: Scalars) -> None:
    """Record CUDA graphs of a stage's shapes before its first step, if graphs were chosen and none are recorded yet;
    `epochs` are those that the stage has still to train, `logged` takes what the task's loss logs."""
    if not stepper.precision.graphs or stepper.recorded is not None:
        return
    recorded = stepper.record(CudaRecorder(stepper.device), recordable_of(task), logged)
    if feed.is_stream:
        return
    loss = partial(task.loss, stepper.model)
    ahead = shapes_ahead(map(feed.plan, epochs), MOST_GRAPHS, feed.collate)
    is_every = stepper.precision.scaled or isinstance(feed.collate, FitsShapes)
    picks = ahead.picks if is_every else ahead.worth_recording(RECORDED_SHARE)
    recorded.graphs.expect(-(-feed.plan(epochs[0]).max_grains // stepper.link.world.size))
    shown = progress.countdown("recording CUDA graphs")
    shown(0, len(picks))
    for number, grain in enumerate(_read(feed, picks, epochs), 1):
        recorded.warm(loss, grain)
        shown(number, len(picks))
    progress.tell(f"CUDA graphs: {recorded.graphs.num_recorded} recorded of {counted(len(picks), 'shape')}")


def _read(feed: Feed, picks: Sequence[Pick], epochs: range) -> Iterator[Grain]:
    for epoch, some in itertools.groupby(sorted(picks, key=lambda pick: pick.epoch), key=lambda pick: pick.epoch):
        yield from feed.read(((pick.step, pick.number) for pick in some), epochs[epoch])


def plan_shapes(stepper: Stepper, task: Task, feed: Feed, progress: Progress, epochs: range) -> None:
    """Run each shape of a stage once before its first step, where no graphs are recorded: in fp16 cuDNN plans every
    convolution anew for a new shape, which takes seconds. Weights, buffers and random numbers stay as they are."""
    prepared = stepper.prepared
    is_slow = stepper.precision.scaled and stepper.device.type == "cuda" and not stepper.precision.compile
    is_plain = stepper.recorded is None and prepared.shards is None
    if not (is_slow and is_plain and isinstance(feed.collate, Padding)):
        return
    loss = partial(task.loss, stepper.model)
    picks = shapes_ahead(map(feed.plan, epochs), MOST_GRAPHS, feed.collate).picks
    shown = progress.countdown("planning convolutions")
    shown(0, len(picks))
    for number, grain in enumerate(_read(feed, picks, epochs), 1):
        with prepared.untraced():
            prepared.plain.backward(prepared.plain.forward(loss, grain)[0])
        shown(number, len(picks))


def closing_lines(stepper: Stepper) -> list[str]:
    """Return what was compiled and recorded, for the end of a run whose way was chosen."""
    compiled = stepper.counters().get("compiled")
    lines = [] if compiled is None else [f"compiled {counted(compiled, 'graph')}"]
    return lines if stepper.recorded is None else [*lines, *stepper.recorded.graphs.lines()]


def precision_for_use(record: Mapping[str, Any] | None, config: TrainConfig, device: torch.device) -> Precision:
    """Return the precision for the use of a model whose way was chosen: the run's level, where this device has it.

    Kernels and graphs are for training.
    """
    capabilities = precision.capabilities(device)
    levels = precision.levels(config.precision, capabilities)
    chosen = 2 if record is None else Choice.read(record).candidate.level
    return precision.resolve_candidate(
        Candidate(max(level for level in levels if level <= chosen)), config.precision, capabilities
    )


def _kernel_folders(task: Task) -> Iterator[Path]:
    """Yield the folders of kernels that a task may use: the public layers', and `kernels` next to its module."""
    yield from map(Path, layers.__path__)
    file = sys.modules[type(task).__module__].__file__
    if file is not None:
        yield Path(file).parent / "kernels"


def _digest_of(folders: Iterable[Path]) -> str:
    """Return a digest of the sources in these folders, so that a choice is measured again when kernels change."""
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
