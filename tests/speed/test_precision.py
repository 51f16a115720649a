"""docs/levels.md, row by row: against the decision, and against what a real step computes in."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.speed import precision
from paceline.speed.autotune.candidates import Candidate
from paceline.speed.master import Masters, cast_inputs, to_half
from paceline.speed.precision import (
    Capabilities,
    LevelConflict,
    LevelUnsupported,
    Precision,
    PrecisionName,
    apply,
    autocast,
    capabilities,
    check_layers,
    described,
    distinct,
    levels,
    resolve,
    resolve_candidate,
    rows,
)

DEVICES = {
    "CPU": Capabilities("cpu", "an old CPU", bf16=False, tf32=False, fp16=True, compiler=True),
    "CPU bf16": Capabilities("cpu", "a new CPU", bf16=True, tf32=False, fp16=True, compiler=True),
    "GPU": Capabilities("cuda", "a V100", bf16=False, tf32=False, fp16=True, compiler=True),
    "GPU sm80": Capabilities("cuda", "an H200", bf16=True, tf32=True, fp16=True, compiler=True),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "none": None}
BACKENDS = [("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv")]


@dataclass(frozen=True)
class Row:
    setting: str
    device: str
    cells: tuple[str, ...]

    @property
    def level(self) -> Any:
        found = re.search(r"-O(\d)", self.setting)
        return int(found[1]) if found else "auto"

    @property
    def precision(self) -> Any:
        found = re.search(r"--precision (\S+)", self.setting)
        return found[1] if found else None

    @property
    def is_error(self) -> bool:
        return self.cells[0] == "error"

    @property
    def compiles(self) -> bool:
        return not self.is_error and self.cells[3] == "yes"


def table() -> list[Row]:
    text = (Path(__file__).parents[2] / "docs/levels.md").read_text()
    found = []
    for line in text.splitlines():
        if line.startswith("| `"):
            setting, devices, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            setting = setting.replace("`", "")
            names = list(DEVICES) if devices == "any" else [name.strip() for name in devices.split(",")]
            found += [Row(setting, name, tuple(cells)) for name in names]
    return found


TABLE = table()


def label(row: Row) -> str:
    return f"{row.setting} on {row.device}"


def machine_row_name(device: torch.device) -> str:
    found = capabilities(device)
    return {("cpu", False): "CPU", ("cpu", True): "CPU bf16", ("cuda", False): "GPU", ("cuda", True): "GPU sm80"}[
        found.device, found.bf16
    ]


@pytest.fixture(autouse=True)
def backends_as_before() -> Iterator[None]:
    before = [torch._C._get_fp32_precision_getter(*backend) for backend in BACKENDS]
    yield
    for backend, mode in zip(BACKENDS, before, strict=True):
        torch._C._set_fp32_precision_setter(*backend, mode)


def test_table_has_every_setting_once_on_every_device() -> None:
    settings = {row.setting for row in TABLE}
    names = {"auto", "-O0", "-O1", "-O2", "-O3", "-O4 until it has measured"}
    assert settings > names | {f"--precision {name}" for name in ("fp16", "fp16-master", "fp16-pure", "fp64")}
    assert sorted((row.setting, row.device) for row in TABLE) == sorted((s, d) for s in settings for d in DEVICES)


@pytest.mark.parametrize("row", TABLE, ids=label)
def test_decision_is_the_documented_one(row: Row) -> None:
    if row.is_error:
        with pytest.raises((LevelUnsupported, LevelConflict)) as caught:
            resolve(row.level, row.precision, DEVICES[row.device])
        assert f"-O{row.level}" in str(caught.value)
        assert caught.value.hint
        return
    weights, cast, fp32_matmul, compiled, scaled = row.cells
    precision = resolve(row.level, row.precision, DEVICES[row.device])
    assert precision.weights == DTYPES[weights]
    assert precision.autocast == DTYPES[cast]
    assert precision.fp32_matmul == fp32_matmul
    assert precision.compile == (compiled == "yes")
    assert precision.scaled == (scaled == "yes")
    assert precision.master == (row.precision == "fp16-master")


def prepared(precision: Precision, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)).to(device)
    if precision.master:
        Masters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    elif precision.weights == torch.float16:
        to_half(model)
    else:
        model.to(precision.weights)
    cast_inputs(model, precision.weights)
    return model


def check_real_step(row: Row, device: torch.device) -> None:
    """Run one step as the row says and look at every dtype that occurred."""
    precision = resolve(row.level, row.precision, capabilities(device))
    weights, cast, fp32_matmul, _, _ = row.cells
    torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32" if fp32_matmul == "ieee" else "ieee")
    apply(precision)
    assert {torch._C._get_fp32_precision_getter("cuda", op) for op in ("matmul", "conv", "rnn")} == {fp32_matmul}
    assert {torch._C._get_fp32_precision_getter("mkldnn", op) for op in ("matmul", "conv")} == {"ieee"}

    model = prepared(precision, device)
    conv, batch_norm, linear = model[0], model[1], model[4]
    seen: dict[str, torch.dtype] = {}
    if not precision.compile:
        conv.register_forward_hook(lambda module, args, output: seen.update(conv=output.dtype))
    run = torch.compile(model) if precision.compile else model
    with autocast(precision, device)():
        output = run(torch.randn(5, 3, 8, device=device))
    output.float().square().sum().backward()

    computed = DTYPES[cast] or DTYPES[weights]
    assert output.dtype == computed
    assert seen.get("conv", computed) == computed
    for layer in (conv, linear):
        assert layer.weight.dtype == layer.weight.grad.dtype == DTYPES[weights]
    norm_dtype = torch.float32 if precision.master else DTYPES[weights]
    assert batch_norm.weight.dtype == batch_norm.weight.grad.dtype == batch_norm.running_mean.dtype == norm_dtype
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.device == machine_row_name(CPU) and not row.is_error], ids=label
)
def test_real_step_on_this_cpu(row: Row) -> None:
    if row.compiles and not capabilities(CPU).compiler:
        pytest.skip("no C++ compiler here")
    with warnings.catch_warnings():
        if row.compiles:  # torch's compiler warns of its own deprecated parts
            warnings.simplefilter("ignore", DeprecationWarning)
        check_real_step(row, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("setting", sorted({row.setting for row in TABLE}))
def test_real_step_on_this_gpu(setting: str) -> None:
    device = torch.device("cuda")
    row = next(row for row in TABLE if (row.setting, row.device) == (setting, machine_row_name(device)))
    if row.is_error:
        with pytest.raises((LevelUnsupported, LevelConflict)):
            resolve(row.level, row.precision, capabilities(device))
        return
    with warnings.catch_warnings():
        if row.compiles:
            warnings.simplefilter("ignore", DeprecationWarning)
        check_real_step(row, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("level", [0, 1])
def test_fp32_products_are_rounded_on_this_gpu_as_said(level: Any) -> None:
    """1 + 2**-12 is 1 in TF32 (10 bits of mantissa) and itself in fp32."""
    device = torch.device("cuda")
    precision = resolve(level, None, capabilities(device))
    apply(precision)
    fine = torch.full((512, 512), 1 + 2**-12, device=device)
    kernel = torch.eye(512, device=device)
    expected = 1.0 if precision.fp32_matmul == "tf32" else 1 + 2**-12
    assert (fine @ kernel).unique().tolist() == [expected]
    convolved = torch.nn.functional.conv1d(fine.expand(8, 512, 512), kernel.unsqueeze(-1))
    assert convolved.unique().tolist() == [expected]


def test_auto_says_what_it_chose() -> None:
    assert resolve("auto", None, DEVICES["GPU sm80"]).notes == ("level auto is -O2: an H200 has bf16",)
    assert resolve("auto", None, DEVICES["GPU"]).notes == ("level auto is -O0: a V100 has no bf16",)
    assert resolve("auto", None, DEVICES["CPU bf16"]).notes == ("level auto is -O0: a new CPU is no GPU",)


def test_level_1_says_where_there_is_no_tf32() -> None:
    assert "no TF32" in resolve(1, None, DEVICES["GPU"]).notes[0]
    assert resolve(1, None, DEVICES["GPU sm80"]).notes == ()
    assert "no effect" in resolve(1, "fp64", DEVICES["GPU sm80"]).notes[0]


@pytest.mark.parametrize(("device", "package"), [("CPU bf16", "g++"), ("GPU sm80", "triton")])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_compile_without_compiler_says_what_to_install(device: str, package: str, precision: Any) -> None:
    bare = Capabilities(**{**vars(DEVICES[device]), "compiler": False})
    with pytest.raises(LevelUnsupported, match=re.escape(package)):
        resolve(3, precision, bare)
    assert not resolve(2, precision, bare).compile


def test_level_4_is_what_it_chose() -> None:
    open_ = resolve(4, None, DEVICES["GPU sm80"])
    assert (open_.level, open_.name, open_.is_open, open_.compile) == (4, "-O4", True, True)
    assert resolve(4, "fp16", DEVICES["GPU"]).name == "--precision fp16"
    chosen = resolve_candidate(Candidate(2, kernels=True, graphs=True), None, DEVICES["GPU sm80"])
    assert (chosen.level, chosen.name, chosen.is_open, chosen.compile) == (4, "-O4", False, False)
    assert chosen.autocast is torch.bfloat16
    assert dict(rows(chosen))["-O4 adds"] == "the task's kernels and CUDA graphs"
    assert dict(rows(resolve_candidate(Candidate(0), None, DEVICES["CPU"])))["-O4 adds"].startswith("nothing")
    assert "loop of your own" in dict(rows(open_))["-O4 adds"]
    assert "-O4 adds" not in dict(rows(resolve(3, None, DEVICES["GPU sm80"])))


def test_which_levels_a_device_has() -> None:
    assert levels(None, DEVICES["GPU sm80"]) == [0, 1, 2, 3]
    assert levels(None, DEVICES["GPU"]) == [0, 1]
    assert levels("fp16", DEVICES["GPU"]) == [0, 1, 2, 3]
    assert levels("fp64", DEVICES["CPU"]) == [0, 1]


def test_levels_that_compute_alike_count_once() -> None:
    assert distinct([0, 1, 2, 3], None, DEVICES["GPU sm80"]) == [0, 1, 2, 3]
    assert distinct([0, 1], None, DEVICES["GPU"]) == [0]  # without TF32
    assert distinct([0, 1, 2, 3], None, DEVICES["CPU bf16"]) == [0, 2, 3]
    assert distinct([0, 1, 2, 3], "fp16", DEVICES["GPU sm80"]) == [0, 1, 3]  # exact, TF32, compiled


def test_unsupported_level_names_the_way_out() -> None:
    with pytest.raises(LevelUnsupported) as caught:
        resolve(2, None, DEVICES["GPU"])
    assert str(caught.value) == "-O2 cannot run on a V100: it has no bf16"
    assert caught.value.hint == "use `-O1` or `--precision fp16`"


def test_levels_in_one_line() -> None:
    assert described(DEVICES["GPU sm80"]).endswith(": -O0, -O1, -O2, -O3")
    assert described(DEVICES["GPU"]) == "a V100: -O0, -O1; not -O2, -O3: it has no bf16"
    old = replace(DEVICES["CPU bf16"], compiler=False, slow_fp16=True)
    assert described(old) == (
        "a new CPU: -O0, -O1, -O2; not -O3: compiling needs g++ (`apt install g++`); fp16 is slower than fp32"
    )


def test_fp16_that_is_slower_than_fp32() -> None:
    slow = replace(DEVICES["CPU"], slow_fp16=True)
    with pytest.raises(LevelUnsupported) as caught:
        resolve(3, None, slow)
    assert caught.value.hint == "use `-O1`"
    assert "an old CPU computes fp16 many times slower than fp32" in resolve("auto", "fp16", slow).notes[0]
    assert resolve("auto", "fp16", DEVICES["GPU"]).notes == ()
    ancient = Capabilities("cuda", "a K80", bf16=False, tf32=False, fp16=False, compiler=False)
    with pytest.raises(LevelUnsupported, match="no fp16"):
        resolve("auto", "fp16-pure", ancient)


@pytest.mark.parametrize(("name", "has_it"), [("fp16", False), ("fp16", True), ("fp16-pure", False), ("fp64", False)])
def test_lstm_in_fp16_on_a_cpu(name: PrecisionName, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a traceback of PyTorch's library ended the run."""
    monkeypatch.setattr(precision, "_cpu_has_fp16_lstm", lambda: has_it)
    chosen = resolve("auto", name, DEVICES["CPU"])
    check_layers(chosen, torch.nn.Sequential(torch.nn.GRU(2, 2)), CPU)
    check_layers(chosen, torch.nn.Sequential(torch.nn.LSTM(2, 2)), torch.device("cuda"))
    if has_it or name != "fp16":
        check_layers(chosen, torch.nn.Sequential(torch.nn.LSTM(2, 2)), CPU)
    else:
        with pytest.raises(LevelUnsupported, match="no LSTM in fp16") as caught:
            check_layers(chosen, torch.nn.Sequential(torch.nn.LSTM(2, 2)), CPU)
        assert "`-O0`" in str(caught.value.hint)


def test_asking_for_it_is_asking_the_library() -> None:
    before = torch.get_rng_state()
    has_it = precision._cpu_has_fp16_lstm()
    assert torch.equal(torch.get_rng_state(), before)
    try:
        with torch.autocast("cpu", torch.float16):
            torch.nn.LSTM(3, 3)(torch.randn(2, 1, 3))[0].float().sum().backward()
    except RuntimeError:
        assert not has_it
    else:
        assert has_it


def test_without_autocast_the_context_is_one_reused_object() -> None:
    enter = autocast(resolve(0, None, DEVICES["CPU"]), CPU)
    assert enter() is enter()
    with enter():
        assert not torch.is_autocast_enabled("cpu")
    with autocast(resolve(2, None, DEVICES["CPU bf16"]), CPU)():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_start_up_table() -> None:
    bf16 = dict(rows(resolve(3, None, DEVICES["GPU sm80"])))
    assert bf16["weights"] == "fp32"
    assert bf16["matmul and convolution inputs"] == "bf16 (autocast)"
    assert bf16["what stays fp32 is multiplied in"] == "TF32 inputs, fp32 sums"
    assert bf16["compile"] == "yes"
    master = dict(rows(resolve("auto", "fp16-master", DEVICES["GPU"])))
    assert master["weights"].startswith("fp16")
    assert master["optimizer state"] == "fp32"
    assert master["loss scaling"] != "none"
    assert dict(rows(resolve("auto", "fp16", DEVICES["GPU"]), "constant: 8"))["loss scaling"] == "constant: 8"
    pure = dict(rows(resolve("auto", "fp16-pure", DEVICES["GPU"])))
    assert pure["optimizer state"] == "fp16"
    assert dict(rows(resolve(0, "fp64", DEVICES["CPU"])))["gradients"] == "fp64"
