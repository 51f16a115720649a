from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import InvalidSetting, Unreadable
from paceline.core.sum_tree import even_starts, layout
from paceline.lab.predict.communication import (
    GLOO,
    PAYLOAD,
    Group,
    LinkSpeed,
    fit_link,
    parse_link,
    read_link_file,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s"),
    [
        ("100Gbit,10us", 12.5e9, 1e-5),
        ("1Gbit", 1.25e8, 5e-5),
        ("100Mbit/s, 1.5ms", 1.25e7, 1.5e-3),
        ("1.2GB/s,5us", 1.2e9, 5e-6),
        ("10Gbps,0.05ms", 1.25e9, 5e-5),
    ],
)
def test_a_typed_link_is_read(text: str, bytes_per_s: float, latency_s: float) -> None:
    link = parse_link(text)
    assert link.bytes_per_s == pytest.approx(PAYLOAD * bytes_per_s)
    assert link.latency_s == pytest.approx(latency_s)


@pytest.mark.parametrize(
    "text", ["", "fast", "Gbit", "10Gbit,soon", "10Gbit,", "0Gbit,1us", "-1Gbit", "10Gbit,1us,2us"]
)
def test_a_link_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_link(text)
    assert "`--link 10Gbit,50us`" in caught.value.hint


def test_a_link_is_shown_as_it_was_typed() -> None:
    assert str(parse_link("10Gbit,50us")) == "10 Gbit/s, 50 us"


def test_reductions_of_a_known_link_give_it_back() -> None:
    link, ranks = LinkSpeed(1e9, 2e-5), 4
    rows = [
        (size, 2 * (ranks - 1) * (link.latency_s + size / ranks / link.bytes_per_s), ranks)
        for size in (4, 1 << 22, 1 << 26)
    ]
    found = fit_link(rows)
    assert found.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert found.latency_s == pytest.approx(2e-5, rel=1e-3)


def test_a_file_of_the_doctor_is_read_and_another_is_refused(tmp_path: Path) -> None:
    rows = [{"num_bytes": 4, "seconds": 1e-4, "ranks": 2}, {"num_bytes": 1 << 26, "seconds": 0.1, "ranks": 2}]
    findings = [{"what": "python"}, {"what": "all-reduce latency", "reductions": rows}]
    (tmp_path / "doctor.json").write_text(json.dumps(findings), encoding="utf-8")
    assert read_link_file(tmp_path / "doctor.json").is_measured
    (tmp_path / "alone.json").write_text("[]", encoding="utf-8")
    (tmp_path / "broken.json").write_text("[", encoding="utf-8")
    for name in ("alone.json", "broken.json", "none.json"):
        with pytest.raises(Unreadable):
            read_link_file(tmp_path / name)


LINK = LinkSpeed(1e8, 1e-3)
S = 8e6


def group(ranks: int, nodes: int | None = None, *, is_nccl: bool = True) -> Group:
    return Group(ranks, nodes or ranks, LinkSpeed(1e10, 1e-5), LINK, is_nccl)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_takes_the_textbook_time(ranks: int) -> None:
    rounds = ranks - 1
    assert group(ranks).all_gather(S) == pytest.approx(rounds * (1e-3 + S / ranks / 1e8))
    assert group(ranks).exchange(S) == pytest.approx(1e-3 + rounds * S / ranks / 1e8)
    seconds = 2 * rounds * (1e-3 + GLOO["all_reduce"][0] * S / ranks / 1e8)
    assert group(ranks, is_nccl=False).all_reduce(S) == pytest.approx(seconds)


def test_nccl_uses_a_tree_for_small_sums_on_many_ranks() -> None:
    assert group(1024).all_reduce(4) == pytest.approx(2 * 10 * 1e-3, rel=1e-3)
    assert group(1024).all_reduce(4) < group(1024, is_nccl=False).all_reduce(4)


def test_more_partial_sums_are_more_bytes() -> None:
    uneven = layout(even_starts(8, 3))
    assert max(uneven.rows) == 2
    assert group(3).exact_sum(S, uneven) > 1.3 * group(3).exact_sum(S, layout(even_starts(3, 3)))


def test_two_ranks_with_one_partial_sum_each_use_an_all_reduce() -> None:
    plain = layout(even_starts(8, 2))
    assert group(2).exact_sum(S, plain) == group(2).all_reduce(S)
    assert group(2).exact_scatter(S, plain) == group(2).reduce_scatter(S)


def test_ranks_of_one_machine_share_its_link_in_an_exchange() -> None:
    assert group(8, 2).all_gather(S) == pytest.approx(7 * 1e-3 + 7 / 8 * S / 1e8)
    assert group(8, 2).exchange(S) == pytest.approx(1e-3 + 4 * 4 / 8 * S / 1e8)


def test_gloo_scatters_by_an_all_reduce() -> None:
    gloo = group(4, is_nccl=False)
    assert gloo.reduce_scatter(S) == gloo.all_reduce(S)
    assert group(4).reduce_scatter(S) == group(4).all_gather(S)
