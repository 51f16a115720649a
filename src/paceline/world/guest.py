"""State of the process that this library is called from, as it was before.

A link takes note when it starts and gives everything back when it is closed, so that a program that trains for a while
goes on as if it had not: threads, precision of the backends, random numbers, the current GPU. Of several links at once
(two engines, a run inside of another's validation) each may be closed first: the last one gives back what was there
before all of them.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


@dataclass(frozen=True)
class Before:
    """State of a process as the user had it."""

    threads: int
    precisions: dict[str, str]
    """`fp32_precision` of each backend."""
    switches: tuple[bool | None, str | None]
    """torch's older names for the same; None where the user's mixture of both cannot be read by them."""
    cache_tag: str
    """Name of torch's cache of compiled graphs."""
    gpu: int | None
    """The current one, where CUDA was in use already."""
    variables: dict[str, str | None]
    random_states: tuple[Any, Any, torch.Tensor, torch.Tensor | None]
    """Of Python, NumPy, torch on the CPU and torch on the current GPU."""

    @classmethod
    def now(cls, variables: tuple[str, ...] = ()) -> Before:
        """Take note of the process as it is; `variables` are those of the environment that may change."""
        has_gpu = torch.cuda.is_initialized()
        return cls(
            threads=torch.get_num_threads(),
            precisions={name: _backend(name).fp32_precision for name in _BACKENDS},
            switches=_switches(),
            cache_tag=torch.compiler.config.cache_key_tag,
            gpu=torch.cuda.current_device() if has_gpu else None,
            variables={name: os.environ.get(name) for name in variables},
            random_states=(
                random.getstate(),
                np.random.get_state(),
                torch.get_rng_state(),
                torch.cuda.get_rng_state() if has_gpu else None,
            ),
        )

    def give_back(self) -> None:
        """Make the process what it was."""
        torch.set_num_threads(self.threads)
        set_precisions(self.precisions, *self.switches)
        torch.compiler.config.cache_key_tag = self.cache_tag
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        of_python, of_numpy, of_torch, of_gpu = self.random_states
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu)


_guests: list[Guest] = []
"""Those that have not left, in the order in which they came."""


class Guest:
    """A link in somebody's process, from its start to its end."""

    def __init__(self, variables: tuple[str, ...] = ()) -> None:
        """`variables` are those of the environment that may change."""
        self._before = Before.now(variables)
        _guests.append(self)

    def leave(self) -> None:
        """Make the process what it was; where one that came later is still there, leave that to it. Once is enough."""
        if self not in _guests:
            return
        place = _guests.index(self)
        _guests.remove(self)
        if place == len(_guests):
            self._before.give_back()
        else:  # what the later one found was ours
            _guests[place]._before = self._before


def set_precisions(precisions: dict[str, str], cudnn_tf32: bool | None, matmul: str | None) -> None:
    """Set how backends compute in fp32, by torch's older names, too.

    Set by the newer names alone, the older ones, which torch itself and other libraries read, raise errors.
    """
    with _older_names():
        if cudnn_tf32 is not None:
            torch.backends.cudnn.allow_tf32 = cudnn_tf32
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
    for name, precision in precisions.items():
        _backend(name).fp32_precision = precision


def _switches() -> tuple[bool | None, str | None]:
    cudnn: bool | None = None
    matmul: str | None = None
    with _older_names():
        with suppress(RuntimeError):
            cudnn = torch.backends.cudnn.allow_tf32
        with suppress(RuntimeError):
            matmul = torch.get_float32_matmul_precision()
    return cudnn, matmul


@contextmanager
def _older_names() -> Iterator[None]:
    """Use names that some versions of torch (2.9, 2.10) warn of: the warning is for code that uses nothing else."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        yield


def _backend(name: str) -> Any:
    backend: Any = torch.backends  # its modules are made at run time, unknown to type checkers
    for part in name.split("."):
        backend = getattr(backend, part)
    return backend
