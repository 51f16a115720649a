"""For all tests: one thread per process, and the pool of ranks ends with the session."""

from __future__ import annotations

import os

# Before torch is imported: several ranks share two cores, and one thread keeps sums in one order.
os.environ["OMP_NUM_THREADS"] = "1"
# torch looks up the names of its peers; a machine without a working name server would wait 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest

from tests.ranks import close_pool


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pool()
