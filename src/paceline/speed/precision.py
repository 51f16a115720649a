"""Levels: from `-O` and `--precision` to the dtypes a step computes in. docs/levels.md is this file as a table.

`resolve` decides and is pure; `capabilities`, `apply` and `autocast` touch the machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from paceline.core import amx
from paceline.core.errors import PacelineError
from paceline.core.together import Exclusion
from paceline.core.torch_private import cpu_has_bf16, cpu_has_fp16
from paceline.speed.autotune.candidates import Candidate
from paceline.world.guest import set_precisions
from paceline.world.installed import has_triton

Level = Literal["auto", 0, 1, 2, 3, 4]
PrecisionName = Literal["fp16", "fp16-master", "fp16-pure", "fp64"]
Fp32Matmul = Literal["ieee", "tf32"]
_LEVELS: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)


class LevelUnsupported(PacelineError):
    """A level or precision that this device cannot compute."""

    wanted: str
    device: str
    reason: str
    advice: str
    excludes = (
        Exclusion(
            "`-O2`, `-O3`",
            "a device without bf16, or `-O3` without a compiler",
            "hardware",
            "The device has no such instructions, or nothing that compiles for it. `-O4` takes the highest level "
            "that there is.",
        ),
    )
    sentence = "{wanted} cannot run on {device}: {reason}"
    hint = "{advice}"


class LevelConflict(PacelineError):
    """A level and a precision that contradict each other on any device."""

    level: int
    precision: str
    sentence = "-O{level} lowers the precision and --precision {precision} raises it"
    hint = "drop `-O{level}`, or drop `--precision {precision}`"


@dataclass(frozen=True)
class Capabilities:
    """Number formats and tools that a device can compute with."""

    device: Literal["cpu", "cuda"]
    name: str
    bf16: bool
    tf32: bool
    fp16: bool
    compiler: bool
    generation: tuple[int, int] | None = None
    """Compute capability of a GPU."""
    slow_fp16: bool = False
    """fp16 is computed, but slower than fp32."""


@dataclass(frozen=True)
class Precision:
    """Precision of a step: dtypes, loss scaling, compilation and kernels."""

    level: int
    name: str
    """The option that the user would type for it: `-O2`, `--precision fp16`."""
    weights: torch.dtype
    autocast: torch.dtype | None
    fp32_matmul: Fp32Matmul
    """Computation of a matmul or convolution that stays in fp32."""
    compile: bool
    scaled: bool
    """The loss is scaled, as `loss_scale` says."""
    master: bool
    """The optimizer updates fp32 masters of the weights; batch norm stays fp32."""
    notes: tuple[str, ...]
    """Lines that tell the user about this choice."""
    kernels: bool = False
    """The task's own kernels stand in for its modules."""
    graphs: bool = False
    """Grains are replayed from CUDA graphs."""
    is_open: bool = False
    """`-O4` or `auto` before the choice: what is said here is what it computes in until then."""


def capabilities(device: torch.device) -> Capabilities:
    """Ask the device what it can do."""
    if device.type == "cuda":
        version = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return Capabilities(
            device="cuda",
            name=torch.cuda.get_device_name(device),
            bf16=bf16,
            tf32=version >= (8, 0),
            fp16=version >= (5, 3),
            compiler=has_triton(),
            generation=version,
        )
    amx.avoid_undescribed()
    return Capabilities(
        device="cpu",
        name="this CPU",
        bf16=cpu_has_bf16(),
        tf32=False,
        fp16=True,
        slow_fp16=not cpu_has_fp16(),
        # The compiler that inductor will look for.
        compiler=shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None,
    )


def resolve(level: Level, precision: PrecisionName | None, capabilities: Capabilities) -> Precision:
    """Decide what a step computes in; raises where the device cannot do it."""
    if level == 4:
        return _resolve_fastest(precision, capabilities)
    notes: list[str] = []
    number = _level(level, precision, capabilities, notes)
    name = f"-O{number}" if precision is None else f"--precision {precision}"
    if precision == "fp64":
        return _resolve_fp64(number, name, notes)
    _check_supported(number, name, precision, capabilities)
    if number == 1 and not capabilities.tf32:
        notes.append(f"-O1: {capabilities.name} has no TF32, so fp32 matmuls stay exact fp32 as at -O0")
    if precision is not None and capabilities.slow_fp16:
        notes.append(f"{name}: {capabilities.name} computes fp16 many times slower than fp32 (`-O0`): for trying out")
    half_weights = precision in ("fp16-master", "fp16-pure")
    return Precision(
        level=number,
        name=name,
        weights=torch.float16 if half_weights else torch.float32,
        autocast=_autocast_dtype(number, precision),
        fp32_matmul="tf32" if number >= 1 and capabilities.tf32 else "ieee",
        compile=number == 3,
        scaled=precision is not None,
        master=precision == "fp16-master",
        notes=tuple(notes),
    )


def _check_supported(level: int, name: str, precision: PrecisionName | None, capabilities: Capabilities) -> None:
    """Raise `LevelUnsupported` where the device lacks what the level or precision needs."""
    if precision is not None and not capabilities.fp16:
        raise LevelUnsupported(name, capabilities.name, "it has no fp16", "use `-O0`")
    if precision is None and level >= 2 and not capabilities.bf16:
        has_fp16 = capabilities.fp16 and not capabilities.slow_fp16
        hint = "use `-O1` or `--precision fp16`" if has_fp16 else "use `-O1`"
        raise LevelUnsupported(name, capabilities.name, "it has no bf16", hint)
    if level == 3 and not capabilities.compiler:
        package = "Triton (`pip install triton`)" if capabilities.device == "cuda" else "g++ (`apt install g++`)"
        why = f"compiling needs {package}"
        raise LevelUnsupported("-O3", capabilities.name, why, "install it, or use `-O2`")


def check_layers(chosen: Precision, model: torch.nn.Module, device: torch.device) -> None:
    """Raise `LevelUnsupported` where the device does not compute a layer of the model in this precision."""
    is_fp16 = device.type == "cpu" and chosen.autocast is torch.float16
    if not is_fp16 or not any(isinstance(each, torch.nn.LSTM) for each in model.modules()):
        return
    if not _cpu_has_fp16_lstm():
        advice = "use `--precision fp16-master`, `-O2` for bf16, or `-O0`"
        raise LevelUnsupported(chosen.name, "this CPU", "it computes no LSTM in fp16 autocast", advice)


@functools.cache
def _cpu_has_fp16_lstm() -> bool:
    """Try it: PyTorch hands it to a library, which has it for some CPUs."""
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.random.fork_rng([]):
            module = torch.nn.LSTM(1, 1, device="cpu", dtype=torch.float32)
            module(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))
    except RuntimeError:
        return False
    return True


def _autocast_dtype(level: int, precision: PrecisionName | None) -> torch.dtype | None:
    """Return the dtype of autocast; None where the weights are half, or everything stays as it is."""
    if precision in ("fp16-master", "fp16-pure"):
        return None
    if precision == "fp16":
        return torch.float16
    return torch.bfloat16 if level >= 2 else None


def _resolve_fastest(precision: PrecisionName | None, capabilities: Capabilities) -> Precision:
    """`-O4` before it has measured: the highest level that this device has, an error only where no level goes."""
    if precision == "fp64":
        raise LevelConflict(4, "fp64")
    for number in reversed(_LEVELS[1:]):
        with contextlib.suppress(LevelUnsupported):
            return replace(resolve_candidate(Candidate(number), precision, capabilities), is_open=True)
    return replace(resolve_candidate(Candidate(0), precision, capabilities), is_open=True)


def resolve_candidate(
    way: Candidate,
    precision: PrecisionName | None,
    capabilities: Capabilities,
    asked: Literal["auto", 4] = 4,
) -> Precision:
    """`-O4` or `auto` once it has chosen: what the way's level computes in, with what comes on top.

    A run is resumed with the same name only. That of `-O4` is the level's: what it chose is stored beside it, and may
    be chosen anew. That of `auto` is all that rounds: graphs change no number.
    """
    resolved = resolve(_LEVELS[way.level], precision, capabilities)
    added = replace(resolved, kernels=way.kernels, graphs=way.graphs)
    if asked == "auto":
        return replace(added, name=f"{resolved.name}{' + kernels' if way.kernels else ''}")
    return replace(added, level=4, name="-O4" if precision is None else resolved.name)


def levels(precision: PrecisionName | None, capabilities: Capabilities) -> list[int]:
    """Return those of the levels 0 to 3 that this device has."""
    supported = []
    for level in _LEVELS:
        with contextlib.suppress(LevelUnsupported, LevelConflict):
            resolve(level, precision, capabilities)
            supported.append(int(level))
    return supported


def described(capabilities: Capabilities) -> str:
    """Return the levels that a device has, and why it has not the others, in one line."""
    supported: list[str] = []
    missing: dict[str, list[str]] = {}
    for level in _LEVELS:
        try:
            resolve(level, None, capabilities)
        except LevelUnsupported as error:
            missing.setdefault(error.reason, []).append(f"-O{level}")
        else:
            supported.append(f"-O{level}")
    parts = [", ".join(supported)]
    parts += [f"not {', '.join(names)}: {why}" for why, names in missing.items()]
    if not capabilities.fp16 or capabilities.slow_fp16:
        parts.append("no fp16" if not capabilities.fp16 else "fp16 is slower than fp32")
    return f"{capabilities.name}: {'; '.join(parts)}"


def distinct(levels: Iterable[int], precision: PrecisionName | None, capabilities: Capabilities) -> list[int]:
    """Of levels that compute alike on this device, the lowest: a CPU has no TF32, so that its -O1 is its -O0."""
    lowest: dict[Precision, int] = {}
    for level in sorted(levels):
        lowest.setdefault(replace(resolve_candidate(Candidate(level), precision, capabilities), notes=()), level)
    return list(lowest.values())


def _level(level: Level, precision: PrecisionName | None, capabilities: Capabilities, notes: list[str]) -> int:
    if level != "auto":
        return level
    if precision is not None:
        return 0 if precision == "fp64" else 2
    if capabilities.device == "cuda" and capabilities.bf16:
        notes.append(f"level auto is -O2: {capabilities.name} has bf16")
        return 2
    reason = "is no GPU" if capabilities.device == "cpu" else "has no bf16"
    notes.append(f"level auto is -O0: {capabilities.name} {reason}")
    return 0


def _resolve_fp64(level: int, name: str, notes: list[str]) -> Precision:
    if level >= 2:
        raise LevelConflict(level, "fp64")
    if level == 1:
        notes.append("-O1 has no effect with --precision fp64: nothing is computed in fp32")
    return Precision(level, name, torch.float64, None, "ieee", False, False, False, tuple(notes))


def apply(precision: Precision) -> None:
    """Set how the backends compute fp32 matmuls, convolutions and recurrent layers, both ways.

    torch's own start is mixed (exact matmuls, TF32 convolutions), so -O0 has to say so too. CPUs stay exact.
    What is compiled for one precision is kept apart from what is compiled for another.
    """
    mode = precision.fp32_matmul
    is_fast = mode == "tf32"
    modes = dict.fromkeys(("cuda.matmul", "cudnn.conv", "cudnn.rnn"), mode)
    exact = dict.fromkeys(("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"), "ieee")
    set_precisions(modes | exact, cudnn_tf32=is_fast, matmul="high" if is_fast else "highest")
    if precision.compile and precision.autocast is not None:
        # torch 2.11's cache of compiled graphs, on disk too, takes a bf16 graph for an fp16 one: not in its key.
        torch.compiler.config.cache_key_tag = f"autocast {_word(precision.autocast)}"


_NOTHING = contextlib.nullcontext()


def autocast(
    precision: Precision, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[object | None]]:
    """Return a function that makes the context around a forward; without autocast it is one reused empty context."""
    if precision.autocast is None:
        return lambda: _NOTHING
    return functools.partial(torch.autocast, device.type, precision.autocast)


def rows(precision: Precision, scaling: str = "fp16") -> list[tuple[str, str]]:
    """Return the start-up table: what computes in which dtype. `scaling` says how, where losses are."""
    weights = _word(precision.weights)
    computed = weights if precision.autocast is None else f"{_word(precision.autocast)} (autocast)"
    exact = "TF32 inputs, fp32 sums" if precision.fp32_matmul == "tf32" else "fp32"
    if precision.weights == torch.float64:
        exact = "none"
    return [
        ("weights", f"{weights} (batch norm fp32, fp32 masters)" if precision.master else weights),
        ("matmul and convolution inputs", computed),
        ("what stays fp32 is multiplied in", exact),
        ("gradients", f"{weights} (updated from fp32 copies)" if precision.master else weights),
        ("optimizer state", "fp32" if precision.master else weights),
        ("loss scaling", scaling if precision.scaled else "none"),
        ("compile", "yes" if precision.compile else "no"),
        *_added_row(precision),
    ]


def _added_row(precision: Precision) -> list[tuple[str, str]]:
    added = {"the task's kernels": precision.kernels, "CUDA graphs": precision.graphs}
    words = " and ".join(word for word, is_added in added.items() if is_added)
    if precision.level < 4:
        return [("auto adds", words)] if words else []
    nothing = "neither kernels nor CUDA graphs are faster, or possible, here"
    if precision.is_open:
        nothing = "it is not measured in a loop of your own"
    return [("-O4 adds", words or f"nothing: {nothing}")]


def _word(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]
