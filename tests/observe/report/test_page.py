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

from paceline.cli.report import recipe_reports
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
        f'{{"kind": "step", "step": {n}, "epoch": 0, "loss": {1 / (n + 1)}, "lr": 0.1}}\n' for n in range(200_000)
    )
    folder = write_run(tmp_path / "long", [])
    (folder / "metrics.jsonl").write_text(lines)
    assert len(page([read_run(folder)])) < MOST_BYTES


def test_without_plotly_the_line_to_type_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "find_spec", lambda name: None)
    with pytest.raises(PlotlyMissing) as missing:
        page([read_run(write_run(tmp_path / "a", usual()))])
    assert "pip install 'paceline[report]'" in missing.value.hint


PROBE = """<script>setTimeout(() => {
  const isOut = (each, box) => each.width && (each.right > box.right + 1 || each.left < box.left - 1);
  const scrolls = (e) => { for (let p = e.parentElement; p; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
  const page = { left: -1e6, right: innerWidth };
  const wide = [...document.querySelectorAll("body *")].filter(
    (e) => isOut(e.getBoundingClientRect(), page) && !scrolls(e));
  const cut = [...document.querySelectorAll(".plot")].flatMap((plot) => [...plot.querySelectorAll("text")].filter(
    (text) => isOut(text.getBoundingClientRect(), plot.getBoundingClientRect())));
  const small = [...document.querySelectorAll(".plot text, main p, td")].filter(
    (e) => e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 10);
  const found = [...wide, ...cut, ...small].map((e) => `${e.tagName} ${e.textContent.slice(0, 40)}`);
  parent.postMessage(`width ${innerWidth}, unreadable: ${JSON.stringify(found)}`, "*");
}, 12000)</script></body>"""
PHONE = """<body><iframe src="page.html" style="width:390px;height:800px;border:0"></iframe><p id="answer"></p>
<script>addEventListener("message", (event) => { answer.textContent = event.data; })</script></body>"""


def test_nothing_is_cut_or_tiny_on_a_phone(tmp_path: Path) -> None:
    """Of ce01e4b numbers in matrices had 5 pixels, names of runs and words without spaces ran out of the page."""
    records: list[dict[str, Any]] = usual()
    records[-1]["samples"] = {"dev": [{"reference": "see a cat", "hypothesis": "cat" * 40}] * 2}
    for record in records:
        if record["kind"] == "epoch":
            record["stage"] = f"classes {record['epoch']} of the stream"
    tasks = [f"classes {number}" for number in range(8)]
    results = {"tasks": tasks, "class_il_matrix": [[0.5] * 8] * 8, "class_il": 50.0}
    runs = [
        write_run(tmp_path / name, records) for name in ("quartznet15x5-novograd-lr0.015-8gpu-seed-7-and-more", "b")
    ]
    for run in runs:
        (run / "continual.json").write_text(json.dumps(results))
    text = page(read_runs(runs, recipe_reports()))
    (tmp_path / "page.html").write_text(text.replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "phone.html").write_text(PHONE, encoding="utf-8")
    seen = look(tmp_path / "phone.html", tmp_path / "profile", "--allow-file-access-from-files")
    assert "width 390, unreadable: []" in seen.document, seen.document
