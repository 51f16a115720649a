"""The engine in a hand-written loop, against the same loop in plain PyTorch."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Gathered, PacelineError
from paceline.checkpoints import Checkpointer, collect, newest, restore
from paceline.core.keys import key
from paceline.data.grain import Batch, Grain
from paceline.train.engine import Engine
from paceline.train.loss import LossContract, NoGradients, NonFiniteLoss, OutOfMemory, TooManySkipped
from paceline.world.discover.environment import discover
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import ranks, run_ranks

BATCH, STEPS = 12, 8


def alone() -> Link:
    return start(discover({}), device="cpu", threads=1)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH * STEPS, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (len(x),), generator=generator))


def own_loop(link: Link, grains: int, settings: dict[str, Any], fused: bool = False) -> list[torch.Tensor]:
    engine = Engine(link=link, level=0, **settings)
    model = net()
    model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused))

    def loss(grain: Grain) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(model(grain.x), grain.y, reduction="sum"), len(grain.y)

    for batch in engine.batches(dataset(), global_batch=BATCH, grains=grains, order="none"):
        engine.step(loss, batch)
    return [parameter.detach().clone() for parameter in model.parameters()]


def raw_loop(grains: int, clip: Callable[[nn.Module], None] = lambda model: None) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = dataset().tensors
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, ids in enumerate(np.array_split(np.arange(step * BATCH, (step + 1) * BATCH), grains)):
            torch.manual_seed(key(0, step, number))
            (F.cross_entropy(model(x[ids]), y[ids], reduction="sum") / BATCH).backward()
        clip(model)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("grains", [1, 3])
@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        ({}, lambda model: None),
        ({"clip_norm": 0.05}, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)),
        ({"clip_value": 0.01}, lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    ],
)
def test_bitwise_the_same_as_plain_pytorch(grains: int, settings: dict[str, Any], clip: Any) -> None:
    for ours, raw in zip(own_loop(alone(), grains, settings), raw_loop(grains, clip), strict=True):
        assert torch.equal(ours, raw)


def test_several_ranks_in_a_hand_written_loop() -> None:
    expected = raw_loop(4)
    for size in (2, 4):
        for weights in run_ranks(size, own_loop, 4, {}):
            for ours, raw in zip(weights, expected, strict=True):
                torch.testing.assert_close(ours, raw, rtol=0, atol=1e-6)


def tokens_loop(link: Link, declared: bool) -> list[torch.Tensor]:
    """A loss that counts tokens; the engine learns the counts before or only while it runs."""
    engine = Engine(link=link, precision="fp64")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.arange(36.0).view(12, 3).sin(), torch.arange(12) % 5 + 1)
    if declared:
        data.counts = data.tensors[1].numpy()  # type: ignore[attr-defined]

    def loss(grain: Grain) -> tuple[torch.Tensor, torch.Tensor | int]:
        tokens = grain.y.sum()
        return (model(grain.x).square().sum(1) * grain.y).sum(), tokens if declared else int(tokens)

    for batch in engine.batches(data, global_batch=6, grains=2, order="none", epochs=3):
        engine.step(loss, batch)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_counts_that_only_the_loss_knows_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, tokens = torch.arange(36.0).view(12, 3).sin().double(), torch.arange(12) % 5 + 1
    for _ in range(3):
        for part in (slice(0, 6), slice(6, 12)):
            optimizer.zero_grad()
            ((model(x[part]).square().sum(1) * tokens[part]).sum() / tokens[part].sum()).backward()
            optimizer.step()
    for size, declared in ((1, True), (1, False), (2, True), (2, False)):
        for weights in run_ranks(size, tokens_loop, declared):
            for ours, raw in zip(weights, model.parameters(), strict=True):
                torch.testing.assert_close(ours, raw.detach(), rtol=1e-12, atol=1e-12)


def one_weight(**settings: Any) -> tuple[Engine, nn.Module]:
    engine = Engine(link=alone(), level=0, **settings)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return engine, model


def batch_of(*values: float, count: float | None = None) -> Batch:
    x = torch.tensor(values).view(-1, 1)
    return Batch(0, 0, 1, len(x), count or len(x), [Grain((x,), 0, np.arange(len(x)))])


def test_a_step_without_finite_gradients_is_skipped_counted_and_fatal_in_a_row() -> None:
    engine, model = one_weight(max_skipped=3)
    loss = lambda grain: ((model(grain.x) * grain.x).sum(), len(grain))  # noqa: E731
    engine.step(loss, batch_of(1.0))
    before = model.weight.detach().clone()
    for _ in range(2):
        engine.step(loss, batch_of(float("inf")))
    assert torch.equal(model.weight, before)
    assert engine.skips.state()[0] == 2
    engine.step(loss, batch_of(1.0))
    assert not torch.equal(model.weight, before)
    engine.step(loss, batch_of(float("nan")))
    engine.step(loss, batch_of(float("nan")))
    with pytest.raises(TooManySkipped, match="3 steps in a row"):
        engine.step(loss, batch_of(float("nan")))


def steps_of(link: Link, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Two weights after each of three steps: with large, with infinite, with usual gradients on the last rank."""
    engine = Engine(link=link, level=0, **settings)
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-30))
    weights = []
    for value in (1.0, 3e38, float("inf"), 1.0):
        x = torch.tensor([[value, value]] if link.world.rank == link.world.size - 1 else [[0.0, 0.0]])
        batch = Batch(0, 0, link.world.size, link.world.size, 1.0, [Grain((x,), link.world.rank, np.arange(1))])
        engine.step(lambda grain: (torch.nan_to_num(model(grain.x)).sum(), float(link.world.rank == 0)), batch)
        first, second = model.weight.detach().flatten().tolist()
        weights.append((first, second))
    assert engine.skips.state()[0] == 1
    return weights


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1e38}])
def test_finite_gradients_whose_sum_or_norm_overflows_are_no_reason_to_skip(settings: dict[str, Any]) -> None:
    for size in (1, 2):
        for before, large, infinite, _ in run_ranks(size, steps_of, settings):
            assert (large != before) is ("clip_norm" not in settings)  # an infinite norm clips everything away
            assert infinite == large


def test_a_step_in_which_nothing_counted_is_skipped() -> None:
    engine, model = one_weight()
    engine.step(lambda grain: (model(grain.x).sum(), 1), batch_of(1.0))
    before = model.weight.detach().clone()
    engine.step(lambda grain: (model(grain.x).sum() * 0, 0), batch_of(1.0))
    assert torch.equal(model.weight, before)
    assert engine.skips.state()[0] == 1


def test_the_first_loss_must_be_a_number() -> None:
    engine, model = one_weight()
    with pytest.raises(NonFiniteLoss, match=r"nan at step 0 .*float32\[2, 1\]"):
        engine.step(lambda grain: (model(grain.x).sum() * float("nan"), 2), batch_of(1.0, 2.0))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda total: total / 2, "a single tensor"),
        (lambda total: (total.expand(3), 3), "not a 0-dim tensor"),
        (lambda total: (total, "many"), "count that is not a number"),
        (lambda total: (total, 1, 2, 3), "4 values"),
        (lambda total: (1.0, 1), "not a 0-dim tensor"),
    ],
)
def test_what_a_loss_must_return(result: Any, words: str) -> None:
    engine, model = one_weight()
    with pytest.raises(LossContract, match=words) as caught:
        engine.step(lambda grain: result(model(grain.x).sum()), batch_of(1.0))
    assert "reduction='sum'" in caught.value.hint


def test_a_loss_detached_from_the_model_is_named() -> None:
    engine, _ = one_weight()
    free = torch.ones((), requires_grad=True)
    with pytest.raises(NoGradients):
        engine.step(lambda grain: (free * 2, 1), batch_of(1.0))


def test_out_of_memory_names_the_shape_and_the_way_out() -> None:
    engine, _ = one_weight()

    def loss(grain: Grain) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    with pytest.raises(OutOfMemory, match=r"2 samples \(float32\[2, 1\]\)") as caught:
        engine.step(loss, batch_of(1.0, 2.0))
    assert "--grains 2" in caught.value.hint


def test_evaluating_restores_the_modes_of_every_module() -> None:
    engine = Engine(link=alone(), level=0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()  # frozen by the user
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with engine.evaluating():
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(2, 2)).requires_grad
    assert [module.training for module in model] == [True, False, True]


def resumed_loop(link: Link, folder: str, stop_after: int | None) -> list[torch.Tensor]:
    """Save in mid-epoch and go on in another engine, as a hand-written loop would after a crash."""
    from pathlib import Path

    def run(engine: Engine, limit: int | None) -> Iterator[None]:
        def loss(grain: Grain) -> tuple[torch.Tensor, int]:
            return F.cross_entropy(engine.model(grain.x), grain.y, reduction="sum"), len(grain.y)

        for batch in engine.batches(dataset(), global_batch=BATCH, grains=2, epochs=2):
            engine.step(loss, batch)
            if engine.num_steps == limit:
                return
            yield

    def build() -> Engine:
        engine = Engine(link=link, precision="fp64", ema=0.9)
        model = net()
        engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return engine

    engine = build()
    list(run(engine, stop_after))
    if stop_after is not None:
        if link.is_first:
            keeper = Checkpointer(Path(folder))
            keeper.save(engine.num_steps, *collect(engine))
            keeper.close()
        link.barrier()
        engine = build()
        found = newest(Path(folder)).checkpoint
        assert found is not None
        restore(engine, found.parts, found.state)
        list(run(engine, None))
    assert engine.num_steps == 2 * STEPS
    assert engine.prepared.average is not None
    return [*(parameter.detach() for parameter in engine.model.parameters()), *engine.prepared.average.tensors.values()]


@ranks(1, 2)
def test_a_hand_written_loop_resumes_in_mid_epoch(link: Link, tmp_path: Any) -> None:
    whole = resumed_loop(link, str(tmp_path), None)
    parts = resumed_loop(link, str(tmp_path), STEPS + 3)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


def evaluated(link: Link) -> tuple[dict[str, float], float]:
    engine = Engine(link=link, level=0)
    model = net()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def metrics(grain: Grain) -> dict[str, Any]:
        output = model(grain.x)
        spread = Gathered(lambda values: float(np.median(values.numpy())), output.sum(1))
        return {"loss": (F.cross_entropy(output, grain.y, reduction="sum"), len(grain)), "median": spread}

    found = engine.evaluate(metrics, dataset(), eval_batch=7)
    limited = engine.evaluate(metrics, DataLoader(dataset(), batch_size=3), eval_batch=7, limit_batches=2)
    assert model.training
    return found, limited["loss"]


def test_evaluate_gives_the_numbers_of_one_process_on_any_ranks() -> None:
    model, (x, y) = net().eval(), dataset().tensors
    output = model(x).detach()
    found, limited = run_ranks(1, evaluated)[0]
    assert found["median"] == pytest.approx(float(np.median(output.sum(1).numpy())), rel=1e-5)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-6)
    assert limited == pytest.approx(float(F.cross_entropy(output[:14], y[:14])), rel=1e-6)
    for size in (2, 3):
        assert run_ranks(size, evaluated) == [(found, limited)] * size


def test_evaluate_explains_mistakes() -> None:
    engine = Engine(link=alone(), level=0)
    model = net()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PacelineError, match="eval_bach"):
        engine.evaluate(lambda grain: {}, dataset(), eval_bach=7)
    with pytest.raises(PacelineError, match="is empty"):
        engine.evaluate(lambda grain: {}, [])
    with pytest.raises(PacelineError, match="not a pair"):
        engine.evaluate(lambda grain: {"loss": 1.0}, dataset())


def test_entries_of_a_dictionary_go_to_a_model_by_name() -> None:
    class Encoding(UserDict[str, Any]):
        """As tokenizers of Hugging Face return them."""

    grain = Grain(Encoding(x=torch.ones(2, 3), scale=2.0), 0, np.arange(2))

    def model(x: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * x

    assert torch.equal(model(**grain), torch.full((2, 3), 2.0))
    assert torch.equal(grain.to(torch.device("cpu")).x, torch.ones(2, 3))
    assert grain.shapes() == "x: float32[2, 3], scale: float"
    with pytest.raises(PacelineError, match="is not a dictionary"):
        dict(**Grain((torch.ones(2), 1), 0, np.arange(2)))


def turns(link: Link, beside: bool, sums: str, warns: bool) -> list[torch.Tensor]:
    """A maker with batch norm that also runs, and is not trained, in the loss of a critic."""
    torch.manual_seed(3)
    maker, critic = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)
    makers, critics = (Engine(link=link, level=0, sums=sums) for _ in range(2))
    makers.prepare(maker, torch.optim.SGD(maker.parameters(), lr=0.1))
    critics.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1), beside=[maker] if beside else [])

    def criticise(grain: Grain) -> tuple[torch.Tensor, int]:
        return critic(maker(grain.x).detach()).square().sum(), len(grain)

    def make(grain: Grain) -> tuple[torch.Tensor, int]:
        return critic(maker(grain.x)).sum(), len(grain)

    with capturing_warnings() as warnings:
        for batch in critics.batches(dataset(), global_batch=BATCH, grains=4):
            critics.step(criticise, batch)
            critic.requires_grad_(False)
            makers.step(make, batch)
            critic.requires_grad_(True)
        critics.close()
        makers.close()
    assert any("beside=[model]" in warning for warning in warnings) == warns
    return [tensor.detach().clone() for tensor in maker.state_dict().values()]


@contextmanager
def capturing_warnings() -> Iterator[list[str]]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logging.getLogger("paceline").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("paceline").removeHandler(handler)


def test_a_model_in_the_losses_of_two_engines_has_the_same_statistics_on_all_ranks() -> None:
    (expected,) = run_ranks(1, turns, True, "exact", False)
    for size in (2, 3):
        for found in run_ranks(size, turns, True, "exact", False):
            for ours, alone_ in zip(found, expected, strict=True):
                assert torch.equal(ours, alone_)


def test_a_model_that_two_engines_run_without_saying_so_is_noticed() -> None:
    first, second = run_ranks(2, turns, False, "exact", True)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)  # the first rank's, at least


@ranks(2)
def test_beside_is_refused_where_statistics_are_shares(link: Link) -> None:
    with pytest.raises(PacelineError, match="summed in every step"):
        turns(link, True, "fast", False)


@ranks(1, 2)
def test_a_closed_engine_leaves_whole_statistics(link: Link) -> None:
    """With `sums` fast each rank kept its share of them: only validation and checkpoints saw the whole."""
    engine = Engine(link=link, level=0, sums="fast")
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def loss(grain: Grain) -> tuple[torch.Tensor, int]:
        return model(grain.x).sum(), len(grain)

    for batch in engine.batches(dataset(), global_batch=BATCH, grains=2):
        engine.step(loss, batch)
    engine.close()
    torch.testing.assert_close(model[0].running_mean, dataset().tensors[0].mean(0))
