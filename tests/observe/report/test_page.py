"""The whole page: self-contained, safe with any text, and drawn by a real browser from its file alone."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.report import page as page_module
from paceline.observe.report.page import PlotlyMissing, for_script, packed, page, sections
from paceline.observe.report.runs import read_run, read_runs
from tests.observe.report.browser import look
from tests.observe.report.made import step, train_on_ranks, usual, write_run
from tests.ranks import run_ranks

pytest.importorskip("plotly", reason="plotly is not installed")
MOST_BYTES = 6_000_000
EVIL = "</script><script>console.error('evil')</script><img src=https://example.invalid/x.png>"


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, three epochs, with a timeline."""
    out = tmp_path_factory.mktemp("real") / "two-ranks"
    run_ranks(2, train_on_ranks, out)
    return out


class Outline(HTMLParser):
    """Whether tags are closed as they were opened, and which there are."""

    EMPTY = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def test_a_page_of_a_real_run_in_a_real_browser(real_run: Path, tmp_path: Path) -> None:
    run = read_run(real_run)
    file = tmp_path / "report.html"
    file.write_text(page([run]), encoding="utf-8")
    assert file.stat().st_size < MOST_BYTES
    num_figures = sum(len(part.figures) for part in sections([run]))
    assert any(figure.title == "Timeline of steps 2 to 4" for part in sections([run]) for figure in part.figures)
    seen = look(file, tmp_path / "profile")
    assert seen.complaints == []
    assert f'data-drawn="{num_figures}"' in seen.document
    drawn = re.findall(r'<div class="plot js-plotly-plot" id="([^"]+)"', seen.document)
    assert len(drawn) == num_figures >= 8
    assert len(re.findall(r'class="main-svg"', seen.document)) >= num_figures, "each plot is a picture"
    assert "M0," in seen.document or 'd="M' in seen.document, "with lines in it"


def test_the_browser_does_complain_of_what_is_wrong(tmp_path: Path) -> None:
    """The control: the page's own rules and the console are looked at for real."""
    text = page([read_run(write_run(tmp_path / "a", usual()))])
    broken = text.replace(
        "</main>", "<img src='https://example.invalid/x.png'><script>nothing.at.all()</script></main>"
    )
    (tmp_path / "broken.html").write_text(broken, encoding="utf-8")
    complaints = " ".join(look(tmp_path / "broken.html", tmp_path / "profile").complaints)
    assert "nothing is not defined" in complaints
    assert "Content Security Policy" in complaints


def test_evil_texts_stay_texts(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = usual()
    records[-1]["samples"] = {EVIL: [{"reference": EVIL, "hypothesis": EVIL}, {EVIL: EVIL}]}
    records[-1][f"{EVIL}/loss"] = 1.0
    records.append(step(4, 1.0) | {EVIL: 2.0})
    runs = [write_run(tmp_path / name, records, **{EVIL: EVIL}) for name in ("a<b>", "c")]
    text = page(read_runs(runs))
    assert "<script>console" not in text
    assert [tag for tag, _ in outline(text).seen].count("script") == 3
    file = tmp_path / "evil.html"
    file.write_text(text, encoding="utf-8")
    seen = look(file, tmp_path / "profile", "--force-dark-mode")
    assert seen.complaints == []
    assert 'data-theme="dark"' in seen.document


def test_nothing_is_asked_of_the_net(tmp_path: Path) -> None:
    found = outline(page([read_run(write_run(tmp_path / "a", usual()))]))
    for tag, attributes in found.seen:
        for name in ("src", "href", "action", "data"):
            target = attributes.get(name) or ""
            assert target.startswith("#") or target in ("", "data:,"), f"{tag} {name}={target}"
    (rules,) = [
        attributes["content"] or "" for tag, attributes in found.seen if tag == "meta" and "http-equiv" in attributes
    ]
    assert rules.startswith("default-src 'none'")
    assert "http" not in rules


def test_data_in_a_script_comes_out_as_it_went_in() -> None:
    value = {"text": EVIL, "number": 1.5}
    assert "<" not in for_script(value)
    assert json.loads(for_script(value)) == value
    assert gzip.decompress(base64.b64decode(packed("äé"))).decode() == "äé"


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    lines = "".join(
        f'{{"kind": "step", "step": {n}, "epoch": 0, "loss": {1 / (n + 1)}, "lr": 0.1}}\n' for n in range(80_000)
    )
    folder = write_run(tmp_path / "long", [])
    (folder / "metrics.jsonl").write_text(lines)
    assert len(page([read_run(folder)])) < MOST_BYTES


def test_without_plotly_the_line_to_type_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "find_spec", lambda name: None)
    with pytest.raises(PlotlyMissing) as missing:
        page([read_run(write_run(tmp_path / "a", usual()))])
    assert "pip install 'paceline[report]'" in missing.value.hint
