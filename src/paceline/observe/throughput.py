"""How fast a run is, in units that people compare: samples, tokens, hours of audio, share of the peak."""

from __future__ import annotations

import re

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # Dense, without sparsity, from the maker's data sheets; the first name that occurs in the device's own counts.
    "H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "H100 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H100": {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "H200 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H200": {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "V100": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
}
WORDS = {"seconds": ("audio_hours_per_hour", "hours of audio per hour")}
"""A second of audio per second is an hour per hour."""


def peak_flops(device: str, dtype: str) -> float | None:
    """Of one device, per second, in a dtype; None where it is not known."""
    known = next((peaks for name, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device)), {})
    return known[dtype] * 1e12 if dtype in known else None


def rates(
    seconds: float,
    *,
    samples: int,
    sample_unit: str = "samples",
    length: float | None = None,
    length_unit: str = "",
    count: float | None = None,
    count_unit: str = "",
) -> dict[str, float]:
    """Speeds by name; a unit without a name gives none."""
    found = {f"{sample_unit}_per_s": samples / seconds}
    if length is not None and length_unit:
        found[WORDS.get(length_unit, (f"{length_unit}_per_s", ""))[0]] = length / seconds
    if count is not None and count_unit:
        found[f"{count_unit}_per_s"] = count / seconds
    return found


def phrase(name: str, rate: float) -> str:
    """`183 utterances/s`, `512 hours of audio per hour`"""
    number = f"{rate:,.0f}".replace(",", "") if rate >= 100 else f"{rate:.3g}"
    said = next((text for key, text in WORDS.values() if key == name), name.removesuffix("_per_s") + "/s")
    return f"{number} {said}"
