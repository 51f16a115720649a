"""Fixtures of tests of kernels."""

from tests.recipes.speech.kernels.conftest import interpreted as interpreted
