"""Settings that all ranks must have alike."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from paceline.config.settings import Section


def shared_settings(settings: Section) -> dict[str, Any]:
    """Return the settings that all ranks must have alike, as plain values by option: all but those of `per_rank`."""
    values = settings.model_dump(mode="json")
    fields = type(settings).model_fields
    return {option(name): values[name] for name, field in fields.items() if not _is_per_rank(field)}


def option(name: str) -> str:
    """Return a setting as it is typed."""
    return f"--{name.replace('_', '-')}"


def _is_per_rank(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("per_rank"))
