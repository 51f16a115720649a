"""`-O4` in a training run: the fastest way is found before the first step, stored with the run, and taken on resume."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.config.settings import TrainConfig
from paceline.core.provenance import version_of
from paceline.data.grain import Grain
from paceline.observe.progress import Progress
from paceline.speed import kernels, precision
from paceline.speed.autotune.candidates import Candidate, candidates
from paceline.speed.autotune.choice import Cache, Choice, cache_folder, choose
from paceline.speed.graphs import MOST_GRAPHS, CudaRecorder, Graphs
from paceline.speed.precision import Precision
from paceline.train.autotune import timing
from paceline.train.autotune.shapes import costly_shapes
from paceline.train.checkpoint import state
from paceline.train.engine import Engine
from paceline.train.feed import Feed
from paceline.train.grains import RecordedPass
from paceline.train.task import Accelerates, Recordable, Task, accelerate, recordable_of
from paceline.world.installed import has_triton

MEASURED_SHAPES = 2
"""Grains of so many shapes are trained on to compare ways: those that an epoch spends most time on."""
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
"""Settings that a choice depends on, ..."""
MATTERS_IF_SET = ("clip_norm", "clip_value", "ema", "weight_decay")
"""... and those of which only whether they are set."""


class Autotuner:
    """Chooses for a trainer's engine, and sets up what was chosen. All ranks take what the first one finds."""

    def __init__(self, task: Task, config: TrainConfig, engine: Engine, progress: Progress) -> None:
        self._task, self._config, self._engine, self._progress = task, config, engine, progress
        self._capabilities = precision.capabilities(engine.device)
        self._levels = precision.levels(config.precision, self._capabilities)
        self._no_kernels = why_no_kernels(task, config, self._capabilities)
        self._no_graphs = why_no_graphs(task, config, self._capabilities, engine.link.world.size)
        self.choice: Choice | None = None
        # Until something is chosen, nothing is compiled for nothing.
        self._settle(Candidate(min(self._levels[-1], 2)), is_open=True)

    def recall(self, record: Mapping[str, Any] | None) -> None:
        """Take what a run chose before it was interrupted, without measuring."""
        if record is None:
            return
        choice = Choice.read(record)
        # Recording changes no number: a run may go on without it, and with it again later. Kernels round differently.
        way = replace(choice.way, graphs=choice.way.graphs and self._no_graphs is None)
        if way.level not in self._levels or (way.kernels and self._no_kernels is not None):
            self._progress.say(f"the run computed as {choice.way.name}, which cannot be done here: -O4 chooses anew")
            return
        self._take(choice, "as before", way)

    def begin_stage(self, feed: Feed, prepare: Callable[[torch.nn.Module], None]) -> None:
        """Before a stage's first step: choose, if that is not done, and record the stage's shapes, if they are to be.

        `prepare` prepares a model for the engine as it is settled then.
        """
        engine = self._engine
        if engine.precision.is_open:
            # A run that is resumed, but not with what it chose before: its optimizer goes on.
            kept = state.carried(engine) if engine.num_steps else None
            self._choose(feed)
            model = engine.model
            engine.release()
            prepare(model)
            if kept is not None:
                state.restore(engine, *kept)
        if engine.precision.graphs and engine.recorded is None:
            graphs = Graphs(engine.model, CudaRecorder(engine.device))
            self._warm_up(engine.record(graphs, recordable_of(self._task)), feed)

    def accelerate(self, model: torch.nn.Module) -> None:
        """Put the task's kernels into a model that is about to be prepared, if they were chosen."""
        if self._engine.precision.kernels:
            for line in accelerate(self._task, model):
                self._progress.say(f"without a kernel: {line}")

    def lines(self) -> list[str]:
        """What is worth saying at the end of the run."""
        compiled = self._engine.counters().get("compiled")
        said = [] if compiled is None else [f"compiled {compiled} graph{'s' * (compiled != 1)}"]
        return said if self._engine.recorded is None else [*said, *self._engine.recorded.graphs.lines()]

    # -- how it is done ------------------------------------------------------------------------------------------

    def _choose(self, feed: Feed) -> None:
        link = self._engine.link
        if feed.is_stream:
            self._take(
                Choice(Candidate(self._levels[-1])), "not measured, since nobody knows the shapes of iterable data"
            )
            return
        found: tuple[dict[str, Any], str] | None = None
        if link.is_first:
            choice, source = self._find(feed)
            found = choice.record(), source
        record, source = link.broadcast_object(found)
        self._take(Choice.read(record), source)

    def _find(self, feed: Feed) -> tuple[Choice, str]:
        picks = costly_shapes(feed.plan(0), MEASURED_SHAPES, feed.collate)
        grains = list(feed.read((pick.step, pick.number) for pick in picks))
        ways = self._ways()
        facts, shelf = self._facts(grains, ways), Cache(cache_folder(os.environ))
        known = shelf.find(facts)
        if known is not None:
            return known, "measured by an earlier run on this machine"
        self._progress.say(f"-O4: timing {len(ways)} ways to compute a step, once on this machine")

        workload = timing.Workload(self._task, self._config, self._engine.link, self._engine.model, grains)

        def measure(way: Candidate, limit_s: float) -> float:
            seconds = timing.step_seconds(way, limit_s * len(grains), workload=workload) / len(grains)
            self._progress.say(f"  {way.name}: {1e3 * seconds:.4g} ms")
            return seconds

        def in_turns(ways: Sequence[Candidate]) -> dict[Candidate, float]:
            seconds = {way: each / len(grains) for way, each in timing.in_turns(ways, workload=workload).items()}
            shown = ", ".join(f"{way.name} {1e3 * each:.4g} ms" for way, each in seconds.items())
            self._progress.say(f"  in turns: {shown}")
            return seconds

        choice = choose(ways, measure, in_turns)
        reasons = [why for why in (self._no_kernels, self._no_graphs) if why is not None]
        choice = replace(choice, notes=(*choice.notes, *reasons))
        if any("-O3" in name for name in choice.step_ms):
            torch.compiler.reset()  # what was compiled for copies of the model is of no more use
        problem = shelf.keep(facts, choice)
        if problem is not None:
            self._progress.say(problem)
        return choice, "measured"

    def _ways(self) -> list[Candidate]:
        levels = precision.distinct(self._levels, self._config.precision, self._capabilities)
        has_kernels, leaves_some = self._no_kernels is None, False
        if has_kernels:
            with contextlib.suppress(Exception):  # whatever it runs into, measuring them says
                leaves_some = bool(accelerate(self._task, copy.deepcopy(self._engine.model)))
        return candidates(levels, has_kernels=has_kernels, can_graph=self._no_graphs is None, leaves_some=leaves_some)

    def _take(self, choice: Choice, source: str, way: Candidate | None = None) -> None:
        """`way`: what of the choice can be had here, where that is not all of it."""
        self.choice = choice
        used = choice
        if way not in (None, choice.way):
            used = replace(choice, way=way, notes=(*choice.notes, *filter(None, [self._no_graphs])))
        self._settle(used.way, notes=(used.line(source), *used.notes))

    def _settle(self, way: Candidate, *, is_open: bool = False, notes: tuple[str, ...] = ()) -> None:
        found = precision.resolve_candidate(way, self._config.precision, self._capabilities)
        self._engine.settle(replace(found, is_open=is_open, notes=(*notes, *found.notes)))

    def _warm_up(self, recorded: RecordedPass, feed: Feed) -> None:
        if feed.is_stream:
            return
        loss = partial(self._task.loss, self._engine.model)
        picks = costly_shapes(feed.plan(0), MOST_GRAPHS, feed.collate)
        for number, grain in enumerate(feed.read((pick.step, pick.number) for pick in picks), 1):
            recorded.warm(loss, grain)
            if number % 8 == 0 or number == len(picks):
                self._progress.say(f"CUDA graphs: {recorded.graphs.num_recorded} recorded of {number} shapes")

    def _facts(self, grains: list[Grain], ways: list[Candidate]) -> dict[str, Any]:
        """What a choice depends on."""
        config, model = self._config, self._engine.model
        named = [f"{name} {tuple(value.shape)} {value.requires_grad}" for name, value in model.named_parameters()]
        network = hashlib.sha256("\n".join([repr(model), *named]).encode()).hexdigest()
        return {
            "device": self._capabilities.name,
            "threads": torch.get_num_threads() if self._capabilities.device == "cpu" else None,
            "versions": {name: version_of(name) for name in ("torch", "triton", "paceline")},
            "kernels": _digest_of(kernels.__path__),
            "ways": [way.name for way in ways],
            "cuda": torch.version.cuda,
            "network": network,
            "settings": config.model_dump(mode="json", include=MATTERS),
            "is set": {name: bool(getattr(config, name)) for name in MATTERS_IF_SET},
            "shapes": [grain.shapes() for grain in grains],
            "without": [self._no_kernels, self._no_graphs],
        }


def precision_for_use(record: Mapping[str, Any] | None, config: TrainConfig, device: torch.device) -> Precision:
    """What a model that was trained at `-O4` is used in: the level that the run chose, where this device has it.

    Kernels and graphs are for training.
    """
    capabilities = precision.capabilities(device)
    levels = precision.levels(config.precision, capabilities)
    chosen = 2 if record is None else Choice.read(record).way.level
    return precision.resolve_candidate(
        Candidate(max(level for level in levels if level <= chosen)), config.precision, capabilities
    )


def why_no_kernels(task: Task, config: TrainConfig, capabilities: precision.Capabilities) -> str | None:
    """Why the task's own kernels are not among the candidates; None: they are."""
    if not isinstance(task, Accelerates):
        return "no kernels: this task has none of its own"
    if capabilities.device != "cuda":
        return f"no kernels: {capabilities.name} is no GPU"
    if not has_triton():
        return "no kernels: Triton is not installed (`pip install triton`)"
    if config.precision is not None:
        return f"no kernels: they compute in bf16, not as --precision {config.precision}"
    if config.checkpoint_activations or config.sync_batchnorm != "no":
        other = "checkpoint_activations" if config.checkpoint_activations else "sync_batchnorm"
        return f"no kernels: they do not go with `{other}`"
    return None


def why_no_graphs(task: Task, config: TrainConfig, capabilities: precision.Capabilities, size: int) -> str | None:
    """Why CUDA graphs are not among the candidates; None: they are."""
    if not isinstance(task, Recordable):
        return "no CUDA graphs: this task does not say that its loss can be recorded"
    if capabilities.device != "cuda":
        return f"no CUDA graphs: {capabilities.name} is no GPU"
    if size > 1:
        return "no CUDA graphs: on several ranks gradients are sent while backward runs, which is not recorded"
    if config.precision is not None:
        return f"no CUDA graphs: they are for bf16 here, not for --precision {config.precision}"
    if config.checkpoint_activations:
        return "no CUDA graphs: `checkpoint_activations` keeps random states aside, which cannot be recorded"
    return None


def _digest_of(folders: Iterable[str]) -> str:
    """Of the sources in there: kernels get faster within a version."""
    files = sorted(file for folder in folders for file in Path(folder).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
