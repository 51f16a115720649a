"""On a real GPU: features, dither and masks are the CPU's at every level, and nothing waits for the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.keys_torch import keyed, normal
from paceline.recipes.speech.sound.features import FeatureSettings, LogMel
from paceline.recipes.speech.sound.spec_augment import SpecAugment, SpecAugmentSettings
from paceline.speed import precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch says of its own sync debug mode that it is a prototype, and of its compiler whatever it likes.
    pytest.mark.filterwarnings("ignore"),
]
SPEECH = Path(__file__).parents[5] / "shared" / "data" / "librispeech" / "test.json"
MASKS = SpecAugmentSettings(
    freq_masks=2, time_masks=2, freq_width=15, time_width=0.07, rect_masks=5, rect_time=120, rect_freq=50
)


class FrontEnd(nn.Module):
    """What a network has before its first layer."""

    def __init__(self, settings: FeatureSettings | None = None) -> None:
        super().__init__()
        self.features = LogMel(settings or FeatureSettings(n_fft=512), 16000)
        self.masks = SpecAugment(MASKS)

    def forward(self, audio: torch.Tensor, lengths: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        features, frames = self.features(audio, lengths, keys)
        masked: torch.Tensor = self.masks(features, frames, keys)
        return masked


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    yield torch.device("cuda")
    torch.cuda.set_sync_debug_mode("default")
    precision.apply(precision.resolve(0, None, precision.capabilities(torch.device("cuda"))))


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise, speech where there is some, half silence, full scale, scraps and nothing; with keys."""
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(40000, generator=generator) * 3000).to(torch.int16)
    silence = torch.zeros(40000, dtype=torch.int16)
    square = torch.tensor([32767, -32768], dtype=torch.int16).repeat(9000)
    all_kinds = [noise, torch.cat([silence, noise[:9000]]), torch.cat([square, silence, noise[:30000]]), silence]
    all_kinds += [noise[:samples] for samples in (0, 1, 2, 159, 160, 161, 257, 24000)]
    all_kinds += speech()
    audio = torch.nn.utils.rnn.pad_sequence(all_kinds, batch_first=True)
    return audio, torch.tensor([len(one) for one in all_kinds]), torch.arange(len(all_kinds)) * 10**15 - 5 * 10**15


def speech() -> list[torch.Tensor]:
    if not SPEECH.exists():
        return []
    soundfile = pytest.importorskip("soundfile")
    paths = [SPEECH.parent / json.loads(line)["audio_filepath"] for line in SPEECH.read_text().splitlines()[:8]]
    return [torch.from_numpy(soundfile.read(path, dtype="int16")[0]) for path in paths]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("normalize", ["per_feature", "all_features", "none"])
def test_features_are_the_cpus_at_every_level(gpu: torch.device, level: int, normalize: str) -> None:
    settings = FeatureSettings(n_fft=512, normalize=normalize)  # type: ignore[arg-type]
    audio, lengths, _ = batch()
    wanted, frames = LogMel(settings, 16000).eval()(audio, lengths)
    chosen = precision.resolve(level, None, precision.capabilities(gpu))  # type: ignore[arg-type]
    precision.apply(chosen)
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if level else "ieee")
    with precision.autocast(chosen, gpu)():
        features, counted = LogMel(settings, 16000).to(gpu).eval()(audio.to(gpu), lengths.to(gpu))
    assert features.dtype == torch.float32
    assert torch.equal(counted.cpu(), frames)
    torch.testing.assert_close(features.cpu(), wanted, rtol=0, atol=1e-4)


def test_training_is_the_cpus_too(gpu: torch.device) -> None:
    audio, lengths, keys = batch()
    wanted = FrontEnd(FeatureSettings(n_fft=512, dither=1e-3))(audio, lengths, keys)
    features = FrontEnd(FeatureSettings(n_fft=512, dither=1e-3)).to(gpu)(audio.to(gpu), lengths.to(gpu), keys.to(gpu))
    torch.testing.assert_close(features.cpu(), wanted, rtol=0, atol=1e-4)


def test_masks_and_hashes_are_the_cpus_bits(gpu: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (257,), generator=generator)
    numbers = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    assert torch.equal(keyed(keys.to(gpu)[:, None], 3, numbers.to(gpu)).cpu(), keyed(keys[:, None], 3, numbers))
    features = torch.randn(257, 64, 400, generator=generator)
    lengths = torch.randint(0, 401, (257,), generator=generator)
    masked = SpecAugment(MASKS)(features.to(gpu), lengths.to(gpu), keys.to(gpu))
    assert torch.equal(masked.cpu(), SpecAugment(MASKS)(features, lengths, keys))
    torch.testing.assert_close(normal(keys.to(gpu), 1, 1001).cpu(), normal(keys, 1, 1001), rtol=0, atol=1e-4)


def test_nothing_waits_for_the_device(gpu: torch.device) -> None:
    front_end = FrontEnd().to(gpu)
    audio, lengths, keys = (tensor.to(gpu) for tensor in batch())
    shorter, fewer = audio[:, :30001], lengths.clamp(max=30001)
    front_end(audio, lengths, keys)  # libraries are loaded at first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for training in (True, False):
        front_end.train(training)
        for _ in range(2):
            front_end(audio, lengths, keys)
            front_end(shorter, fewer, keys)
            front_end.features(audio, lengths)


def test_compiled_at_level_3(gpu: torch.device) -> None:
    audio, lengths, keys = (tensor.to(gpu) for tensor in batch())
    plain = FrontEnd(FeatureSettings(n_fft=512, dither=0.0)).to(gpu)
    wanted = plain(audio, lengths, keys)
    chosen = precision.resolve(3, None, precision.capabilities(gpu))
    precision.apply(chosen)
    plain.compile()
    with precision.autocast(chosen, gpu)():
        torch.testing.assert_close(plain(audio, lengths, keys), wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(plain(audio[2:], lengths[2:], keys[2:]), wanted[2:], rtol=0, atol=1e-6)


def test_graph_of_the_device_can_hold_it(gpu: torch.device) -> None:
    """Nothing asks the host: the same batch shape can be captured and replayed with other audio."""
    front_end = FrontEnd().to(gpu)
    audio, lengths, keys = (tensor.to(gpu) for tensor in batch())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            front_end(audio, lengths, keys)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = front_end(audio, lengths, keys)
    other = audio.flip(0).clone()
    wanted = front_end(other, lengths, keys)
    audio.copy_(other)
    graph.replay()
    torch.testing.assert_close(captured, wanted, rtol=0, atol=1e-6)
