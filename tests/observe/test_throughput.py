"""Speeds and peaks, by arithmetic."""

from __future__ import annotations

import pytest

from paceline.observe.throughput import RateWords, Units, peak_flops

AUDIO = {"seconds": RateWords("audio_hours_per_hour", "hours of audio per hour")}


def test_every_unit_has_its_rate() -> None:
    assert Units().rates(4.0, 100, None, None) == {"samples_per_s": 25.0}
    heard = Units("utterances", "seconds", words=AUDIO).rates(10.0, 50, 3600.0, None)
    assert heard == {"utterances_per_s": 5.0, "audio_hours_per_hour": 360.0}
    read = Units("samples", "frames", "tokens").rates(2.0, 8, 64.0, 50.0)
    assert read == {"samples_per_s": 4.0, "frames_per_s": 32.0, "tokens_per_s": 25.0}
    assert Units().rates(2.0, 8, 64.0, 8.0) == {"samples_per_s": 4.0}, "units without a name"


@pytest.mark.parametrize(
    ("name", "rate", "said"),
    [
        ("samples_per_s", 811.6, "812 samples/s"),
        ("utterances_per_s", 0.03125, "0.0312 utterances/s"),
        ("audio_hours_per_hour", 1234.4, "1234 hours of audio per hour"),
    ],
)
def test_words(name: str, rate: float, said: str) -> None:
    assert Units(words=AUDIO).phrase(name, rate) == said


@pytest.mark.parametrize(
    ("device", "dtype", "tera"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "tf32", 494),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("NVIDIA RTX A4000", "bf16", None),
        ("NVIDIA L40", "bf16", None),
        ("this CPU", "fp32", None),
    ],
)
def test_only_peaks_that_are_known(device: str, dtype: str, tera: float | None) -> None:
    assert peak_flops(device, dtype) == (None if tera is None else tera * 1e12)
