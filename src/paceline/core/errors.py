"""The root of every failure that is the user's to mend, and how one is declared.

    class RunBusy(PacelineError):
        \"\"\"Another process is training in this folder.\"\"\"

        folder: Path
        owner: str
        sentence = "{folder} is being trained by {owner}"
        hint = "wait for it or stop it, or choose another `--out`"

    raise RunBusy(folder, owner)

A failure whose sentence is used once has no class of its own. It is raised as one of the kinds below, with its hint:

    raise NotFound(f"{folder} contains no checkpoint", hint="train it first: `paceline train ...`")

Annotated names are the fields, given by position or by name. `sentence` and `hint` are format strings over the fields
and over properties of the class, so a sentence that needs a decision takes it in a property. `{ranks:#rank}` is a
number with its noun: `1 rank`, `2 ranks`.

`str(error)` and `error.hint` are English, in records too; `error.rendered()` is what a terminal shows, in the reader's
language (`core/language.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from typing_extensions import dataclass_transform

from paceline.core.language import translate
from paceline.core.terminal import visible
from paceline.core.together import Exclusion
from paceline.core.units import worded


@dataclass_transform()
class PacelineError(Exception):
    """A mistake the user can mend: `str(error)` says what and why, `hint` says what to type next.

    The command line prints both without a traceback and exits with `exit_code`. A traceback that nobody caught has the
    hint below the message, as a note (from Python 3.11 on).
    """

    exit_code: ClassVar[int] = 2
    sentence: ClassVar[str] = ""
    hint: str = ""
    excludes: ClassVar[tuple[Exclusion, ...]] = ()
    """Pairs that this error refuses, for docs/together.md."""
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = [name for name, kind in inspect.get_annotations(cls).items() if not str(kind).startswith("ClassVar")]
        cls._fields = (*cls._fields, *(name for name in names if name not in cls._fields))

    def __init__(self, *values: Any, **named: Any) -> None:
        if not self.sentence:
            super().__init__(*(_shown(value) if isinstance(value, str) else value for value in values))
            self.__dict__.update(named)  # `hint`, for a kind of failure whose sentence is written where it is raised
            return
        fields = dict(zip(self._fields, values, strict=False)) | named
        missing = [name for name in self._fields if name not in fields and not hasattr(type(self), name)]
        if missing or len(values) > len(self._fields) or not set(named) <= set(self._fields):
            raise TypeError(f"{type(self).__name__} takes {self._fields}, not {values} and {named}")
        self.__dict__.update(fields)
        names = _Attributes(self)
        super().__init__(_shown(worded(self.sentence, names)))
        self.hint = _shown(worded(type(self).hint, names))

    def __str__(self) -> str:
        """Return the message. It may hold names and lines from files, which must not command a terminal."""
        return visible(super().__str__())

    def rendered(self) -> str:
        """Return what a terminal shows, in the reader's language: what and why, then what to type next."""
        message = translate("error: ") + translate(str(self), self.sentence)
        return f"{message}\n  {translate(self.hint, type(self).hint)}" if self.hint else message

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # what is added goes through `add_note`
        """The hint, and what `add_note` was given: lines that Python prints below the message of a traceback."""
        return [*([f"  {visible(self.hint)}"] if self.hint else []), *self.__dict__.get("_notes", ())]

    def add_note(self, note: str, /) -> None:
        self.__dict__.setdefault("_notes", []).append(note)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the fields as they are; `__init__` is not called again."""
        return _restored, (type(self), self.args, self.__dict__)


class InvalidSetting(PacelineError):
    """A setting, option or argument has a value that cannot be used."""


class WrongType(PacelineError, TypeError):
    """An argument of a public function has the wrong type."""


class Conflict(PacelineError):
    """Two settings, or a setting and the data or machine, cannot be used together."""


class NotFound(PacelineError):
    """A file, run, checkpoint, name or device does not exist."""


class AlreadyExists(PacelineError):
    """An output exists and is not overwritten."""


class Busy(PacelineError):
    """Another process is using a folder, port or file."""


class NotInstalled(PacelineError):
    """A package or program that a command needs is not installed."""


class Unreadable(PacelineError):
    """A file is damaged, or is not in the format that was expected."""


class InvalidData(PacelineError):
    """A data set, sample or batch cannot be used."""


class TaskContract(PacelineError):
    """A method of the user's task, model, loss or metric returned something that training cannot use."""


class RanksDiffer(PacelineError):
    """Ranks have different values where all must have the same."""


class Failed(PacelineError):
    """A process, program or service that this command needs has failed."""


def _shown(text: str) -> str:
    """Return a text with paths as the user typed them: addresses, where they are copies of such."""
    from paceline.core.cloud.address import shown  # which declares errors itself

    return shown(text)


class _Attributes(Mapping[str, Any]):
    """An object's attributes, as a formatter wants them."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self._owner))

    def __len__(self) -> int:
        return len(dir(self._owner))


def first_line(error: BaseException) -> str:
    """Return `ValueError: <first line of its message>`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _restored(kind: type[PacelineError], args: tuple[Any, ...], values: dict[str, Any]) -> PacelineError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(values)
    return error
