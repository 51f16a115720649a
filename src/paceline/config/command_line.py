"""Parser of command lines against the fields of a model: collects values and all mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel
from pydantic.config import JsonDict

from paceline.config.aliases import SHORT, aliases_of
from paceline.config.parse import Given, choices, expand, is_flag, length, sequence
from paceline.config.problems import WORDS, Place, Problem, nearest

HELP_WORDS = ("-h", "--help")
CONFIG = "config"
VERBATIM: JsonDict = {"verbatim": True}
"""For the `json_schema_extra` of a field whose value may begin with dashes: `--directives "--exclusive"`."""
_NUMBER = re.compile(r"-(\d|\.\d|inf)")


@dataclass
class Typed:
    """Content of a command line."""

    given: dict[str, Given] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    """Files of `--config`, in order."""
    loose: list[int] = field(default_factory=list)
    """Places of the words that belong to no option."""
    swallowed: list[int] = field(default_factory=list)
    """Places of the words behind options that the model does not know."""
    problems: list[Problem] = field(default_factory=list)


def dashed(name: str) -> str:
    """Return the option of a setting: `global_batch` is `--global-batch`."""
    return "--" + name.replace("_", "-")


def is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NUMBER.match(word)


def asks_for_help(words: Sequence[str]) -> bool:
    """Return True if help is asked for before any `--`."""
    before = words[: words.index("--")] if "--" in words else words
    return any(word in HELP_WORDS for word in before)


def resolve(model: type[BaseModel], name: str) -> str | None:
    """Return the field of a name or of an alias, typed with dashes or underscores; None if there is none."""
    plain = name.replace("-", "_")
    plain = aliases_of(model).get(plain, plain)
    return plain if plain in model.model_fields else None


def read_words(model: type[BaseModel], words: Sequence[str], positional: Sequence[str] = ()) -> Typed:
    """Sort words into settings, files and mistakes. Loose words are the positional ones, in order."""
    reader = _Reader(model, list(words), positional)
    reader.read()
    reader.place(positional)
    return reader.typed


class _Reader:
    def __init__(self, model: type[BaseModel], words: list[str], positional: Sequence[str]) -> None:
        self.typed = Typed()
        self._model, self._words, self._at = model, words, 0
        self._place: Place = (WORDS, 0)
        self._options = [name for name in model.model_fields if name not in positional]

    def read(self) -> None:
        while self._at < len(self._words):
            word, self._place = self._words[self._at], (WORDS, self._at)
            self._at += 1
            if word == "--":
                self.typed.loose += range(self._at, len(self._words))
                return
            if not is_option(word):
                self.typed.loose.append(self._at - 1)
            elif word.startswith("--"):
                self._long(word)
            else:
                self._short(word)

    def place(self, positional: Sequence[str]) -> None:
        """Give loose words to the positional settings; the last one may take several."""
        loose = list(self.typed.loose)
        for name in positional:
            annotation = self._model.model_fields[name].annotation
            takes = len(loose) if sequence(annotation) is not None else 1
            taken, loose = loose[:takes], loose[takes:]
            if taken:
                values = [self._words[place] for place in taken]
                raw = values if sequence(annotation) is not None else values[0]
                self.typed.given[name] = Given(raw, name.upper(), " ".join(values), (WORDS, taken[0]))
        hint = "options are typed as --name value, flags as --name or --no-name"
        self.typed.problems += [
            Problem(self._words[place], "belongs to no option", hint, place=(WORDS, place)) for place in loose
        ]

    def _long(self, word: str) -> None:
        name, equals, attached = word[2:].partition("=")
        where = f"--{name}"
        if name == CONFIG:
            self.typed.files += self._values(where, attached if equals else None, 1)
            return
        setting = resolve(self._model, name)
        if setting in self._options and setting is not None:
            annotation = self._model.model_fields[setting].annotation
            if not is_flag(annotation):
                takes, bare = _takes(annotation), _bare(self._model, setting)
                self._keep(setting, where, self._values(where, attached if equals else None, takes, bare))
            elif equals:
                self._keep(setting, where, [attached])
            else:
                self._keep(setting, where, ["true"], is_shown=False)
                self._refuse_flag_value(where)
            return
        negated = resolve(self._model, name.replace("_", "-").removeprefix("no-"))
        is_negation = name.replace("_", "-").startswith("no-") and negated in self._options
        if is_negation and negated is not None and is_flag(self._model.model_fields[negated].annotation):
            self._keep(negated, where, ["false"], is_shown=False)
            return
        self._unknown(where, name, attached if equals else None)

    def _short(self, word: str) -> None:
        name = SHORT.get(word[1])
        if name not in self._options or name is None:
            self._unknown(word, word[1:], None)
        elif len(word) > 2:
            self._keep(name, word, [word[2:].removeprefix("=")], is_shown=False)
        else:
            self._keep(name, word, self._values(word, None, 1))

    def _values(self, where: str, attached: str | None, takes: int | None, bare: str | None = None) -> list[str]:
        """Return the words that belong to an option: one per value, or all up to the next option.

        `bare` is what the option means without any.
        """
        if attached is not None:
            return [attached]
        if takes == 1 and self._is_verbatim(where):
            self._at += 1
            return [self._words[self._at - 1]]
        values: list[str] = []
        while self._at < len(self._words) and not is_option(self._words[self._at]) and len(values) != takes:
            values.append(self._words[self._at])
            self._at += 1
            if takes is not None and takes > 1 and re.search(r"[,\[]|^none$", values[0]):
                break  # one word holds them all
        if not values and bare is not None:
            return [bare]
        if not values:
            self._without_value(where)
        return values

    def _without_value(self, where: str) -> None:
        """Note that an option has no value, and which it could have."""
        meant = resolve(self._model, where.lstrip("-")) or ""
        is_last = self._at == len(self._words)
        what = "needs a value" if is_last else f"needs a value before {self._words[self._at]}"
        known = choices(self._model.model_fields[meant].annotation) if meant else []
        hint = f"one of {', '.join(map(str, known))}" if len(known) > 1 else ""
        self.typed.problems.append(Problem(where, what, hint, place=self._place, meant=meant))

    def _is_verbatim(self, where: str) -> bool:
        """Return True if the next word is the value although it begins with a dash; our own options never are."""
        name = resolve(self._model, where.lstrip("-"))
        if name is None or self._at == len(self._words) or not _extra(self._model, name).get("verbatim"):
            return False
        word = self._words[self._at]
        return is_option(word) and word != "--" and resolve(self._model, word.lstrip("-")) is None

    def _keep(self, name: str, where: str, values: list[str], *, is_shown: bool = True) -> None:
        if not values:
            return  # said already
        annotation = self._model.model_fields[name].annotation
        before = self.typed.given.get(name)
        is_open = sequence(annotation) is not None and length(annotation) is None
        if before is not None and not is_open:
            again = f"{where} {' '.join(values)}" if is_shown else where
            once = f"{before.where} {before.text}".strip()
            what = f"given twice, first as {once}"
            self.typed.problems.append(Problem(again, what, "keep one of them", place=self._place))
            return
        raw: object = values[0]
        if is_open or len(values) > 1:
            earlier = before.raw if before is not None else []
            raw = [*earlier, *expand(annotation, values)] if sequence(annotation) is not None else values
        text = " ".join(values) if is_shown else ""
        self.typed.given[name] = Given(raw, where, text, self._place)

    def _refuse_flag_value(self, where: str) -> None:
        if self._at < len(self._words) and self._words[self._at].lower() in ("true", "false", "yes", "no", "0", "1"):
            word = self._words[self._at]
            self._at += 1
            right = where if word.lower() in ("true", "yes", "1") else where.replace("--", "--no-", 1)
            hint = f"type {right}"
            self.typed.problems.append(Problem(where, "is a flag and takes no value", hint, word, self._place))

    def _unknown(self, where: str, name: str, attached: str | None) -> None:
        values = [attached] if attached is not None else []
        while attached is None and self._at < len(self._words) and not is_option(self._words[self._at]):
            values.append(self._words[self._at])
            self.typed.swallowed.append(self._at)
            self._at += 1
        meant = nearest(name.replace("-", "_").removeprefix("no_"), self._options)
        hint = f"did you mean {dashed(meant)}?" if meant else ""
        self.typed.problems.append(
            Problem(
                where,
                "there is no such option",
                hint,
                " ".join(values),
                self._place,
                is_unknown=True,
                meant=meant or "",
            )
        )


def _takes(annotation: object) -> int | None:
    return 1 if sequence(annotation) is None else length(annotation)


def _bare(model: type[BaseModel], name: str) -> str | None:
    """Return the value of an option that is given without one, if it may be."""
    bare = _extra(model, name).get("bare")
    return bare if isinstance(bare, str) else None


def _extra(model: type[BaseModel], name: str) -> JsonDict:
    extra = model.model_fields[name].json_schema_extra
    return extra if isinstance(extra, dict) else {}
