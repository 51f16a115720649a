"""Verdicts on kernels that are known to be slow on a device, with what was measured instead."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.observe.records import EpochRecord, Finding

SLOW_BF16_DEPTHWISE = {"H200": "`--precision fp16` was 2.4 times as fast for QuartzNet"}
"""Devices on which the library's depthwise convolution was measured to be slower in bf16 than in fp16."""


def slow_depthwise(record: EpochRecord) -> Iterator[Finding]:
    """Find depthwise convolutions in bf16 on a device that is slow at them."""
    way, device = record.way, record.device
    if way is None or device is None or not way.depthwise:
        return
    advice = next((text for name, text in SLOW_BF16_DEPTHWISE.items() if name in device.name), None)
    if advice is None or way.precision is not None or way.level not in (2, 3):
        return
    best = "`-O4` has its own kernels for them, and " if way.highest_level >= 4 else ""
    yield Finding("precision", f"depthwise convolutions in bf16 are slow on {device.name}", f"{best}{advice}")
