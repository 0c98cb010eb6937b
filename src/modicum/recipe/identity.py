"""Which part of the settings says what a run is: the part that may not change while it goes on."""

from typing import Any

from pydantic import BaseModel


def identity(settings: BaseModel) -> dict[str, Any]:
    """The settings as plain data, without the fields that only say how the work is carried out, and those marked as
    part of another's value that is not taken (and without paths: what a file holds counts, not where it lies, and its
    hash stands in the stage's manifest)."""
    plain = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        extra = field.json_schema_extra
        marks = extra if isinstance(extra, dict) else {}
        if marks.get("operates") or not _is_in_force(settings, marks):
            del plain[name]
        elif isinstance(value, BaseModel):
            plain[name] = identity(value)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            plain[name] = [identity(item) for item in value]
        elif "Path" in str(field.annotation):
            del plain[name]
    return plain


def _is_in_force(settings: BaseModel, marks: dict[str, Any]) -> bool:
    return all(getattr(settings, name) == value for name, value in marks.get("only_with", {}).items())
