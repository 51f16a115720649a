"""Speech from packed files: the same losses as from the audio files that they were made of, wherever manifests go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml

from paceline.cli.main import main
from paceline.data.fetch import Fetch, Request
from paceline.data.grain import Grain, map_tensors
from paceline.data.packed.errors import PackedMisfit
from paceline.data.packed.reader import open_packed
from paceline.data.plan import BatchRule, Plan
from paceline.data.thread_reader import ThreadReader
from paceline.recipes.speech.audio.recordings import Recordings
from paceline.recipes.speech.data.inputs import open_inputs
from paceline.recipes.speech.data.ladder import ladder
from paceline.recipes.speech.data.utterances import Utterances, collate
from paceline.recipes.speech.manifest.bad_line import BadManifest
from paceline.recipes.speech.manifest.read import NothingKept, read_manifests
from paceline.recipes.speech.network.config import NetworkSettings
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.sound.perturb import find_clips
from paceline.recipes.speech.sound.placement import NotOnDevice
from paceline.recipes.speech.text.labels import EncodedTexts
from paceline.train.autotune.shapes import costly_shapes
from paceline.train.task import Surroundings
from paceline.world.discover.environment import World
from paceline.world.start import start
from tests.recipes.speech import tiny
from tests.train.small import alone

NOTHING_RANDOM = {**tiny.PLAIN, "features": {**tiny.PLAIN["features"], "dither": 0.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifests, each packed; the file to train on in both layouts, and in shards; features."""
    made = tmp_path_factory.mktemp("packed")
    tiny.speech(made, "train", 24, seed=1)
    tiny.speech(made, "dev", 7, seed=2)
    (made / "network.yaml").write_text(yaml.safe_dump(NOTHING_RANDOM))
    pack(made / "train.json", made / "train.h5")
    pack(made / "train.json", made / "shards.h5", "--shard-size", "60kB", "--processes", 2)
    pack(made / "train.json", made / "returnn.hdf", "--layout", "returnn")
    pack(made / "dev.json", made / "dev.h5")
    for name in ("train", "dev"):
        pack(made / f"{name}.json", made / f"{name}-mels.h5", "--features", "--network", made / "network.yaml")
    return made


def pack(*words: object) -> None:
    assert main(["pack", *map(str, words)]) == 0


def trained(folder: Path, out: Path, train: str, val: str, **changes: Any) -> tuple[list[float], Any]:
    paths = tuple(folder / name for name in train.split(","))
    sets = tuple(f"dev={'+'.join(str(folder / name) for name in val.split('+'))}" for val in [val])
    tiny.train(tiny.settings(folder, train_manifest=paths, val_manifest=sets, out=out, **changes))
    return tiny.losses_of(out), tiny.validations_of(out)


PERTURBED = {"speed_factors": (0.9, 1.1), "gain_db": (-6, 6), "white_noise_db": (-60, -50)}


@pytest.mark.parametrize("changes", [{}, PERTURBED], ids=["plain", "perturbed"])
def test_the_same_losses_as_from_audio_files(folder: Path, tmp_path: Path, changes: Any) -> None:
    """Dropout, masks, dither and perturbation included: what is random is keyed by the sample."""
    expected = trained(folder, tmp_path / "files", "train.json", "dev.json", **changes)
    assert len(expected[0]) == 3
    names = ["train.h5"] if changes else ["train.h5", "shards.h5", "returnn.hdf"]
    for name in names:
        assert trained(folder, tmp_path / name, name, "dev.h5", **changes) == expected


def test_grains_of_packed_audio_stand_on_the_ladder_too(folder: Path) -> None:
    """Copied from the file into the batch at once, and still what the ladder makes of the samples one by one."""
    found = []
    for name in ("train.json", "train.h5"):
        manifest, _ = read_manifests([folder / name])
        texts = EncodedTexts(np.zeros(5 * len(manifest), np.uint8), 5 * np.arange(len(manifest) + 1))
        data = Utterances(manifest, texts, tiny.RATE)
        fetch = Fetch(data, ladder(data, NetworkSettings(**NOTHING_RANDOM)), seed=3)
        found.append(fetch(Request(1, 0, np.array([4, 0, 17]))).data)
    assert data._recordings.packed(np.array([4])) is not None
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        same = torch.equal(found[1][name], value) if isinstance(value, torch.Tensor) else found[1][name] == value
        assert same, name
    assert found[0]["audio"].shape[1] > max(found[0]["num_samples"])


@pytest.mark.parametrize("names", [["train.h5"], ["shards.h5"], ["train.h5", "dev.h5"]], ids="+".join)
def test_threads_read_what_one_process_reads(folder: Path, names: list[str]) -> None:
    """Grains of one packed file, of shards and of several files, also mixed; with the keys of each sample."""
    manifest, _ = read_manifests([folder / name for name in names])
    texts = EncodedTexts(np.zeros(5 * len(manifest), np.uint8), 5 * np.arange(len(manifest) + 1))
    data = Utterances(manifest, texts, tiny.RATE)
    fetch = Fetch(data, collate, seed=3)
    assert fetch.reads_in_threads
    order = np.random.default_rng(0).permutation(len(data))
    requests = [Request(2, number, order[number : number + 5]) for number in range(len(order) - 5)]
    reader = ThreadReader(fetch, 3)
    one_by_one = Fetch(data, OneByOne(), seed=3)
    for grain, request in zip(reader.read(iter(requests)), requests, strict=True):
        assert grain.number == request.number
        for name, value in one_by_one(request).data.items():
            found = grain[name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
    reader.close()


CHANGES: dict[str, Any] = {
    "speed_range": (0.9, 1.1),
    "speed_prob": 0.8,
    "shift_ms": (-9, 9),
    "gain_db": (-6, 6),
    "white_noise_db": (-60, -46),
}


class PlainUploads:
    """To where the data is already."""

    def __init__(self, finish: Any) -> None:
        self.finish = finish

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def pinned(self, grain: Grain) -> Grain:
        return grain

    def start(self, grain: Grain) -> Grain:
        return Grain(map_tensors(torch.clone, grain.data), grain.number, grain.samples)

    def mark(self) -> Any:
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("name", ["train.h5", "shards.h5"])
def test_a_device_perturbs_what_threads_have_read(folder: Path, name: str) -> None:
    """Utterances, keys and lengths are those of the processes that read and perturb one by one, and so are the samples
    but for the last bit, on any slot of memory; the width has room for the slowest speed."""
    settings = tiny.settings(folder, **CHANGES, noise_from=folder / "dev.h5")
    manifest, _ = read_manifests([folder / name])
    texts = EncodedTexts(np.zeros(5 * len(manifest), np.uint8), 5 * np.arange(len(manifest) + 1))
    workers = Utterances(manifest, texts, tiny.RATE, settings)
    data = Utterances(manifest, texts, tiny.RATE, settings, on_device=True)
    assert (workers.lengths == data.lengths).all()
    fit = ladder(data, NetworkSettings(**NOTHING_RANDOM))
    fetch = Fetch(data, fit, seed=3)
    order = np.random.default_rng(0).permutation(len(data))
    requests = [Request(2, number, order[number : number + 5]) for number in range(len(order) - 5)]
    reader = ThreadReader(fetch, 2, PlainUploads(fetch.finisher))
    one_by_one = Fetch(workers, fit, seed=3)
    for grain, request in zip(reader.read(iter(requests)), requests, strict=True):
        expected = one_by_one(request).data
        assert set(grain.data) == set(expected)
        longest_s = float(data.lengths[request.samples].max())
        assert grain["audio"].shape == (5, fit.padded(longest_s))
        width = expected["audio"].shape[1]
        assert width <= grain["audio"].shape[1]
        found = grain["audio"].to(torch.int32)
        assert not found[:, width:].any()
        apart = (found[:, :width] - expected["audio"]).abs()
        assert apart.max() <= 40  # soxr's first three samples, where noise begins at once
        assert ((apart > 2).sum(1) <= 3).all()
        for key in set(expected) - {"audio"}:
            value, other = grain[key], expected[key]
            assert torch.equal(value, other) if isinstance(other, torch.Tensor) else value == other, key
    reader.close()


def test_widths_follow_from_the_samples_alone(folder: Path) -> None:
    """Whatever is drawn: the shapes of many epochs are those that are recorded before the first step."""
    settings = tiny.settings(folder, speed_range=(0.9, 1.1))
    manifest, _ = read_manifests([folder / "train.h5"])
    texts = EncodedTexts(np.zeros(5 * len(manifest), np.uint8), 5 * np.arange(len(manifest) + 1))
    data = Utterances(manifest, texts, tiny.RATE, settings, on_device=True)
    fit = replace(ladder(data, NetworkSettings(**NOTHING_RANDOM)), audio_multiple=160)  # many rungs
    fetch = Fetch(data, fit, seed=0)
    plan = Plan(len(data), rule=BatchRule(6), grains=1, seed=0, lengths=data.lengths, order="bucket")
    shapes = {
        (len(plan.batch(step)), fetch(Request(epoch, 0, plan.batch(step))).data["pending"].width)
        for epoch in range(6)
        for step in range(plan.num_steps)
    }
    picked = {plan.shapes(pick.step)[pick.number] for pick in costly_shapes(plan, 99, fit)}
    assert shapes == {(size, fit.padded(longest)) for size, longest in picked}


def test_the_summary_says_where_sound_is_varied(folder: Path) -> None:
    made, said = tiny.task(), list[str]()
    config = tiny.settings(folder, train_manifest=(folder / "train.h5",), augment_on="workers")
    made.attach(Surroundings(config, alone(), said.append))
    made.train_data()
    assert made.summary_rows() == []
    assert "`augment_on` has no effect" in said[-1]
    config = config.model_copy(update={"gain_db": (-6.0, 6.0), "augment_on": "auto"})
    made.attach(Surroundings(config, alone(), said.append))
    made.train_data()
    line = "gain -6 to 6 dB; where it is read (there is no GPU in this run)"
    assert made.summary_rows() == [("augmentation", line)]
    made.attach(Surroundings(config.model_copy(update={"augment_on": "device"}), alone(), said.append))
    with pytest.raises(NotOnDevice, match="no GPU"):
        made.train_data()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("level", [0, 4])
def test_losses_are_the_same_wherever_sound_is_varied(folder: Path, tmp_path: Path, level: int) -> None:
    """Also after an interruption, then bit for bit."""
    link = start(World(0, 0, 1, 1, 0, 1, "test", None), device="cuda", threads=1)
    plain = {"device": "cuda", "level": level, "workers": 2, "epochs": None, "schedule": "constant", **CHANGES}
    more: dict[str, Any] = {**plain, "train_manifest": (folder / "train.h5",), "val_manifest": ()}
    if level == 0:
        for augment_on in ("device", "workers"):
            # At one speed: else batches are padded to the slowest, or to what was drawn.
            here = {**more, "speed_range": None, "augment_on": augment_on, "out": tmp_path / augment_on}
            tiny.train(tiny.settings(folder, **here, steps=6), link)
        assert tiny.losses_of(tmp_path / "device") == pytest.approx(tiny.losses_of(tmp_path / "workers"), rel=1e-3)
    tiny.train(tiny.settings(folder, **more, steps=6, out=tmp_path / "whole"), link)
    for steps, resume in ((4, "no"), (6, "auto")):
        again = {"save_every_steps": 2, "resume": resume, "allow_change": True, "steps": steps}
        tiny.train(tiny.settings(folder, **{**more, **again}, out=tmp_path / "parts"), link)
    assert tiny.losses_of(tmp_path / "parts") == tiny.losses_of(tmp_path / "whole")


class OneByOne:
    """Pads as `collate` does, but is not known to: samples are read one by one."""

    def __call__(self, samples: list[Any]) -> Any:
        return collate(samples)


def test_data_that_threads_do_not_read(folder: Path) -> None:
    """Perturbed audio, audio files, another sample rate, and other ways of collating."""
    texts = EncodedTexts(np.zeros(0, np.uint8), np.zeros(99, np.int64))
    plain = Utterances(read_manifests([folder / "train.h5"])[0], texts, tiny.RATE)
    assert plain.reads_in_threads(collate)
    assert not plain.reads_in_threads(OneByOne())
    perturbed = tiny.settings(folder, speed_factors=(0.9, 1.1))
    assert not Utterances(read_manifests([folder / "train.h5"])[0], texts, tiny.RATE, perturbed).reads_in_threads(
        collate
    )
    for names in (["train.json"], ["train.h5", "dev.json"]):
        mixed, _ = read_manifests([folder / name for name in names])
        assert not Utterances(mixed, texts, tiny.RATE).reads_in_threads(collate)
    resampled = Utterances(read_manifests([folder / "train.h5"])[0], texts, tiny.RATE * 2)
    assert not resampled.reads_in_threads(collate)


@pytest.mark.parametrize(
    ("names", "is_packed"),
    [(["train.json"], False), (["train.h5", "dev.json"], False), (["train.h5", "dev.h5"], True), (["shards.h5"], True)],
)
def test_data_knows_whether_it_is_packed(folder: Path, names: list[str], is_packed: bool) -> None:
    manifest, _ = read_manifests([folder / name for name in names])
    texts = EncodedTexts(np.zeros(0, np.uint8), np.zeros(len(manifest) + 1, np.int64))
    assert Utterances(manifest, texts, tiny.RATE).is_packed == is_packed


def test_mixed_with_manifests(folder: Path, tmp_path: Path) -> None:
    both = trained(folder, tmp_path / "a", "train.json,dev.json", "dev.json+train.json")
    mixed = trained(folder, tmp_path / "b", "train.h5,dev.json", "dev.h5+train.json")
    assert mixed == both


def test_a_run_goes_on_with_packed_data(folder: Path, tmp_path: Path) -> None:
    """In the middle of an epoch: names, texts and durations are the same, and so is the order."""
    changes = {"epochs": 2, "save_every_steps": 4, "keep_last": 9}
    expected, _ = trained(folder, tmp_path / "whole", "train.json", "dev.json", **changes)
    middle = tmp_path / "whole" / "checkpoints" / "step-00000004"
    found, _ = trained(folder, tmp_path / "on", "train.h5", "dev.h5", **changes, resume=middle, allow_change=True)
    assert found == expected[4:]


def test_eval_and_infer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trained(folder, run, "train.h5", "dev.h5", threads=1)
    shown = []
    for first, second in (("dev.json", "train.h5"), ("dev.h5", "train.json")):
        capsys.readouterr()
        assert main(["eval", str(run), "--manifest", f"{folder / first},{folder / second}"]) == 0
        assert main(["infer", str(run), str(folder / first)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].count("dev/") == 7


def test_features_are_those_of_the_network(folder: Path, tmp_path: Path) -> None:
    """Losses bit for bit those of audio, where nothing is random but the order; and no front end in the way."""
    expected = trained(folder, tmp_path / "audio", "train.json", "dev.json", network=NOTHING_RANDOM)
    found = trained(folder, tmp_path / "mels", "train-mels.h5", "dev-mels.h5", network=NOTHING_RANDOM)
    assert found == expected
    model = AcousticModel(NetworkSettings(**NOTHING_RANDOM)).eval()
    model.features.forward = None  # type: ignore[method-assign, assignment]
    data = open_inputs([str(folder / "dev-mels.h5")], tiny.RATE, skip_bad=False, check_audio=True, say=print)
    batch = collate([data[row] for row in range(7)])
    assert batch["audio"].dtype == torch.float32
    assert model(batch["audio"], batch["lengths"]).isfinite().all()


@pytest.mark.parametrize(
    ("train", "changes", "match"),
    [
        ("train-mels.h5", {}, "holds features of another front end: `mag_power` is 2.0, not 1.0"),
        ("train-mels.h5", {"network": NOTHING_RANDOM, "gain_db": (-6, 6)}, "cannot be perturbed"),
        ("train-mels.h5,dev.json", {"network": NOTHING_RANDOM}, "holds features, and .*dev.json does not"),
    ],
)
def test_features_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, train: str, changes: Any, match: str
) -> None:
    other = {**NOTHING_RANDOM, "features": {**NOTHING_RANDOM["features"], "mag_power": 1.0}}
    with pytest.raises(PackedMisfit, match=match):
        trained(folder, tmp_path / "run", train, "dev.h5", **{"network": other, **changes})


def test_limits_and_counts_are_those_of_lines(folder: Path) -> None:
    limits = {"min_seconds": 0.45, "max_seconds": 0.6}
    for most in (None, 1, 5, 24, 100):
        lines, reading = read_manifests([folder / "train.json"], max_utterances=most, **limits)
        rows, packed = read_manifests([folder / "train.h5"], max_utterances=most, **limits)
        for amount in ("kept", "too_short", "too_long"):
            assert getattr(packed, amount).number == getattr(reading, amount).number
            assert getattr(packed, amount).hours == pytest.approx(getattr(reading, amount).hours)
        assert [rows.line(row) for row in range(len(rows))] == [lines.line(row) for row in range(len(lines))]
        assert [rows.text(row) for row in range(len(rows))] == [lines.text(row) for row in range(len(lines))]
    with pytest.raises(NothingKept):
        read_manifests([folder / "train.h5"], min_seconds=100.0)


def test_another_sample_rate_as_for_files(folder: Path) -> None:
    """16-bit files: resampled from the very samples that are packed."""
    for rate in (16000, 6000):
        files, packed = (Recordings(read_manifests([folder / name])[0], rate) for name in ("train.json", "returnn.hdf"))
        for row in range(3):
            np.testing.assert_array_equal(files.read(row), packed.read(row))


def test_noise_from_a_packed_file(folder: Path) -> None:
    files, packed = (find_clips(folder / name) for name in ("train", "train.h5"))
    assert sorted(clip.seconds for clip in packed) == sorted(clip.seconds for clip in files)
    manifest, _ = read_manifests([folder / "dev.h5"])
    nothing = tiny.settings(folder)
    heard = {}
    for name in ("train.json", "train.h5"):
        settings = nothing.model_copy(update={"noise_from": folder / name, "noise_snr_db": (0.0, 5.0)})
        data = Utterances(manifest, _Silent(), tiny.RATE, settings)  # type: ignore[arg-type]
        torch.manual_seed(0)
        heard[name] = data[0].audio
    np.testing.assert_array_equal(heard["train.h5"], heard["train.json"])
    assert not np.array_equal(heard["train.h5"], Recordings(manifest, tiny.RATE).read(0))


class _Silent:
    def __getitem__(self, row: int) -> Any:
        return np.zeros(0, np.uint8)


def test_damaged_bytes_are_found_before_training(folder: Path, tmp_path: Path) -> None:
    raw = bytearray((folder / "train.h5").read_bytes())
    middle = raw.index(Recordings(read_manifests([folder / "train.h5"])[0], tiny.RATE).read(11).tobytes())
    raw[middle + 100] ^= 1
    (tmp_path / "train.h5").write_bytes(raw)
    config = {
        "train_manifest": (tmp_path / "train.h5",),
        "val_manifest": (),
        "out": tmp_path / "run",
        "validation": False,
    }
    with pytest.raises(BadManifest, match="train.h5:12: .*the bytes are not those that were written"):
        tiny.train(tiny.settings(folder, **config))


# -- silence -----------------------------------------------------------------------------------------------------------


def test_trimmed_on_the_way_or_when_packed_is_the_same(folder: Path, tmp_path: Path) -> None:
    """`trim_silence` of the run, or of `pack`: the same losses, and others than with the silence."""
    silent = tmp_path / "train"
    silent.mkdir()
    lines = []
    for number, line in enumerate((folder / "train.json").read_text().splitlines()):
        row = json.loads(line)
        samples = soundfile.read(folder / row["audio_filepath"], dtype="int16")[0]
        samples = np.concatenate([np.zeros(3000 + 100 * number, np.int16), samples, np.zeros(4000, np.int16)])
        soundfile.write(silent / f"{number}.flac", samples, tiny.RATE)
        lines.append(
            {"audio_filepath": f"train/{number}.flac", "duration": len(samples) / tiny.RATE, "text": row["text"]}
        )
    tiny.manifest(tmp_path / "train.json", lines)
    pack(tmp_path / "train.json", tmp_path / "whole.h5")
    pack(tmp_path / "train.json", tmp_path / "trimmed.h5", "--trim-silence")
    pack(tmp_path / "trimmed.h5", tmp_path / "again.h5")
    network = folder / "network.yaml"
    mels = ("--features", "--network", network, "--trim-silence")
    pack(tmp_path / "train.json", tmp_path / "mels.h5", *mels)
    assert open_packed(tmp_path / "again.h5").about.is_trimmed

    def losses(name: str, **changes: Any) -> list[float]:
        settings = {"network": NOTHING_RANDOM, "val_manifest": (), "epochs": 1, "order": "none", "grains": 1, **changes}
        out = tmp_path / f"run-{name}-{len(list(tmp_path.iterdir()))}"
        tiny.train(tiny.settings(folder, train_manifest=(tmp_path / name,), out=out, **settings))
        return tiny.losses_of(out)

    expected = losses("train.json", trim_silence="all")
    for name in ("whole.h5", "trimmed.h5", "again.h5"):
        assert losses(name, trim_silence="train") == expected
    assert losses("mels.h5", trim_silence=True) == pytest.approx(expected, rel=1e-5)
    assert losses("train.json") != expected
    for name, wrong in (("trimmed.h5", "no"), ("mels.h5", "no")):
        with pytest.raises(PackedMisfit, match="without the silence") as refused:
            losses(name, trim_silence=wrong)
        assert "--trim-silence" in refused.value.hint
    with pytest.raises(PackedMisfit, match="can cut nothing"):
        tiny.train(
            tiny.settings(
                folder, train_manifest=(folder / "train-mels.h5",), network=NOTHING_RANDOM, trim_silence="all"
            )
        )
