"""Python values on the wire between ranks: JSON and raw arrays. Reading them runs no code, unlike pickle.

Numbers, text, bytes, paths, containers, dtypes, arrays and tensors (which arrive on the CPU) travel, and dataclasses,
named tuples, enumerations and our errors of classes that the receiver has imported already: their fields are put back,
no constructor is called.
"""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.core.errors import PacelineError

K = TypeVar("K", bound=type)
_LENGTH = struct.Struct("!Q")
# Classes of ours that are no dataclasses, and may travel all the same.
_sendable: set[type] = set()


class NotSendable(PacelineError):
    """A Python value that ranks cannot tell each other."""

    kind: str
    sentence = "a value of type {kind} cannot be sent to other ranks"
    hint = (
        "send what it is made of: numbers, text, bytes, paths, lists, tuples, dictionaries, sets, tensors, arrays, "
        "dataclasses and named tuples of modules that all ranks have imported"
    )


class NotAValue(PacelineError):
    """Bytes from another rank that are no value."""

    why: str
    sentence = "another rank sent what is no value: {why}"
    hint = "give all ranks the same versions of paceline and of the task file"


def sendable(kind: K) -> K:
    """Let instances of a class travel, as their attributes in `__slots__` or `__dict__`."""
    _sendable.add(kind)
    return kind


def encode(value: Any) -> bytes:
    """Return a value as bytes."""
    blobs: list[bytes] = []
    tree = json.dumps(_tree(value, blobs)).encode()
    return b"".join(_LENGTH.pack(len(part)) + part for part in (tree, *blobs))


def decode(data: bytes) -> Any:
    """Return the value that `encode` wrote; nothing of it is executed."""
    parts, at = [], 0
    try:
        while at < len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if length > len(data) - at:
                raise NotAValue("it is cut short")
            parts.append(data[at : at + length])
            at += length
        return _value(json.loads(parts[0]), parts[1:])
    except (struct.error, ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotAValue(f"{type(error).__name__}: {error}") from None


def _tree(value: Any, blobs: list[bytes]) -> Any:
    """Return a value in JSON's terms: a list whose first entry says what it is, or a plain number or text."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    for is_kind, write in _WRITERS:
        if is_kind(value):
            return write(value, blobs)
    raise NotSendable(f"{kind.__module__}.{kind.__qualname__}")


def _trees(values: Iterable[Any], blobs: list[bytes]) -> list[Any]:
    return [_tree(each, blobs) for each in values]


def _blob(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(blobs) - 1


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


# The first that fits writes a value.
_WRITERS: Sequence[tuple[Callable[[Any], bool], Callable[[Any, list[bytes]], Any]]] = (
    (_is(Enum), lambda value, blobs: ["enum", _name(type(value)), value.name]),
    (_is(torch.Size), lambda value, blobs: ["size", *value]),
    (
        lambda value: isinstance(value, tuple) and hasattr(value, "_fields"),
        lambda value, blobs: ["named", _name(type(value)), *_trees(value, blobs)],
    ),
    (_is(tuple), lambda value, blobs: ["tuple", *_trees(value, blobs)]),
    (_is(list), lambda value, blobs: ["list", *_trees(value, blobs)]),
    (_is(set), lambda value, blobs: ["set", *_trees(value, blobs)]),
    (_is(frozenset), lambda value, blobs: ["frozenset", *_trees(value, blobs)]),
    (_is(bytes, bytearray), lambda value, blobs: ["bytes", _blob(bytes(value), blobs)]),
    (
        _is(torch.Tensor),
        lambda value, blobs: ["tensor", _blob(_tensor_bytes(value), blobs), _dtype_name(value.dtype), [*value.shape]],
    ),
    (_is(np.ndarray), lambda value, blobs: ["array", _blob(_array_bytes(value), blobs)]),
    (_is(np.generic), lambda value, blobs: ["scalar", _blob(_array_bytes(value), blobs)]),
    (_is(torch.dtype), lambda value, blobs: ["dtype", _dtype_name(value)]),
    (_is(PurePath), lambda value, blobs: ["path", str(value)]),
    (
        _is(PacelineError),
        lambda value, blobs: ["error", _name(type(value)), _trees(value.args, blobs), _tree(value.__dict__, blobs)],
    ),
    (
        lambda value: _is_record(type(value)),
        lambda value, blobs: ["record", _name(type(value)), *_pairs(_attributes(value), blobs)],
    ),
    (_is(Mapping), lambda value, blobs: ["dict", *_pairs(value, blobs)]),
    # Of a class of somebody's own: what it is worth is enough.
    (_is(str), lambda value, blobs: str(value)),
    (_is(int), lambda value, blobs: int(value)),
    (_is(float), lambda value, blobs: float(value)),
)


def _pairs(values: Mapping[Any, Any], blobs: list[bytes]) -> list[Any]:
    return [[_tree(key, blobs), _tree(each, blobs)] for key, each in values.items()]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _value(tree: Any, blobs: Sequence[bytes]) -> Any:
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise NotAValue("a bare mapping")
        return tree
    what, *rest = tree
    return _READERS[what](rest, blobs)


def _values(trees: Sequence[Any], blobs: Sequence[bytes]) -> list[Any]:
    return [_value(each, blobs) for each in trees]


def _tensor(rest: list[Any], blobs: Sequence[bytes]) -> torch.Tensor:
    index, dtype, shape = rest
    kind = _dtype(dtype)
    data = blobs[index]
    if not data:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise NotAValue(f"no dtype {name!r}")
    return found


def _record(rest: list[Any], blobs: Sequence[bytes]) -> Any:
    kind = _class(rest[0], _is_record)
    made: Any = object.__new__(kind)
    for name, tree in rest[1:]:
        if name.startswith("__"):
            raise NotAValue(f"an attribute {name!r}")
        object.__setattr__(made, name, _value(tree, blobs))
    return made


def _error(rest: list[Any], blobs: Sequence[bytes]) -> PacelineError:
    kind = _class(rest[0], lambda kind: issubclass(kind, PacelineError))
    made: PacelineError = PacelineError.__new__(kind)
    made.args = tuple(_values(rest[1], blobs))
    made.__dict__.update(_value(rest[2], blobs))
    return made


def _named(rest: list[Any], blobs: Sequence[bytes]) -> Any:
    kind = _class(rest[0], lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return tuple.__new__(kind, _values(rest[1:], blobs))


def _enum(rest: list[Any], blobs: Sequence[bytes]) -> Any:
    kind: Any = _class(rest[0], lambda kind: issubclass(kind, Enum))
    return kind[rest[1]]


_READERS: Mapping[str, Callable[[list[Any], Sequence[bytes]], Any]] = {
    "list": _values,
    "tuple": lambda rest, blobs: tuple(_values(rest, blobs)),
    "set": lambda rest, blobs: set(_values(rest, blobs)),
    "frozenset": lambda rest, blobs: frozenset(_values(rest, blobs)),
    "size": lambda rest, blobs: torch.Size(_values(rest, blobs)),
    "dict": lambda rest, blobs: {_value(key, blobs): _value(each, blobs) for key, each in rest},
    "bytes": lambda rest, blobs: blobs[rest[0]],
    "array": lambda rest, blobs: np.load(io.BytesIO(blobs[rest[0]]), allow_pickle=False),
    "scalar": lambda rest, blobs: np.load(io.BytesIO(blobs[rest[0]]), allow_pickle=False)[()],
    "dtype": lambda rest, blobs: _dtype(rest[0]),
    "path": lambda rest, blobs: Path(rest[0]),
    "tensor": _tensor,
    "record": _record,
    "error": _error,
    "named": _named,
    "enum": _enum,
}


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout != torch.strided:
        raise NotSendable(f"torch.Tensor ({tensor.layout})")
    # A single element may have any stride, which `view` does not like.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data


def _array_bytes(array: Any) -> bytes:
    if array.dtype.hasobject:
        raise NotSendable("numpy.ndarray of Python objects")
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or kind in _sendable


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    found = {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__")}
    return found | (value.__dict__ if hasattr(value, "__dict__") else {})


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str, is_allowed: Callable[[type], bool]) -> Any:
    """Return a class that this process has imported already; nothing is imported because another rank names it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if found is not None else None
    if not isinstance(found, type) or not is_allowed(found):
        raise NotAValue(f"{name} is no class that may travel, or is not imported here")
    return found
