"""Speed of a run in units that people compare: samples, lengths and counts of the task, and share of the peak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class RateWords:
    """Name of a rate that is not `UNIT_per_s`."""

    name: str
    """In records: `audio_hours_per_hour`."""
    text: str
    """On the console, after the number: `hours of audio per hour`."""


@dataclass(frozen=True)
class Units:
    """Names of a task's numbers, and what training on them costs."""

    samples: str = "samples"
    lengths: str = ""
    counts: str = ""
    flops: float | None = None
    """Of training on one unit of length, or on one sample where lengths are not known."""
    words: Mapping[str, RateWords] = field(default_factory=dict)
    """Rates with a name of their own, by unit."""

    def rates(self, seconds: float, samples: int, length: float | None, count: float | None) -> dict[str, float]:
        """Return speeds by name; a unit without a name gives none."""
        rates = {self._name(self.samples): samples / seconds}
        if length is not None and self.lengths:
            rates[self._name(self.lengths)] = length / seconds
        if count is not None and self.counts:
            rates[self._name(self.counts)] = count / seconds
        return rates

    def flops_per_s(self, seconds: float, samples: int, length: float | None) -> float | None:
        """Return the arithmetic that training needs; None where the task does not know it."""
        return None if self.flops is None else self.flops * (samples if length is None else length) / seconds

    def phrase(self, name: str, rate: float) -> str:
        """Return a rate in words: `183 utterances/s`."""
        number = f"{rate:,.0f}".replace(",", "") if rate >= 100 else f"{rate:.3g}"
        text = next((words.text for words in self.words.values() if words.name == name), None)
        return f"{number} {text or name.removesuffix('_per_s') + '/s'}"

    def _name(self, unit: str) -> str:
        return self.words[unit].name if unit in self.words else f"{unit}_per_s"


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the peak of one device per second in a dtype; None where it is not known."""
    known = next((peaks for name, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device)), {})
    return known[dtype] * 1e12 if dtype in known else None
