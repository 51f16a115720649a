"""Sharded training (FSDP2) against one process and against whole models on every rank, and over a resumption."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.settings import EngineConfig, TrainConfig
from paceline.core.torch_private import compile_counters
from paceline.observe.journal import read
from paceline.parallel.sharded.blocks import CalledAround, CannotShard, blocks
from paceline.parallel.sharded.strategy import UnevenUse
from paceline.speed import precision
from paceline.speed.compile import compiled_parts
from paceline.speed.precision import Capabilities
from paceline.train.autotune import timing
from paceline.train.checkpoint import reader as restore
from paceline.train.engine import Engine
from paceline.train.loop import train
from paceline.train.task import HasStages, Stage
from paceline.world.link import Link
from tests.bf16 import needs_bf16
from tests.ranks import ranks, run_ranks
from tests.train.sharded import BlocksTask, Net, fit, opened, points


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read(folder / "metrics.jsonl") if "loss" in record and "step" in record]


def run(size: int, folder: Path, *, has_norm: bool = False, machines: int = 1, **settings: Any) -> list[dict[str, Any]]:
    return run_ranks(size, fit, {"out": str(folder), **settings}, has_norm, machines=machines)


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "precision", "bound"),
    [
        (4, "fp64", 1e-10),
        (2, None, 1e-6),
        pytest.param(2, "fp64", 1e-10, marks=pytest.mark.long),
        pytest.param(4, None, 1e-6, marks=pytest.mark.long),
    ],
)
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


NODE: dict[str, Any] = {"shard": "node", "machines": 2}


def test_pieces_of_a_machine(tmp_path: Path) -> None:
    """Two machines of two ranks: each machine has the whole model, in two pieces."""
    (one,) = run(1, tmp_path / "one", precision="fp64")
    cut = run(4, tmp_path / "cut", precision="fp64", **NODE)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    for rank in cut:
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-10)
        assert rank["weights"] < rank["parameters"] / 2 * 1.35
    assert sum(rank["weights"] for rank in cut) == 2 * cut[0]["parameters"]


@pytest.mark.parametrize(("size", "machines"), [(2, 1), (2, 2)])
def test_one_machine_or_one_rank_on_each(tmp_path: Path, size: int, machines: int) -> None:
    """`node` on one machine is `full`; with one rank per machine there is nothing to cut."""
    run(1, tmp_path / "one", precision="fp64")
    cut = run(size, tmp_path / "cut", precision="fp64", shard="node", machines=machines)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    assert sum(rank["weights"] for rank in cut) == machines * cut[0]["parameters"]


@pytest.mark.parametrize("wire", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_gradients_travel_as_those_of_whole_models(tmp_path: Path, wire: str) -> None:
    """The sum of two rounded numbers is the same whoever adds them; grains of a rank are added before they travel."""
    common: dict[str, Any] = {"precision": "fp64", "wire": wire, "clip_norm": None}
    exact = run(2, tmp_path / "exact", **common | {"wire": "full"})
    whole = run(2, tmp_path / "whole", **common)
    cut = run(2, tmp_path / "cut", shard="full", **common)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)  # which travel in fp32
    assert cut[0]["metrics"] == pytest.approx(whole[0]["metrics"], rel=1e-10)
    assert cut[0]["metrics"] != pytest.approx(exact[0]["metrics"], rel=1e-6)


def test_gradients_travel_rounded_between_machines(tmp_path: Path) -> None:
    run(1, tmp_path / "one", precision="fp64")
    run(4, tmp_path / "cut", precision="fp64", wire="bf16", **NODE)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=0.05)
    assert losses(tmp_path / "cut") != pytest.approx(losses(tmp_path / "one"), rel=1e-7)


@pytest.mark.parametrize(("cut", "group"), [({"shard": "full"}, 2), (NODE, "all")], ids=["full", "node"])
def test_joined_batch_norms(tmp_path: Path, cut: dict[str, Any], group: Any) -> None:
    """Each epoch ends with a step in which ranks have nothing, and are not joined."""
    common: dict[str, Any] = {"precision": "fp64", "grains": 4, "sync_batchnorm": group, "has_norm": True}
    whole = run(4, tmp_path / "whole", **common)
    pieces = run(4, tmp_path / "cut", **cut, **common)
    run(4, tmp_path / "apart", **common | {"sync_batchnorm": "no"})
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)
    assert losses(tmp_path / "cut") != pytest.approx(losses(tmp_path / "apart"), rel=1e-4)
    assert pieces[3]["metrics"] == pytest.approx(whole[0]["metrics"], rel=1e-10)


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(2, {"precision": "fp16-master"}, marks=pytest.mark.long),
        (4, {"precision": "fp16-master", "checkpoint_activations": ("blocks.*",), "lr": 0.004, "ema": 0.5}),
        (2, {"precision": "fp16-pure", "optimizer": "sgd"}),
        pytest.param(4, {"precision": "fp16", "loss_scale": "logmax"}, marks=pytest.mark.long),
        pytest.param(2, {"precision": "fp16-master", "loss_scale": "logmax"}, marks=pytest.mark.long),
    ],
    ids=["masters", "masters-recomputed", "pure", "logmax", "masters-logmax"],
)
def test_half_precision(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    """The scales, which depend on the largest gradient of all ranks, are the same, too."""
    whole = run(size, tmp_path / "whole", has_norm=True, **settings)
    cut = run(size, tmp_path / "cut", has_norm=True, **settings, **(NODE if size == 4 else {"shard": "full"}))
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=0.02)
    assert len(losses(tmp_path / "cut")) == 12
    assert [rank["scale"] for rank in cut] == [rank["scale"] for rank in whole]
    ours, theirs = (restore.newest(tmp_path / name / "checkpoints").checkpoint for name in ("cut", "whole"))
    assert ours is not None
    assert theirs is not None
    for part in ("model", "optimizer", "ema", "scale"):
        names = theirs.parts.get(part, {})
        assert ours.parts.get(part, {}).keys() == names.keys()
        assert all(ours.parts[part][name].dtype == names[name].dtype for name in names), part


@pytest.mark.parametrize("grains", [6, pytest.param(4, marks=pytest.mark.long)])
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


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "novograd", "lr": 0.01, "weight_decay": 0.1},
        {"optimizer": "lamb", "lr": 0.01, "weight_decay": 0.1},
        pytest.param({"optimizer": "lars", "lr": 1.0, "weight_decay": 0.1}, marks=pytest.mark.long),
        pytest.param({"optimizer": "sgd", "larc": "clip"}, marks=pytest.mark.long),
        {"optimizer": "adamw", "larc": "scale", "larc_exclude": "vectors"},
    ],
    ids=["novograd", "lamb", "lars", "larc", "larc-scale-adamw"],
)
def test_norms_are_those_of_whole_tensors(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    """Where a tensor has fewer rows than there are ranks (the head has one), some ranks have no piece of it."""
    common = {"precision": "fp64", **settings}
    (one,) = run(1, tmp_path / "one", **common)
    cut = run(size, tmp_path / "cut", **(NODE if size == 4 else {"shard": "full"}), **common)
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


def stream(link: Link, shard: str, folder: str, is_joined: bool) -> int:
    settings = {"shard": shard, "epochs": 2, "steps": None, "grains": 4, "out": folder, "precision": "fp64"}
    settings |= {"sync_batchnorm": "all", "grains": 2} if is_joined else {}
    return train(opened(link, Streamed(has_norm=is_joined), settings)).num_steps


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_rank_whose_data_ends_early_goes_on_with_anothers(is_joined: bool, tmp_path: Path) -> None:
    whole = run_ranks(2, stream, "none", str(tmp_path / "whole"), is_joined)
    cut = run_ranks(2, stream, "full", str(tmp_path / "cut"), is_joined)
    assert cut == whole == [4, 4]
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


def test_every_rank_on_its_own_way(tmp_path: Path) -> None:
    common = {"dataset_distribution": "random_seed_offset", "precision": "fp64", "epochs": 2, "steps": None}
    run(2, tmp_path / "whole", **common)
    run(2, tmp_path / "cut", shard="full", **common)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-10)


class Halving(BlocksTask, HasStages):
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
    train(opened(link, Halving(), settings))


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
        pytest.param((4, "full"), (1, "full"), marks=pytest.mark.long),
        pytest.param((4, "full"), (1, "none"), marks=pytest.mark.long),
        ((4, "full"), (2, "none")),
        pytest.param((2, "full"), (4, "full"), marks=pytest.mark.long),
        pytest.param((1, "none"), (4, "full"), marks=pytest.mark.long),
        pytest.param((2, "none"), (2, "full"), marks=pytest.mark.long),
        pytest.param((4, "node"), (2, "full"), marks=pytest.mark.long),
        ((2, "full"), (4, "node")),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_in_any_form(tmp_path: Path, before: Candidate, after: Candidate) -> None:
    """From before a step in which ranks have nothing of their own."""
    stop = 5
    (tmp_path / "whole").mkdir()
    common = {"ema": 0.9, "save_every_steps": stop, "keep_last": 9}
    run(2, tmp_path / "whole" / "run", **common)
    machines = {"none": 1, "full": 1, "node": 2}
    launches = [(before, {"steps": stop}), (after, {"steps": 12, "resume": "auto"})]
    for (size, shard), settings in launches:
        run(size, tmp_path / "parts", **{**common, **settings, "shard": shard, "machines": machines[shard]})
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole" / "run"), rel=1e-6)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shard": "full"}, "shard full needs reduce grad"),
        ({"shard": "node"}, "shard node needs reduce grad"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainConfig(epochs=1, reduce="param", sync_step=4, **settings)


def test_other_words_for_it() -> None:
    words = {"fsdp": "full", "FSDP2": "full", "true": "full", "hsdp": "node", "hybrid_shard": "node", "no": "none"}
    assert {word: EngineConfig(shard=word).shard for word in words} == words  # type: ignore[arg-type]


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
        train(opened(link, task, {"shard": "full", "epochs": 1, "steps": None}))


class Pieces(BlocksTask):
    def loss(self, model: nn.Module, grain: Any) -> Any:
        return model.head(model.body(grain.x)).square().sum(), len(grain)  # type: ignore[operator]


@ranks(2)
def test_a_layer_called_on_its_own_is_named(link: Link) -> None:
    with pytest.raises(CalledAround, match="on its own"):
        train(opened(link, Pieces(), {"shard": "full"}))


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


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled_loop(link: Link, shard: str, backend: str | None) -> tuple[list[float], int]:
    """Losses of a model whose blocks have different shapes, compiled by a backend; and how much was compiled."""
    plain = torch.compile
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width + 1), nn.Tanh()) for width in range(5, 15)]
    model = nn.Sequential(*layers, nn.Linear(15, 1))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own deprecated parts
        patch.setattr(torch, "compile", lambda call, **_: plain(call, backend=backend))
        engine = Engine(link=link, precision="fp64", shard=shard, shard_modules=("[0-9]",), clip_norm=1.0)
        engine.settle(replace(engine.precision, compile=backend is not None))
        engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        before = compile_counters()
        steps = [
            engine.step(lambda grain: (model(grain.x.double()).square().sum(), len(grain)), batch)
            for batch in engine.batches(points(30, seed=1), global_batch=6, grains=4, epochs=2)
        ]
    return [float(step.loss_sum) for step in steps], compile_counters().graphs - before.graphs


@pytest.mark.parametrize(
    ("size", "shard", "machines"), [(2, "full", 1), pytest.param(4, "node", 2, marks=pytest.mark.long)]
)
def test_blocks_are_compiled_one_by_one(size: int, shard: str, machines: int) -> None:
    """More blocks of one class than the compiler would compile one function for: each has a limit of its own."""
    ((expected, _),) = run_ranks(1, compiled_loop, "none", None)
    for found, num_graphs in run_ranks(size, compiled_loop, shard, "aot_eager", machines=machines):
        assert found == pytest.approx(expected, rel=1e-10)
        assert num_graphs >= 11


def test_what_lies_between_blocks_is_compiled_too() -> None:
    model = Net(has_norm=True)
    assert compiled_parts(model, ()) == [""]
    assert compiled_parts(model, ("blocks.0", "blocks.2")) == ["body", "blocks.0", "blocks.1", "blocks.2", "head"]
    inner = ["body", "blocks.0", "blocks.1.0", "blocks.1.1", "blocks.2", "head"]
    assert compiled_parts(model, ("blocks.1.0",)) == inner


# -- -O4 ---------------------------------------------------------------------------------------------------------------


def fit_tuned(link: Link, settings: dict[str, Any]) -> dict[str, Any]:
    """Train at `-O4` on a device without bf16 and without a compiler."""
    bare = Capabilities("cpu", "this CPU", bf16=False, tf32=False, fp16=True, compiler=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "capabilities", lambda device: bare)
        patch.setenv("XDG_CACHE_HOME", settings["out"] + "-cache")
        return fit(link, {**settings, "level": 4}, True)


def test_the_model_is_cut_after_the_choice(tmp_path: Path) -> None:
    """`-O4` times copies of the whole model; a run that goes on does not choose again."""
    run(1, tmp_path / "one", has_norm=True)
    for steps, resume, shard in ((5, "no", "full"), (12, "auto", "node")):
        settings = {"out": str(tmp_path / "cut"), "steps": steps, "resume": resume, "shard": shard}
        for rank in run_ranks(2, fit_tuned, settings):
            assert rank["weights"] < rank["parameters"] * 0.7
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def fit_without_room(link: Link, settings: dict[str, Any]) -> dict[str, Any]:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for a copy of the model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.TimedSteps, "__init__", full)
        return fit_tuned(link, settings)


def test_a_model_that_only_fits_in_pieces_is_not_measured(tmp_path: Path) -> None:
    settings = {"out": str(tmp_path / "cut"), "steps": 3, "shard": "full"}
    assert run_ranks(2, fit_without_room, settings)[0]["weights"]
    assert len(losses(tmp_path / "cut")) == 3


class Fused(nn.Module):
    """Parts that are not called, as the kernels of `-O4` do it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def fused_forward(self: Fused, x: torch.Tensor) -> torch.Tensor:
    for part in self.parts:
        x = nn.functional.linear(x, part.weight, part.bias)  # type: ignore[arg-type]
    return x


@ranks(2)
def test_a_forward_that_computes_with_its_parts_is_one_block(link: Link) -> None:
    torch.manual_seed(0)
    plain, model = nn.Sequential(nn.Linear(5, 6), Fused(), nn.Linear(6, 1)), nn.Sequential()
    model = copy.deepcopy(plain)
    model[1].forward = MethodType(fused_forward, model[1])
    assert blocks(model, ("1.parts.*", "2")) == ["2"]
    assert blocks(model, ("1", "2")) == ["1", "2"]
    engine = Engine(link=link, precision="fp64", shard="full", shard_modules=("1.parts.*", "2"))
    engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = points(8, seed=1).tensors[0].double()
    for batch in engine.batches(points(8, seed=1), global_batch=8, grains=2, order="none"):
        step = engine.step(lambda grain: (model(grain.x.double()).square().sum(), len(grain)), batch)
    torch.testing.assert_close(
        float(step.loss_sum), float(plain.double()(x).detach().square().sum()), rtol=1e-10, atol=0.0
    )
