"""Fixtures of tests of layers."""

from tests.recipes.speech.kernels.conftest import interpreted as interpreted
