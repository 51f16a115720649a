"""Kernels, compiled for an H200 on any machine: they compile, and fit into registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

ADDED = {
    **dict.fromkeys(("x", "residual", "out", "total", "g", "g_total", "of_x", "of_residual"), "*bf16"),
    **{"seed": "*i32", "width": "i32", "rows": "i32", "rows_each": "i32", "least": "i64", "factor": "fp32"},
}
"""Types of the arguments of `added_rows`."""
PACKED = {
    **ADDED,
    **dict.fromkeys(("q", "k", "v", "of_q", "of_k", "of_v", "scores", "changed"), "*bf16"),
    **dict.fromkeys(("q_offsets", "k_offsets"), "*i32"),
    **dict.fromkeys(("target", "tokens", "places"), "*i64"),
    **dict.fromkeys(("q_stride", "k_stride", "out_stride", "of_q_stride", "of_k_stride", "heads", "stride"), "i32"),
    **dict.fromkeys(("vocabulary", "ignored", "longest"), "i32"),
    **{"scale": "fp32", "smoothing": "fp32"},
}
"""Types of the arguments of `packed_rows`, `score_rows`, `column_sums` and `embedded_rows`."""
CONFORMER = {
    **dict.fromkeys(("qkv", "p", "shifted", "slopes", "of_qkv", "g", "mels", "of_x", "of_y"), "*bf16"),
    **dict.fromkeys(("time", "heads", "width", "pitch", "p_stride", "parts_stride", "channels", "batch"), "i32"),
    **dict.fromkeys(("time_0", "mels_0", "time_1", "mels_1", "time_2", "mels_2", "time_3", "mels_3"), "i32"),
    **dict.fromkeys(("places", "places_each", "quads", "quads_t", "quads_f", "quads_each"), "i32"),
    **dict.fromkeys(("blocks", "blocks_each"), "i32"),
    **{"seed": "*i32", "lengths": "*i32", "least": "i64", "factor": "fp32", "scale": "fp32", "natural": "fp32"},
}
"""Types of the arguments of `relative`, `striding` and `gated_rows`."""
SPILLED = {
    **{"backward 75": 16, "backward 75, cut": 48, "product": 16},
    **{"attention": 8, "attention back": 192},
}
"""Bytes of a thread's registers that lie in memory for want of room, where the kernel was measured with them."""


@pytest.mark.parametrize(
    ("group", "number"),
    [
        ("separable", 10),
        pytest.param("transformer", 5, marks=pytest.mark.long),
        pytest.param("conformer", 7, marks=pytest.mark.long),
    ],
)
def test_compile_for_an_h200(group: str, number: int) -> None:
    # In a process of its own: here kernels belong to the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, group], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for name, (stack_bytes, shared_bytes, multiplies, fetches) in found.items():
        assert stack_bytes <= SPILLED.get(name, 0), f"{name}: {stack_bytes} bytes of registers in memory"
        assert shared_bytes <= 227 * 1024, f"{name}: {shared_bytes} bytes of shared memory"
        is_stream = name.startswith(("fetched", "backward", "product"))
        multiplies_too = name.startswith(("relative", "attention")) or name == "strides first"
        assert (multiplies > 0) == (is_stream or multiplies_too), f"{name}: products on the warpgroups' tensor cores"
        assert (fetches > 0) == is_stream, f"{name}: fetched by the accelerator"
    assert len(found) == number


def compile_separable() -> dict[str, tuple[int, int, int, int]]:
    """Bytes of stack, of shared memory, tensor-core products of warpgroups, and fetches, by kernel."""
    import triton.language as tl

    from paceline.recipes.speech.kernels import tiles
    from paceline.recipes.speech.kernels.quartznet import norm, stream_backward, stream_fetched
    from paceline.speed.layers.kernels import added_rows

    found = {}
    for kernel in (33, 75):
        way = tiles.streaming(kernel, 1, 1, 256)
        assert way is not None
        common = {"KERNEL": kernel, "PAD": kernel // 2, "DILATION": 1, "PRODUCT": tl.bfloat16, "IS_COMPILED": True}
        common |= {"ROWS": way.rows, "TILE": way.tile, "HAS_AFFINE": True, "IS_TURNED": True}
        boxes = {"x_tiles": way.chunk, "out_tiles": way.tile}
        options = {"num_warps": way.warps, "num_stages": way.stages}
        found[f"fetched {kernel}"] = build(stream_fetched._forward, {**common, "CHUNK": way.chunk}, boxes, options)
    back = tiles.backward_streaming(75, 1, 1, 512, 256, 848)
    assert back is not None
    backward = {
        **common,
        "KERNEL_2": 128,
        "LEFT": tiles.window_start(75, 1),
        "WIDE": back.wide,
        "MORE": back.more,
        "NEEDS_DATA": True,
        "HAS_ADDED": False,
        "IS_TURNED": False,
    }
    boxes = {"g_wide": back.wide, "g_more": back.more, "x_tiles": back.tile, "h_tiles": back.tile}
    options = {"num_warps": back.warps, "num_stages": back.stages}
    for name, is_cut in (("backward 75", False), ("backward 75, cut", True)):
        found[name] = build(stream_backward._backward, {**backward, "IS_CUT": is_cut}, boxes, options)
    found["pieces"] = build(norm._piece_moments, {"PIECE": norm.PIECE, "GROUPS": 32}, {}, {"num_warps": 8})
    found["product"] = build_product()
    for width in (512, 1024):
        rows, wide, warps = added_rows.tile(width)
        for name, kernel, more in (
            ("forward", added_rows._add_norm, {"HAS_SHIFT": True}),
            ("backward", added_rows._add_norm_backward, {"HAS_TOTAL": True}),
        ):
            constants = {"HAS_DROPOUT": True, "ROWS": rows, "WIDTH": wide, **more}
            found[f"added {name} {width}"] = build(kernel, constants, {}, {"num_warps": warps}, ADDED)
    return found


def compile_transformer() -> dict[str, tuple[int, int, int, int]]:
    """Kernels of a Transformer with heads of 64 channels, on sentences of at most 64 tokens."""
    from paceline.recipes.translation.kernels import column_sums
    from paceline.speed.layers.kernels import added_rows, embedded_rows, packed_rows, score_rows

    block, warps, _ = packed_rows.plan(64)
    attention = {"IS_CAUSAL": True, "BLOCK": block, "WIDTH": 64, "PRECISION": "tf32"}
    back = {**attention, "IS_WHOLE": True}
    rows, wide, row_warps = added_rows.tile(512)
    table = {"HAS_DROPOUT": True, "ROWS": rows, "WIDTH": wide}
    sums = {"HAS_RELU": True, "ROWS": column_sums.ROWS, "WIDTH": column_sums.WIDTH}
    losses = {"HAS_GRADIENT": True, "BLOCK": score_rows.BLOCK}
    return {
        "attention": build(packed_rows._attend, attention, {}, {"num_warps": warps}, PACKED),
        "attention back": build(packed_rows._attend_backward, back, {}, {"num_warps": warps}, PACKED),
        "embedding": build(embedded_rows._embed, table, {}, {"num_warps": row_warps}, PACKED),
        "relu": build(column_sums._sums, sums, {}, {"num_warps": 4}, PACKED),
        "losses": build(score_rows._losses, losses, {}, {"num_warps": 8}, PACKED),
    }


def compile_conformer() -> dict[str, tuple[int, int, int, int]]:
    """Kernels of a Conformer with heads of 64 channels."""
    import triton.language as tl

    from paceline.recipes.speech.kernels.conformer import gated_rows, relative, striding

    found = {}
    for name, kernel, more in (
        ("forward", relative._forward, {"HAS_DROPOUT": True}),
        ("keys", relative._backward_keys, {"HAS_DROPOUT": True}),
        ("queries", relative._backward_queries, {}),
        ("places", relative._backward_places, {}),
    ):
        constants = {**relative.options(name, 4, 256), "PRODUCT": tl.bfloat16, **more}
        options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
        found[f"relative {name}"] = build(kernel, constants, {}, options, CONFORMER)
    for name, kernel, places, channels, warps in (
        ("first", striding._first, striding.PLACES, striding.CHANNELS, striding.WARPS),
        (
            "first backward",
            striding._first_backward,
            striding.PLACES_BACK,
            striding.CHANNELS_BACK,
            striding.WARPS_BACK,
        ),
    ):
        constants = {"PLACES": places, "CHANNELS": channels, "PRODUCT": tl.bfloat16}
        kinds = {**CONFORMER, "weight": "*bf16"}
        found[f"strides {name}"] = build(kernel, constants, {}, {"num_warps": warps}, kinds)
    taps = {"KERNEL": 31, "TAPS": gated_rows.MOST_TAPS - 1}
    taps |= {"TIMES": gated_rows.TIMES, "CHANNELS": gated_rows.CHANNELS}
    found["taps"] = build(gated_rows._of_taps, taps, {}, {"num_warps": 4}, {**CONFORMER, "u": "*bf16"})
    return found


def build_product() -> tuple[int, int, int, int]:
    """Of 512 channels, forward."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    from paceline.recipes.speech.kernels.quartznet import product

    depth, stages = product.PIPELINE
    wide = product.matrix_layout(depth, is_turned=False)
    fetched, stored = (f"tensordesc<bf16[1,{channels},128],{product._DEEP!r}>" for channels in (depth, 64))
    pointers = {"w_tiles": f"tensordesc<bf16[64,{depth}],{wide!r}>", "x_tiles": fetched, "out_tiles": stored}
    pointers |= {"parts": "*fp32", "tiles": "*i32"}
    constants = {"DEPTHS": 512 // depth, "STAGES": stages, "ROWS": 1, "DEPTH": depth, "WIDTH": product.WIDTH}
    constants |= {"LAYOUT": product._FLAT, "W_LAYOUT": wide, "HAS_SUMS": True, "IS_TURNED": False}
    names = product._product.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = [place for place, name in enumerate(names) if signature[name].startswith("*") or name == "filters"]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = GluonASTSource(product._product, signature, constants, attributes)
    built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = built.asm["ptx"]
    return stack_bytes(ptx), built.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor")


def build(
    kernel: Any,
    constants: dict[str, Any],
    boxes: dict[str, int],
    options: dict[str, int],
    kinds: dict[str, str] | None = None,
) -> Any:
    """`boxes`: frames of what is fetched or stored by the accelerator, by argument; `kinds`: types of others."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    halves, words = ("x", "out", "y", "added"), ("lengths", "counters")
    numbers = ("channels", "batch", "row", "num_tiles", "num_groups", "size", "true_size", "groups")
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif kinds and name in kinds:
            signature[name] = kinds[name]
        elif name in boxes:
            signature[name] = f"tensordesc<bf16[1,{constants['ROWS']},{boxes[name]}]>"
        elif name in numbers:
            signature[name] = "i32"
        elif name == "eps":
            signature[name] = "fp32"
        else:
            signature[name] = "*bf16" if name in halves else "*i32" if name in words else "*fp32"
    multiples = ("channels", "batch", "row", "size", "width", "pitch", "p_stride", "parts_stride")
    if kinds:  # a batch of any size
        multiples = tuple(name for name in multiples if name != "batch")
    aligned = [
        (place,) for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name in multiples
    ]
    source = ASTSource(kernel, signature, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    return stack_bytes(ptx), built.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor")


def stack_bytes(ptx: str) -> int:
    """What the assembler that comes with Triton says of registers that do not fit."""
    import re
    import tempfile
    from pathlib import Path

    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        words = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes stack frame", said))


if __name__ == "__main__":
    groups = {"separable": compile_separable, "transformer": compile_transformer, "conformer": compile_conformer}
    print(json.dumps(groups[sys.argv[1]]()))
