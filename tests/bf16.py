"""`@needs_bf16`: a test of `-O2` on the CPU, which is refused where the CPU has no instructions for bfloat16."""

from __future__ import annotations

import pytest
import torch

from paceline.speed.precision import capabilities

needs_bf16 = pytest.mark.skipif(
    not capabilities(torch.device("cpu")).bf16, reason="this CPU has no bf16, so -O2 is refused on it"
)
