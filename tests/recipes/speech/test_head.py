"""The two heads: what they allow, how many frames their texts need, and that both train and validate a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import PacelineError
from paceline.data.grain import Grain
from paceline.recipes.speech.data.utterances import Utterance, collate
from paceline.recipes.speech.head import CtcHead, TransducerHead, head_of, output_frames, outputs_of
from paceline.recipes.speech.manifest.bad_line import BadLine
from paceline.recipes.speech.network.config import NetworkSettings, read_network
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.text.labels import Labels, encode_all
from paceline.recipes.speech.text.pieces import Pieces
from tests.recipes.speech import tiny

CTC: dict[str, Any] = tiny.PLAIN
TRANSDUCER: dict[str, Any] = {**CTC, "transducer": {"pred_hidden": 8, "joint_hidden": 8}}


def network_of(values: dict[str, Any]) -> NetworkSettings:
    return read_network(values)


def grain_of(bad: BadLine | None = None) -> Grain:
    dice = np.random.default_rng(0)
    samples = [
        Utterance(dice.integers(-9000, 9000, 4000).astype(np.int16), np.array([1, 2]), 1),
        Utterance(dice.integers(-9000, 9000, 3000).astype(np.int16), np.array([3]), 2, bad),
    ]
    return Grain(collate(samples), 0, np.arange(2))


def test_only_ctc_is_recorded_searched_and_read_in_windows() -> None:
    ctc, transducer = head_of(network_of(CTC)), head_of(network_of(TRANSDUCER))
    assert isinstance(ctc, CtcHead)
    assert isinstance(transducer, TransducerHead)
    assert (ctc.can_record, transducer.can_record) == (True, False)
    ctc.check_beam()
    ctc.check_windows("a.flac")
    with pytest.raises(PacelineError, match="beam"):
        transducer.check_beam()
    with pytest.raises(PacelineError, match="a.flac is read in windows"):
        transducer.check_windows("a.flac")


def test_ctc_needs_a_frame_per_label_and_a_transducer_none() -> None:
    texts, _ = encode_all(["abc", "aab"], Labels(tiny.LABELS), "none")
    assert head_of(network_of(CTC)).required_frames(texts).tolist() == [3, 4]
    assert head_of(network_of(TRANSDUCER)).required_frames(texts).tolist() == [0, 0]


@pytest.mark.parametrize("values", [CTC, TRANSDUCER])
def test_losses_of_training_and_validation_agree_without_dropout(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network, grain = network_of(values), grain_of()
    if network.transducer is not None:
        still = network.transducer.model_copy(update={"pred_dropout": 0.0, "joint_dropout": 0.0})
        network = network.model_copy(update={"transducer": still})
    head, model = head_of(network), AcousticModel(network).eval()
    loss = head.loss(model, outputs_of(model, grain), grain)
    assert loss.item() == pytest.approx(head.training_loss(model, grain).item(), rel=1e-6)
    texts = head.greedy_decoder(model, Pieces(network.labels)).texts(outputs_of(model, grain), [3, 2])
    assert len(texts) == 2


@pytest.mark.parametrize("values", [CTC, TRANSDUCER])
def test_an_utterance_that_cannot_be_read_adds_nothing_to_the_loss(values: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = network_of(values)
    head, model = head_of(network), AcousticModel(network).eval()
    sound, unread = grain_of(), grain_of(BadLine(Path("train.json"), 1, "is damaged"))
    assert output_frames(model, unread)[1] == 0
    whole = head.loss(model, outputs_of(model, sound), sound).item()
    assert 0 < head.loss(model, outputs_of(model, unread), unread).item() < whole
