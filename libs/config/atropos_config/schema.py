"""A JSON Schema of run files, for editors: the sections of core, and for each `use` the options of that component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from atropos_core.config.component import Component, RunReward, TrainerComponent, Weighted
from atropos_core.config.run_file import LEFT_OUT, NAMED, SINGLE, EngineComponent, RunConfig
from atropos_core.plugins.registry import Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"
UNSAID = (
    "Not covered: rules between two keys; options of your own code, [engine.replica.NAME] tables and components inside "
    "another one's options; numbers written as strings, which are accepted; what depends on the machine. `atropos config "
    "show FILE` checks all of it."
)
_REFERENCE = r":|\.py$"  # a reference to code, not a plugin's name: plugins/references.py
_OWN: Mapping[str, type[Component]] = {
    "environment": Weighted, "reward": RunReward, "engine": EngineComponent, "trainer": TrainerComponent,
}  # fmt: skip


def run_file_schema(registry: Registry) -> dict[str, Any]:
    """Return a schema with every installed component. A section without `use` may have the options of any component of its
    kind, because a model's preset may choose it."""
    offers = {
        kind: {offer.provider.name: offer.provider.options for offer in registry.offers(kind)}
        for kind in (*SINGLE, *NAMED)
    }
    models: list[type[BaseModel]] = [RunConfig, *(one for named in offers.values() for one in named.values())]
    refs, together = models_json_schema([(one, "validation") for one in dict.fromkeys(models)])
    defs: dict[str, Any] = together["$defs"]
    _allow_names(defs)
    base = defs.pop(refs[RunConfig, "validation"]["$ref"].rpartition("/")[2])
    for kind, named in offers.items():
        own = _OWN.get(kind, Component).model_json_schema()["properties"]
        tables = {}
        for name, model in named.items():
            of = defs[refs[model, "validation"]["$ref"].rpartition("/")[2]]
            defs[f"{kind}.{name}"] = tables[name] = {
                "type": "object",
                "description": of.get("description", ""),
                "properties": {**of.get("properties", {}), **own},
                "required": of.get("required", []),
                "additionalProperties": False,
            }
        section = base["properties"][kind]
        usable = [*tables, *([LEFT_OUT] if kind in NAMED else [])]
        chosen = {"type": "object", "properties": {"use": _use(own["use"], usable)}, "allOf": [
            *({"if": _uses(name), "then": _table(kind, name)} for name in tables)
        ]}  # fmt: skip
        if kind in SINGLE:
            anything = {
                "if": {"not": {"required": ["use"]}},
                "then": {"anyOf": [_table(kind, name) for name in tables]},
            }
            base["properties"][kind] = {"description": section["description"], **chosen} | {
                "allOf": [*chosen["allOf"], anything]
            }
            continue
        defs[kind] = chosen
        base["properties"][kind] = {
            "description": section["description"],
            "type": "object",
            "properties": {
                name: {"if": {"required": ["use"]}, "then": {"$ref": f"#/$defs/{kind}"}, "else": _table(kind, name)}
                for name in tables
            },
            "patternProperties": {_REFERENCE: {"type": "object"}},
            "additionalProperties": {"$ref": f"#/$defs/{kind}", "required": ["use"]},
        }
    return {
        "$schema": DIALECT,
        "title": "A run file of Atropos",
        "$comment": UNSAID,
        **_plain(base),
        "$defs": _plain(defs),
    }


def _table(kind: str, name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{kind}.{name}"}


def _uses(name: str) -> dict[str, Any]:
    return {"required": ["use"], "properties": {"use": {"const": name}}}


def _use(field: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {"description": field["description"], "anyOf": [{"enum": names}, {"type": "string", "pattern": _REFERENCE}]}


def _allow_names(defs: dict[str, Any]) -> None:
    """A component inside another one's options may be just its name, or take `use` from the name of its table."""
    for name, one in defs.items():
        if "use" in one.get("properties", {}):
            defs[name] = {
                "type": ["object", "string"],
                **{key: one[key] for key in ("description", "properties") if key in one},
            }


def _plain(schema: Any) -> Any:
    """Remove the titles that repeat each key."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _plain(one) for key, one in schema.items() if key != "title" or not isinstance(one, str)}
