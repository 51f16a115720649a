"""Values of JSON that others may have written, against the types that are declared for them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

MAX_NUMBER = 1e300
"""Numbers in a record are smaller; larger ones, which JSON can hold, overflow where they are computed with."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER


def is_count(value: Any) -> TypeGuard[int]:
    """Return True for a whole number that a float can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _is_none(value: Any) -> bool:
    return value is None


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    Any: lambda value: True,
    None: _is_none,
    type(None): _is_none,
    float: is_number,
    int: is_count,
}


def declared(of: Any) -> Mapping[str, Any]:
    """Return the types of the fields of a class."""
    return _type_hints(of)


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value of JSON has a declared type; lists stand for sequences."""
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (Sequence, list, tuple):
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if origin in (Mapping, dict):
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    return isinstance(value, kind)


def may_be_list(kind: Any) -> bool:
    """Return True if a sequence is among the declared types."""
    return get_origin(kind) is Sequence or any(get_origin(each) is Sequence for each in get_args(kind))


_type_hints = cache(get_type_hints)
