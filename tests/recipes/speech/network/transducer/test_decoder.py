"""A transducer's networks, against the same formulas on plain tensors, and against NeMo's own modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.recipes.speech.network.config import NetworkInvalid, NetworkSettings, read_network
from paceline.recipes.speech.network.ctc_objective import Objective
from paceline.recipes.speech.network.model import AcousticModel
from paceline.recipes.speech.network.transducer.decoder import Shares, Transcripts, TransducerDecoder
from paceline.recipes.speech.network.transducer.settings import TransducerSettings, usual_sizes
from paceline.recipes.speech.text.ctc import ctc_loss_sum
from tests.recipes.speech.network.conformer import nemo_source

CHANNELS, CLASSES = 6, 5
TARGETS, FRAMES, LABELS = torch.tensor([[0, 3, 1], [2, 2, 9]]), [7, 4], [3, 2]


def made(shares: Shares | None = None, **changes: Any) -> TransducerDecoder:
    torch.manual_seed(0)
    settings = TransducerSettings(**{"pred_hidden": 4, "joint_hidden": 8, "pred_rnn_layers": 2, **changes})
    return TransducerDecoder(settings, CHANNELS, CLASSES, shares or Shares()).double()


def scores(network: TransducerDecoder, encoded: Tensor) -> Tensor:
    """Of all frames and all beginnings of the texts."""
    states = network.joint.pred(network.prediction(TARGETS))
    return network.joint.scores(network(encoded), states)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_scores_are_their_formula(activation: str) -> None:
    """An LSTM gate by gate, two linear layers, a sum."""
    network = made(joint_activation=activation).eval()
    encoded = torch.randn(2, CHANNELS, 7, dtype=torch.float64)
    found, weights = scores(network, encoded), dict(network.named_parameters())
    row, column, frame = 0, 2, 5
    x = [torch.zeros(4, dtype=torch.float64), *weights["prediction.embed.weight"][TARGETS[row, :column]]]
    for layer in range(2):
        h = c = torch.zeros(4, dtype=torch.float64)
        parts = [weights[f"prediction.dec_rnn.lstm.{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh")]
        bias = sum(weights[f"prediction.dec_rnn.lstm.{kind}_l{layer}"] for kind in ("bias_ih", "bias_hh"))
        outputs = []
        for entering in x:
            gates = (parts[0] @ entering + parts[1] @ h + bias).view(4, 4)
            c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh()
            h = gates[3].sigmoid() * c.tanh()
            outputs.append(h)
        x = outputs
    summed = network.joint.enc(encoded[row, :, frame]) + network.joint.pred(x[-1])
    expected = getattr(torch, activation)(summed) @ weights["joint.out.weight"].T + weights["joint.out.bias"]
    torch.testing.assert_close(found[row, frame, column], expected)


def test_one_label_at_a_time_is_the_whole_text() -> None:
    network = made().eval()
    whole = network.joint.pred(network.prediction(TARGETS.clamp(max=3)))
    seen, state = network.begin(2)
    torch.testing.assert_close(seen, whole[:, 0])
    for place in range(3):
        seen, state = network.go_on(TARGETS[:, place].clamp(max=3), state)
        torch.testing.assert_close(seen, whole[:, place + 1])


def test_the_blank_is_read_as_nothing_and_never_learned() -> None:
    network = made()
    assert not network.prediction.embed.weight[-1].any()
    encoded = torch.randn(2, CHANNELS, 7, dtype=torch.float64)
    network(encoded, Transcripts.of(TARGETS, FRAMES, LABELS)).backward()
    gradient = network.prediction.embed.weight.grad
    assert gradient is not None
    assert not gradient[-1].any()
    assert gradient[0].any()


def test_padding_and_other_utterances_change_no_loss() -> None:
    network = made().eval()
    encoded = torch.randn(2, CHANNELS, 7, dtype=torch.float64)
    together = network.loss_sum(network(encoded), Transcripts.of(TARGETS, FRAMES, LABELS))
    each = [
        network.loss_sum(network(encoded[row : row + 1, :, :f]), Transcripts.of(TARGETS[row : row + 1, :n], [f], [n]))
        for row, (f, n) in enumerate(zip(FRAMES, LABELS, strict=True))
    ]
    torch.testing.assert_close(together, sum(each))


def test_half_precision_is_in_the_products_alone() -> None:
    network = made(pred_dropout=0.0, joint_dropout=0.0).float()
    encoded = torch.randn(2, CHANNELS, 7)
    transcripts = Transcripts.of(TARGETS, FRAMES, LABELS)
    exact = network(encoded, transcripts)
    with torch.autocast("cpu", torch.bfloat16):
        assert network.prediction(TARGETS).dtype == torch.float32
        rounded = network(encoded, transcripts)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)
    rounded.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


def test_the_loss_of_a_hybrid_is_its_formula() -> None:
    shares = Shares(0.3, Objective(2, 1, 0.4))
    network = made(shares, ctc=True, pred_dropout=0.0, joint_dropout=0.0)
    encoded = torch.randn(4, CHANNELS, 7, dtype=torch.float64)  # the last layer, then one before
    found = network(encoded, Transcripts.of(TARGETS, FRAMES, LABELS))
    last, before = encoded[:2], encoded[2:]
    plain = network.loss_sum(network(last), Transcripts.of(TARGETS, FRAMES, LABELS))
    assert network.ctc is not None
    ctc = [ctc_loss_sum(network.ctc(each), TARGETS, FRAMES, LABELS) for each in (last, before)]
    torch.testing.assert_close(found, 0.7 * plain + 0.3 * (0.6 * ctc[0] + 0.4 * ctc[1]))


def test_the_usual_sizes_are_those_of_nemos_table() -> None:
    assert [usual_sizes(channels, ctc=False).pred_hidden for channels in (176, 256, 512)] == [320, 640, 640]
    network = read_network("fastconformer-l")
    network = network.model_copy(update={"transducer": usual_sizes(512, ctc=False), "labels": _many(1024)})
    with torch.device("meta"):
        model = AcousticModel(network)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(120e6, rel=0.01)  # its "large"


def _many(number: int) -> tuple[str, ...]:
    return tuple(f"\u2581{index}" for index in range(number))


def test_mistakes_in_its_settings_are_named() -> None:
    network = {"blocks": [{"filters": 4, "kernel": 3}], "transducer": {"pred_hiden": 8}}
    with pytest.raises(NetworkInvalid, match=r"transducer\.pred_hiden.*no such setting") as refused:
        read_network(network)
    assert "pred_hidden" in str(refused.value.hint)


def test_a_network_without_one_is_stored_as_before() -> None:
    assert "transducer" not in read_network("small").model_dump()
    network = read_network({"blocks": [{"filters": 4, "kernel": 3}], "transducer": {}})
    assert NetworkSettings.model_validate(network.model_dump()) == network


@contextlib.contextmanager
def nemo_modules(folder: Path) -> Iterator[Any]:
    """NeMo's `rnnt.py`, with nothing of NeMo around it."""
    stubs: dict[str, dict[str, Any]] = {
        "omegaconf": {},
        "nemo.utils": {},
        "nemo.core.classes": {
            "typecheck": lambda: lambda function: function,
            "adapter_mixins": SimpleNamespace(get_registered_adapter=bool),
        },
        "nemo.core.classes.exportable": {},
        "nemo.core.classes.mixins": {"AdapterModuleMixin": nemo_source._Adapted},
        "nemo.core.neural_types": {},
        "nemo.collections.asr.parts.submodules": {},
        "nemo.collections.asr.parts.submodules.stateless_net": {},
        "nemo.collections.asr.parts.utils": {},
        "nemo.collections.asr.parts.utils.adapter_utils": {},
        "nemo.collections.asr.parts.utils.rnnt_utils": {},
        "nemo.collections.asr.modules.rnnt_abstract": {"AbstractRNNTJoint": nn.Module, "AbstractRNNTDecoder": _Base},
    }
    names = ("nemo.collections.common.parts.rnn", "nemo.collections.asr.modules.rnnt")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("nemo", "omegaconf")}
    for name in before:
        del sys.modules[name]
    try:
        for name, content in stubs.items():
            nemo_source._register(name, content)
        for name in names:
            module = nemo_source._register(name, {})
            source = nemo_source.text_of(folder, name.replace(".", "/") + ".py")
            exec(compile(source, name, "exec"), module.__dict__)
        yield sys.modules[names[-1]]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("nemo", "omegaconf")]:
            del sys.modules[name]
        sys.modules.update(before)


class _Base(nn.Module):
    def __init__(self, vocab_size: int, blank_idx: int, blank_as_pad: bool) -> None:
        super().__init__()
        self.vocab_size, self.blank_idx, self.blank_as_pad = vocab_size, blank_idx, blank_as_pad


@pytest.mark.skipif(nemo_source.where() is None, reason="NeMo's source is not here: set PACELINE_NEMO to a checkout")
@pytest.mark.parametrize("dropout", [0.2, 0.0])
def test_nemo_computes_the_same(dropout: float) -> None:
    """With our weights under its names."""
    from paceline.recipes.speech.exchange.nemo import nemo_names

    folder = nemo_source.where()
    assert folder is not None
    settings = {"pred_hidden": 4, "joint_hidden": 8, "pred_rnn_layers": 2, "joint_dropout": dropout}
    network = read_network(
        {"labels": list("abcd"), "blocks": [{"filters": CHANNELS, "kernel": 3}], "transducer": settings}
    )
    torch.manual_seed(0)
    ours = AcousticModel(network).eval().decoder
    assert isinstance(ours, TransducerDecoder)
    names = nemo_names(network, is_masked=True)
    weights = {names[f"decoder.{name}"]: tensor for name, tensor in ours.state_dict().items()}
    with nemo_modules(folder) as module:
        prednet = {"pred_hidden": 4, "pred_rnn_layers": 2, "dropout": 0.1}
        decoder = module.RNNTDecoder(prednet, 4).eval()
        jointnet = {"encoder_hidden": CHANNELS, "pred_hidden": 4, "joint_hidden": 8, "activation": "relu"}
        joint = module.RNNTJoint({**jointnet, "dropout": dropout}, 4, log_softmax=True).eval()
        theirs = nn.ModuleDict({"decoder": decoder, "joint": joint})
        theirs.load_state_dict(weights)
        encoded = torch.randn(2, CHANNELS, 7)
        with torch.no_grad():
            predicted = decoder.predict(TARGETS.clamp(max=3))[0]
            expected = joint.joint_after_projection(
                joint.project_encoder(encoded.transpose(1, 2)), joint.project_prednet(predicted)
            )
            found = ours.joint.scores(ours(encoded), ours.joint.pred(ours.prediction(TARGETS.clamp(max=3))))
    torch.testing.assert_close(found.log_softmax(-1), expected, rtol=0, atol=1e-6)
