"""Continual learning: a stream of tasks, a method, a replay buffer that no rank has otherwise, a matrix."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.core.errors import PacelineError, TaskContract
from paceline.core.together import Exclusion
from paceline.core.user_file import class_from_file
from paceline.data.grain import Batch, Grain
from paceline.recipes.continual import backbones, streams
from paceline.recipes.continual.evaluation import Evaluation
from paceline.recipes.continual.files import Labelled
from paceline.recipes.continual.matrix import Results
from paceline.recipes.continual.method import Answer, Incoming, Method, Replayed
from paceline.recipes.continual.methods import METHODS
from paceline.recipes.continual.replay.buffer import ReplayBuffer
from paceline.recipes.continual.replay.exchange import cut
from paceline.recipes.continual.replay.table import Field
from paceline.recipes.continual.settings import ContinualSettings
from paceline.recipes.continual.step_replay import StepReplay
from paceline.train.task import HasStages, SavesState, Stage, Sums, Task

PART = 256
"""Examples computed together between tasks."""


class NotDistributed(PacelineError):
    """A method that cannot run on several ranks was asked to."""

    name: str
    why: str
    num_ranks: int
    excludes = (
        Exclusion(
            "a continual `--method` whose loss is no sum over examples",
            "several ranks",
            "mathematics",
            "A sum over the ranks of their gradients is not the gradient of such a loss.",
        ),
    )
    sentence = "method {name} cannot run on {num_ranks} ranks: {why}"
    hint = "use `--procs 1`, or a method that can: {able}"

    @property
    def able(self) -> str:
        return ", ".join(name for name in METHODS if method_class(name).exact)


class Continual(Task, HasStages, SavesState):
    """`paceline train continual`."""

    Settings = ContinualSettings
    settings: ContinualSettings
    measures_untrained = True
    """Measure the network before the first step, for forward transfer."""
    stage = 0

    # -- parts ---------------------------------------------------------------------------------------------------

    @cached_property
    def stream(self) -> streams.Stream:
        settings = self.settings
        return streams.build(
            settings.dataset,
            settings.data_root,
            num_tasks=settings.num_tasks,
            scenario=settings.scenario,
            permute_classes=settings.permute_classes,
            seed=settings.seed,
        )

    @cached_property
    def method(self) -> Method:
        method = method_class(self.settings.method)
        if self.world.size > 1 and not method.exact:
            raise NotDistributed(self.settings.method, method.why_not, self.world.size)
        return method(self)

    @cached_property
    def evaluation(self) -> Evaluation:
        batch = self.settings.eval_batch or PART
        return Evaluation(self.stream, batch, self.link, lambda: self.evaluating())

    @property
    def results(self) -> Results:
        return self.evaluation.results

    @cached_property
    def together(self) -> Tensor:
        """(classes, classes): which classes are of the same task, on the device."""
        return self.stream.together.to(self.link.device)

    @cached_property
    def buffer(self) -> ReplayBuffer | None:
        """The replay buffer, if the method replays."""
        settings = self.settings
        if self.method.draws == 0:
            return None
        number = torch.float64 if settings.precision == "fp64" else torch.float32
        fields = {"x": Field(self.stream.dtype, self.stream.shape), "y": Field(torch.int64)}
        if self.method.keeps_logits:
            fields["logits"] = Field(number, (self.stream.num_classes,))
        return ReplayBuffer(
            settings.buffer_size,
            fields,
            self.link,
            seed=settings.seed,
            strategy=settings.strategy,
            mode=settings.buffer_mode,
            check_every=settings.check_every,
        )

    @cached_property
    def replay(self) -> StepReplay | None:
        """The buffer in the course of a step."""
        if self.buffer is None:
            return None
        return StepReplay(self.buffer, self.method, self.settings, self.stream, self.link)

    # -- what to train -------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        name = self.settings.backbone or self.stream.kind.backbone
        return backbones.build(name, self.stream.shape, self.stream.num_classes)

    def stages(self) -> Sequence[Stage]:
        if self.stream.note:
            self.say(self.stream.note)
        return self.method.stages()

    def default_stages(self) -> list[Stage]:
        """Return one stage per task; each begins with a new optimizer and at the start of the schedule, as in
        Mammoth."""
        return [
            Stage(experience.name, partial(self._stage_data, number), restart_optimizer=True, restart_schedule=True)
            for number, experience in enumerate(self.stream.experiences)
        ]

    def _stage_data(self, number: int) -> TensorDataset:
        return self.stage_data(self.stream.experiences[number].train())

    def stage_data(self, data: Labelled) -> TensorDataset:
        """Return a stage's examples; their labels are then known to all ranks."""
        self._labels = data.y.numpy()
        return TensorDataset(data.x, data.y)

    def val_data(self) -> Mapping[str, Any]:
        tests = {experience.name: experience.test() for experience in self.stream.experiences}
        return {name: TensorDataset(data.x, data.y) for name, data in tests.items()}

    def view(self, x: Tensor, augment: bool = True) -> Tensor:
        """Return stored examples as the network takes them."""
        return self.stream.view(x, augment)

    def classes_of(self, stage: int) -> Tensor:
        """Return a mask (classes,) of those that a task has."""
        mask = torch.zeros(self.stream.num_classes, dtype=torch.bool, device="cpu")
        mask[list(self.stream.experiences[stage].classes)] = True
        return mask

    # -- a step --------------------------------------------------------------------------------------------------

    def before_step(self, model: nn.Module, batch: Batch) -> None:
        if self.measures_untrained:
            self.measures_untrained = False
            self.evaluation.measure_untrained(model, self._last_task)
        assert batch.samples is not None
        self._batch = batch
        self._step_labels = self._labels[batch.samples]
        if self.replay is not None:
            self.replay.begin(batch, self._step_labels)

    @property
    def num_replayed(self) -> int:
        """Items of each of this step's draws."""
        return 0 if self.replay is None else self.replay.num_replayed

    def replay_pieces(self, draw: int) -> list[Replayed]:
        """Return this rank's pieces of one of this step's draws, one per grain of its own."""
        return [] if self.replay is None else self.replay.pieces_of_draw(draw)

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        """Return the method's loss of a grain. It is called once per grain, in order: with this rank's last one, the
        step's examples go into the buffer (see `step_replay`)."""
        x, y = grain.data
        now = Incoming(x, y, self._batch.num_samples, self._step_labels)
        pieces = [] if self.replay is None else self.replay.pieces()
        answer = self.method.loss(lambda stored: model(self.stream.view(stored, True)), now, pieces)
        if not isinstance(answer, Answer):
            returned = "a single tensor (a mean?)" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
            raise TaskContract(
                f"`loss` of method {type(self.method).__name__} returned {returned}, not an Answer",
                hint="return Answer(sum, count, output): the sum of the losses, their number, the outputs for `now.x`",
            )
        if self.replay is not None:
            self.replay.answered(grain, answer)
        return answer.total, answer.count

    def after_backward(self, model: nn.Module) -> None:
        self.method.after_backward(model)

    # -- between tasks -------------------------------------------------------------------------------------------

    def before_stage(self, model: nn.Module, stage: int) -> None:
        self.stage = stage
        self.method.begin(model, stage)

    def after_stage(self, model: nn.Module, stage: int) -> None:
        self.method.end(model, stage)
        if self.buffer is not None and self.settings.strategy == "herding":
            self._herd(self.buffer, model, stage)
        self.say(self.evaluation.measure_after(model, self._last_task))
        if self.settings.out is not None and self.link.is_first:
            self.evaluation.write(self.settings.out, f"{self.settings.dataset}, {self.settings.method}")

    def _herd(self, buffer: ReplayBuffer, model: nn.Module, stage: int) -> None:
        """Choose the items that represent the task, by the features that the network has now."""
        data = self.stream.experiences[stage].train()
        columns: dict[str, list[Tensor]] = {"x": [], "y": [], "features": []}
        if self.method.keeps_logits:
            columns["logits"] = []
        with self.evaluating():
            nothing = data.select(
                torch.zeros(0, dtype=torch.int64, device="cpu")
            )  # right shapes for a rank without a part
            for part in [nothing, *self.share_of(data, PART)]:
                view = self.view(part.x, augment=False)
                values = {"x": part.x, "y": part.y, "features": backbones.features_of(model, view)}
                for name, tensors in columns.items():
                    tensors.append(values[name] if name in values else model(view))
        items = {name: torch.cat(tensors) for name, tensors in columns.items()}
        ranks = self._even_ranks(len(data), PART)
        buffer.choose(items, items.pop("features"), len(data), ranks, data.y.numpy())

    def share_of(self, data: Labelled, batch: int) -> Iterator[Labelled]:
        """Yield this rank's part of a data set, on its device, in batches of at most `batch` that do not depend on the
        number of ranks."""
        here = cut(len(data), self._even_ranks(len(data), batch), self.world.rank, self.world.size)
        for positions in torch.from_numpy(here.local).split(list(here.sizes)) if here.sizes else []:
            part = data.select(positions)
            yield Labelled(part.x.to(self.link.device), part.y.to(self.link.device))

    def _even_ranks(self, num_items: int, batch: int) -> tuple[int, ...]:
        return tuple(number % self.world.size for number in range(-(-num_items // batch)))

    # -- measuring -----------------------------------------------------------------------------------------------

    @property
    def _last_task(self) -> int:
        """Last task of this stage: joint training has a single stage, for all of them."""
        return len(self.stream.experiences) - 1 if self.method.is_joint else self.stage

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Sums]:
        return self.evaluation.metrics(model, grain, self._last_task)

    def predict(self, model: nn.Module, grain: Grain) -> Tensor:
        seen = self.stream.seen[self._last_task].to(self.link.device)
        output: Tensor = model(self.stream.view(grain.x, False))
        return output.masked_fill(~seen, -torch.inf).argmax(1)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        parts = {
            "results": self.evaluation.state(),
            "method": self.method.state(),
            "buffer": {} if self.buffer is None else self.buffer.state(),
        }
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"results": {}, "method": {}, "buffer": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self.evaluation.load_state(parts["results"])
        self.method.load_state(parts["method"])
        if self.buffer is not None:
            self.buffer.load_state(parts["buffer"])


def method_class(name: str) -> type[Method]:
    """Return the class of a method: one of `METHODS`, or `file.py:Name`."""
    if name in METHODS:
        module, _, class_name = METHODS[name].partition(":")
        methods = importlib.import_module(f"paceline.recipes.continual.methods.{module}")
        method: type[Method] = getattr(methods, class_name)
        return method
    return class_from_file("method", name, Method)
