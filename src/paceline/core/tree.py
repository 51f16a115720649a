"""Nested data (mappings, dataclasses, tuples, lists) with its leaves changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

Leaf = TypeVar("Leaf")


def map_leaves(change: Callable[[Leaf], Any], data: Any, kind: type[Leaf]) -> Any:
    """Return the same structure with `change` applied to every leaf of a kind; other leaves stay as they are."""
    if isinstance(data, kind):
        return change(data)
    if isinstance(data, Mapping):
        return {name: map_leaves(change, value, kind) for name, value in data.items()}
    if isinstance(data, tuple):
        values = [map_leaves(change, value, kind) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    if isinstance(data, list):
        return [map_leaves(change, value, kind) for value in data]
    if is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in fields(data) if field.init]
        return replace(data, **{name: map_leaves(change, getattr(data, name), kind) for name in names})
    return data
