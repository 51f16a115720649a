"""Keyed randomness for Python and numpy: keys never meet, and every form gives the numbers that runs were made with."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from paceline.core.keys import bits, bits_from, finalise, key, keys, uniform


def test_keys_differ_by_every_number_and_its_place() -> None:
    drawn = {key(seed, step, grain) for seed in range(20) for step in range(50) for grain in range(20)}
    assert len(drawn) == 20 * 50 * 20
    assert all(0 <= value < 2**63 for value in drawn)
    assert key(1, 2) != key(2, 1) != key(1, 2, 0)
    bits = [sum(value >> bit & 1 for value in drawn) / len(drawn) for bit in range(63)]
    assert all(0.47 < share < 0.53 for share in bits)  # standard error 0.0035


def test_keys_stay_what_they_were() -> None:
    assert key() == 0
    assert key(0) == 8147104208329303767
    assert key(1, 2, 3) == 3851293329796251419
    assert key(-1, 2**64 - 1) == 2930421862203734649
    assert key(20240229, 7) == 7312029541851930643


def test_many_keys_at_once_are_those_of_one_at_a_time() -> None:
    last = np.array([0, 1, 7, -1, 2**62], np.int64)
    for numbers in ((), (5,), (2**64 - 1, -3)):
        assert keys(numbers, last) == [key(*numbers, each) for each in last.tolist()]


def test_bits_of_arrays_stay_what_they_were() -> None:
    assert bits((3, 1), np.arange(3)).tolist() == [13463351480344452140, 9854047729315221779, 17495749849999284242]
    assert uniform((3, 1), np.arange(3)).tolist() == [0.7298497461962693, 0.5341889977949708, 0.9484464998316081]
    starts = np.array([5, 2**64 - 1], np.uint64)
    assert bits_from(starts, np.array([0, 9])).tolist() == [7134611160154358618, 224706085343030812]
    assert finalise(np.array([0, 1, 2**63], np.uint64)).tolist() == [0, 6238072747940578789, 2720858781877447050]


def test_numpy_and_python_have_one_finaliser() -> None:
    words = np.array([1, 2**40 + 3, 2**64 - 1], np.uint64)
    increment = np.uint64(0x9E3779B97F4A7C15)
    assert (finalise(words + increment) >> np.uint64(1)).tolist() == [key(int(word)) for word in words]


def test_core_imports_no_torch() -> None:
    script = """
import importlib, pkgutil, sys, paceline.core
for module in pkgutil.iter_modules(paceline.core.__path__, "paceline.core."):
    if "torch" not in module.name:
        importlib.import_module(module.name)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
