"""Engine: the training step for a hand-written loop, with its data, its evaluation and its place in the data.

The step itself is in `stepper.py`, which the training loop uses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.config.compared import shared_settings
from paceline.config.python_call import kind_of, settings_of_call, settings_or_config
from paceline.config.settings import DataSettings, EngineConfig
from paceline.core.errors import WrongType
from paceline.core.terminal import warn
from paceline.data.dataset import DatasetTraits, fingerprint
from paceline.data.grain import Batch, Grain
from paceline.data.loader import Loader
from paceline.data.plan import BatchRule
from paceline.data.torch_loader import take_out, take_out_for_training
from paceline.observe.clock import Clock
from paceline.parallel.step import Average, Step
from paceline.speed.graphs import Recorder
from paceline.speed.loss_scale import LossScale
from paceline.speed.precision import Precision
from paceline.train.checkpoint import state
from paceline.train.evaluation import Metrics, check_set, evaluate, evaluation_plan
from paceline.train.feed import Feed, TrainingData
from paceline.train.grains import Loss, RecordedPass
from paceline.train.loss import SkipCount
from paceline.train.prepare import Prepared, sums_in_tree
from paceline.train.resume import choose_grains
from paceline.train.scalars import Scalars
from paceline.train.scaling import for_ranks
from paceline.train.stepper import Stepper
from paceline.world.consistency import check_same
from paceline.world.link import Link
from paceline.world.start import from_settings

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from paceline.config.arguments import DataArguments, EngineArguments


@dataclass
class _Reading:
    """Place of `Engine.batches` in its data."""

    epoch: int = 0
    step: int = 0
    """Within the epoch."""
    first_epoch: int = 0
    """First epoch of the current call."""
    is_resumed: bool = False
    """True from a resume until the first call, which continues the interrupted one."""


class Engine:
    """Verbs for a loop of your own: `prepare`, `batches`, `step`, `evaluate` (or `evaluating`), `close`."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        link: Link | None = None,
        clock: Clock | None = None,
        **settings: Unpack[EngineArguments],
    ) -> None:
        self.config = settings_or_config(EngineConfig, config, settings, "paceline.Engine", more=("link", "clock"))
        if link is not None and not isinstance(link, Link):
            raise WrongType(
                f"`link` of paceline.Engine is {kind_of(link)}, not a link of ranks",
                hint="share the ranks of another engine with `link=other.link`, or leave it out",
            )
        self._owns_link = link is None
        self.link = link or from_settings(self.config)
        self.device = self.link.device
        self._is_closed = False
        self._reading = _Reading()
        self._feed: Feed | None = None
        self._stream_saved: Mapping[str, Tensor] = {}
        self._warned: set[str] = set()
        with ExitStack() as undo:  # a level that this device does not have leaves no process group behind
            if self._owns_link:
                undo.callback(self.link.abandon)
            self.stepper = Stepper(self.config, self.link, clock=clock)
            undo.pop_all()

    # -- the model -----------------------------------------------------------------------------------------------

    def settle(self, chosen: Precision) -> None:
        """Compute in this precision from now on; a model that is already prepared must be prepared again."""
        self.stepper.settle(chosen)

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | LRScheduler | None = None,
        *,
        beside: Sequence[torch.nn.Module] = (),
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Prepare a model and its optimizer for training. Both are changed in place and keep their names.

        A schedule is a function of the step, or a torch scheduler of this optimizer, which is then stepped with it. It
        stays the same unless another one is given. `beside` are modules that the loss runs in training mode although
        another engine trains them, such as the generator for a discriminator: their batch-norm statistics stay equal on
        all ranks. That engine prepares them first. All ranks must call it.
        """
        return self.stepper.prepare(model, optimizer, schedule, beside=beside)

    def follow(
        self,
        schedule: Callable[[int], float] | LRScheduler,
        *,
        peak: float | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Set the learning rate of every following step to `schedule(step)`, or step a torch scheduler.

        With `peak`, the highest rate of the schedule, rates set elsewhere are respected: see `Rates`.
        """
        self.stepper.follow(schedule, peak=peak, tell=tell)

    def record(
        self, recorder: Recorder, tensors: Callable[[Grain], Any], logged: Scalars | None = None
    ) -> RecordedPass:
        """Replay CUDA graphs of grains from now on, where their shape has one; `tensors` gives a grain's inputs, and
        `logged` takes what a loss logs."""
        return self.stepper.record(recorder, tensors, logged)

    def release(self) -> None:
        """Give the model back, so that it can be prepared again with another shape or optimizer."""
        self.stepper.release()

    @property
    def prepared(self) -> Prepared:
        """The model and its optimizer, with everything that a step needs of them."""
        return self.stepper.prepared

    @property
    def model(self) -> torch.nn.Module:
        return self.stepper.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.stepper.optimizer

    @property
    def recorded(self) -> RecordedPass | None:
        """CUDA graphs of grains, where `-O4` has chosen them."""
        return self.stepper.recorded

    @property
    def precision(self) -> Precision:
        """Precision that the model computes in."""
        return self.stepper.precision

    @property
    def scale(self) -> LossScale:
        """Loss scale."""
        return self.stepper.scale

    @property
    def skips(self) -> SkipCount:
        """Count of steps whose gradients were not finite."""
        return self.stepper.skips

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, loss: Loss, batch: Batch, after_backward: Callable[[], None] | None = None) -> Step:
        """Forward and backward over this rank's grains, one reduction over the ranks, one update.

        With `reduce: param` the update is this rank's own, and ranks are averaged every `sync_step` steps.
        """
        return self.stepper.step(loss, batch, after_backward)

    @property
    def num_steps(self) -> int:
        """Steps since the run began, those before a resume included."""
        return self.stepper.num_steps

    @property
    def rate(self) -> float | None:
        """Learning rate of the last step: of the schedule, or of the first group without one."""
        return self.stepper.rate

    def sync(self) -> None:
        """With `reduce: param`: average now, so that all ranks have the same model. All ranks must call it."""
        self.stepper.sync()

    @property
    def is_together(self) -> bool:
        """True if reading the model now needs no further average: see `Strategy.is_together`."""
        return self.stepper.is_together

    def on_average(self, listener: Callable[[Average], None]) -> None:
        """Call `listener` with every average of the ranks' models, which completes the records of earlier steps."""
        self.stepper.on_average(listener)

    def ask_to_stop(self) -> None:
        """Tell all ranks with the next reduction that this one was asked to stop; safe in a signal handler."""
        self.stepper.ask_to_stop()

    @property
    def wants_stop(self) -> bool:
        """True if this rank was asked to stop."""
        return self.stepper.wants_stop

    def evaluating(self) -> AbstractContextManager[None]:
        """The model in evaluation mode with complete statistics (and averaged weights); all ranks must enter."""
        return self.stepper.evaluating()

    def whole_statistics(self) -> AbstractContextManager[None]:
        """Batch-norm statistics as one process would have them; all ranks must enter.

        With `reduce: param` the ranks are averaged first.
        """
        return self.stepper.whole_statistics()

    def counters(self) -> dict[str, Any]:
        """Return numbers of compiled and recorded graphs, for the log; empty without either."""
        return self.stepper.counters()

    # -- data ----------------------------------------------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        **settings: Unpack[DataArguments],
    ) -> Iterator[Batch]:
        """This rank's part of every global batch of `epochs` epochs; `settings` are those of `DataSettings`.

        After a resume, the first call continues the interrupted one.
        """
        self.stepper.check_open("batches")
        more = ("dataset", "epochs", "collate")
        return self._batches(
            dataset, epochs, collate, settings_of_call(DataSettings, settings, "engine.batches", more=more)
        )

    def _batches(
        self, dataset: Any, epochs: int, collate: Callable[[list[Any]], Any] | None, settings: DataSettings
    ) -> Iterator[Batch]:
        config, _ = for_ranks(settings, self.link.world.size)
        source, lines = take_out_for_training(dataset, config)
        check_same(self.link, shared_settings(settings) | {"epochs": epochs})
        reading = self._reading
        if not reading.is_resumed:
            reading.first_epoch = reading.epoch
        reading.is_resumed = False
        end_epoch = reading.first_epoch + epochs
        feed = Feed(
            TrainingData.of(source.dataset, collate or source.collate),
            config,
            self.link,
            grains=choose_grains(config.grains, None, self.link.world.size, config.regrain),
            seed=self.config.seed,
            in_blocks=sums_in_tree(self.config),
            end_epoch=end_epoch,
        )
        self._warn_once([*lines, feed.resume_stream(self._stream_saved)])
        self._feed, self._stream_saved = feed, {}
        with closing(feed):  # also where the caller leaves its loop
            while reading.epoch < end_epoch:
                for batch in feed.batches(reading.epoch, reading.step):
                    reading.step = batch.step + 1
                    yield batch
                    if feed.is_stream and self.stepper.takes_end_of_data():
                        break
                reading.epoch, reading.step = reading.epoch + 1, 0

    def _warn_once(self, lines: Sequence[str | None]) -> None:
        """Report unexpected facts about the data, each once and on one rank; `batches` may be called per epoch."""
        new = [line for line in lines if line is not None and line not in self._warned]
        self._warned.update(new)
        if self.link.is_first:
            warn("".join(f"{line}\n" for line in new))

    def evaluate(
        self,
        metrics: Metrics,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        **settings: Unpack[DataArguments],
    ) -> dict[str, float]:
        """Return metrics of a data set, the same on any number of ranks; all must call it.

        `metrics(grain)` returns those of one batch by name, as `Task.metrics` does: pairs (sum, weight), `Gathered`, or
        torchmetrics objects. Batches have `eval_batch` samples (32) and are read by `workers`; no other setting of
        `DataSettings` but `limit_batches` has an effect. The model is as in `evaluating`.
        """
        self.stepper.check_open("evaluate")
        more = ("metrics", "dataset", "collate")
        config = settings_of_call(DataSettings, settings, "engine.evaluate", more=more)
        data, loaders_collate = take_out(dataset)
        check_set(data, "the data set")
        lengths = DatasetTraits(data).lengths
        check_same(
            self.link, {"data set to evaluate": fingerprint(data, lengths, None), "eval_batch": config.eval_batch}
        )
        rule = BatchRule(max_samples=config.eval_batch or config.max_samples)
        loader = Loader(
            data,
            collate=collate or loaders_collate,
            seed=self.config.seed,
            device=self.device,
            workers=config.workers,
            local_size=self.link.world.local_size,
        )
        plan, limit, seed = evaluation_plan(len(data), rule, lengths), config.limit_batches, self.config.seed
        with closing(loader), self.evaluating():
            return evaluate(metrics, loader, plan, self.link, limit_batches=limit, seed=seed)

    # -- resume --------------------------------------------------------------------------------------------------

    def resume_at(self, num_steps: int, batches: Sequence[int] | None = None) -> None:
        """Continue after `num_steps` steps; `batches` is what `batches_state` returned."""
        self.stepper.resume_at(num_steps)
        if batches is not None:
            epoch, step, first_epoch = batches
            self._reading = _Reading(epoch, step, first_epoch, is_resumed=True)

    def batches_state(self) -> list[int]:
        """Return the place of `batches`: (epoch, step, first epoch of the call)."""
        return [self._reading.epoch, self._reading.step, self._reading.first_epoch]

    def stream_state(self) -> dict[str, Tensor]:
        """Return the place of `batches` in a stream that knows it; empty if every rank reads a part of its own."""
        feed = self._feed
        if feed is None or not feed.is_stream or feed.is_cut:
            return {}
        return feed.stream_state(self._reading.epoch, self._reading.step)

    def load_stream(self, saved: Mapping[str, Tensor]) -> None:
        """Let the next call of `batches` continue where `stream_state` was taken."""
        self._stream_saved = saved

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the other ranks, after a last average if they step apart. The model stays the same on all ranks, with
        complete batch-norm statistics. A second call does nothing."""
        if self._is_closed:
            return
        self.stepper.finish()
        self._is_closed = True
        if self._owns_link:
            self.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error without waiting for other ranks, which may never come."""
        if error is None:
            self.close()
        elif self._owns_link:
            self.link.__exit__(kind, error, trace)


def collect(engine: Engine, in_pieces: bool = False) -> tuple[state.Parts, dict[str, Any]]:
    """Return the state of an engine for a checkpoint: (tensors by part, plain values).

    Call it inside `engine.whole_statistics()`. With `shard` all ranks must call it, and only the first gets everything;
    `in_pieces` leaves every rank its own pieces.
    """
    parts, values = state.collect(engine.stepper, in_pieces)
    stream = engine.stream_state()
    return ({**parts, "stream": stream} if stream else parts), {**values, "batches": engine.batches_state()}


def restore(engine: Engine, parts: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> None:
    """Restore what `collect` returned into an engine with a prepared model."""
    state.restore(engine.stepper, parts, values)
    engine.load_stream({name: tensor.clone() for name, tensor in parts.get("stream", {}).items()})
    engine.resume_at(values["num_steps"], values["batches"])
