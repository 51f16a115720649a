"""Names of plugins as values of settings: `optimizer`, `schedule` and `loggers` take those of other packages, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from paceline.config.parse import choices, members
from paceline.core import plugins

NO_SUCH_PLUGIN = "no_such_plugin"
"""Kind of pydantic's error for a name that no plugin has."""
RECORDED = "recorded plugins"
"""Key of a validation context: names in the record of a run, which may be of plugins that are not installed here."""


@dataclass(frozen=True)
class PluginName:
    """Marks text that is the name of a plugin, as `Annotated[str, PluginName("optimizers")]`. Nothing is imported."""

    group: plugins.Group

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str, info: ValidationInfo) -> str:
        context = info.context if isinstance(info.context, dict) else {}
        if value in plugins.names(self.group) or value in context.get(RECORDED, ()):
            return value
        raise PydanticCustomError(NO_SUCH_PLUGIN, "no plugin has this name", {"group": self.group})


def group_of(annotation: Any) -> plugins.Group | None:
    """Return the group whose names a field takes beside its own."""
    for member in members(annotation):
        if get_origin(member) is Annotated:
            for mark in get_args(member)[1:]:
                if isinstance(mark, PluginName):
                    return mark.group
    return None


def all_choices(annotation: Any) -> list[Any]:
    """Return the words of a field, those of plugins after its own."""
    group = group_of(annotation)
    own = choices(annotation)
    return own if group is None else [*own, *(name for name in plugins.names(group) if name not in own)]
