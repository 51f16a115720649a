"""Recorded grains against plain ones, bitwise, with a recorder that replays on the CPU; on a GPU with the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.tree import map_leaves
from paceline.speed.graphs import CudaRecorder, Graphs, Mark, Recorder, detached, signature, tensors


class Again:
    """Replays by running the recorded function again, without the hooks of `net`: a graph calls none."""

    def __init__(self, net: nn.Module | None = None) -> None:
        self.parameters = [] if net is None else list(net.parameters())
        self.num_recorded = 0
        self.done: list[str] = []
        """Marks that were passed and waited for, in order."""

    def warm(self, function: Callable[[], None]) -> None:
        function()

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor

    def recover(self) -> bool:
        return False

    def mark(self) -> Mark:
        return Passed(self.done)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        function()

        def replay() -> None:
            hooks = [parameter._post_accumulate_grad_hooks or {} for parameter in self.parameters]
            kept = [dict(each) for each in hooks]
            for each in hooks:
                each.clear()
            function()
            for each, former in zip(hooks, kept, strict=True):
                each.update(former)

        return replay


class Passed:
    """A mark that is passed when it is made."""

    def __init__(self, done: list[str]) -> None:
        self._done = done
        done.append("marked")

    def wait(self) -> None:
        self._done.append("waited")


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return net.to(device)


def make_data(size: int, seed: int, device: torch.device) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(size, 5, generator=random), torch.randint(0, 2, (size,), generator=random)
    return {"x": x.to(device), "rest": (y.to(device),)}


def loss_of(net: nn.Module) -> Callable[[Any], tuple[Tensor, Any, Any]]:
    def run(data: Any) -> tuple[Tensor, Any, Any]:
        logits = net(data["x"])
        loss = nn.functional.cross_entropy(logits, data["rest"][0], reduction="sum")
        return loss, len(data["x"]), {"logits": logits}

    return run


def train(net: nn.Module, graphs: Graphs | None, sizes: list[int], grains: int = 2) -> list[float]:
    """Plain SGD, `grains` micro-batches per step, seeded per grain as the engine does."""
    device, losses, run = next(net.parameters()).device, [], loss_of(net)
    for step in range(len(sizes) // grains):
        for parameter in net.parameters():
            parameter.grad = None
        if graphs is not None:
            graphs.start_step(grains)
        for number in range(grains):
            index = step * grains + number
            data = make_data(sizes[index], index, device)
            torch.manual_seed(1000 + index)

            def seed(total: Tensor, count: int = sum(sizes[step * grains : (step + 1) * grains])) -> Tensor:
                return torch.full_like(total, 1.0 / count)

            done = None if graphs is None else graphs.run(run, data, seed)
            if done is None:
                total, count, outputs = run(data)
                total.backward(seed(total))
                total, count, outputs = detached((total, count, outputs))
            else:
                total, count, outputs = done.results
            assert count == sizes[index] == len(outputs["logits"])
            losses.append(float(total.detach()))
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return losses


SIZES = [4, 6, 4, 6, 6, 4, 3, 4, 4, 4, 6, 6, 4, 3, 3, 6]
CPU = torch.device("cpu")


def check(device: torch.device, make: Callable[[nn.Module], Recorder], warm: bool, grains: int) -> Graphs:
    plain, net = make_net(device), make_net(device)
    graphs = Graphs(net, make(net))
    graphs.expect(grains)
    if warm:
        for size in (4, 6, 3):
            assert graphs.warm(loss_of(net), make_data(size, 77, device)), graphs.failures
    expected, found = train(plain, None, SIZES, grains), train(net, graphs, SIZES, grains)
    assert found == expected
    for (name, one), other in zip(plain.state_dict().items(), net.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert net.get_parameter("unused").grad is None  # a zero would be decayed and counted
    return graphs


@pytest.mark.parametrize("grains", [1, 2])
@pytest.mark.parametrize("warm", [False, True])
def test_replayed_training_is_bitwise_the_same(warm: bool, grains: int) -> None:
    """Batch norm's statistics, dropout's numbers, accumulation over grains of different shapes."""
    graphs = check(CPU, Again, warm, grains)
    assert graphs.num_recorded == 3
    assert graphs.num_plain == (0 if warm else 3)  # the first sight of each shape
    assert graphs.num_replayed == len(SIZES) - graphs.num_plain
    assert graphs.numbers()["replayed"] == graphs.num_replayed
    assert "3 shapes recorded" in graphs.lines()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # torch tells of a thread that has no CUDA context yet
@pytest.mark.parametrize("grains", [1, 2])
@pytest.mark.parametrize("warm", [False, True])
def test_replayed_training_is_bitwise_the_same_on_a_gpu(warm: bool, grains: int) -> None:
    device = torch.device("cuda")
    assert check(device, lambda net: CudaRecorder(device), warm, grains).num_recorded == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore")
def test_steps_of_one_grain_and_of_several_in_turns(device: str) -> None:
    """A shape has a recording for either; neither sees gradients that the other has left."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    where = torch.device(device)
    plain, net = make_net(where), make_net(where)
    graphs = Graphs(net, Again(net) if device == "cpu" else CudaRecorder(where))
    for grains in (1, 2, 1, 2, 4, 1):
        assert train(net, graphs, SIZES[:8], grains) == train(plain, None, SIZES[:8], grains)
    for (name, one), other in zip(plain.state_dict().items(), net.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert graphs.num_recorded == 6


def test_gradients_are_added_where_groups_have_their_place() -> None:
    """Group by group, each with a mark as soon as it is complete; values are those of plain runs."""
    plain, net = make_net(CPU), make_net(CPU)
    names = [["4.weight", "4.bias", "unused"], ["1.weight", "1.bias"], ["0.weight", "0.bias"]]
    groups = [{net.get_parameter(name): torch.zeros_like(net.get_parameter(name)) for name in each} for each in names]
    recorder = Again(net)
    graphs = Graphs(net, recorder, groups)
    assert graphs.warm(loss_of(net), make_data(4, 77, CPU)), graphs.failures
    assert all(not place.any() for group in groups for place in group.values())
    recorder.done.clear()
    for index in range(2):
        data = make_data(4, index, CPU)
        for each in (plain, net):
            torch.manual_seed(index)
            if each is plain:
                total, *_ = loss_of(plain)(data)
                total.backward(torch.tensor(0.5))
            else:
                replay = graphs.run(loss_of(net), data, lambda total: torch.tensor(0.5))
                assert replay is not None
    assert recorder.done == ["marked"] * 6
    assert replay.recorded.used == {parameter for name, parameter in net.named_parameters() if name != "unused"}
    assert [mark is not None for mark in replay.recorded.marks] == [True] * 3
    for group, each in zip(groups, names, strict=True):
        for name, place in zip(each, group.values(), strict=True):
            expected = plain.get_parameter(name).grad
            assert torch.equal(place, torch.zeros(3) if expected is None else expected), name


def test_a_gradient_in_pieces_is_not_recorded() -> None:
    """A group would be sent before its gradient is whole."""
    net = nn.Linear(3, 1)

    def in_pieces(data: Any) -> tuple[Tensor, Any, Any]:
        total = net(data["x"]).sum()

        # As reentrant checkpointing does: a backward in backward.
        @torch.enable_grad()
        def again(gradient: Tensor) -> None:
            net(data["x"]).sum().backward()

        total.register_hook(again)
        return total, 1, {}

    graphs = Graphs(net, Again(net), [{net.weight: torch.zeros(1, 3)}])
    assert not graphs.warm(in_pieces, {"x": torch.ones(2, 3)})
    assert "several pieces" in next(iter(graphs.failures.values()))


def test_only_so_many_shapes_are_recorded() -> None:
    net = make_net(CPU)
    graphs = Graphs(net, Again(net), most=1)
    assert train(net, graphs, SIZES) == train(make_net(CPU), None, SIZES)
    assert graphs.num_recorded == 1
    assert not graphs.warm(loss_of(net), make_data(9, 0, CPU))


def test_what_cannot_be_recorded_runs_plainly_and_is_said() -> None:
    class Fails(Again):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    net = make_net(CPU)
    graphs = Graphs(net, Fails(net))
    assert train(net, graphs, SIZES) == train(make_net(CPU), None, SIZES)
    assert graphs.num_recorded == graphs.num_replayed == 0
    assert len(graphs.failures) == 3
    assert "float32[4, 5], int64[4] could not be recorded: RuntimeError: operation not permitted" in graphs.lines()[1]


def test_a_failure_that_spoils_what_was_recorded() -> None:
    """Then nothing is recorded any more, and everything goes on plainly."""

    class FailsSecond(Again):
        def recover(self) -> bool:
            return True

        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            if self.num_recorded:
                raise RuntimeError("out of memory")
            return super().record(function)

    net = make_net(CPU)
    graphs = Graphs(net, FailsSecond(net))
    assert train(net, graphs, SIZES) == train(make_net(CPU), None, SIZES)
    assert graphs.num_recorded == 0
    assert len(graphs.failures) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_waits_for_the_gpu_runs_plainly() -> None:
    device = torch.device("cuda")
    plain, net = make_net(device), make_net(device)
    graphs = Graphs(net, CudaRecorder(device))

    def waits(data: Any) -> tuple[Tensor, Any, Any]:
        total, count, outputs = loss_of(net)(data)
        return total if total.item() > -1 else -total, count, outputs

    assert not graphs.warm(waits, make_data(4, 77, device))
    assert train(net, graphs, SIZES) == train(plain, None, SIZES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_a_stream_that_waits_for_a_mark_goes_on_beside_the_replay() -> None:
    """After the mark of the replay that was started last, not of one before; before that replay ends."""
    device = torch.device("cuda")
    recorder, marks = CudaRecorder(device), []
    source, place, seen = (torch.zeros(1024, device=device) for _ in range(3))

    def function() -> None:
        torch.cuda._sleep(20_000_000)
        place.copy_(source)
        marks.append(recorder.mark())
        torch.cuda._sleep(2_000_000_000)  # about a second

    replay = recorder.record(function)
    stream, end = torch.cuda.Stream(device), torch.cuda.Event()
    for number in range(1, 4):
        source.fill_(number)
        replay()
        end.record()
        with torch.cuda.stream(stream):
            marks[-1].wait()
            seen.copy_(place)
        stream.synchronize()
        assert not end.query(), "the stream has waited for the whole replay"
        assert seen.eq(number).all()
        torch.cuda.synchronize()


def test_structures() -> None:
    data = make_data(4, 0, CPU)
    assert signature(list(tensors(data))) == (((4, 5), torch.float32), ((4,), torch.int64))
    doubled = map_leaves(lambda tensor: 2 * tensor, data, torch.Tensor)
    assert torch.equal(doubled["rest"][0], 2 * data["rest"][0])
    with pytest.raises(TypeError, match="not of str"):
        list(tensors({"name": "a"}))
