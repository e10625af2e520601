"""The JSON Schema of a config, for editors: what may be written, what it does here, what its default is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zrun_runtime.config.keys import Section, section_of
from zrun_runtime.config.schema import Document


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) made from the one table of keys. Every plain key may be "auto"."""
    schema = Document.model_json_schema(by_alias=True)
    closed = {kind.__name__ for kind in _closed(Document)}
    for name, part in (("Document", schema), *schema.get("$defs", {}).items()):
        if name in closed:
            part["additionalProperties"] = False
        properties = part.get("properties", {})
        for key, declared in properties.items():
            properties[key] = _property(declared)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "zrun runtime config"}


def _closed(kind: type[Section]) -> Iterator[type[Section]]:
    """The sections that hold no other keys than theirs, so that an editor marks a misspelt one."""
    if not kind.open_ended:
        yield kind
    for field in kind.model_fields.values():
        inner = section_of(field)
        if inner is not None:
            yield from _closed(inner)


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
