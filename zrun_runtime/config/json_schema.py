"""The JSON Schema of a config, for editors: what may be written, what it does here, what its default is."""

from __future__ import annotations

from typing import Any

from zrun_runtime.config.schema import Document


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) made from the one table of keys. Every plain key may be "auto"."""
    schema = Document.model_json_schema(by_alias=True)
    for part in (schema, *schema.get("$defs", {}).values()):
        properties = part.get("properties", {})
        for name, declared in properties.items():
            properties[name] = _property(declared)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "zrun runtime config"}


def _property(declared: dict[str, Any]) -> dict[str, Any]:
    effect, stages = declared.pop("effect", None), declared.pop("stages", None)
    declared.pop("harmless", None)
    declared.pop("title", None)
    about = {"description": declared.pop("description", ""), "x-effect": effect, "x-stages": stages}
    about = {name: value for name, value in about.items() if value}
    if "$ref" in declared:
        return {**about, "$ref": declared["$ref"]}
    default = {"default": declared.pop("default")} if "default" in declared else {}
    if "anyOf" in declared:
        return {**about, **default, "anyOf": [*declared["anyOf"], {"const": "auto"}]}
    return {**about, **default, "anyOf": [declared, {"const": "auto"}]}
