"""Plugins: recipes, commands, report sections, optimizers, ... of installed packages, found by their entry points.

Paceline registers its own recipes and lab tools in the same groups (`pyproject.toml`), so the core names none of them.
Listing reads the metadata of installed packages and imports none of them. A plugin is imported when it is used; an
error in it is reported with the name of its package. The groups are `paceline.recipes`, `paceline.commands`, ...
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from paceline.core.errors import PacelineError, first_line

Group = Literal["recipes", "commands", "reports", "models", "optimizers", "schedules", "loggers", "launchers"]
GROUPS: tuple[Group, ...] = get_args(Group)
PREFIX = "paceline."
SWITCH = "PACELINE_NO_PLUGINS"
"""Environment variable: if set, and not to 0, plugins of other packages are ignored. `--no-plugins` sets it."""
PACKAGE = "paceline"
OURS = "paceline itself"
T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """A command of the command line. Its module is imported when the command runs, so keep this declaration light."""

    about: str
    """One line for `paceline --help`."""
    module: str
    """Module with `run(words) -> exit code`, the options as the model `OPTIONS`, and `POSITIONAL`."""


@dataclass(frozen=True)
class Plugin:
    """Something that a package offers under a name."""

    group: Group
    name: str
    package: str
    version: str
    value: str
    """`module:name` of the object."""

    @property
    def is_ours(self) -> bool:
        """True for what Paceline itself registers."""
        return self.package == PACKAGE

    @property
    def origin(self) -> str:
        return OURS if self.is_ours else f"{self.package} {self.version}".strip()

    @property
    def title(self) -> str:
        return f"the {kind(self.group)} {self.name!r} of {self.origin}"

    def record(self) -> dict[str, str]:
        """Return what `run.json` keeps of it."""
        return asdict(self)


@dataclass(frozen=True)
class Catalog:
    """The plugins of all installed packages."""

    plugins: tuple[Plugin, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    """Packages whose entry points cannot be read, and why."""

    def of(self, group: Group) -> list[Plugin]:
        return [plugin for plugin in self.plugins if plugin.group == group]

    @property
    def others(self) -> tuple[Plugin, ...]:
        """Plugins of other packages."""
        return tuple(plugin for plugin in self.plugins if not plugin.is_ours)


class PluginsClash(PacelineError):
    """Two packages offer a plugin under one name."""

    kind: str
    name: str
    packages: list[str]
    sentence = "the {kind} {name!r} is offered by {all_packages}: which one is meant cannot be known"
    hint = "uninstall all but one of them (`pip uninstall ...`), or leave all plugins out with `--no-plugins`"

    @property
    def all_packages(self) -> str:
        return " and ".join(self.packages)


class PluginFails(PacelineError):
    """A plugin raised when it was imported or used, or is something else than its group takes."""

    title: str
    doing: str
    why: str
    sentence = "{title} {doing}: {why}"
    hint = (
        "update or uninstall that package, choose another name, or leave all plugins out with `--no-plugins`; "
        "`paceline doctor` lists them"
    )


def kind(group: Group) -> str:
    """Return what one plugin of a group is called."""
    return group.removesuffix("s")


def are_enabled() -> bool:
    return os.environ.get(SWITCH, "") in ("", "0")


def installed() -> Catalog:
    """Return all plugins, in the order of packages on Python's path. Nothing is imported."""
    catalog = _scan(tuple(sys.path))
    return catalog if are_enabled() else Catalog(tuple(plugin for plugin in catalog.plugins if plugin.is_ours))


def names(group: Group) -> list[str]:
    """Return the names of all plugins of a group."""
    return sorted({plugin.name for plugin in installed().of(group)})


def find(group: Group, name: str, built_in: Collection[str] = ()) -> Plugin | None:
    """Return the plugin of this name; None if there is none. One that another package, or Paceline, has too is refused.

    `built_in` are the names that the group has without any plugin.
    """
    offers = [plugin for plugin in installed().of(group) if plugin.name == name]
    if len(offers) + (name in built_in) > 1:
        origins = [OURS] * (name in built_in) + [plugin.origin for plugin in offers]
        raise PluginsClash(kind(group), name, origins)
    return offers[0] if offers else None


def clashes(built_in: Mapping[Group, Collection[str]]) -> list[PluginsClash]:
    """Return all names that are offered more than once."""
    refused = []
    for group in GROUPS:
        for name in names(group):
            try:
                find(group, name, built_in.get(group, ()))
            except PluginsClash as clash:
                refused.append(clash)
    return refused


def load(plugin: Plugin) -> Any:
    """Import a plugin's module and return what it names there."""
    module, _, path = plugin.value.partition(":")
    if not path:
        raise PluginFails(plugin.title, "cannot be loaded", f"{plugin.value!r} is not of the form module:name")

    def get() -> Any:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))

    # A package that a plugin of ours needs has a message of its own, which names the extra.
    return get() if plugin.is_ours else guarded(plugin, "cannot be loaded", get)


def load_command(plugin: Plugin) -> Command:
    """Return the declaration of a command."""
    command = load(plugin)
    if not isinstance(command, Command):
        raise unfit(plugin, command, "a paceline.plugins.Command")
    return command


def guarded(plugin: Plugin, doing: str, action: Callable[[], T]) -> T:
    """Call something of a plugin; an error that it raises is said with the package and the line that raised it."""
    try:
        return action()
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        if plugin.is_ours and isinstance(error, ModuleNotFoundError):
            raise  # callers name the extra that installs it
        raise PluginFails(plugin.title, doing, f"{first_line(error)}{_place(error)}") from error


def unfit(plugin: Plugin, value: object, wanted: str) -> PluginFails:
    """Return the error for a plugin that is something else than its group takes."""
    kind_of_value = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    return PluginFails(plugin.title, "cannot be used", f"{plugin.value} is {kind_of_value}, not {wanted}")


def changes(before: Iterable[Mapping[str, Any]], now: Iterable[Plugin]) -> list[str]:
    """Return a line per plugin whose package or version is another than in the record of an earlier start."""
    earlier = {(entry.get("group"), entry.get("name")): entry for entry in before}
    lines = []
    for plugin in now:
        entry = earlier.get((plugin.group, plugin.name))
        if entry is None:
            continue
        origin = f"{entry.get('package', '')} {entry.get('version', '')}".strip()
        if origin != plugin.origin:
            what = f"the {kind(plugin.group)} {plugin.name!r}"
            lines.append(f"{what} is now of {plugin.origin}; the run was last started with {origin}")
    return lines


@functools.lru_cache(maxsize=8)
def _scan(path: tuple[str, ...]) -> Catalog:
    from importlib import metadata

    plugins: dict[Plugin, None] = {}
    unreadable: list[tuple[str, str]] = []
    seen: set[str] = set()
    for package in metadata.distributions(path=list(path)):
        try:
            if PREFIX not in (package.read_text("entry_points.txt") or ""):
                continue
            name = _normal(package.metadata["Name"] or "")
            if not name:
                raise ValueError("its metadata has no name")
            if name in seen:  # a folder that is earlier on the path goes before
                continue
            seen.add(name)
            for entry in package.entry_points:
                group = next((each for each in GROUPS if entry.group == f"{PREFIX}{each}"), None)
                if group is not None:
                    plugins[Plugin(group, entry.name, name, package.version or "", _target(entry.value))] = None
                elif entry.group.startswith(PREFIX):
                    unreadable.append((name, f"there is no group {entry.group}: {', '.join(GROUPS)}"))
        except Exception as error:  # what is wrong with one package must not stop those that do not use it
            unreadable.append((_folder(package), first_line(error)))
    return Catalog(tuple(plugins), tuple(unreadable))


def _normal(name: str) -> str:
    """Return a package's name as package indices write it: `Paceline_Lion` is `paceline-lion`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _target(value: str) -> str:
    """Return an entry point's `module:name` without the extras that may follow it."""
    return value.partition("[")[0].strip()


def _folder(package: object) -> str:
    """Return the name of a package's metadata folder, by which it can be found."""
    folder = vars(package).get("_path")
    return Path(str(folder)).name if folder is not None else "a package"


def _place(error: BaseException) -> str:
    """Return the file and line that raised, but for a syntax error, which says it itself."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (__file__, importlib.__file__)
    theirs = [frame for frame in frames if frame.filename not in others and not frame.filename.startswith("<")]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
