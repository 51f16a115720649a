"""Fixtures of tests of layers."""

from tests.speed.kernels.conftest import interpreted as interpreted
