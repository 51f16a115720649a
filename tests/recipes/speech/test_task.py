"""The whole of speech recognition, trained: the same numbers at any number of ranks, and in a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from paceline.core.keys import key
from paceline.data.grain import Grain
from paceline.data.plan import BatchRule, Plan
from paceline.recipes.speech.audio.check import check
from paceline.recipes.speech.audio.file import AudioUnreadable
from paceline.recipes.speech.data.corpus import BAD_DATA
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.word_errors.file import ERRORS
from paceline.train import loop
from paceline.train.checkpoint.format import listed
from paceline.train.resume import SettingsChanged
from paceline.train.run import open_run
from paceline.train.summary import data_facts
from paceline.train.task import Surroundings
from paceline.train.validate import fixed_set
from paceline.world.link import Link
from tests.ranks import run_ranks
from tests.recipes.speech import tiny
from tests.train.small import alone

TIMEOUT_S = 300.0
NUM_UTTERANCES = 26  # batches of 8 leave 2: fewer than grains and ranks
PERTURB: dict[str, Any] = {
    "speed_range": (0.9, 1.1),
    "gain_db": (-6.0, 6.0),
    "shift_ms": (-10.0, 10.0),
    "noise_snr_db": (5.0, 20.0),
    "white_noise_db": (-70.0, -50.0),
    "noise_prob": 0.7,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    tiny.speech(folder, "train", NUM_UTTERANCES, seed=1)
    tiny.speech(folder, "dev", 7, seed=2)
    tiny.speech(folder, "other", 5, seed=3)
    (folder / "noise").mkdir()
    noise = np.random.default_rng(4).normal(0, 0.1, tiny.RATE)
    soundfile.write(folder / "noise" / "street.wav", noise, tiny.RATE)
    return folder


# -- one answer --------------------------------------------------------------------------------------------------------


def train(link: Link, data: Path, out: Path, changes: dict[str, Any]) -> dict[str, float]:
    config = tiny.settings(data, out=out / str(link.world.size), **{"val_every_epochs": 2, **changes})
    return tiny.train(config, link).validation.metrics


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), (None, 1e-5)])
def test_losses_and_error_rates_do_not_depend_on_ranks(
    tmp_path: Path, data: Path, precision: Any, bound: float
) -> None:
    """With batch norm, dropout, masks, speed, gain, shift and two kinds of noise."""
    changes = {"noise_from": data / "noise", **PERTURB, "epochs": 2, "precision": precision, "level": 0}
    found = {size: run_ranks(size, train, data, tmp_path, changes, timeout_s=TIMEOUT_S) for size in (1, 2, 4)}
    expected, (one,) = tiny.losses_of(tmp_path / "1"), found[1]
    assert len(expected) == 8
    assert 0 < one["dev/cer"] != 1  # something is written, so that there is something to compare
    assert list(one) == [f"{name}/{metric}" for name in ("dev", "other") for metric in ("wer", "cer", "loss")]
    assert one == tiny.validations_of(tmp_path / "1")[-1]
    for size in (2, 4):
        assert (tmp_path / str(size) / ERRORS).read_text() == (tmp_path / "1" / ERRORS).read_text()
        assert tiny.losses_of(tmp_path / str(size)) == pytest.approx(expected, rel=bound, abs=0)
        for ours in found[size]:
            assert ours == found[size][0]
            for name, value in ours.items():
                assert value == (pytest.approx(one[name], rel=bound, abs=0) if name.endswith("loss") else one[name])


def test_losses_do_not_depend_on_who_reads(tmp_path: Path, data: Path) -> None:
    changes = {"noise_from": data / "noise", **PERTURB, "validation": False}
    for workers in (0, 1, 2):
        tiny.train(tiny.settings(data, out=tmp_path / str(workers), workers=workers, **changes))
    expected = tiny.losses_of(tmp_path / "0")
    assert tiny.losses_of(tmp_path / "1") == expected
    assert tiny.losses_of(tmp_path / "2") == expected


def test_a_run_that_goes_on_within_an_epoch_is_the_run_that_was_not_interrupted(tmp_path: Path, data: Path) -> None:
    """Also on another number of ranks."""
    changes = {
        "noise_from": data / "noise",
        **PERTURB,
        "epochs": 2,
        "val_every_epochs": 2,
        "precision": "fp64",
        "ema": 0.5,
        "save_every_steps": 1,
        "keep_last": 99,
    }
    whole = tiny.train(tiny.settings(data, out=tmp_path / "whole", **changes))
    expected = tiny.losses_of(tmp_path / "whole")
    middle = tmp_path / "whole" / "checkpoints" / "step-00000003"
    resumed = tiny.train(tiny.settings(data, out=tmp_path / "on", **changes, resume=middle))
    assert tiny.losses_of(tmp_path / "on") == expected[3:]
    assert tiny.validations_of(tmp_path / "on") == tiny.validations_of(tmp_path / "whole")
    for name, tensor in whole.stepper.model.state_dict().items():
        assert torch.equal(tensor, resumed.stepper.model.state_dict()[name]), name
    run_ranks(2, train, data, tmp_path / "two", {**changes, "resume": middle}, timeout_s=TIMEOUT_S)
    assert tiny.losses_of(tmp_path / "two" / "2") == pytest.approx(expected[3:], rel=1e-12, abs=0)


# -- against a loop written by hand ------------------------------------------------------------------------------------


def steps_by_hand(data: Path, grains: int, batch: int, lr: float, seed: int) -> Iterator[float]:
    """One epoch in plain PyTorch, in float64; samples of a batch by their durations, as the plan has them."""
    lines = tiny.lines_of(data / "train.json")
    network = read_network(tiny.NETWORK)
    torch.manual_seed(seed)
    model = AcousticModel(network).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    durations = np.array([line["duration"] for line in lines])
    plan = Plan(len(lines), rule=BatchRule(batch), grains=grains, seed=seed, lengths=durations, order="bucket")
    for step in range(plan.num_steps):
        optimizer.zero_grad()
        total, count = 0.0, len(plan.batch(step))
        for number, samples in enumerate(plan.grains(step)):
            sounds = [soundfile.read(data / lines[sample]["audio_filepath"], dtype="int16")[0] for sample in samples]
            texts = [[tiny.LABELS.index(letter) for letter in lines[sample]["text"]] for sample in samples]
            keys = []
            for sample in samples:
                torch.manual_seed(key(seed, 0, int(sample)))
                keys.append(int(torch.randint(2**62, ())))
            audio = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(each) for each in sounds], batch_first=True)
            lengths = torch.tensor([len(each) for each in sounds])
            torch.manual_seed(key(seed, step, number))
            features, frames = model.features(audio, lengths, torch.tensor(keys))
            masked = model.spec_augment(features, frames, torch.tensor(keys))
            encoded, _ = model.encoder(masked.double(), frames)
            loss = F.ctc_loss(
                F.log_softmax(model.decoder.conv(encoded), dim=1).permute(2, 0, 1),
                torch.tensor([label for text in texts for label in text]),
                (lengths + 159) // 160,  # a hop of 80 samples and a stride of 2
                torch.tensor([len(text) for text in texts]),
                blank=len(tiny.LABELS),
                reduction="sum",
                zero_infinity=True,
            )
            (loss / count).backward()
            total += float(loss.detach())
        optimizer.step()
        yield total / count


def test_training_is_the_loop_that_one_would_write_by_hand(tmp_path: Path, data: Path) -> None:
    constant = {"optimizer": "sgd", "schedule": "constant", "warmup_ratio": None, "weight_decay": 0.0}
    tiny.train(tiny.settings(data, out=tmp_path / "run", precision="fp64", lr=0.01, seed=5, **constant))
    by_hand = list(steps_by_hand(data, grains=4, batch=8, lr=0.01, seed=5))
    assert len(by_hand) == 4
    assert tiny.losses_of(tmp_path / "run") == pytest.approx(by_hand, rel=1e-12, abs=0)


# -- one utterance among others ----------------------------------------------------------------------------------------


def test_what_is_heard_does_not_depend_on_the_batch(data: Path) -> None:
    model = tiny.train(tiny.settings(data)).stepper.model.eval()
    lines = tiny.lines_of(data / "train.json")[:6]
    sounds = [torch.from_numpy(soundfile.read(data / line["audio_filepath"], dtype="int16")[0]) for line in lines]
    audio = F.pad(torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True), (0, 4000))
    lengths = torch.tensor([len(each) for each in sounds])
    with torch.inference_mode():
        together = model(audio, lengths)
        for row, each in enumerate(sounds):
            alone = model(each[None], lengths[row : row + 1])
            frames = model.output_length(len(each))
            assert torch.allclose(together[row, :frames], alone[0, :frames], rtol=0, atol=1e-6)


def test_an_utterance_too_short_for_its_transcript_adds_nothing_but_its_count(tmp_path: Path) -> None:
    """In a network that does not look at the batch (no masks, batch norm in eval), the others' losses stay."""
    tiny.speech(tmp_path, "train", 5, seed=6)
    lines = tiny.lines_of(tmp_path / "train.json")
    tiny.manifest(tmp_path / "poisoned.json", [*lines, {**lines[0], "text": "abcabcabc" * 10}])
    sums, counts, gradients = {}, {}, {}
    for name in ("train", "poisoned"):
        config = tiny.settings(tmp_path, train_manifest=(tmp_path / f"{name}.json",))
        task = tiny.task()
        task.attach(Surroundings(config, alone(), lambda text: None))
        data = task.train_data()
        torch.manual_seed(0)
        model = task.model().eval()
        grain = Grain(task.collate([data[index] for index in range(len(data))]), 0, np.arange(len(data)))
        total, counts[name] = task.loss(model, grain)
        total.backward()
        sums[name] = total.item()
        gradients[name] = {key: each.grad for key, each in model.named_parameters()}
    assert counts == {"train": 5, "poisoned": 6}
    assert sums["poisoned"] == pytest.approx(sums["train"], rel=1e-6)
    for key_, gradient in gradients["train"].items():
        assert torch.allclose(gradients["poisoned"][key_], gradient, rtol=1e-4, atol=1e-5), key_


def summed(folder: Path, name: str, **changes: Any) -> tuple[float, int, dict[str, Any], dict[str, Any]]:
    """Loss, count, gradients and metrics of a whole manifest as one grain, batch norm in eval."""
    config = tiny.settings(folder, train_manifest=(folder / f"{name}.json",), validation=False, **changes)
    task = tiny.task()
    task.attach(Surroundings(config, alone(), lambda text: None))
    data = task.train_data()
    torch.manual_seed(0)
    model = task.model().eval()
    grain = Grain(task.collate([data[index] for index in range(len(data))]), 0, np.arange(len(data)))
    total, count = task.loss(model, grain)
    total.backward()
    metrics = task.metrics(model, grain)
    return (
        total.item(),
        count,
        {key: each.grad for key, each in model.named_parameters()},
        {name: (float(torch.as_tensor(total).detach()), weight) for name, (total, weight) in metrics.items()},
    )


@pytest.fixture
def unsound(tmp_path: Path) -> Path:
    """Training data with one file whose damage a look at its ends does not show."""
    tiny.speech(tmp_path, "train", 5, seed=6)
    lines = tiny.lines_of(tmp_path / "train.json")
    bad = tiny.damaged(tmp_path / "mid.flac")
    assert check(tmp_path / "mid.flac", bad["duration"]) is None
    tiny.manifest(tmp_path / "unsound.json", [*lines[:3], bad, *lines[3:]])
    return tmp_path


def test_damage_found_in_training_is_said_with_its_line(unsound: Path) -> None:
    for workers in (0, 1):
        with pytest.raises(AudioUnreadable, match=r"unsound.json:4: .*mid.flac: ") as caught:
            tiny.train(tiny.settings(unsound, train_manifest=(unsound / "unsound.json",), workers=workers))
        assert f"paceline manifest stats {unsound / 'unsound.json'} --check" in caught.value.hint
        assert "--bad-data skip" in caught.value.hint


def test_what_cannot_be_read_adds_nothing_but_its_count(unsound: Path) -> None:
    loss, count, gradients, metrics = summed(unsound, "train")
    skipped_loss, skipped_count, skipped_gradients, skipped_metrics = summed(unsound, "unsound", bad_data="skip")
    assert (count, skipped_count) == (5, 6)
    assert skipped_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(skipped_gradients[name], gradient, rtol=1e-4, atol=1e-5), name
    for name, sums in metrics.items():
        assert skipped_metrics[name] == pytest.approx(sums, rel=1e-6), name


def train_unsound(link: Link, folder: Path) -> list[str]:
    """What is said while it is trained; ranks beside the first say it to nobody."""
    sets = {"train_manifest": (folder / "unsound.json",), "val_manifest": (str(folder / "unsound.json"),)}
    out = folder / f"run-{link.world.size}"
    task, said = tiny.task(), list[str]()
    config = tiny.settings(folder, out=out, bad_data="skip", precision="fp64", epochs=2, **sets)
    trainer = open_run(task, config, link)
    task.attach(Surroundings(config, link, said.append))
    loop.train(trainer)
    return said


def test_a_run_goes_on_without_what_cannot_be_read_and_lists_it(unsound: Path) -> None:
    for size in (1, 2):
        for said in run_ranks(size, train_unsound, unsound, timeout_s=TIMEOUT_S):
            assert said[::3] == ["1 utterance could not be read and added nothing:"] * 2  # once an epoch
            assert f"{unsound / 'unsound.json'}:4: " in said[1]
        (listed,) = (unsound / f"run-{size}" / BAD_DATA).read_text().splitlines()
        assert listed.startswith(f"{unsound / 'unsound.json'}:4: {unsound / 'mid.flac'}: ")
    losses = tiny.losses_of(unsound / "run-1")
    assert np.isfinite(losses).all()
    assert tiny.losses_of(unsound / "run-2") == pytest.approx(losses, rel=1e-12)
    assert tiny.validations_of(unsound / "run-2") == [
        pytest.approx(found, rel=1e-12) for found in tiny.validations_of(unsound / "run-1")
    ]


def test_a_run_with_such_an_utterance_in_every_batch_stays_finite(tmp_path: Path) -> None:
    tiny.speech(tmp_path, "train", 4, seed=6)
    lines = tiny.lines_of(tmp_path / "train.json")
    impossible = [{**line, "text": "abcabcabc" * 10} for line in lines]
    tiny.manifest(tmp_path / "train.json", [*lines, *impossible])
    tiny.train(tiny.settings(tmp_path, out=tmp_path / "run", epochs=3, global_batch=4))
    losses = tiny.losses_of(tmp_path / "run")
    assert len(losses) == 6
    assert np.isfinite(losses).all()


class Lengths(list[float]):
    """Recordings of which only the lengths are asked for."""

    @property
    def lengths(self) -> NDArray[np.float64]:
        return np.array(self)


def test_hours_are_those_of_the_manifest_whatever_the_speed(data: Path) -> None:
    hours = sum(line["duration"] for line in tiny.lines_of(data / "train.json")) / 3600
    for changes in ({}, {"speed_range": (0.5, 1.5)}):
        trainer = open_run(tiny.task(), tiny.settings(data, **changes), alone())
        feed = trainer.begin_stage(0)
        facts = data_facts(feed, 0, "seconds")
        assert facts.total_length == pytest.approx(3600 * hours)
        assert float(feed.lengths.sum()) == pytest.approx(3600 * hours * (2 if changes else 1))


def test_batches_of_long_recordings_are_small_unless_told_otherwise(data: Path) -> None:
    """Twenty minutes with the padding, whatever the size of a training batch."""
    recordings = Lengths([3600.0, 500.0, 500.0, 500.0, *[10.0] * 200])
    padded = {}
    for name, value in (("global_batch", 4000), ("eval_batch", 150), ("batch_cost", 2400.0)):
        config = tiny.settings(data, **{"global_batch": 4000, name: value})
        trainer = open_run(tiny.task(), config, alone())
        plan = fixed_set(trainer.task, trainer.stepper, config, 4, "recordings", recordings).plan
        batches = [recordings.lengths[plan.batch(step)] for step in range(plan.num_steps)]
        assert sum(map(len, batches)) == 204
        padded[name] = max(len(batch) * max(batch) for batch in batches if len(batch) > 1)
    assert padded["global_batch"] <= 1200.0
    assert padded["eval_batch"] > 3600.0
    assert padded["batch_cost"] <= 600.0


# -- what a run was made with ------------------------------------------------------------------------------------------


def test_going_on_with_another_network_or_labels_is_refused(tmp_path: Path, data: Path) -> None:
    tiny.train(tiny.settings(data, out=tmp_path / "run"))
    for changes in ({"labels": [" ", "c", "b", "a"]}, {"conv_mask": False}):
        other = {**tiny.NETWORK, **changes}
        with pytest.raises(SettingsChanged, match="network"):
            tiny.train(tiny.settings(data, out=tmp_path / "run", resume="auto", epochs=2, network=other))
    assert len(listed(tmp_path / "run" / "checkpoints")) == 1


def test_labels_are_those_of_the_attached_settings(data: Path) -> None:
    task = tiny.task()
    task.attach(Surroundings(tiny.settings(data), alone(), lambda text: None))
    assert task.network.labels == tiny.LABELS
    other = tiny.settings(data, network={**tiny.NETWORK, "labels": [" ", "c", "b", "a"]})
    task.attach(Surroundings(other, alone(), lambda text: None))
    assert task.network.labels == (" ", "c", "b", "a")


def test_samples_are_shown_of_every_set(tmp_path: Path, data: Path) -> None:
    trained = tiny.train(tiny.settings(data, out=tmp_path / "run"))
    assert {name: len(samples) for name, samples in trained.validation.samples.items()} == {"dev": 2, "other": 2}
    references = {line["text"] for line in tiny.lines_of(data / "dev.json")}
    for sample in trained.validation.samples["dev"]:
        assert sample.keys() == {"reference", "hypothesis"}
        assert sample["reference"] in references
