from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.lab.predict.links import PAYLOAD, BadLink, BadLinkFile, LinkSpeed, fit_link, parse_link, read_link_file


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
    with pytest.raises(BadLink) as caught:
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
        with pytest.raises(BadLinkFile):
            read_link_file(tmp_path / name)
