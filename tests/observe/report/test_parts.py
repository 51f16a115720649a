"""What the page says, part by part, against numbers that are known; figures against plotly's own rules."""

from __future__ import annotations

import fcntl
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.report import texts
from paceline.observe.report.curves import learning, loss, metrics
from paceline.observe.report.findings import held_back, ranges
from paceline.observe.report.page import sections
from paceline.observe.report.runs import BrokenRun, EmptyRun, NoRun, ReportedRun, read_run, short_names
from paceline.observe.report.samples import marked
from paceline.observe.report.section import Fact, RecipeReport, Section
from paceline.observe.report.series import short, smooth, thin
from paceline.observe.report.settings import differences, settings_of
from paceline.observe.report.summary import best, computing, facts, training_s
from paceline.observe.report.times import numbers, spent
from tests.observe.report.made import epoch, step, usual, write_run


def made(tmp_path: Path, records: list[dict[str, Any]] | None = None, name: str = "a", **settings: Any) -> ReportedRun:
    return read_run(write_run(tmp_path / name, usual() if records is None else records, **settings))


# -- reading -------------------------------------------------------------------------------------------------------


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", usual(), status="running")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    run = read_run(folder)
    assert [record.step for record in run.steps] == [0, 1, 2, 3]
    assert run.standing == "not finished: running or died, which cannot be told from here"
    assert run.num_unread == 0, "a line may be cut short at the end"
    (folder / ".lock").write_text(f"pid 1 on {socket.gethostname()}\n")
    assert read_run(folder).standing.startswith("died without a word")
    with (folder / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_run(folder).standing == "not finished: still running"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="there is no folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(NoRun, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(EmptyRun, match="no steps yet"):
        read_run(write_run(tmp_path / "empty", [], status="running"))
    with pytest.raises(EmptyRun) as failed:
        read_run(write_run(tmp_path / "failed", [], status="failed"))
    assert "failed before its first steps" in failed.value.hint
    died = write_run(tmp_path / "died", [], status="running")
    (died / ".lock").write_text(f"pid 1 on {socket.gethostname()}\n")
    with pytest.raises(EmptyRun, match=r"no steps yet \(status: died\)") as failed:
        read_run(died)
    assert "died before its first steps" in failed.value.hint
    for status in ("finished", "early", "stopped"):
        over = write_run(tmp_path / status, [], status=status)
        with pytest.raises(EmptyRun, match=rf"metrics.jsonl holds no steps, and the run is over \(status: {status}\)"):
            read_run(over)
        (over / "metrics.jsonl").unlink()
        with pytest.raises(EmptyRun, match=r"metrics.jsonl is missing") as lost:
            read_run(over)
        assert "wait" not in lost.value.hint
    (tmp_path / "broken").mkdir()
    for text, why in (("{", "Expecting"), ('{"task": "a", "settings": {}}', "no 'status'"), ("[]", "no 'settings'")):
        (tmp_path / "broken" / "run.json").write_text(text)
        with pytest.raises(BrokenRun, match=why):
            read_run(tmp_path / "broken")


def test_names_are_short_and_different() -> None:
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert short_names([Path("/a/x"), Path("/a/x")]) == ["x (1)", "x (2)"]


# -- curves --------------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=400), st.integers(6, 50))
def test_thinning_keeps_both_ends_and_every_extreme(values: list[float | None], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, 2)
    known = [value for value in values if value is not None]
    left = [values[place] for place in kept if values[place] is not None]
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    if known:
        assert (min(left), max(left)) == (min(known), max(known)), "a spike is what one looks for"


def test_smoothing_halves_weights() -> None:
    constant = smooth([3.0] * 9, half_life=2)
    assert constant == pytest.approx([3.0] * 9), "no start from 0"
    values = [1.0, None, 5.0]
    weight = 0.5 ** (1 / 2)
    ends = [(1 + weight * 5) / (1 + weight), (weight * 1 + 5) / (weight + 1)]
    assert smooth(values, half_life=2) == [pytest.approx(ends[0]), None, pytest.approx(ends[1])]
    assert short(float("nan")) is None
    assert short(0.123456789) == 0.12346


@given(st.lists(st.floats(-100, 100), max_size=60), st.floats(0.5, 20))
def test_smoothing_is_the_weighted_mean_of_both_sides(values: list[float], half_life: float) -> None:
    for place, smoothed in enumerate(smooth(values, half_life)):
        weights = [0.5 ** (abs(other - place) / half_life) for other in range(len(values))]
        expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        assert smoothed == pytest.approx(expected, abs=1e-9)


def test_a_jump_is_where_it_was() -> None:
    smoothed = smooth([8.0] * 100 + [2.0] * 100, half_life=10)
    assert smoothed[99] > 5.0 > smoothed[100], "half way at the jump itself, not many steps after it"


def test_losses_that_are_not_finite_are_gaps_and_said(tmp_path: Path) -> None:
    run = made(tmp_path, [step(0, 2.0), step(1, None), step(2, 1.0)])
    figure = loss([run])
    assert figure.traces[0]["y"] == [2.0, None, 1.0]
    assert "1 of them was not finite" in figure.about


def test_a_log_axis_where_small_losses_would_vanish(tmp_path: Path) -> None:
    far = loss([made(tmp_path, [step(0, 500.0), step(1, 0.5)], "far")])
    near = loss([made(tmp_path, [step(0, 5.0), step(1, 0.5)], "near")])
    assert (far.layout["yaxis"]["type"], near.layout["yaxis"]["type"]) == ("log", "linear")


def test_every_metric_has_a_plot_and_every_set_a_curve(tmp_path: Path) -> None:
    figures = {figure.name: figure for figure in metrics([made(tmp_path)])}
    assert figures.keys() == {"metric-wer", "metric-loss"}
    (curve,) = figures["metric-wer"].traces
    assert (curve["name"], curve["x"], curve["y"]) == ("dev", [1, 3], [0.5, 0.25])


# -- plotly's own rules --------------------------------------------------------------------------------------------


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    """Its Python package refuses unknown names and wrong values."""
    objects = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    many = [step(number, 1.0 / (number + 1), loss_scale=2.0**number) for number in range(60)]
    rates = {"rates": {"tokens_per_s": 5.0}, "memory": [{"host_bytes": 2**30, "device_bytes": None}], "mfu": 0.5}
    long = [step(0, 1.0), *(epoch(number, [{"data": 1.0, "new": 2.0}] * 40, **rates) for number in range(3))]
    runs = [made(tmp_path), made(tmp_path, many, "many"), made(tmp_path, long, "long")]
    figures = [*learning(runs), *spent(runs)]
    assert len({figure.name for figure in figures}) == len(figures) >= 11
    for figure in figures:
        described = figure.as_json()
        objects.Figure(data=described["data"], layout=described["layout"])
        json.dumps(described, allow_nan=False)


# -- numbers -------------------------------------------------------------------------------------------------------


def test_the_summary_has_the_numbers_of_the_journal(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", usual()), recipes=[Own()])
    assert run.monitor == "dev/wer"
    assert best(run) == (0.25, 3)
    assert best(made(tmp_path, name="up", monitor="dev/wer", monitor_mode="max")) == (0.5, 1)
    assert computing(run) == pytest.approx(1 - 4 / 40)
    assert training_s(run) == 20.0
    shown = {fact.name: fact.value for fact in facts(run)}
    assert shown["best dev/wer"] == "25.00 %"
    assert shown["training loss, last step"] == "1"
    assert shown["steps"] == "4"
    assert shown["computing time"] == "90.0 %"
    assert shown["padding"] == "12.5 %"
    assert shown["ranks"] == "2"


class Own(RecipeReport):
    """A recipe whose runs have a file of its own."""

    goals, percent = ("wer",), ("wer",)

    def facts(self, run: ReportedRun) -> list[Fact]:
        return [Fact("own", "1", run.name)]

    def sections(self, runs: Sequence[ReportedRun]) -> list[Section]:
        return [Section("own", "Of its own", "<p>here</p>"), Section("empty", "Nothing")]


def test_a_recipe_adds_goals_facts_and_sections(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", usual())
    plain, run = read_run(folder), read_run(folder, recipes=[Own()])
    assert (plain.monitor, run.monitor) == ("dev/loss", "dev/wer")
    assert [figure.layout["yaxis"].get("tickformat") for figure in metrics([plain])] == [None, None]
    assert [figure.layout["yaxis"].get("tickformat") for figure in metrics([run])] == [".3~%", None]
    assert Fact("own", "1", "a") in facts(run)
    names = [section.name for section in sections([run])]
    assert names == ["summary", "verdict", "learning", "own", "empty", "samples", "time", "settings"]


def test_time_is_split_by_epoch_and_rank_with_what_was_between(tmp_path: Path) -> None:
    between = [{"validation": 3.0}, {"validation": 4.0}]
    run = made(tmp_path, [*usual(), epoch(2, [{"compute": 5.0}, {"compute": 6.0}], between=between)])
    by_epoch, by_rank = spent([run])[:2]
    bars = {trace["name"]: trace for trace in by_epoch.traces}
    assert "resumed" not in by_epoch.about.lower()
    again = epoch(2, [{"compute": 5.0}], launch={"steps": 1, "seconds": 2.0})
    (figure, *_) = spent([made(tmp_path, [*usual(), again], "again")])
    assert "Resumed within epoch 3: without what was lost" in figure.about
    assert bars["validation"]["y"] == [0, 0, 0, 0, 3, 4]
    assert bars["compute"]["y"] == [7, 9, 7, 9, 5, 6]
    assert bars["data"]["x"][0] == ["epoch 1"] * 2 + ["epoch 2"] * 2 + ["epoch 3"] * 2
    shares = {trace["name"]: trace["x"] for trace in by_rank.traces}
    assert shares["communication"] == [pytest.approx(100 * 4 / 28, abs=1e-2), 0]
    assert sum(share[0] for share in shares.values()) == pytest.approx(100, abs=0.01)


def test_many_epochs_are_drawn_as_some(tmp_path: Path) -> None:
    every = [step(0, 1.0), *(epoch(number, [{"compute": float(number)}], padding=0.1) for number in range(700))]
    by_epoch, padding = spent([made(tmp_path, every)])
    assert by_epoch.traces[0]["x"][:3] == ["1", "4", "7"]
    assert by_epoch.traces[0]["y"][:3] == [0.0, 3.0, 6.0]
    assert "one epoch in 3" in by_epoch.about
    assert len(padding.traces[0]["x"]) == 700


def test_samples_have_one_name_only(tmp_path: Path) -> None:
    both = [step(0, 1.0), epoch(0, [{"compute": 1.0}], objects_per_s=7.0, rates={"utterances_per_s": 7.0})]
    assert [figure.title for figure in numbers([made(tmp_path, both)])] == ["Utterances per second"]


def test_what_held_back_is_joined_over_epochs(tmp_path: Path) -> None:
    def finding(share: float) -> dict[str, Any]:
        return {"kind": "data", "rank": 1, "text": f"data wait {share}", "advice": "`--workers 8`", "share": share}

    ranks = [{"compute": 1.0}, {"compute": 1.0}]
    found = [[finding(0.4)], [], [finding(0.2)], [finding(0.3)]]
    records = [step(0, 1.0), *(epoch(number, ranks, findings=each) for number, each in enumerate(found))]
    (held,) = held_back(made(tmp_path, records))
    assert (held.text, held.share, held.when) == ("data wait 0.3", 0.4, "in 3 of 4 epochs (1, 3-4)")
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert "<code>--workers 8</code>" in texts.verdicts([made(tmp_path, records, "again")])


def test_nothing_found_is_good_only_where_something_was_looked_at(tmp_path: Path) -> None:
    long, short, few = [{"compute": 9.0}], [{"compute": 0.9}], {"steps": 9}
    for name, epochs, is_good, said in (
        ("none", [], False, "No epoch has ended"),
        ("one", [epoch(0, short, steps=100)], False, "The one epoch was shorter than 10 steps or 1 second"),
        ("two", [epoch(0, short, steps=100), epoch(1, long, **few)], False, "All 2 epochs were shorter than"),
        ("some", [epoch(0, long, steps=100), epoch(1, long, **few)], True, "was seen in 1 of 2 epochs; the others"),
        ("all", [epoch(0, long, steps=100)], True, "hold runs back was seen."),
    ):
        page = texts.verdicts([made(tmp_path, [step(0, 1.0), *epochs], name)])
        assert said in page
        assert ('class="good"' in page) == is_good


def test_a_run_older_than_verdicts_gets_one(tmp_path: Path) -> None:
    ranks = [{"data": 1.0, "compute": 9.0}, {"data": 5.0, "compute": 5.0}]
    record = epoch(0, ranks) | {"steps": 100}
    (held,) = held_back(made(tmp_path, [step(0, 1.0), record]))
    assert held.kind == "data"
    assert "50 %" in held.text


# -- words ---------------------------------------------------------------------------------------------------------


def test_wrong_words_are_marked_and_text_is_never_markup() -> None:
    found = marked({"reference": "see a cat", "hypothesis": "see <b> cat"})
    assert found == {"reference": "see <mark>a</mark> cat", "hypothesis": "see <mark>&lt;b&gt;</mark> cat"}
    assert marked({"label": "<i>", "guess": "x"}) == {"label": "&lt;i&gt;", "guess": "x"}


def test_samples_show_what_was_heard_before(tmp_path: Path) -> None:
    shown = texts.samples([made(tmp_path)])
    assert "see a cat <mark>now</mark>" in shown
    assert "step 2</span> see a <mark>bat</mark>" in shown


def test_only_settings_that_differ_are_compared(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path, name="a", nested={"x": 1, "y": [1, 2]}), made(tmp_path, name="b", lr=0.2, out="other")
    assert differences([settings_of(ours), settings_of(theirs)]) == {
        "lr": ["0.1", "0.2"],
        "nested.x": ["1", "(none)"],
        "nested.y": ["1 2", "(none)"],
    }
