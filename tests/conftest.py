"""For all tests: one thread per process, and the pool of ranks ends with the session."""

from __future__ import annotations

import os
import secrets

# Before torch is imported: several ranks share two cores, and one thread keeps sums in one order.
os.environ["OMP_NUM_THREADS"] = "1"
# torch looks up the names of its peers; a machine without a working name server would wait 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Ranks that tests start by hand share it; without it they would make a file in the configuration of who runs the tests.
os.environ.setdefault("PACELINE_SECRET", secrets.token_hex(32))

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels run on the CPU, too

from tests.ranks import close_pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="all cases of tests that run a sample otherwise: hours")


def pytest_configure(config: pytest.Config) -> None:
    import hypothesis

    # No deadline, which is 0.2 s by default: no test asserts a time, and a machine may be busy with others.
    times = 10 if config.getoption("--long") else 1
    examples = times * hypothesis.settings.default.max_examples
    hypothesis.settings.register_profile("paceline", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("paceline")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases that are marked `long`, unless `--long` asks for them."""
    if config.getoption("--long"):
        return
    further = [item for item in items if item.get_closest_marker("long") is not None]
    if further:
        config.hook.pytest_deselected(items=further)
        items[:] = [item for item in items if item not in further]


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pool()
