"""Loss scaling against the rules written out in plain Python and numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.core.errors import Conflict, InvalidSetting
from paceline.speed.loss_scale import (
    HEADROOM,
    BackoffScale,
    LogMaxScale,
    LossScale,
    NoScale,
    StaticScale,
    build,
    search,
)
from paceline.speed.precision import Capabilities, resolve

CPU = torch.device("cpu")
MACHINE = Capabilities("cpu", "a CPU", bf16=True, tf32=False, fp16=True, compiler=True)


def found(value: bool) -> torch.Tensor:
    return torch.tensor(float(value))


def backoff_rule(overflows: list[bool], low: float, high: float, window: int) -> Iterator[float]:
    """OpenSeq2Seq's Backoff: the scale after each step."""
    scale, clean = high, 0
    for overflow in overflows:
        if overflow:
            scale, clean = max(scale / 2, low), 0
        else:
            clean += 1
            if clean % window == 0:
                scale = min(scale * 2, high)
        yield scale


@pytest.mark.parametrize(("low", "high", "window"), [(1.0, 2.0**14, 5), (8.0, 64.0, 3), (1.0, 2.0**24, 1)])
def test_backoff_follows_the_rule_and_survives_saving(low: float, high: float, window: int) -> None:
    draw = random.Random(0)
    overflows = [draw.random() < 0.3 for _ in range(40)] + [True] * 30 + [False] * 60
    scaler = BackoffScale(CPU, low, high, window_steps=window)
    assert scaler.current() == high
    for step, expected in enumerate(backoff_rule(overflows, low, high, window)):
        scaler.update(found(overflows[step]))
        assert scaler.current() == expected
        if step % 7 == 0:
            state = scaler.state_dict()
            scaler = BackoffScale(CPU, low, high, window_steps=window)
            scaler.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0, float("inf"), float("-inf"), float("nan"), 1e30])
def test_the_check_of_large_gradients_finds_what_is_not_finite(value: float, dtype: torch.dtype) -> None:
    """1e30 is finite, and its square is not in fp32."""
    large = torch.ones(300, 200, dtype=dtype, device=CPU)
    for gradient in (large, large.t(), large[0]):
        gradient.fill_(1.0)
        gradient[-1] = value
        flag = torch.zeros(1, dtype=torch.float32, device=CPU)
        NoScale(CPU).unscale_and_check([torch.ones(3, dtype=dtype, device=CPU), gradient], flag)
        assert bool(flag) == (value not in (1.0, 1e30))


def test_saved_state_does_not_follow_the_run() -> None:
    scaler = BackoffScale(CPU)
    state = scaler.state_dict()
    scaler.update(found(True))
    assert state["scale"] == 2**14
    assert scaler.current() == 2**13


def logmax_rule(largest: list[float], log_max: float, low: float, high: float) -> Iterator[float]:
    """OpenSeq2Seq's LogMax with its two defects mended, in float64: the scale after each step."""
    fast = slow = square = 0.0
    beta1, beta2, steps = 0.99, 0.999, 0
    scale = low
    for value in largest:
        if value != 0.0:
            x = np.log2(value) if np.isfinite(value) else log_max
            steps += 1
            fast = beta1 * fast + (1 - beta1) * x
            slow = beta2 * slow + (1 - beta2) * x
            square = beta2 * square + (1 - beta2) * x * x
            mu = fast / (1 - beta1**steps)
            slow_mu = slow / (1 - beta2**steps)
            sigma = np.sqrt(max(square / (1 - beta2**steps) - slow_mu**2, 0.0))
            scale = float(np.clip(2.0 ** (log_max - (mu + 3.09 * sigma)), low, high))
        yield scale


@pytest.mark.parametrize("log_max", [16.0, 12.0])
def test_logmax_follows_the_rule_and_survives_saving(log_max: float) -> None:
    rng = np.random.default_rng(0)
    largest = [float(np.float32(value)) for value in np.exp2(rng.normal(-1.0, 1.5, 200))]
    largest[0] = 0.0  # gradients that say nothing, also as the very first
    largest[17], largest[60], largest[61], largest[90] = float("inf"), float("nan"), float("inf"), 0.0
    scaler = LogMaxScale(CPU, scale_max=2.0**24, log_max=log_max)
    seen = []
    for step, expected in enumerate(logmax_rule(largest, log_max, 1.0, 2.0**24)):
        scale = scaler.current()
        gradient = torch.tensor([0.0, -largest[step], largest[step] / 3]) * scale
        flag = found(False)
        scaler.unscale_and_check([gradient, torch.zeros(2).half()], flag)
        assert bool(flag) == (not np.isfinite(largest[step]))
        scaler.update(flag)
        seen.append(scaler.current())
        # The gradient of float32 times a float32 scale is rounded twice: 1e-7 in max|g|, relatively.
        assert seen[-1] == pytest.approx(expected, rel=1e-5)
        if step % 50 == 49:
            state = scaler.state_dict()
            scaler = LogMaxScale(CPU, scale_max=2.0**24, log_max=log_max)
            scaler.load_state_dict(state)
    assert len(set(seen)) > 100
    assert min(seen[1:]) > 1.0
    assert max(seen) < 2.0**24


def test_logmax_statistics_are_exact_in_float64() -> None:
    powers = [2.0**exponent for exponent in (-3, 1, 4, -2, 0, 7)]  # powers of two stay exact through any scale
    scaler = LogMaxScale(CPU, scale_max=2.0**24)
    for value, expected in zip(powers, logmax_rule(powers, 16.0, 1.0, 2.0**24), strict=True):
        scaler._scale.fill_(4.0)
        scaler.unscale_and_check([torch.tensor([value * 4.0])], found(False))
        scaler.update(found(False))
        assert scaler.current() == np.float32(expected)


SCALERS = {
    "none": lambda device: NoScale(device),
    "static": lambda device: StaticScale(48.0, device),
    "backoff": lambda device: BackoffScale(device),
    "logmax": lambda device: LogMaxScale(device, scale_min=1024.0),
}


@pytest.mark.parametrize("kind", SCALERS)
def test_gradients_come_back_unscaled(kind: str) -> None:
    scaler: LossScale = SCALERS[kind](CPU)
    weight = torch.randn(100, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((weight**3).sum(), weight)[0]
    loss = (weight**3).sum()
    loss.backward(scaler.seed(loss, 1))
    flag = found(False)
    scaler.unscale_and_check([weight.grad], flag)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-6, atol=0)
    assert not flag


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_in_any_dtype_is_found(kind: str, dtype: torch.dtype, bad: float) -> None:
    scaler: LossScale = SCALERS[kind](CPU)
    gradients = [torch.ones(5), torch.ones(7, dtype=dtype), torch.ones(3).half()]
    gradients[1][4] = bad
    flag = found(False)
    scaler.unscale_and_check(gradients, flag)
    assert flag == 1.0
    scaler.unscale_and_check([torch.ones(3)], flag)
    assert flag == 1.0, "a clean call must not take the finding back"
    clean = found(False)
    scaler.unscale_and_check([], clean)
    assert clean == 0.0


def test_no_scale_changes_no_bit() -> None:
    scaler = NoScale(CPU)
    bits = torch.randint(-(2**31), 2**31 - 1, (10_000,), dtype=torch.int64).to(torch.int32)
    gradient = bits.view(torch.float32)
    gradient = torch.cat([gradient[gradient.isfinite()], torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38])])
    before = gradient.clone().view(torch.int32)
    scaler.unscale_and_check([gradient], found(False))
    assert torch.equal(gradient.view(torch.int32), before)
    loss = torch.tensor(1.25, requires_grad=True)
    assert scaler.seed(loss, 8) == 0.125


def test_build_takes_the_setting_only_where_the_precision_is_scaled() -> None:
    fp16 = resolve("auto", "fp16", MACHINE)
    assert isinstance(build("backoff", fp16, CPU), BackoffScale)
    assert isinstance(build("logmax", fp16, CPU), LogMaxScale)
    assert build(128.0, fp16, CPU).current() == 128.0
    assert isinstance(build("backoff", resolve(2, None, MACHINE), CPU), NoScale)


def test_state_of_another_kind_is_refused() -> None:
    with pytest.raises(Conflict, match="clean_steps"):
        LogMaxScale(CPU).load_state_dict(BackoffScale(CPU).state_dict())
    with pytest.raises(InvalidSetting, match="no loss scale between"):
        BackoffScale(CPU, scale_max=2.0**25)
    with pytest.raises(InvalidSetting, match="no loss scale between"):
        LogMaxScale(CPU, scale_min=4.0, scale_max=2.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_a_step_never_waits_for_the_gpu_and_equals_the_cpu(kind: str) -> None:
    device = torch.device("cuda")
    draw = torch.Generator().manual_seed(0)
    steps = [[torch.randn(1000, generator=draw), torch.randn(10, generator=draw).half()] for _ in range(20)]
    steps[7][0][3] = float("inf")
    here = [[gradient.to(device) for gradient in gradients] for gradients in steps]
    scalers: list[LossScale] = [SCALERS[kind](torch.device("cpu")), SCALERS[kind](device)]
    flags = [torch.zeros((), device=place) for place in ("cpu", "cuda")]
    loss = torch.ones((), device=device)
    for scaler, flag, data, mode in zip(scalers, flags, (steps, here), ("default", "error"), strict=True):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for gradients in data:
                flag.zero_()
                scaler.unscale_and_check(gradients, flag)
                scaler.update(flag)
            if mode == "error":
                scaler.seed(loss, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scalers[1].current() == pytest.approx(scalers[0].current(), rel=1e-6)
    for expected, actual in zip(steps, here, strict=True):
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other.cpu(), one, equal_nan=True)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0**14), (8.0, 64.0), (1.0, 2.0**24), (1.0, 1.0), (3.0, 48.0)])
def test_the_first_scale_is_below_the_first_overflow(low: float, high: float) -> None:
    """Against a plain walk down by halves, for every place that the first overflow may be at."""
    halves = [high / 2.0**number for number in range(40) if high / 2.0**number >= low]
    for limit in [*halves, 2 * high, low / 2]:
        tried: list[float] = []

        def overflows(scale: float, limit: float = limit, tried: list[float] = tried) -> bool:
            tried.append(scale)
            return scale > limit

        clean = next((scale for scale in halves if scale <= limit), low)
        assert search(low, high, overflows) == (high if limit >= high else max(low, clean / HEADROOM))
        assert len(tried) <= 2 + np.ceil(np.log2(len(halves)))
        assert set(tried) <= set(halves)


def test_only_a_new_backoff_scale_is_searched_for() -> None:
    for kind, make in SCALERS.items():
        assert make(CPU).is_found == (kind != "backoff")
    scaler, tried = BackoffScale(CPU), []

    def overflows() -> bool:
        tried.append(scaler.current())
        return tried[-1] > 512

    scaler.find(overflows)
    assert (scaler.is_found, scaler.current(), tried[0]) == (True, 128.0, 2.0**14)
    resumed = BackoffScale(CPU)
    resumed.load_state_dict(scaler.state_dict())
    assert (resumed.is_found, resumed.current()) == (True, 128.0)
    assert scaler.state_dict().keys() == {"scale", "clean_steps"}  # as ever: older runs have no other
