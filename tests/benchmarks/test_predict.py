"""`benchmarks/predict.py` and `published_scaling.py`, as far as they run without hosts of their own."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline.data.grain import Grain

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"paceline_benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_truth_is_of_whole_intervals_inside_of_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("predict", monkeypatch)
    run = bench.run_of(tmp_path, "100mbit", "param blocking", 2)
    run.parent.mkdir(parents=True)
    # Steps of 0.1 s; every 4th waits 0.4 s more; the first of an epoch, and all of the first interval, take 9 s.
    took = [9.0 if n < 4 or n % 12 == 0 else 0.5 if n % 4 == 3 else 0.1 for n in range(bench.EPOCHS * 12)]
    ends = [sum(took[: n + 1]) for n in range(len(took))]
    for rank in range(2):
        stamps = {
            "rank": rank,
            "ends_s": ends,
            "sent": [1000 * n for n in range(24)],
            "cpu_s": [0.01 * n for n in range(24)],
        }
        run.with_name(f"{run.name}-rank{rank}.json").write_text(json.dumps(stamps))
    truth = bench.truth_of(tmp_path, "100mbit", "param blocking", 2)
    assert truth.step_s == pytest.approx(0.2)
    assert truth.spread_s == pytest.approx(0.0, abs=1e-9)
    assert truth.sent == 1000
    assert truth.cpu_s == pytest.approx(0.02)


@pytest.mark.parametrize("name", ["even", "uneven", "ragged"])
def test_stand_ins_sleep_as_they_say_and_give_every_weight_a_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("predict", monkeypatch)
    slept: list[float] = []
    monkeypatch.setattr(bench.time, "sleep", slept.append)
    stand_in = bench.STAND_INS[name]
    task = bench.Sleeper(1 << 12, stand_in)
    model = task.model()
    total, count = task.loss(model, Grain((torch.zeros(2, 1),), 0, torch.arange(2).numpy()))
    total.backward()
    assert count == 2
    assert sum(stand_in.sizes) == 1
    assert slept == [*stand_in.forward_s, *reversed(stand_in.backward_s)]
    assert sum(weight.numel() for weight in model.parameters()) == 1 << 12
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_table_judges_predicted_rows_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("predict", monkeypatch)
    lines = [
        bench.Line("100mbit", "grad fast", 2, 0.9, 1.0, 1.1, 2.0, is_calibration=True),
        bench.Line("100mbit", "grad fast", 4, 0.45, 0.5, 0.55, 0.52, is_calibration=False),
        bench.Line("100mbit", "grad fast", 8, 0.27, 0.3, 0.33, 0.25, is_calibration=False),
    ]
    bench.show(lines, as_json=False)
    text = capsys.readouterr().out
    assert "| 100mbit | grad fast | 2 (fit) | 1000 (900 to 1100) | 2000 | -50.0 % | **no** | 0 % |" in text
    assert "| 100mbit | grad fast | 4 | 500 (450 to 550) | 520 | -3.8 % | yes | 0 % |" in text
    assert "predicted rows: 2; error 11.9 % mean, 20.0 % worst (100mbit grad fast 8); inside the interval 1" in text


def test_published_rows_are_predicted_from_two_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("published_scaling", monkeypatch)
    for node in (bench.NODES[0], bench.NODES[6]):  # the batch is fixed, and grows with the GPUs
        from_one, from_two = [line for line in bench.lines(node) if line.gpus == 8]
        assert (from_one.known, from_two.known) == ((1,), (1, 4))
        assert abs(from_two.error) < 0.05
        assert from_two.is_inside
        assert from_one.error > from_two.error, "what GPUs share cannot be known from one"
        assert from_one.predicted < 8 * node.speeds[1]
