from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.data.partition import grain_ranks
from paceline.lab.predict.calibration import calibrate
from paceline.lab.predict.cost import GLOO, Library, Place, all_gather, exchange
from paceline.lab.predict.links import LinkSpeed
from paceline.lab.predict.prediction import Row, predict
from paceline.lab.predict.replay import Buffer, Stream, buffers, grain_owners, sampled, seconds
from paceline.recipes.continual.replay.buffer import ReplayBuffer
from paceline.recipes.continual.replay.table import Field
from paceline.train.step_profile import replay_buffers
from paceline.world.discover.environment import World
from paceline.world.start import start
from tests.lab.predict.folders import PROFILE, make_run

BUFFER = Buffer(500, 832, "replicated", "reservoir", 10, 1, 100, 1)
FREE = Library(0.0, 0.0, has_trees=False, scatters=False, crowding=1.0)
LINK = LinkSpeed(1e8, 1e-3)


@pytest.mark.parametrize(
    ("row_bytes", "batch", "seen", "ranks", "replicated", "sharded"),
    [
        (832, 10, 30_000, 2, 100, 2039),
        (832, 10, 30_000, 4, 294, 1519),
        (3120, 32, 250_000, 2, 153, 24_776),
        (3120, 32, 250_000, 4, 458, 18_587),
    ],
)
def test_bytes_are_those_that_were_counted(
    row_bytes: int, batch: int, seen: int, ranks: int, replicated: int, sharded: int
) -> None:
    """The table of benchmarks/recipes/continual/replay.py: the middle of a stream, 3 rounds of 150 steps."""
    for mode, wanted in (("replicated", replicated), ("sharded", sharded)):
        buffer = replace(BUFFER, row_bytes=row_bytes, mode=mode, size=batch)
        stream = Stream(buffer, batch, grain_ranks(batch, ranks, ranks))
        while stream.num_seen < buffer.capacity:
            stream.step()
        stream.num_seen = seen
        stream.step()
        sent = [stream.step().bytes_sent(row_bytes, ranks) for _ in range(450)]
        assert round(sum(sent) / 450) == wanted


def test_steps_that_are_skipped_leave_the_same_buffer() -> None:
    buffer, pieces = replace(BUFFER, mode="sharded", capacity=40, draws=2), (0, 2, 1)
    slow, fast = Stream(buffer, 10, pieces), Stream(buffer, 10, pieces)
    for _ in range(300):
        slow.step()
    fast.skip(300)
    for one, other in zip(slow.step(), fast.step(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("batch", "grains", "ranks"), [(10, 4, 3), (32, 8, 8), (10, 5, 7)])
def test_grains_are_where_a_step_has_them(batch: int, grains: int, ranks: int, in_blocks: bool) -> None:
    assert grain_owners(batch, grains, ranks, in_blocks=in_blocks) == grain_ranks(
        batch, grains, ranks, in_blocks=in_blocks
    )


def test_an_exchange_takes_what_the_busiest_sends_or_gets() -> None:
    sources, receivers = np.array([0, 0, 1, 3, 3, 3]), np.array([0, 1, 0, 0, 1, 2])
    alone = Place(4, 4, LinkSpeed(1e10, 1e-5), LINK, FREE)
    assert exchange(alone, sources, receivers, 1000) == pytest.approx(1e-3 + 3000 / 1e8)
    paired = replace(alone, nodes=2)  # ranks 2 and 3 send two rows to 0 and 1
    assert exchange(paired, sources, receivers, 1000) == pytest.approx(1e-3 + 2000 / 1e8)
    assert exchange(alone, sources, sources, 1000) == pytest.approx(1e-3)
    assert exchange(replace(alone, ranks=1, nodes=1), sources, receivers, 1000) == 0


def test_the_first_steps_send_whole_batches_and_later_ones_little() -> None:
    early = sampled(BUFFER, 10, (0, 1), 50)
    assert [rows.gathered for rows in early] == [5] * 50
    late = sampled(BUFFER, 10, (0, 1), 100_000)
    assert np.mean([rows.gathered for rows in late]) < 0.3


def test_seconds_are_those_of_the_collectives() -> None:
    at = Place(2, 2, LINK, LINK, FREE)
    found = seconds(replace(BUFFER, strategy="loss-aware"), at, 10, 2, 50, in_blocks=True)
    assert found.travel_s == pytest.approx(all_gather(at, 2 * 5 * 832))
    assert found.blocking_s == pytest.approx(all_gather(at, 16) / 100 + all_gather(at, 2 * 10 * 8))
    assert seconds(BUFFER, replace(at, ranks=1, nodes=1), 10, 2, 50, in_blocks=True) == (0, 0)


def row(folder: Path, link: LinkSpeed, *noted: Buffer, **settings: object) -> Row:
    profile = replace(PROFILE, replay=[asdict(each) for each in noted])
    found = calibrate([make_run(folder, profile=profile)])
    manner = replace(found.manner, **settings)  # type: ignore[arg-type]
    return predict(found, ranks=[8], between=link, manner=manner).rows[0]


def test_replay_hides_beside_backward_as_far_as_that_lasts(tmp_path: Path) -> None:
    """Batches of 64 on 8 ranks, of which a step of 40 draws 64 rows; the last backward takes 20 ms, its first bucket
    is complete after 10."""
    link = LinkSpeed(1e9, 1e-4)
    small = replace(BUFFER, mode="sharded", size=64, check_every=0)
    without = row(tmp_path / "a", link)
    hidden = row(tmp_path / "b", link, small)
    late = hidden.communication_s - without.communication_s  # the first draw of an epoch of 100 steps is not sent ahead
    assert 0 < late < 2e-5
    large = replace(small, row_bytes=1 << 20)
    at = Place(8, 8, link, link, GLOO)
    travel_s = seconds(large, at, 64, 8, 200, in_blocks=True).travel_s
    assert travel_s > 0.015
    exposed = row(tmp_path / "c", link, large)
    assert 0 < exposed.communication_s - without.communication_s < travel_s


@pytest.mark.parametrize("settings", [{"reduce": "param", "sync_step": 10}, {"shard": "full", "sums": "fast"}])
def test_averages_and_shards_pay_for_replay_in_every_step(tmp_path: Path, settings: dict[str, object]) -> None:
    link = LinkSpeed(1e8, 1e-4)
    large = replace(BUFFER, mode="sharded", size=64, row_bytes=1 << 18, check_every=0)
    travel_s = seconds(large, Place(8, 8, link, link, GLOO), 64, 8, 200, in_blocks=False).travel_s
    without = row(tmp_path / "a", link, **settings)
    exposed = row(tmp_path / "b", link, large, **settings)
    wanted = travel_s - 0.02 + travel_s / 100
    assert exposed.communication_s - without.communication_s == pytest.approx(wanted, rel=0.02)


def test_what_a_run_on_two_ranks_took_is_found_again(tmp_path: Path) -> None:
    """Its clock has scores that are gathered in forward as computing, all else as communication."""
    link = LinkSpeed(1e9, 1e-4)
    scored = replace(BUFFER, strategy="loss-aware", size=64)
    profile = replace(PROFILE, replay=[asdict(scored)], epoch_steps=20)
    one = make_run(tmp_path / "a", profile=profile)
    two = make_run(tmp_path / "b", profile=profile, ranks=2, compute_s=0.12, communication_s=0.05)
    (found,) = predict(calibrate([one, two], link), ranks=[2], between=link).rows
    replayed = seconds(scored, Place(2, 2, link, link, GLOO), 64, 8, 40, in_blocks=True)
    blocking_s = replayed.blocking_s + replayed.travel_s / 20
    assert found.communication_s - blocking_s == pytest.approx(0.05, rel=1e-3)


def test_what_a_run_did_not_note_is_said(tmp_path: Path) -> None:
    def unknown(name: str, noted: list[dict[str, object]] | None) -> str:
        found = calibrate([make_run(tmp_path / name, profile=replace(PROFILE, replay=noted))])
        return "\n".join(predict(found, ranks=[2], between=LINK).unknown)

    assert "before its sizes were noted" in unknown("old", None)
    assert "before its sizes were noted" not in unknown("new", [])
    assert buffers([{"capacity": 5}, {**asdict(BUFFER), "mode": None}, asdict(BUFFER)]) == [BUFFER]


def test_a_task_is_asked_for_its_buffers() -> None:
    link = start(World(0, 0, 1, 1, 0, 1, "test", None), device="cpu", threads=1)
    fields = {"x": Field(torch.uint8, (1, 28, 28)), "y": Field(torch.int64), "logits": Field(torch.float32, (10,))}
    buffer = ReplayBuffer(500, fields, link, seed=1)
    buffer.draw(10, (0,), 1)
    assert buffers(replay_buffers(SimpleNamespace(name="er", buffer=buffer))) == [BUFFER]
    assert replay_buffers(object()) == []
