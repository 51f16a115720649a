"""What NovoGrad, LAMB and Muon share: skipped steps, dtypes, layouts, state that survives a checkpoint, no waiting."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import InvalidData, PacelineError
from paceline.optim import state
from paceline.optim.lamb import Lamb
from paceline.optim.layerwise import OutOfRange
from paceline.optim.muon import Muon
from paceline.optim.novograd import NovoGrad
from tests.optim.reference import SHAPES, give, gradients, in_two_groups, snapshot, weights

CASES: dict[str, Any] = {
    "novograd": lambda groups: NovoGrad(groups, lr=0.1, weight_decay=0.01),
    "novograd-amsgrad": lambda groups: NovoGrad(groups, lr=0.1, amsgrad=True, grad_averaging=True),
    "novograd-luc": lambda groups: NovoGrad(groups, lr=0.1, luc=True, weight_decay=0.01),
    "lamb": lambda groups: Lamb(groups, lr=0.1, weight_decay=0.01),
    "muon": lambda groups: Muon(routed(groups), lr=0.1, weight_decay=0.01, ns_dtype="fp32"),
    "muon-bf16": lambda groups: Muon(routed(groups), lr=0.1, nesterov=False, ns_dtype="bf16", scale="original"),
    "lamb-clamped": lambda groups: Lamb(groups, lr=0.1, trust_range=(0.1, 2.0), adapt_undecayed=False),
}


def routed(groups: Any) -> list[dict[str, Any]]:
    """Groups, or tensors, with matrices to Muon and vectors to AdamW."""
    given = list(groups)
    given = given if given and isinstance(given[0], dict) else [{"params": given}]
    parts = []
    for group in given:
        for rule, is_matrix in (("muon", True), ("adamw", False)):
            parameters = [each for each in group["params"] if (each.ndim > 1) == is_matrix]
            parts += [{**group, "params": parameters, "rule": rule}] if parameters else []
    return parts


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_case = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def train(optimizer: Any, parameters: list[Tensor], steps: range) -> None:
    for step in steps:
        give(parameters, gradients(step, parameters[0].dtype))
        optimizer.step()


@every_case
@every_dtype
def test_a_skipped_step_changes_no_bit(case: str, dtype: torch.dtype) -> None:
    """Steps 0 and 3 overflow: they leave no trace, and the result is that of the clean steps alone."""
    skipping, clean = weights(dtype), weights(dtype)
    with torch.no_grad():
        skipping[0][0, 0] = clean[0][0, 0] = -0.0  # which would become +0 if anything were added to it
    first, second = CASES[case](skipping), CASES[case](clean)
    for step in range(6):
        overflows = step in (0, 3)
        first.found_inf = torch.tensor(float(overflows))
        found = gradients(step, dtype)
        if overflows:
            before = snapshot(first, skipping)
            values = (float("nan"), float("inf"), -float("inf"))
            found = [None if each is None else torch.full_like(each, values[i % 3]) for i, each in enumerate(found)]
        give(skipping, found)
        first.step()
        if overflows:
            after = snapshot(first, skipping)
            assert after[: len(before)] == before
            # State that the skipped step itself began is as if it had not been.
            assert all(not any(each) for each in after[len(before) :])
        else:
            give(clean, found)
            second.step()
    assert snapshot(first, skipping) == snapshot(second, clean)


@every_case
@every_dtype
def test_many_tensors_at_once_are_each_as_alone(case: str, dtype: torch.dtype) -> None:
    together, alone = weights(dtype), weights(dtype)
    first, each = CASES[case](together), [CASES[case]([weight]) for weight in alone]
    for step in range(5):
        give(together, gradients(step, dtype))
        give(alone, gradients(step, dtype))
        first.step()
        for optimizer in each:
            optimizer.step()
    own = [snapshot(optimizer, [weight]) for optimizer, weight in zip(each, alone, strict=True)]
    assert snapshot(first, together) == [bits[0] for bits in own] + [bit for bits in own for bit in bits[1:]]


@every_case
@every_dtype
def test_goes_on_bitwise_from_a_checkpoint(case: str, dtype: torch.dtype) -> None:
    """Also into other groups, and from tensors in another layout."""
    whole, first, second = weights(dtype), weights(dtype), weights(dtype)
    one = CASES[case](whole)
    train(one, whole, range(6))
    saving = CASES[case](first)
    train(saving, first, range(3))
    tensors, plain = state.pack(saving, {weight: str(index) for index, weight in enumerate(first)})
    assert not plain["values"]  # all of it is tensors
    with torch.no_grad():
        for new, old in zip(second, first, strict=True):
            new.copy_(old)
    resumed = CASES[case]([{"params": second[3:]}, {"params": second[:3]}])
    turned = {name: tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    state.unpack(resumed, {weight: str(index) for index, weight in enumerate(second)}, turned, plain)
    train(resumed, second, range(3, 6))
    assert snapshot(resumed, second) == snapshot(one, whole)


@every_case
def test_half_precision_is_the_fp32_update_rounded(case: str) -> None:
    """One step on fp16 weights is that on fp32 weights of the same values, rounded; state is never fp16."""
    half = weights(torch.float16)
    full = [weight.detach().float().requires_grad_() for weight in half]
    first, second = CASES[case](half), CASES[case](full)
    found = gradients(0, torch.float16)
    found[0] = torch.full(SHAPES[0], 6e4, dtype=torch.float16)  # whose square no fp16 can hold
    give(half, found)
    give(full, [None if each is None else each.float() for each in found])
    first.step()
    second.step()
    for narrow, wide in zip(half, full, strict=True):
        assert torch.equal(narrow, wide.half())
        assert {entry.dtype for entry in first.state[narrow].values()} == {torch.float32}


@every_case
def test_weights_laid_out_otherwise(case: str) -> None:
    """Channels last, and a gradient whose layout is not its weight's."""
    start, gradient = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    plain = start.clone().requires_grad_()
    turned = start.clone().to(memory_format=torch.channels_last).requires_grad_()
    mixed = start.clone().requires_grad_()
    for weight, own in [
        (plain, gradient),
        (turned, gradient.to(memory_format=torch.channels_last)),
        (mixed, gradient.to(memory_format=torch.channels_last)),
    ]:
        optimizer = CASES[case]([weight])
        for _ in range(3):
            weight.grad = own.clone()
            optimizer.step()
    assert not torch.equal(plain, start)
    assert torch.equal(plain, turned)
    assert torch.equal(plain, mixed)
    assert turned.is_contiguous(memory_format=torch.channels_last)


@every_case
def test_several_dtypes_and_groups_in_one_optimizer(case: str) -> None:
    mixed = [weight for dtype in DTYPES for weight in weights(dtype)]
    optimizer = CASES[case](in_two_groups(mixed, 0.1, 0.01))
    apart = [weights(dtype) for dtype in DTYPES]
    count = len(SHAPES)
    for step in range(3):
        give(mixed, [each for dtype in DTYPES for each in gradients(step, dtype)])
        optimizer.step()
    for index, (dtype, own) in enumerate(zip(DTYPES, apart, strict=True)):
        in_first = max(0, 3 - index * count)
        groups = in_two_groups(own, 0.1, 0.01)
        groups[0]["params"], groups[1]["params"] = own[:in_first], own[in_first:]
        single = CASES[case]([group for group in groups if group["params"]])
        for step in range(3):
            give(own, gradients(step, dtype))
            single.step()
        assert snapshot(single, own)[:count] == snapshot(optimizer, mixed[index * count : (index + 1) * count])[:count]


@every_case
def test_a_copy_goes_on_alone(case: str) -> None:
    parameters = weights(torch.float32)
    optimizer = CASES[case](parameters)
    train(optimizer, parameters, range(2))
    copied, own = copy.deepcopy((optimizer, parameters))
    train(optimizer, parameters, range(2, 4))
    assert snapshot(copied, own) != snapshot(optimizer, parameters)
    train(copied, own, range(2, 4))
    assert snapshot(copied, own) == snapshot(optimizer, parameters)


@pytest.mark.parametrize("fused", [None, False, True])
def test_a_copy_keeps_whose_kernels_it_asked_for(fused: bool | None) -> None:
    optimizer = NovoGrad(weights(torch.float32), fused=fused)
    assert copy.deepcopy(optimizer).fused is fused
    assert pickle.loads(pickle.dumps(optimizer)).fused is fused


@every_case
def test_with_torchs_own_scaler(case: str) -> None:
    """In a hand-written loop a GradScaler hands over its scale and what it found; powers of two change no bit."""
    scaled, plain = weights(torch.float32), weights(torch.float32)
    first, second = CASES[case](scaled), CASES[case](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        factors = [torch.ones(()) if each is None else each for each in gradients(step, torch.float32)]
        for optimizer, parameters in ((first, scaled), (second, plain)):
            optimizer.zero_grad()
            loss = sum((weight * factor).sum() for weight, factor in zip(parameters, factors, strict=True))
            assert isinstance(loss, Tensor)
            if optimizer is first:
                scaler.scale(loss if step != 1 else loss * float("inf")).backward()
                scaler.step(optimizer)
                scaler.update()
            elif step != 1:
                loss.backward()
                optimizer.step()
    assert snapshot(first, scaled) == snapshot(second, plain)


@every_case
def test_a_closure_is_called_with_gradients_on(case: str) -> None:
    weight = torch.full((3,), 10.0, requires_grad=True)
    optimizer = CASES[case]([weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == 300.0
    assert losses == sorted(set(losses), reverse=True)


class NoHostReads(TorchDispatchMode):
    """Fails where a tensor's value is asked for, which on a GPU would wait for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


@every_case
def test_no_value_is_asked_for(case: str) -> None:
    parameters = weights(torch.float32)
    optimizer = CASES[case](in_two_groups(parameters, 0.1, 0.01))
    with NoHostReads():
        for step in range(3):
            give(parameters, gradients(step, torch.float32))
            optimizer.found_inf = torch.full((), float(step == 1))
            optimizer.step()
    assert all(int(optimizer.state[weight]["step"]) >= 1 for weight in parameters)
    with pytest.raises(AssertionError), NoHostReads():
        bool(parameters[0].detach().sum() > 0)


@every_case
def test_sparse_gradients_are_refused(case: str) -> None:
    layer = nn.Embedding(4, 3, sparse=True)
    optimizer = CASES[case](layer.parameters())
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidData, match=r"shape \[4, 3\] is sparse") as caught:
        optimizer.step()
    assert "sparse=False" in caught.value.hint


@pytest.mark.parametrize("kind", [NovoGrad, Lamb, Muon])
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
    ],
)
def test_numbers_without_meaning_are_refused(kind: Any, setting: dict[str, Any], named: str) -> None:
    with pytest.raises(OutOfRange, match=f"{kind.__name__}: {named}") as caught:
        kind(weights(torch.float32), **setting)
    assert isinstance(caught.value, PacelineError)
    assert "must be" in caught.value.hint


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
@every_case
@every_dtype
def test_on_gpu_as_on_cpu_without_waiting(case: str, dtype: torch.dtype) -> None:
    """Steps 0 and 3 overflow on the GPU; the CPU takes the clean ones only."""
    there, here = weights(dtype, "cuda"), weights(dtype)
    first, second = CASES[case](there), CASES[case](here)
    found = [gradients(step, dtype, "cuda") for step in range(6)]
    for step in (0, 3):
        found[step] = [None if each is None else each * float("inf") for each in found[step]]
    flags = [torch.tensor(float(step in (0, 3)), device="cuda") for step in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6):
            give(there, found[step])
            first.found_inf = flags[step]
            first.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in (1, 2, 4, 5):
        give(here, gradients(step, dtype))
        second.step()
    for one, other in zip(there, here, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.cpu(), other)
