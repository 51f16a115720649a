"""Muon against a float64 reference written from its formulas, and against torch's own where that is defined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.config.settings import OptimSettings
from paceline.core.errors import InvalidSetting, NotFound
from paceline.optim.build import groups, optimizer
from paceline.optim.layerwise import OutOfRange
from paceline.optim.muon import Muon, NothingForMuon, hidden_matrices, orthogonalize, orthogonalize_all
from paceline.parallel.sharded.redistribute import rows_of

A, B, C = 3.4445, -4.7750, 2.0315
SHAPES = [(6, 4), (4, 9), (5, 5), (3, 2, 3, 3)]


def newton_schulz(matrix: Any, steps: int) -> Any:
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Reference:
    """One matrix, in float64."""

    def __init__(self, lr: float, momentum: float, nesterov: bool, scale: str, decay: float, steps: int) -> None:
        self.lr, self.momentum, self.nesterov, self.scale = lr, momentum, nesterov, scale
        self.decay, self.steps, self.average = decay, steps, 0.0

    def step(self, w: Any, g: Any) -> Any:
        self.average = self.momentum * self.average + (1 - self.momentum) * g
        u = (1 - self.momentum) * g + self.momentum * self.average if self.nesterov else self.average
        rows, columns = g.shape[0], math.prod(g.shape[1:])
        o = newton_schulz(u.reshape(rows, columns), self.steps).reshape(g.shape)
        factor = 0.2 * math.sqrt(max(rows, columns)) if self.scale[0] == "m" else math.sqrt(max(1, rows / columns))
        return w - self.lr * self.decay * w - self.lr * factor * o


def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match-rms-adamw", "original"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_as_the_formulas_say(nesterov: bool, scale: Any, dtype: torch.dtype, allowed: float) -> None:
    parameters = [each.requires_grad_() for each in drawn(1, dtype)]
    muon = Muon(parameters, lr=0.02, momentum=0.9, nesterov=nesterov, scale=scale, weight_decay=0.1, ns_steps=4)
    references = [Reference(0.02, 0.9, nesterov, scale, 0.1, 4) for _ in SHAPES]
    expected = [each.detach().double().numpy().copy() for each in parameters]
    for step in range(8):
        gradients = drawn(10 + step, dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        muon.step()
        for index, gradient in enumerate(gradients):
            expected[index] = references[index].step(expected[index], gradient.double().numpy())
    for own, wanted in zip(parameters, expected, strict=True):
        assert np.abs(own.detach().double().numpy() - wanted).max() < allowed


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_as_torchs_own_in_bf16(nesterov: bool, scale: str) -> None:
    """Gradients and momenta without rounding, so that both multiply the same bf16 numbers."""
    shapes = [(8, 6), (6, 16), (12, 12)]
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    ours, raw = ([each.clone().requires_grad_() for each in start] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.5, "nesterov": nesterov, "weight_decay": 0.1}
    first = Muon(ours, scale=scale.replace("_", "-"), ns_dtype="bf16", **options)  # type: ignore[arg-type]
    second = torch.optim.Muon(raw, adjust_lr_fn=scale, **options)
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        for one, other in zip(ours, raw, strict=True):
            one.grad = torch.randint(-8, 9, one.shape, generator=generator).float()
            other.grad = one.grad.clone()
        first.step()
        second.step()
    for one, other, before in zip(ours, raw, start, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(one, before, atol=0.01)


def test_adamw_for_the_rest_is_torchs() -> None:
    start = [torch.randn(shape, dtype=torch.float64) for shape in ((7,), (3, 4))]
    ours, raw = ([each.clone().requires_grad_() for each in start] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
    first, second = Muon(ours, rule="adamw", **options), torch.optim.AdamW(raw, **options)
    for step in range(6):
        for one, other in zip(ours, raw, strict=True):
            one.grad = torch.randn_like(one) * 0.1**step
            other.grad = one.grad.clone()
        first.step()
        second.step()
    for one, other in zip(ours, raw, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(8, 8), (3, 20), (20, 3)])
def test_orthogonal_up_to_the_published_slack(shape: tuple[int, int]) -> None:
    """Singular values come near 1 from below 0.1, and the singular vectors stay."""
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(0.05, 1.0, min(shape), dtype=torch.float64)
    result = orthogonalize(u @ torch.diag(values) @ v)
    inside = u.mT @ result @ v.mT
    assert float((inside - torch.diag(inside.diagonal())).abs().max()) < 1e-10
    assert float(inside.diagonal().min()) > 0.6
    assert float(inside.diagonal().max()) < 1.3


def test_matrices_of_one_shape_together() -> None:
    """As on a GPU."""
    matrices = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    together = orthogonalize(torch.stack(matrices))
    for one, other in zip(orthogonalize_all(matrices, 5, (A, B, C)), together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_gradient_of_0_moves_nothing() -> None:
    weight = torch.randn(4, 3).requires_grad_()
    before = weight.detach().clone()
    weight.grad = torch.zeros(4, 3)
    Muon([weight], lr=0.1).step()
    assert torch.equal(weight, before)


# -- which parameters --------------------------------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self, has_head: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.zeros(9, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        if has_head:
            self.lm_head = nn.Linear(16, 50, bias=False)
            self.lm_head.weight = self.embedding.weight


HIDDEN = [
    f"encoder.layers.0.{name}"
    for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
]


@pytest.mark.parametrize("has_head", [True, False])
def test_hidden_matrices_of_a_transformer(has_head: bool) -> None:
    """Not the tables, tied or not, nor the last hidden layer for want of a head; norms and biases are vectors."""
    model = Translator(has_head)
    assert hidden_matrices(model) == HIDDEN


def test_the_last_layer_is_a_head() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    assert hidden_matrices(model) == ["0.weight", "2.weight"]
    named = nn.ModuleDict({"head": nn.Linear(8, 8), "body": nn.Linear(8, 3)})
    assert hidden_matrices(named) == ["body.weight"]


def test_convolutions_by_option() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "hidden": nn.Linear(8, 8), "head": nn.Linear(8, 4)})
    assert hidden_matrices(model) == ["hidden.weight"]
    assert hidden_matrices(model, convolutions=True) == ["conv.weight", "hidden.weight"]


def settings(**values: Any) -> OptimSettings:
    return OptimSettings(optimizer="muon", lr=0.01, **values)


def names(model: nn.Module, made: list[dict[str, Any]], rule: str) -> set[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {by_id[id(each)] for group in made if group["rule"] == rule for each in group["params"]}


def test_routed_in_every_group() -> None:
    model = Translator(has_head=True)
    rules = [{"match": "encoder.*.linear*", "lr_scale": 0.5, "weight_decay": 0.0}]
    made = groups(model, settings(groups=rules, adamw_lr=0.001, weight_decay=0.1))
    assert names(model, made, "muon") == {*HIDDEN}
    assert [(group["rule"], group["weight_decay"]) for group in made] == [
        ("muon", 0.0),
        ("adamw", 0.0),
        ("muon", 0.1),
        ("adamw", 0.1),
    ]
    assert [group["lr"] for group in made] == pytest.approx([0.005, 0.0005, 0.01, 0.001])
    assert [group["lr_scale"] for group in made] == pytest.approx([0.5, 0.05, 1.0, 0.1])
    muon = optimizer(settings(muon_momentum=0.8, muon_steps=3, betas=(0.7, 0.9)), made, torch.device("cpu"))
    assert isinstance(muon, Muon)
    assert (muon.defaults["momentum"], muon.defaults["ns_steps"], muon.defaults["betas"]) == (0.8, 3, (0.7, 0.9))
    assert "4 matrices" in muon.way


def test_patterns_go_before_the_rule() -> None:
    model = Translator(has_head=False)
    made = groups(model, settings(muon_match=("*.linear*", "embedding.*")))
    assert names(model, made, "muon") == {"embedding.weight", *HIDDEN[2:]}
    with pytest.raises(NotFound, match="muon_match: 'decoder"):
        groups(model, settings(muon_match=("decoder.*",)))


def test_nothing_for_muon() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(NothingForMuon) as caught:
        groups(model, settings())
    assert "--muon-convolutions" in caught.value.hint
    assert names(model, groups(model, settings(muon_convolutions=True)), "muon") == {"0.weight"}
    with pytest.raises(NothingForMuon) as caught:
        groups(nn.Linear(3, 2), settings())
    assert "--muon-match" in caught.value.hint


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"scale": "none"}, "scale"),
        ({"rule": "x"}, "rule"),
    ],
)
def test_numbers_without_meaning_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(OutOfRange, match=named):
        Muon([torch.zeros(2, 2, requires_grad=True)], **values)


def test_a_vector_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"\[3\]"):
        Muon([torch.zeros(3, requires_grad=True)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rows_of_pieces_are_torchs_chunks(size: int) -> None:
    for rows in range(1, 15):
        chunks = [len(each) for each in torch.zeros(rows).chunk(size)]
        assert [rows_of(rows, size, rank) for rank in range(size)] == chunks + [0] * (size - len(chunks))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "allowed"), [("fp32", 2e-4), ("bf16", 0.05)])
def test_on_a_gpu_against_float64(dtype: Any, allowed: float) -> None:
    """Matrices of one shape together; a step that is skipped changes no bit."""
    shapes = [(64, 48), (64, 48), (48, 96), (33,)]
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for shape in shapes]
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", torch.float32)):
        weights = [each.to(device, kind, copy=True).requires_grad_() for each in start]
        parts = [{"params": weights[:3]}, {"params": weights[3:], "rule": "adamw"}]
        muon = Muon(parts, lr=0.02, weight_decay=0.1, ns_dtype=dtype if device == "cuda" else "auto")
        dice = torch.Generator().manual_seed(4)
        for step in range(5):
            is_skipped = step in (0, 3)
            for weight in weights:
                drawn = torch.randn(weight.shape, generator=dice, dtype=torch.float64).to(device, kind)
                weight.grad = torch.full_like(drawn, math.nan) if is_skipped else drawn
            muon.found_inf = torch.tensor(float(is_skipped), device=device)  # type: ignore[attr-defined]
            before = [weight.detach().clone() for weight in weights]
            muon.step()
            if is_skipped:
                assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))
        results.append([weight.detach().cpu().double() for weight in weights])
    for one, other, first in zip(*results, start, strict=True):
        assert float((one - other).norm() / (one - first).norm()) < allowed
