"""The options of a component and the keys of a run file, with their descriptions, read from the pydantic fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Option:
    """One option of a component. `name` is its path below the component's table; NAME stands for a name that the user chooses."""

    name: str
    type: str  # in plain words
    required: bool
    default: Any  # JSON; None if unset or required
    meaning: str

    def default_text(self) -> str:
        from atropos_core.config.run_file import toml_value

        if self.required:
            return "required"
        return "unset" if self.default is None else toml_value(self.default)


def options_of(model: type[BaseModel]) -> list[Option]:
    """Return every option of a component; those of a table follow it."""
    schema = model.model_json_schema()
    return list(_options(model, schema, schema.get("$defs", {}), ""))


def meaning_at(model: type[BaseModel], path: Sequence[str], options: Mapping[str, type[BaseModel]]) -> str:
    """Return the description of the value at `path` of a run file, "" if no field has one (an option of a component inside
    another's options). `options` maps the path of each component of the run to its options."""
    meaning, at, walked = "", model, ""
    parts = iter(path)
    for part in parts:
        field = at.model_fields.get(part)
        if field is None and walked in options:
            field = options[walked].model_fields.get(part)
        if field is None:
            return ""
        meaning, walked = field.description or "", f"{walked}.{part}".lstrip(".")
        inner, is_named = _inner(field)
        if is_named and (name := next(parts, None)) is not None:
            walked += f".{name}"
        at = inner or BaseModel
    return meaning


def type_words(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """Describe a JSON Schema in plain words."""
    if "$ref" in schema:
        return type_words(defs[schema["$ref"].rpartition("/")[2]], defs)
    if len(schema.get("allOf", ())) == 1:
        return type_words(schema["allOf"][0], defs)
    if "anyOf" in schema:
        words = [type_words(one, defs) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    if "enum" in schema or "const" in schema:
        return " | ".join(str(one) for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array" and "prefixItems" in schema:
        return f"[{', '.join(type_words(one, defs) for one in schema['prefixItems'])}]"
    if kind == "array":
        return f"list of {type_words(schema.get('items', {}), defs)}"
    if kind == "string" and schema.get("format") == "path":
        return "path"
    word = {"string": "text", "boolean": "true | false", "object": "table"}.get(str(kind), str(kind or "anything"))
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
    return " ".join([word, ", ".join(bounds)]).strip()


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _options(
    model: type[BaseModel], schema: Mapping[str, Any], defs: Mapping[str, Any], prefix: str
) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        one = schema["properties"][name]
        inner, is_named = _inner(field)
        default = _default(field, one) if not field.is_required() else None
        table = inner is not None and isinstance(default, Mapping)  # the defaults of its keys are below
        meaning = field.description or ""
        yield Option(f"{prefix}{name}", type_words(one, defs), field.is_required(), {} if table else default, meaning)
        if inner is not None:
            below = inner.model_json_schema()
            several = ".NAME." if is_named else "[]." if get_origin(field.annotation) in (tuple, list) else "."
            yield from _options(inner, below, below.get("$defs", {}), f"{prefix}{name}{several}")


def _default(field: FieldInfo, schema: Mapping[str, Any]) -> Any:
    from pydantic_core import to_jsonable_python

    if "default" in schema:
        return schema["default"]
    return to_jsonable_python(field.get_default(call_default_factory=True))


def _inner(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """Return the model of a field's table, and True if there is one table per name."""

    def models(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation, False
        named = get_origin(annotation) is dict
        for part in get_args(annotation):
            yield from ((found, named or below) for found, below in models(part))

    return next(models(field.annotation), (None, False))
