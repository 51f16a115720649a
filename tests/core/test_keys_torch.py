"""Keyed randomness on tensors."""

from __future__ import annotations

import torch

from paceline.core.keys import key
from paceline.core.keys_torch import below, keyed, normal


def test_keyed_numbers_are_those_of_the_house() -> None:
    numbers = [0, 1, 2**62, 2**63 - 1, -1, -(2**63), 123456789]
    first = keyed(torch.tensor(numbers)[:, None], 3, torch.tensor([0, 5, -2, 2**40]))
    assert first.tolist() == [[key(one, 3, other) for other in (0, 5, -2, 2**40)] for one in numbers]
    assert below(first, 10).tolist() == [[(value >> 31) * 10 >> 32 for value in row] for row in first.tolist()]
    many = below(keyed(torch.arange(70000), 0), 7)
    assert ((torch.bincount(many, minlength=7) - 10000) ** 2 / 10000).sum() < 22.46  # chi-square, 6 degrees: p = 0.001


def test_normal_numbers_are_normal() -> None:
    drawn = normal(torch.arange(100), 1, 4001).double()
    assert drawn.shape == (100, 4001)
    assert torch.equal(normal(torch.arange(5, 9), 1, 10).double(), drawn[5:9, :10])
    values = drawn.flatten()
    error = len(values) ** -0.5
    assert abs(values.mean()) < 4 * error
    assert abs(values.square().mean() - 1) < 4 * error * 2**0.5
    assert abs((values**4).mean() - 3) < 4 * error * 96**0.5
    assert abs((drawn[:, 1:] * drawn[:, :-1]).mean()) < 4 * error
    assert abs((drawn[1:] * drawn[:-1]).mean()) < 4 * error
    quantiles = torch.quantile(values[:100000], torch.tensor([0.001, 0.1587, 0.5, 0.8413, 0.999], dtype=torch.float64))
    torch.testing.assert_close(quantiles, torch.tensor([-3.09, -1, 0, 1, 3.09], dtype=torch.float64), rtol=0, atol=0.1)


# -- mistakes ----------------------------------------------------------------------------------------------------


def test_numbers_stay_what_they_were() -> None:
    keys = torch.tensor([0, 1, -1, 2**62])
    hashes = [8147104208329303767, 5225608189600411232, 8245168133484221968, 23969857188386037]
    assert keyed(keys).tolist() == hashes
    mixed = [2280503537364795165, 3021174256106475679, 1978792242225894234, 5973923672685651009]
    assert keyed(keys, 3, torch.arange(4)).tolist() == mixed
    assert below(keyed(keys), 1000).tolist() == [883, 566, 893, 2]
    hexadecimal = [
        "-0x1.079c8ap-2",
        "0x1.4622ecp-2",
        "-0x1.1675e0p-3",
        "0x1.b7c626p-1",
        "-0x1.72a3d6p-2",
        "0x1.aca8b4p-1",
    ]
    drawn = normal(torch.tensor([5, 6]), 2, 3).flatten()
    torch.testing.assert_close(drawn, torch.tensor([float.fromhex(text) for text in hexadecimal]), rtol=1e-6, atol=0)
