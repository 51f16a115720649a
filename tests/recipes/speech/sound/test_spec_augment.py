"""Masks against a plain loop per sample that draws from the same keys, their extents and their distribution."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.core.errors import PacelineError
from paceline.core.keys import key
from paceline.recipes.speech.sound.spec_augment import SpecAugment, SpecAugmentSettings

QUARTZNET = SpecAugmentSettings(rect_masks=5, rect_time=120, rect_freq=50)
EVERYTHING = SpecAugmentSettings(
    freq_masks=2, time_masks=3, freq_width=15, time_width=0.07, rect_masks=4, rect_time=25, rect_freq=6
)


def rectangles(
    settings: SpecAugmentSettings, sample: int, mels: int, frames: int
) -> Iterator[tuple[int, int, int, int]]:
    """(first mel, mels, first frame, frames) of every mask of a sample, drawn one after the other."""

    def draw(stream: int, mask: int, widest: int, extent: int) -> tuple[int, int]:
        width = (key(sample, stream, mask, 0) >> 31) * (min(widest, extent) + 1) >> 32
        return (key(sample, stream, mask, 1) >> 31) * (extent - width + 1) >> 32, width

    time_width = int(settings.time_width)
    if 0 < settings.time_width < 1:
        time_width = max(1, int(settings.time_width * frames))
    for mask in range(settings.freq_masks):
        yield *draw(2, mask, settings.freq_width, mels), 0, 10**6
    for mask in range(settings.time_masks):
        yield 0, mels, *draw(3, mask, time_width, frames)
    for mask in range(settings.rect_masks):
        yield *draw(4, mask, settings.rect_freq, mels), *draw(5, mask, settings.rect_time, frames)


def by_loop(settings: SpecAugmentSettings, features: torch.Tensor, lengths: list[int], keys: list[int]) -> torch.Tensor:
    features = features.clone()
    for sample, length, number in zip(features, lengths, keys, strict=True):
        for mel, mels, frame, frames in rectangles(settings, number, features.shape[1], length):
            sample[mel : mel + mels, frame : frame + frames] = 0
    return features


def hidden(settings: SpecAugmentSettings, lengths: list[int], keys: list[int], mels: int = 64) -> torch.Tensor:
    features = torch.ones(len(keys), mels, max(lengths))
    return SpecAugment(settings)(features, torch.tensor(lengths), torch.tensor(keys)) == 0


@pytest.mark.parametrize(
    "settings",
    [
        QUARTZNET,
        EVERYTHING,
        SpecAugmentSettings(freq_masks=2, freq_width=27),
        SpecAugmentSettings(time_masks=2, time_width=100),
        SpecAugmentSettings(time_masks=2, time_width=0),
        SpecAugmentSettings(freq_masks=1, freq_width=1000, time_masks=1, time_width=1000),
    ],
)
def test_masks_are_those_of_a_loop(settings: SpecAugmentSettings) -> None:
    lengths = [300, 299, 120, 17, 2, 1, 0, 300]
    keys = [0, 1, 2**62, 2**63 - 1, 77, 78, 79, -5]
    features = torch.randn(8, 64, 300, generator=torch.Generator().manual_seed(0))
    masked = SpecAugment(settings)(features, torch.tensor(lengths), torch.tensor(keys))
    assert torch.equal(masked, by_loop(settings, features, lengths, keys))


def test_a_sample_keeps_its_masks_in_any_batch() -> None:
    lengths, keys = [200, 150, 90, 33], [11, 12, 13, 14]
    together = hidden(EVERYTHING, lengths, keys)
    assert len({tuple(sample.flatten().tolist()) for sample in together[:, :, :33]}) == 4
    for row in range(4):
        alone = hidden(EVERYTHING, lengths[row : row + 1], keys[row : row + 1])[0]
        assert torch.equal(alone, together[row, :, : lengths[row]])
    order = [2, 0, 3, 1]
    shuffled = hidden(EVERYTHING, [lengths[row] for row in order], [keys[row] for row in order])
    assert torch.equal(shuffled, together[order])


def test_nothing_happens_in_evaluation_or_without_masks() -> None:
    features = torch.randn(2, 64, 50)
    lengths, keys = torch.tensor([50, 40]), torch.tensor([1, 2])
    assert SpecAugment(EVERYTHING).eval()(features, lengths, keys) is features
    assert SpecAugment(SpecAugmentSettings())(features, lengths, keys) is features
    kept = features.clone()
    SpecAugment(EVERYTHING)(features, lengths, keys)
    assert torch.equal(features, kept)


def test_no_number_of_torchs_generator_is_used() -> None:
    state = torch.get_rng_state()
    hidden(EVERYTHING, [100], [1])
    assert torch.equal(torch.get_rng_state(), state)


def test_each_setting_bounds_its_own_axis() -> None:
    """Wide in time and flat in frequency stays so: NeMo's cut-out takes each extent from the other's bound."""
    keys = list(range(2000))
    flat = hidden(SpecAugmentSettings(rect_masks=1, rect_time=40, rect_freq=3), [100] * 2000, keys)
    assert flat.any(2).sum(1).max() == 3
    assert flat.any(1).sum(1).max() == 40
    bands = hidden(SpecAugmentSettings(freq_masks=1, freq_width=7), [20] * 2000, keys)
    assert bands.all(2).sum(1).max() == bands.any(2).sum(1).max() == 7
    stretches = hidden(SpecAugmentSettings(time_masks=1, time_width=0.1), [50, 100] * 1000, keys)
    assert stretches[::2].all(1).sum(1).max() == 5
    assert stretches[1::2].all(1).sum(1).max() == 10
    assert not stretches[::2, :, 50:].any()


def chi_square(counts: torch.Tensor, expected: Any) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_widths_and_starts_are_uniform() -> None:
    number, widest, extent = 22000, 10, 30
    keys = list(range(number))
    masks = hidden(SpecAugmentSettings(time_masks=1, time_width=widest), [extent] * number, keys, mels=1)[:, 0]
    widths = masks.sum(1)
    assert (
        chi_square(torch.bincount(widths, minlength=widest + 1), number / (widest + 1)) < 29.6
    )  # 10 degrees: p = 0.001
    for width in (1, 10):
        starts = masks[widths == width].int().argmax(1)
        places = extent - width + 1
        counts = torch.bincount(starts, minlength=places)
        assert len(counts) == places
        # Degrees of freedom plus 4 of the chi-square's own deviations.
        assert chi_square(counts, len(starts) / places) < places - 1 + 4 * (2 * (places - 1)) ** 0.5


def test_masks_of_a_sample_do_not_depend_on_each_other() -> None:
    """Numbers of masks, of axes, of neighbouring keys: no two of them go together."""
    settings = SpecAugmentSettings(freq_masks=2, freq_width=64, time_masks=2, time_width=64, rect_masks=1)
    drawn = [[n for box in rectangles(settings, sample, 64, 64) for n in box] for sample in range(4000)]
    columns = torch.tensor(drawn, dtype=torch.float64).T
    varying = [column for column in columns if column.std() > 0]
    assert len(varying) == 12
    series = [*varying, torch.roll(varying[1], 1)]
    for (i, first), (j, second) in itertools.combinations(enumerate(series), 2):
        if {i, j} in ({0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}):
            continue  # a start leaves room for its width
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / 4000**0.5


def test_half_a_frame_is_refused() -> None:
    assert SpecAugmentSettings(time_width=0.05).time_width == 0.05
    with pytest.raises(PacelineError, match="whole frames, or below 1 a share"):
        SpecAugmentSettings(time_width=1.5)
