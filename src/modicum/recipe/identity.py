"""Which part of the settings says what a run is: the part that may not change while it goes on."""

from typing import Any

from pydantic import BaseModel


def identity(settings: BaseModel) -> dict[str, Any]:
    """The settings as plain data, without the fields that only say how the work is carried out (and without paths:
    what a file holds counts, not where it lies, and its hash stands in the stage's manifest)."""
    plain = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("operates"):
            del plain[name]
        elif isinstance(value, BaseModel):
            plain[name] = identity(value)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            plain[name] = [identity(item) for item in value]
        elif "Path" in str(field.annotation):
            del plain[name]
    return plain
