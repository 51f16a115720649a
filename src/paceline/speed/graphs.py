"""CUDA graphs: forward, loss and backward of a grain recorded once per shape and replayed without launching anything.

What a recorded grain reads lies in buffers of fixed address, into which each new grain is copied; its gradients are
added to tensors that all graphs share; everything between lives in one pool of memory that graphs use in turn, since
only one of them runs at a time. In a step of a single grain there is nothing to add: its gradients are those of the
graph itself, where they lie until the next replay. Where gradients have a place already (buckets that ranks sum), they
are added there bucket by bucket while backward runs, and a mark in the graph tells when a bucket is complete: its sum
over the ranks starts beside the rest of the replay. Random numbers are drawn from the generator's seed at replay, which
the engine sets for every grain as always, so that a replay draws what the same grain would have drawn without a graph.

A shape is recorded when it is seen for the second time, or before the first step (`warm`), up to `MOST_GRAPHS` of them;
other grains run as they always do, into the same gradients. `CudaRecorder` is all that touches CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from paceline.core.errors import first_line
from paceline.core.torch_private import backward, foreach_add_, foreach_copy_, foreach_zero_
from paceline.core.tree import map_leaves
from paceline.core.units import counted

MOST_GRAPHS = 64
WARM_RUNS, WARM_RUNS_AGAIN = 2, 1
"""Runs before a recording: what is chosen, tuned or compiled on first use must not be recorded. The first shape of a
model is run twice, the second time with hooks on its gradients."""

Pass = Callable[[Any], tuple[Tensor, Any, Any]]
"""Forward and loss of a grain's data: (sum, count, outputs)."""


class Mark(Protocol):
    """A place in a recording."""

    def wait(self) -> None:
        """Let the current stream wait until the replay that was started last has come here."""


class Recorder(Protocol):
    """Interface that turns a function of fixed buffers into a replayable recording."""

    def warm(self, function: Callable[[], None]) -> None:
        """Run it as it will be recorded, without recording."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run it once for recording, which computes nothing, and give what computes it from now on."""

    def mark(self) -> Mark:
        """Return a mark of what the function has done so far; called by it while it is warmed or recorded."""

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a recorded tensor that does not hold its memory: replays of other recordings may use it."""

    def recover(self) -> bool:
        """Clean up after a recording that failed; return True if recordings made before are lost."""


class _Address:
    """Memory of a CUDA tensor, in the words that libraries have agreed on."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


class CudaRecorder:
    """CUDA graphs of one device, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # Other threads (the loader's, which pins memory) may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def mark(self) -> Mark:
        event = torch.cuda.Event(external=True)  # recorded anew by each replay, for streams outside of the graph
        event.record()
        return event

    def alias(self, tensor: Tensor) -> Tensor:
        # The pool keeps the memory for as long as one of its graphs is there.
        if tensor.dtype is not torch.float32 or not tensor.numel():
            return tensor
        return torch.as_tensor(_Address(tensor), device=tensor.device)

    def recover(self) -> bool:
        generator = torch.cuda.default_generators[self._device.index or 0]
        try:
            torch.rand(1, dtype=torch.float32, device=self._device)
        except RuntimeError:
            # torch 2.11 leaves its generator as if the recording still went on. Another state helps, which graphs that
            # were recorded with the old one do not look at.
            generator.graphsafe_set_state(generator.clone_state())
            torch.rand(1, dtype=torch.float32, device=self._device)
            return True
        return False


@dataclass(frozen=True)
class Recorded:
    """One shape."""

    inputs: list[Tensor]
    seed: Tensor
    """Gradient that backward starts from: 1 over the step's count."""
    results: Mapping[str, Any]
    """`total`, `count`, `outputs`: tensors that a replay writes to; `gradients` by parameter, where they are not added
    to others."""
    replay: Callable[[], None]
    used: frozenset[Tensor]
    """Parameters that backward has a gradient for."""
    marks: Sequence[Mark | None]
    """Marks after the gradients of each group; None for a group that backward does not reach."""


class Replay(NamedTuple):
    """A replay that was started: (sum, count, outputs), and the recording."""

    results: tuple[Tensor, Any, Any]
    recorded: Recorded


class GradientInPieces(RuntimeError):
    """A gradient grew after its group was complete: it would be missing in what is sent."""


class Graphs:
    """The recorded shapes of one model, and the gradients that they share."""

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        groups: Sequence[Mapping[Tensor, Tensor]] = (),
        most: int = MOST_GRAPHS,
    ) -> None:
        """`groups`: gradients that have a place, by parameter. Somebody else zeroes them; each group gets a mark."""
        self._is_single = False
        self._recorder, self._most = recorder, most
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buffers = list(model.buffers())
        self._generators = [torch.default_generator]
        device = self._parameters[0].device
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._groups = [dict(group) for group in groups]
        self._places = {parameter: place for group in self._groups for parameter, place in group.items()}
        """Where gradients are added, those in `_own` included."""
        self._own: dict[Tensor, Tensor] = {}
        """Gradients of parameters that are in no group."""
        self._recorded: dict[Any, Recorded] = {}
        self._seen: Counter[Any] = Counter()
        self.failures: dict[str, str] = {}
        """Shapes that could not be recorded, and why."""
        self.num_replayed = 0
        self.num_plain = 0
        """Grains that ran without a graph."""

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def expect(self, num_grains: int) -> None:
        """Record and replay for steps of so many grains from now on."""
        self._is_single = num_grains == 1 and not self._groups

    def start_step(self, num_grains: int) -> None:
        """All gradients 0, in the tensors that the graphs add to; those of groups are left to their owner. Where there
        is nothing to add to, no gradients."""
        self.expect(num_grains)
        if self._is_single:
            for parameter in self._own:
                parameter.grad = None
            return
        if self._own:
            foreach_zero_(list(self._own.values()))
        for parameter, gradient in self._own.items():
            parameter.grad = gradient

    def run(self, run: Pass, data: Any, seed: Callable[[Tensor], Tensor]) -> Replay | None:
        """Forward and backward of a grain by replay, None where it must be run plainly (counted in `num_plain`).

        `seed` gives what backward of a sum starts from.
        """
        leaves = list(tensors(data))
        shape = signature(leaves)
        recorded = self._recorded.get((shape, self._is_single))
        if recorded is None:
            self._seen[shape] += 1
            if self._seen[shape] < 2 or self.num_recorded >= self._most or _words(shape) in self.failures:
                self.num_plain += 1
                return None
            recorded = self._record(shape, run, data)
            if recorded is None:
                self.num_plain += 1
                return None
        return self._replay(recorded, leaves, seed)

    def warm(self, run: Pass, data: Any) -> bool:
        """Record the shape of a grain before the first step; return True if it is recorded now."""
        shape = signature(list(tensors(data)))
        is_recorded = (shape, self._is_single) in self._recorded
        if not is_recorded and self.num_recorded < self._most and _words(shape) not in self.failures:
            self._record(shape, run, data)
        return (shape, self._is_single) in self._recorded

    def lines(self) -> list[str]:
        """For the console, at the end of a run."""
        lines = [
            f"CUDA graphs: {counted(self.num_recorded, 'shape')} recorded,"
            f" {counted(self.num_replayed, 'grain')} replayed, {self.num_plain:,} run without"
        ]
        return lines + [f"  {shape} could not be recorded: {why}" for shape, why in self.failures.items()]

    def numbers(self) -> dict[str, int]:
        """For the journal."""
        return {"recorded": self.num_recorded, "replayed": self.num_replayed, "plain": self.num_plain}

    def _replay(self, recorded: Recorded, leaves: Sequence[Tensor], seed: Callable[[Tensor], Tensor]) -> Replay:
        foreach_copy_(recorded.inputs, list(leaves), non_blocking=True)
        results = recorded.results
        recorded.seed.copy_(seed(results["total"]))
        recorded.replay()
        self.num_replayed += 1
        for parameter, gradient in results["gradients"].items():
            parameter.grad = gradient
        # The next replay writes over these.
        copies = _cloned(results["total"]), _cloned(results["count"]), _cloned(results["outputs"])
        return Replay(copies, recorded)

    def _record(self, shape: Any, run: Pass, data: Any) -> Recorded | None:
        """Record a shape; None if that fails. The runs that this takes leave no trace: see `_kept`, `_rewind`."""
        inputs: list[Tensor] = []

        def held(tensor: Tensor) -> Tensor:
            inputs.append(tensor.clone())
            return inputs[-1]

        fixed = map_leaves(held, data, Tensor)
        seed = torch.zeros((), dtype=torch.float32, device=inputs[0].device)
        last: dict[str, Any] = {"gradients": {}}
        is_single = self._is_single
        used: set[Tensor] = set()
        marks: list[Mark | None] = [None] * len(self._groups)

        def once() -> None:
            with self._without_gradients(), self._landing(used, marks):
                total, count, outputs = run(fixed)
                backward(total, seed.to(total.dtype))
                # Without what backward has kept of the run.
                last["total"], last["count"], last["outputs"] = detached((total, count, outputs))
                if is_single:
                    last["gradients"] = {each: each.grad for each in self._parameters if each.grad is not None}
                    used.update(last["gradients"])
                else:
                    used.update(self._land(self._parameters))

        try:
            with self._kept():
                for _ in range(WARM_RUNS_AGAIN if self._recorded else WARM_RUNS):
                    self._rewind()
                    self._recorder.warm(once)
                self._rewind()
                replay = self._recorder.record(once)
                last["gradients"] = {each: self._recorder.alias(grad) for each, grad in last["gradients"].items()}
        except Exception as error:  # whatever a loss does that cannot be recorded
            self.failures[_words(shape)] = first_line(error)
            if self._recorder.recover():
                self._recorded.clear()
                self._most = 0
            return None
        finally:
            self._rewind()
        recorded = Recorded(inputs, seed, last, replay, frozenset(used), marks)
        self._recorded[shape, is_single] = recorded
        return recorded

    def _land(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Add the gradients of these parameters where they belong, and take them away; return those that had one."""
        landed, gradients = [], []
        for parameter in parameters:
            if parameter.grad is not None:
                landed.append(parameter)
                gradients.append(parameter.grad)
                parameter.grad = None
                if parameter not in self._places:
                    self._own[parameter] = self._places[parameter] = torch.zeros_like(gradients[-1])
        if landed:
            foreach_add_([self._places[parameter] for parameter in landed], gradients)
        return landed

    @contextmanager
    def _landing(self, used: set[Tensor], marks: list[Mark | None]) -> Iterator[None]:
        """Land the gradients of a group, and mark it, as soon as all of those are complete that were `used` before."""
        waiting = [{parameter for parameter in group if parameter in used} for group in self._groups]
        hooks = []

        def hook(number: int) -> Callable[[Tensor], None]:
            def accumulated(parameter: Tensor) -> None:
                if parameter not in waiting[number]:
                    raise GradientInPieces("a parameter got its gradient in several pieces in one backward")
                waiting[number].remove(parameter)
                if not waiting[number]:
                    self._land(self._groups[number])
                    marks[number] = self._recorder.mark()

            return accumulated

        for number, group in enumerate(waiting):
            hooks += [parameter.register_post_accumulate_grad_hook(hook(number)) for parameter in group]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Parameters without `grad`, so that gradients are taken over as they are, not added one by one."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Buffers and sums of gradients as they were, after a recording; a new place of a gradient is its `grad`."""
        buffers = [buffer.clone() for buffer in self._buffers]
        others: list[Tensor] = [parameter for parameter in self._parameters if parameter not in self._places]
        sums = {parameter: None if parameter.grad is None else parameter.grad.clone() for parameter in others}
        places = {parameter: place.clone() for parameter, place in self._places.items()}
        try:
            yield
        finally:
            for parameter, place in self._places.items():
                if parameter in places:
                    place.copy_(places[parameter])
                else:
                    so_far = sums[parameter]
                    place.zero_() if so_far is None else place.copy_(so_far)
                    parameter.grad = place
            for buffer, value in zip(self._buffers, buffers, strict=True):
                buffer.copy_(value)

    def _rewind(self) -> None:
        """To where the engine's seeding of this grain left the generators."""
        for generator in self._generators:
            generator.manual_seed(generator.initial_seed())


def tensors(data: Any) -> Iterator[Tensor]:
    """All tensors of a grain's data, always in the same order. Anything else in it is an error of the caller's."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors(value)
    elif isinstance(data, tuple | list):
        for value in data:
            yield from tensors(value)
    else:
        raise TypeError(f"a grain to be recorded is made of tensors, not of {type(data).__name__}")


def signature(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the shapes and dtypes that two grains must have in common to be replayed from one recording."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)


def _words(shape: tuple[Any, ...]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(sizes)}" for sizes, dtype in shape)


def _cloned(value: Any) -> Any:
    return map_leaves(Tensor.clone, value, Tensor)


def detached(value: Any) -> Any:
    """A result without what backward needs of it."""
    return map_leaves(Tensor.detach, value, Tensor)
