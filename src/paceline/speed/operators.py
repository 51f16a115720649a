"""Operators that PyTorch knows: for its dispatcher, autograd, autocast and compiler one call, whatever is in it.

As `torch.library.custom_op`, of the public names beneath it, with two differences. The first call does not load torch's
compiler, which takes seconds. And results are not searched for aliases of the inputs at every call: an operator must
not return any of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.core.torch_private import not_compiled

NAMESPACE = "paceline"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class Operator:
    """An operator of that name, computed by a function on every device; inputs are never changed."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = f"{NAMESPACE}::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, not_compiled(function), "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        """What torch knows it as."""
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Give the shapes and dtypes of the results, for the compiler."""
        torch.library.register_fake(self.name, function, lib=_LIBRARY)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Give the backward pass, and what is kept for it."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context, lib=_LIBRARY)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of a function whose annotations say what goes in and comes out."""
    return lambda function: Operator(name, function)
