"""Sharded training (FSDP2) against one process and against whole models on every rank, and over a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.settings import EngineConfig, TrainConfig
from paceline.observe.journal import read
from paceline.parallel.sharded import CalledAround, CannotShard, UnevenUse
from paceline.train.checkpoint import reader as restore
from paceline.train.engine import Engine
from paceline.train.task import Stage
from paceline.world.link import Link
from tests.bf16 import needs_bf16
from tests.ranks import ranks, run_ranks
from tests.train.sharded import BlocksTask, Net, fit, points, trainer


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read(folder / "metrics.jsonl") if "loss" in record and "step" in record]


def run(size: int, folder: Path, *, has_norm: bool = False, **settings: Any) -> list[dict[str, Any]]:
    return run_ranks(size, fit, {"out": str(folder), **settings}, has_norm)


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-10), (None, 1e-6)])
def test_sharded_is_whole(tmp_path: Path, size: int, precision: Any, bound: float) -> None:
    """AdamW with decay and clipping, several grains per rank, steps in which ranks have fewer grains or none."""
    common = {"precision": precision}
    (one,) = run(1, tmp_path / "one", **common)
    whole = run(size, tmp_path / "whole", **common)
    cut = run(size, tmp_path / "cut", shard="full", **common)
    expected = losses(tmp_path / "one")
    assert len(expected) == 12
    assert losses(tmp_path / "cut") == pytest.approx(expected, rel=bound)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=bound)
    for rank in (*whole, *cut):
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=bound)
    for rank in cut:
        # Each parameter is cut along its first axis, so a rank has at most one row more than its even share.
        even = rank["parameters"] / size
        assert rank["weights"] < even * 1.35
        assert rank["moments"] == 2 * rank["weights"]
        assert rank["storage"] < even * 1.35 * (8 if precision else 4)  # the piece itself, not a view of the whole
    assert sum(rank["weights"] for rank in cut) == cut[0]["parameters"] == whole[0]["weights"]


@pytest.mark.parametrize("grains", [4, 6])
def test_statistics_and_averages_as_on_one_rank(tmp_path: Path, grains: int) -> None:
    """Six grains on four ranks: two ranks run a grain for nothing, which batch norms must not see."""
    common: dict[str, Any] = {"precision": "fp64", "grains": grains, "ema": 0.8, "has_norm": True}
    (one,) = run(1, tmp_path / "one", **common)
    cut = run(4, tmp_path / "cut", shard="full", **common)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    assert cut[3]["metrics"] == pytest.approx(one["metrics"], rel=1e-10)
    ours, theirs = (restore.newest(tmp_path / name / "checkpoints").checkpoint for name in ("cut", "one"))
    assert ours is not None
    assert theirs is not None
    assert ours.parts.keys() - {"statistics"} == theirs.parts.keys()  # shares of batch norms, of several ranks
    for part in ("model", "optimizer", "ema"):
        assert ours.parts[part].keys() == theirs.parts[part].keys()
        for name, tensor in theirs.parts[part].items():
            torch.testing.assert_close(ours.parts[part][name], tensor, rtol=1e-9, atol=1e-12, msg=f"{part} {name}")


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "sgd", "clip_norm": None}, {"checkpoint_activations": ("blocks.*",)}, {"shard_modules": ()}],
    ids=["sgd", "recomputed", "one-block"],
)
def test_other_ways_to_train(tmp_path: Path, settings: dict[str, Any]) -> None:
    common = {"precision": "fp64", **settings}
    run(1, tmp_path / "one", **common)
    run(2, tmp_path / "cut", shard="full", **common)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "novograd", "lr": 0.01, "weight_decay": 0.1},
        {"optimizer": "lamb", "lr": 0.01, "weight_decay": 0.1},
        {"optimizer": "lars", "lr": 1.0, "weight_decay": 0.1},
        {"optimizer": "sgd", "larc": "clip"},
        {"optimizer": "adamw", "larc": "scale", "larc_exclude": "vectors"},
    ],
    ids=["novograd", "lamb", "lars", "larc", "larc-scale-adamw"],
)
def test_norms_are_those_of_whole_tensors(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    """Where a tensor has fewer rows than there are ranks (the head has one), some ranks have no piece of it."""
    common = {"precision": "fp64", **settings}
    (one,) = run(1, tmp_path / "one", **common)
    cut = run(size, tmp_path / "cut", shard="full", **common)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    assert len(losses(tmp_path / "one")) == 12
    for rank in cut:
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-10)


@needs_bf16
def test_bf16_autocast_is_the_same_computation(tmp_path: Path) -> None:
    run(2, tmp_path / "whole", level=2)
    run(2, tmp_path / "cut", level=2, shard="full")
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


class Walk(torch.utils.data.IterableDataset[Any]):
    """A stream that ends earlier on one rank than on another."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size = rank, size

    def shard(self, rank: int, size: int) -> Walk:
        return Walk(rank, size)

    def __iter__(self) -> Any:
        return iter([points(24, seed=3)[index] for index in range(8 + 8 * self._rank)])


class Streamed(BlocksTask):
    def train_data(self) -> Any:
        return Walk()


def stream(link: Link, shard: str, folder: str) -> int:
    settings = {"shard": shard, "epochs": 2, "steps": None, "grains": 4, "out": folder, "precision": "fp64"}
    return trainer(link, Streamed(), settings).fit().num_steps


def test_a_rank_whose_data_ends_early_goes_on_with_anothers(tmp_path: Path) -> None:
    whole = run_ranks(2, stream, "none", str(tmp_path / "whole"))
    cut = run_ranks(2, stream, "full", str(tmp_path / "cut"))
    assert cut == whole
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


def test_every_rank_on_its_own_way(tmp_path: Path) -> None:
    common = {"dataset_distribution": "random_seed_offset", "precision": "fp64", "epochs": 2, "steps": None}
    run(2, tmp_path / "whole", **common)
    run(2, tmp_path / "cut", shard="full", **common)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


class Halving(BlocksTask):
    """Looks at gradients after backward, and replaces one; two stages, the second with a new optimizer."""

    is_growing = False

    def stages(self) -> list[Stage]:
        return [Stage("one", points(32, seed=1)), Stage("two", points(16, seed=4), restart_optimizer=True)]

    def before_stage(self, model: nn.Module, stage: int) -> None:
        if self.is_growing and stage == 1:
            model.head = nn.Linear(13, 1)

    def after_backward(self, model: nn.Module) -> None:
        model.body.weight.grad.mul_(0.5)  # type: ignore[union-attr, operator]
        model.head.bias.grad = model.head.bias.grad * 3.0  # type: ignore[union-attr, operator]


def staged(link: Link, shard: str, folder: str) -> None:
    settings = {"shard": shard, "epochs": 2, "steps": None, "out": folder, "precision": "fp64"}
    trainer(link, Halving(), settings).fit()


def test_stages_and_changed_gradients(tmp_path: Path) -> None:
    run_ranks(1, staged, "none", str(tmp_path / "one"))
    run_ranks(2, staged, "full", str(tmp_path / "cut"))
    assert len(losses(tmp_path / "one")) == 6
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


@pytest.mark.parametrize("patterns", [("blocks.*",), ("body", "blocks.*", "head")], ids=["some", "all"])
def test_a_loop_of_ones_own(patterns: tuple[str, ...]) -> None:
    run_ranks(2, own_loop, patterns)


def own_loop(link: Link, patterns: tuple[str, ...]) -> None:
    """Validation before the first step, where ranks call the model, and its layers, as often as each likes."""
    torch.manual_seed(0)
    twin = Net(has_norm=True).double()
    engine = Engine(link=link, precision="fp64", shard="full", shard_modules=patterns)
    torch.manual_seed(0)
    model = Net(has_norm=True)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = points(6, seed=5).tensors[0].double()
    for _ in range(2):
        with engine.evaluating():
            for _ in range(link.world.rank):
                torch.testing.assert_close(model(x), twin.eval()(x))
                torch.testing.assert_close(model.blocks[0](model.body(x)), twin.blocks[0](twin.body(x)))
    twin.train()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in engine.batches(points(8, seed=1), global_batch=8, order="none", grains=2):
        engine.step(lambda grain: (model(grain.x).square().sum(), len(grain)), batch)
        for x_part in points(8, seed=1).tensors[0].double().chunk(2):
            (twin(x_part).square().sum() / 8).backward()
        optimizer.step()
    for _ in range(2):
        with engine.evaluating():
            torch.testing.assert_close(model(x), twin.eval()(x), rtol=1e-10, atol=1e-12)


# -- checkpoints -------------------------------------------------------------------------------------------------------

Candidate = tuple[int, str]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "full"), (2, "full")),
        ((4, "full"), (1, "full")),
        ((4, "full"), (1, "none")),
        ((4, "full"), (2, "none")),
        ((2, "full"), (4, "full")),
        ((1, "none"), (4, "full")),
        ((2, "none"), (2, "full")),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_in_any_form(tmp_path: Path, before: Candidate, after: Candidate) -> None:
    """From before a step in which ranks have nothing of their own."""
    stop = 5
    (tmp_path / "whole").mkdir()
    common = {"ema": 0.9, "save_every_steps": stop, "keep_last": 9}
    run(2, tmp_path / "whole" / "run", **common)
    run(before[0], tmp_path / "parts", **{**common, "steps": stop, "shard": before[1]})
    run(after[0], tmp_path / "parts", **{**common, "steps": 12, "shard": after[1], "resume": "auto"})
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole" / "run"), rel=1e-6)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reduce": "param", "sync_step": 4}, "needs `reduce` grad"),
        ({"wire": "bf16"}, "`wire` does not go"),
        ({"sync_batchnorm": "all"}, "`sync_batchnorm` does not go"),
        ({"precision": "fp16-master"}, "fp16-master"),
        ({"loss_scale": "logmax"}, "logmax"),
        ({"level": 3}, "level"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(epochs=1, shard="full", **settings)


def test_other_words_for_it() -> None:
    assert [EngineConfig(shard=word).shard for word in ("fsdp", "FSDP2", "true", "false", "no")] == [  # type: ignore[arg-type]
        "full",
        "full",
        "full",
        "none",
        "none",
    ]


class Whole(torch.optim.AdamW):
    """Some rule of a user's own."""


@ranks(2)
def test_optimizers_that_need_whole_tensors_are_refused(link: Link) -> None:
    engine = Engine(link=link, level=0, shard="full")
    model = Net(has_norm=False)
    with pytest.raises(CannotShard, match="Whole may need whole tensors"):
        engine.prepare(model, Whole(model.parameters()))
    Whole.is_elementwise = True  # type: ignore[attr-defined]
    engine.prepare(model, Whole(model.parameters()))


@ranks(2)
def test_a_stage_that_changes_the_model_is_refused(link: Link) -> None:
    task = Halving()
    task.is_growing = True
    with pytest.raises(CannotShard, match="a stage changed the model"):
        trainer(link, task, {"shard": "full", "epochs": 1, "steps": None}).fit()


class Pieces(BlocksTask):
    def loss(self, model: nn.Module, grain: Any) -> Any:
        return model.head(model.body(grain.x)).square().sum(), len(grain)  # type: ignore[operator]


@ranks(2)
def test_a_layer_called_on_its_own_is_named(link: Link) -> None:
    with pytest.raises(CalledAround, match="on its own"):
        trainer(link, Pieces(), {"shard": "full"}).fit()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return self.get_submodule(head)(x)


@ranks(2)
def test_ranks_that_use_different_layers_are_found(link: Link) -> None:
    """Heads of one size: nothing else would notice that their gradients were mixed up."""
    engine = Engine(link=link, level=0, shard="full")
    model = TwoHeads()
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(iter(engine.batches(points(8, seed=1), global_batch=8)))
    head = "ab"[link.world.rank]
    with pytest.raises(UnevenUse, match=r"a\.weight"):
        engine.step(lambda grain: (model(grain.x, head).square().sum(), len(grain)), batch)


@ranks(2)
def test_layers_that_no_rank_uses_are_left_alone(link: Link) -> None:
    engine = Engine(link=link, level=0, shard="full")
    model = TwoHeads()
    engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in engine.prepared.named_weights().items()}
    for batch in engine.batches(points(8, seed=1), global_batch=4):
        engine.step(lambda grain: (model(grain.x, "a").square().sum(), len(grain)), batch)
    after = engine.prepared.named_weights()
    assert torch.equal(after["b.weight"], before["b.weight"])
    assert link.world.rank == 1 or not torch.equal(after["a.weight"], before["a.weight"])


@ranks(2)
def test_all_ranks_skip_a_step_whose_gradient_overflowed_on_one(link: Link) -> None:
    """Only row 0 overflows, which the first rank has."""
    engine = Engine(link=link, level=0, shard="full")
    model = nn.Linear(5, 4)
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, batch in enumerate(engine.batches(points(12, seed=1), global_batch=4)):
        before = engine.prepared.named_weights()["weight"].clone()
        weights = torch.tensor([float("inf") if number == 1 else 1.0, 1.0, 1.0, 1.0])
        engine.step(lambda grain, weights=weights: ((model(grain.x) * weights).sum(), len(grain)), batch)
        assert torch.equal(engine.prepared.named_weights()["weight"], before) == (number == 1)
