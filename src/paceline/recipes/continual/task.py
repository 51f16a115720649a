"""Continual learning: a stream of tasks, a method, a replay buffer that no rank has otherwise, a matrix."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.core.errors import PacelineError
from paceline.data.grain import Batch, Grain
from paceline.data.loader import Loader
from paceline.data.partition import grain_ranks
from paceline.data.plan import BatchRule
from paceline.recipes.continual import backbones, streams
from paceline.recipes.continual.files import Labelled
from paceline.recipes.continual.matrix import Results
from paceline.recipes.continual.method import Answer, Incoming, Method, NotAnAnswer, Replayed
from paceline.recipes.continual.methods import METHODS
from paceline.recipes.continual.own import class_from_file
from paceline.recipes.continual.plot import heat_map
from paceline.recipes.continual.report import RESULTS
from paceline.recipes.continual.settings import ContinualSettings
from paceline.replay.buffer import ReplayBuffer
from paceline.replay.exchange import cut
from paceline.replay.table import Field
from paceline.train.task import Stage, Sums, Task
from paceline.train.validate import evaluate, evaluation_plan

PART = 256
"""Examples looked at together between tasks."""
PICTURE = "matrix-{}.svg"
"""In the run folder."""


class NotDistributed(PacelineError):
    """A method that cannot run on several ranks was asked to."""

    def __init__(self, name: str, why: str, num_ranks: int) -> None:
        super().__init__(f"method {name} cannot run on {num_ranks} ranks: {why}")
        able = [known for known in METHODS if _load(known).exact]
        self.hint = f"use `--procs 1`, or a method that can: {', '.join(able)}"


class ReplayTooThin(PacelineError):
    """Not one replayed item per grain."""

    def __init__(self, size: int, grains: int) -> None:
        super().__init__(f"a replay batch of {size} cannot be shared by {grains} grains: each needs at least one item")
        self.hint = f"set `--minibatch-size` to {grains} or more, or `--grains` to {size} or less"


class Continual(Task):
    """`paceline train continual`."""

    Settings = ContinualSettings
    settings: ContinualSettings
    num_replayed = 0
    """Items of each of this step's draws."""
    _stage, _is_measured_untrained = 0, False

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
        found = _load(self.settings.method)
        if self.world.size > 1 and not found.exact:
            raise NotDistributed(self.settings.method, found.why_not, self.world.size)
        return found(self)

    @cached_property
    def results(self) -> Results:
        return Results(len(self.stream.experiences))

    @cached_property
    def together(self) -> Tensor:
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

    # -- what to train -------------------------------------------------------------------------------------------

    def model(self) -> nn.Module:
        name = self.settings.backbone or self.stream.kind.backbone
        return backbones.build(name, self.stream.shape, self.stream.num_classes)

    def stages(self) -> Sequence[Stage]:
        if self.stream.note:
            self.say(self.stream.note)
        return self.method.stages()

    def default_stages(self) -> list[Stage]:
        """One per task; each begins with a new optimizer and at the start of the schedule, as in Mammoth."""
        return [
            Stage(experience.name, partial(self._stage_data, number), restart_optimizer=True, restart_schedule=True)
            for number, experience in enumerate(self.stream.experiences)
        ]

    def _stage_data(self, number: int) -> TensorDataset:
        return self.stage_data(self.stream.experiences[number].train())

    def stage_data(self, data: Labelled) -> TensorDataset:
        """A stage's examples; their labels are then known to all ranks."""
        self._labels = data.y.numpy()
        return TensorDataset(data.x, data.y)

    def val_data(self) -> Mapping[str, Any]:
        tests = {experience.name: experience.test() for experience in self.stream.experiences}
        return {name: TensorDataset(data.x, data.y) for name, data in tests.items()}

    def view(self, x: Tensor, augment: bool = True) -> Tensor:
        """Examples as stored, as the network sees them."""
        return self.stream.view(x, augment)

    def classes_of(self, stage: int) -> Tensor:
        """(classes,): which ones a task has."""
        mask = torch.zeros(self.stream.num_classes, dtype=torch.bool)
        mask[list(self.stream.experiences[stage].classes)] = True
        return mask

    # -- a step --------------------------------------------------------------------------------------------------

    def before_step(self, model: nn.Module, batch: Batch) -> None:
        if not self._is_measured_untrained:
            self._measure_untrained(model)
        assert batch.samples is not None
        self._batch, self._grain = batch, 0
        self._answers: list[tuple[Grain, Answer]] = []
        self._step_labels = self._labels[batch.samples]
        if self.buffer is None:
            return
        self._pieces = grain_ranks(batch.num_samples, batch.num_grains, self.world.size)
        size = self.settings.replay_size
        if size < batch.num_grains:
            raise ReplayTooThin(size, batch.num_grains)
        stored = min(size, self.buffer.num_stored)
        self.num_replayed = stored if stored >= batch.num_grains else 0
        if self.method.counts_replayed:
            batch.count += self.num_replayed
        self._drawn = self.buffer.draw(size, self._pieces, self.method.draws)
        if not batch.grains:  # where others have computed theirs, before anything is reduced
            self._observe()

    def replay_pieces(self, draw: int) -> list[Replayed]:
        """This rank's pieces of one of this step's draws, one per grain of its own."""
        return [self._replayed(piece) for piece in self._drawn[draw]]

    def _replayed(self, piece: dict[str, Tensor]) -> Replayed:
        return Replayed(piece["x"], piece["y"], self.num_replayed, piece.get("logits"))

    def loss(self, model: nn.Module, grain: Grain) -> Any:
        x, y = grain.data
        replay = [self._replayed(drawn[self._grain]) for drawn in self._drawn] if self.num_replayed else []
        now = Incoming(x, y, self._batch.num_samples, self._step_labels)
        answer = self.method.loss(lambda stored: model(self.stream.view(stored, True)), now, replay)
        if not isinstance(answer, Answer):
            raise NotAnAnswer(self.method, answer)
        self._grain += 1
        if self.buffer is not None:
            self._answers.append((grain, answer))
            if self._grain == len(self._batch.grains):
                self._observe()
        return answer.total, answer.count

    def _observe(self) -> None:
        """All forwards of this rank are done: keep what is to be kept, and send what comes next behind the backward."""
        assert self.buffer is not None
        scores = replayed = None
        if self.settings.strategy == "loss-aware":
            scores, replayed = self._scores()
        self.buffer.observe(
            self._items(),
            self._batch.num_samples,
            self._pieces,
            labels=self._step_labels,
            scores=scores,
            replayed=replayed,
        )
        if not self._batch.is_last:
            self.buffer.prefetch(self.settings.replay_size, self._pieces, self.method.draws)

    def _items(self) -> dict[str, Tensor]:
        grains, answers = [grain for grain, _ in self._answers], [answer for _, answer in self._answers]
        if len(grains) == 1:
            items = {"x": grains[0].x, "y": grains[0].y}
        elif grains:
            items = {"x": torch.cat([grain.x for grain in grains]), "y": torch.cat([grain.y for grain in grains])}
        else:
            empty = torch.zeros(0, device=self.link.device)
            items = {"x": empty.to(self.stream.dtype).view(0, *self.stream.shape), "y": empty.long()}
        if self.method.keeps_logits:
            found = [answer.logits.detach() for answer in answers]
            empty = torch.zeros((0, self.stream.num_classes), device=self.link.device)
            items["logits"] = found[0] if len(found) == 1 else torch.cat([empty, *found])
        return items

    def _scores(self) -> tuple[Tensor, Tensor | None]:
        """Negative losses of this rank's examples, and of those it replayed."""
        none = torch.zeros(0, device=self.link.device)
        new = [-_losses(answer.logits, grain.y) for grain, answer in self._answers]
        old = (
            [
                -_losses(answer.replayed_logits, piece["y"])
                for (_, answer), piece in zip(self._answers, self._drawn[0], strict=True)
                if answer.replayed_logits is not None
            ]
            if self.num_replayed
            else []
        )
        # Whether a method gives outputs for what it replays is the same on all ranks, grains or none.
        gives = self.num_replayed > 0 and (bool(old) or not self._answers) and self.method.draws > 0
        return torch.cat([none, *new]), torch.cat([none, *old]) if gives else None

    def after_backward(self, model: nn.Module) -> None:
        self.method.after_backward(model)

    # -- between tasks -------------------------------------------------------------------------------------------

    def before_stage(self, model: nn.Module, stage: int) -> None:
        self._stage = stage
        self.method.begin(model, stage)

    def after_stage(self, model: nn.Module, stage: int) -> None:
        self.method.end(model, stage)
        if self.buffer is not None and self.settings.strategy == "herding":
            self._herd(model, stage)
        task = self._task
        class_il, task_il = self._measure(model, range(min(task + 2, len(self.stream.experiences))))
        self.results.class_il[task, : len(class_il)] = class_il
        self.results.task_il[task, : len(task_il)] = task_il
        summary = self.results.summary()
        done = ", ".join(f"{100 * value:.1f}" for value in class_il[: task + 1])
        self.say(f"after {self.stream.experiences[task].name}: class-IL {summary['class_il']:.2f} % ({done})")
        self._write()

    def _herd(self, model: nn.Module, stage: int) -> None:
        """Choose what represents the task, by the features that the network has now."""
        assert self.buffer is not None
        data = self.stream.experiences[stage].train()
        found: dict[str, list[Tensor]] = {"x": [], "y": [], "features": []}
        if self.method.keeps_logits:
            found["logits"] = []
        with self.evaluating():
            nothing = data.select(
                torch.zeros(0, dtype=torch.int64)
            )  # of a rank without a part, but of the right shapes
            for part in [nothing, *self.share_of(data, PART)]:
                view = self.view(part.x, augment=False)
                own = {"x": part.x, "y": part.y, "features": backbones.features_of(model, view)}
                for name, tensors in found.items():
                    tensors.append(own[name] if name in own else model(view))
        items = {name: torch.cat(tensors) for name, tensors in found.items()}
        pieces = self._even_pieces(len(data), PART)
        self.buffer.choose(items, items.pop("features"), len(data), pieces, data.y.numpy())

    # -- measuring -----------------------------------------------------------------------------------------------

    def metrics(self, model: nn.Module, grain: Grain) -> Mapping[str, Sums]:
        """Class-IL: among all classes so far. Task-IL: among those of the example's task."""
        output, y = model(self.stream.view(grain.x, False)), grain.y
        seen = self.stream.seen[self._task].to(output.device)
        # What has not come yet (forward transfer) is judged among all classes.
        hidden = seen[y].unsqueeze(1) & ~seen
        right = output.masked_fill(hidden, -torch.inf).argmax(1) == y
        in_task = output.masked_fill(~self.together[y], -torch.inf).argmax(1) == y
        return {"class_il": (right.sum(), len(grain)), "task_il": (in_task.sum(), len(grain))}

    @property
    def _task(self) -> int:
        """The task that this stage ends with: joint training has a single stage, for all of them."""
        return len(self.stream.experiences) - 1 if self.method.is_joint else self._stage

    def predict(self, model: nn.Module, grain: Grain) -> Tensor:
        seen = self.stream.seen[self._task].to(self.link.device)
        output: Tensor = model(self.stream.view(grain.x, False))
        return output.masked_fill(~seen, -torch.inf).argmax(1)

    def _measure(self, model: nn.Module, tasks: Sequence[int]) -> tuple[list[float], list[float]]:
        """Class-IL and task-IL accuracy on these tasks, the same numbers on every rank."""
        found = []
        with self.evaluating():
            for task in tasks:
                data = self.stream.experiences[task].test()
                loader = Loader(TensorDataset(data.x, data.y), device=self.link.device, workers=0)
                plan = evaluation_plan(len(data), BatchRule(self.settings.eval_batch or PART))
                found.append(evaluate(partial(self.metrics, model), loader, plan, self.link))
                loader.close()
        return [each["class_il"] for each in found], [each["task_il"] for each in found]

    def _measure_untrained(self, model: nn.Module) -> None:
        """What a network that has learned nothing knows, which forward transfer is measured against."""
        self._is_measured_untrained = True
        if np.isnan(self.results.untrained).all():
            every = range(len(self.stream.experiences))
            self.results.untrained[:] = self._measure(model, every)

    def share_of(self, data: Labelled, batch: int) -> Iterator[Labelled]:
        """This rank's part of a data set, on its device, in batches of at most so many that do not depend on ranks."""
        here = cut(len(data), self._even_pieces(len(data), batch), self.world.rank, self.world.size)
        for positions in torch.from_numpy(here.local).split(list(here.sizes)) if here.sizes else []:
            part = data.select(positions)
            yield Labelled(part.x.to(self.link.device), part.y.to(self.link.device))

    def _even_pieces(self, num_items: int, batch: int) -> tuple[int, ...]:
        return tuple(number % self.world.size for number in range(-(-num_items // batch)))

    def _write(self) -> None:
        """The matrices as numbers and as pictures, in the run folder."""
        folder = self.settings.out
        if folder is None or not self.link.is_first:
            return
        names = [experience.name for experience in self.stream.experiences]
        for name, matrix in (("class-IL", self.results.class_il), ("task-IL", self.results.task_il)):
            title = f"{self.settings.dataset}, {self.settings.method}: {name} accuracy, %"
            (folder / PICTURE.format(name.lower())).write_text(heat_map(matrix, names, title), encoding="utf-8")
        (folder / RESULTS).write_text(json.dumps({"tasks": names, **self.results.as_json()}), encoding="utf-8")

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        results = {
            "results.class_il": torch.from_numpy(self.results.class_il.copy()),
            "results.task_il": torch.from_numpy(self.results.task_il.copy()),
            "results.untrained": torch.from_numpy(self.results.untrained.copy()),
        }
        method = {f"method.{name}": tensor for name, tensor in self.method.state().items()}
        buffer = {} if self.buffer is None else self.buffer.state()
        return {**results, **method, **{f"buffer.{name}": tensor for name, tensor in buffer.items()}}

    def load_state(self, state: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"results": {}, "method": {}, "buffer": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        for name, tensor in parts["results"].items():
            setattr(self.results, name, tensor.numpy().copy())
        self.method.load_state(parts["method"])
        if self.buffer is not None:
            self.buffer.load_state(parts["buffer"])


def _load(name: str) -> type[Method]:
    """The method's class."""
    if name in METHODS:
        module, _, found = METHODS[name].partition(":")
        method: type[Method] = getattr(importlib.import_module(f"paceline.recipes.continual.methods.{module}"), found)
        return method
    own: type[Method] = class_from_file("method", name, Method)
    return own


def _losses(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), y, reduction="none")
