"""One buffer on 1, 2 and 4 ranks, both modes, every strategy: the same content, digests and draws after every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import Conflict, RanksDiffer
from paceline.recipes.continual.replay.admission import Needed, Strategy
from paceline.recipes.continual.replay.buffer import ReplayBuffer
from paceline.recipes.continual.replay.table import Field, ItemMisfit, Layout
from paceline.world.discover.environment import World
from paceline.world.link import Link
from paceline.world.start import start
from tests.ranks import ranks, run_ranks

STRATEGIES: list[Strategy] = ["reservoir", "class-balanced", "loss-aware", "herding"]
FIELDS = {
    "logits": Field(torch.float64, (3,)),
    "examples": Field(torch.uint8, (1, 3, 5)),  # 15 bytes: rows need filling up
    "labels": Field(torch.int64),
    "is_odd": Field(torch.bool),
}


def items_of(index: np.ndarray) -> dict[str, torch.Tensor]:
    """Items as a function of their global index, so that what is stored can be checked."""
    number = torch.from_numpy(index)
    spread = torch.arange(15).view(1, 1, 3, 5)
    return {
        "examples": ((number.view(-1, 1, 1, 1) * 7 + spread) % 256).to(torch.uint8),
        "labels": number * number % 5,
        "logits": torch.sin(number.double().unsqueeze(1) + torch.arange(3)),
        "is_odd": number % 2 == 1,
    }


def assert_is(items: dict[str, torch.Tensor], index: np.ndarray) -> None:
    wanted = items_of(index)
    assert items.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert items[name].dtype == tensor.dtype
        assert torch.equal(items[name], tensor), name


def pieces_of(num_items: int, grains: int, size: int) -> tuple[int, ...]:
    return tuple(number % size for number in range(min(grains, max(1, num_items // 2))))


def walk(
    link: Link,
    mode: Any,
    strategy: Any,
    steps: list[int],
    capacity: int,
    replay: int,
    grains: int,
    state: Any = None,
) -> tuple[list[Any], Any]:
    """Go through a stream; (what was replayed and the digest, step by step; the state at the end)."""
    size, rank = link.world.size, link.world.rank
    buffer = ReplayBuffer(capacity, FIELDS, link, seed=5, strategy=strategy, mode=mode, check_every=3)
    if state is not None:
        buffer.load_state(state)
    seen = []
    for num_items in steps:
        pieces = pieces_of(num_items, grains, size)
        first = buffer.num_seen
        index = np.arange(first, first + num_items)
        parts = np.array_split(index, len(pieces))
        mine = np.concatenate([index[:0], *(part for part, owner in zip(parts, pieces, strict=True) if owner == rank)])
        drawn = buffer.draw(replay, pieces, draws=2)
        own = [[piece["labels"].tolist() for piece in pieces_] for pieces_ in drawn]
        for pieces_ in drawn:
            for piece in pieces_:
                assert torch.equal(piece["is_odd"], piece["examples"][:, 0, 0, 0] * 183 % 2 == 1)  # 183 is 1/7 mod 256
        first_draw = [piece["logits"][:, 0] for piece in drawn[0]]
        buffer.observe(
            items_of(mine),
            num_items,
            pieces,
            labels=index * index % 5,
            scores=torch.cos(torch.from_numpy(mine).double()),
            replayed=torch.cat([torch.zeros(0, dtype=torch.float64), *first_draw]),
        )
        if strategy == "herding" and buffer.num_steps % 3 == 0:
            everyone = np.arange(buffer.num_seen, buffer.num_seen + num_items)
            parts = np.array_split(everyone, len(pieces))
            here = [part for part, owner in zip(parts, pieces, strict=True) if owner == rank]
            mine = np.concatenate([index[:0], *here])
            features = torch.stack([torch.sin(torch.from_numpy(mine * k).double()) for k in (1, 2, 3)], 1)
            buffer.choose(items_of(mine), features, num_items, pieces, everyone * everyone % 5)
        buffer.prefetch(replay, pieces, draws=2)
        everyone_drew = link.gather_objects(
            dict(zip([g for g, o in enumerate(pieces) if o == rank], zip(*own, strict=True), strict=False))
        )
        merged = {grain: drew for part in everyone_drew for grain, drew in part.items()}
        table = buffer.table
        stored = buffer.num_stored
        assert stored <= capacity
        num_held = sum(link.gather_objects(len(buffer.table.held_slots)))
        assert num_held == stored * (1 if mode == "sharded" or size == 1 else size)
        seen.append(
            [sorted(merged.items()), buffer.digest(), table.index[:stored].tolist(), table.score[:stored].tolist()]
        )
    saved = buffer.state()
    if rank == 0:
        stored = saved.pop("index").numpy()
        assert_is({name.removeprefix("item."): tensor for name, tensor in saved.items() if "item." in name}, stored)
        saved["index"] = torch.from_numpy(stored)
    return seen, link.broadcast_object(saved)


def alone() -> Link:
    return start(World(0, 0, 1, 1, 0, 1, "test", None), device="cpu", threads=1)


STEPS = [7, 10, 3, 10, 1, 10, 10, 5, 10, 10, 9, 10, 10, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_the_same_at_any_world_size(mode: str, strategy: str) -> None:
    alone_seen, alone_state = walk(alone(), "replicated", strategy, STEPS, 23, 6, 4)
    for size in (1, 2, 4):
        for seen, state in run_ranks(size, walk, mode, strategy, STEPS, 23, 6, 4):
            assert seen == alone_seen, f"{size} ranks"
            assert all(torch.equal(state[name], tensor) for name, tensor in alone_state.items())


@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=8),
    st.integers(1, 19),
    st.integers(1, 8),
    st.integers(2, 4),
    st.sampled_from(STRATEGIES),
    st.sampled_from(["replicated", "sharded"]),
)
@settings(max_examples=25)
def test_any_stream_batch_and_buffer(
    steps: list[int], capacity: int, replay: int, size: int, strategy: str, mode: str
) -> None:
    replay = min(replay, capacity)
    expected = walk(alone(), "replicated", strategy, steps, capacity, replay, 4)
    for seen, _ in run_ranks(size, walk, mode, strategy, steps, capacity, replay, 4):
        assert seen == expected[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("before", "mode", "after"), [(4, "sharded", 2), (1, "replicated", 4), (2, "sharded", 1)])
def test_a_checkpoint_goes_on_at_another_world_size(strategy: str, before: int, mode: str, after: int) -> None:
    whole, _ = walk(alone(), "replicated", strategy, STEPS, 23, 6, 4)
    (first, state), *_ = run_ranks(before, walk, mode, strategy, STEPS[:6], 23, 6, 4)
    (second, _), *_ = run_ranks(after, walk, mode, strategy, STEPS[6:], 23, 6, 4, state)
    assert first + second == whole


@ranks(2, 4)
def test_a_shard_is_a_share(link: Link) -> None:
    buffer = ReplayBuffer(200, FIELDS, link, mode="sharded")
    pieces = tuple(range(link.world.size))
    for _ in range(60):
        index = np.array_split(np.arange(buffer.num_seen, buffer.num_seen + 20), link.world.size)[link.world.rank]
        buffer.observe(items_of(index), 20, pieces)
    assert 0.6 * 200 / link.world.size < len(buffer.table.held_slots) < 1.5 * 200 / link.world.size
    assert len(buffer.table.payload) <= 2 * 200 / link.world.size


@ranks(2)
def test_ranks_that_disagree_are_found(link: Link) -> None:
    for mode in ("replicated", "sharded"):
        for fault in ("payload", "decision"):
            if (mode, fault) == ("sharded", "payload"):
                continue  # nobody else has it
            buffer = ReplayBuffer(16, FIELDS, link, mode=mode, check_every=2)  # type: ignore[arg-type]
            own = np.arange(2) + 2 * link.world.rank
            buffer.observe(items_of(own), 4, (0, 1))
            buffer.draw(2, (0, 1))
            if link.world.rank == 1 and fault == "payload":
                buffer.table.payload[0, 3] ^= 1
            if link.world.rank == 1 and fault == "decision":
                buffer.table.index[2] += 1
            buffer.observe(items_of(own), 4, (0, 1))
            with pytest.raises(RanksDiffer, match=r"rank.* 1 differ .* after step 2"):
                buffer.observe(items_of(own), 4, (0, 1))


def test_rows_are_exact_and_equal_items_are_equal_rows() -> None:
    layout = Layout(FIELDS)
    assert layout.row_bytes % 8 == 0
    items = items_of(np.arange(9))
    rows = layout.pack(items, torch.tensor([3, 0, 8]), torch.device("cpu"))
    assert_is(layout.unpack(rows), np.array([3, 0, 8]))
    assert torch.equal(rows[1], layout.pack(items, torch.tensor([0]), torch.device("cpu"))[0])


def test_digest_sees_every_change_that_counts() -> None:
    def filled() -> ReplayBuffer:
        buffer = ReplayBuffer(6, FIELDS, alone())
        buffer.observe(items_of(np.arange(6)), 6, (0,))
        return buffer

    same = filled().digest()
    assert filled().digest() == same
    changed = filled()
    changed.table.payload[2, 0] ^= 1  # a logit's lowest bit
    assert changed.digest() == same
    assert changed.digest(exact_only=False) != filled().digest(exact_only=False)
    changed = filled()
    changed.table.payload[4, 30] ^= 1  # a pixel
    assert changed.digest() != same
    changed = filled()
    changed.table.row[[1, 2]] = changed.table.row[[2, 1]]
    assert changed.digest() != same
    changed = filled()
    changed.table.index[0] = 77
    assert changed.digest() != same


def test_mistakes_are_said() -> None:
    buffer = ReplayBuffer(4, FIELDS, alone(), strategy="class-balanced")
    with pytest.raises(Conflict, match="replay batch of 5 cannot come from a buffer of 4") as small:
        buffer.draw(5, (0,))
    assert "--buffer-size" in small.value.hint
    with pytest.raises(Needed, match="labels"):
        buffer.observe(items_of(np.arange(2)), 2, (0,))
    with pytest.raises(Needed, match="scores"):
        ReplayBuffer(4, FIELDS, alone(), strategy="loss-aware").observe(items_of(np.arange(2)), 2, (0,))
    with pytest.raises(ItemMisfit, match="fields labels instead of"):
        ReplayBuffer(4, FIELDS, alone()).observe({"labels": torch.zeros(2)}, 2, (0,))
    with pytest.raises(ItemMisfit, match=r"'logits' has the shape \[2, 3\] instead of \[3, 3\]"):
        ReplayBuffer(4, FIELDS, alone()).observe(items_of(np.arange(2)), 3, (0,))
    full = ReplayBuffer(4, FIELDS, alone())
    full.observe(items_of(np.arange(4)), 4, (0,))
    with pytest.raises(Conflict, match="4 items"):
        ReplayBuffer(3, FIELDS, alone()).load_state(full.state())
