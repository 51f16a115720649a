"""The root of every failure that is the user's to mend."""

from __future__ import annotations

from typing import Any


class PacelineError(Exception):
    """A mistake the user can mend: `str(error)` says what and why, `hint` says what to type next.

    The command line prints both without a traceback and exits with code 2.
    """

    hint: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is, to another process: a class may make its message from other things than a message."""
        return _again, (type(self), self.args, self.__dict__)


def first_line(error: BaseException) -> str:
    """`ValueError: what it says first`, for a line among others."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _again(kind: type[PacelineError], args: tuple[Any, ...], values: dict[str, Any]) -> PacelineError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(values)
    return error
