"""atroposlib's routes in the OpenAPI document, which plain ASGI routes do not add automatically."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from atropos_trajectory_api.legacy_groups.incoming_groups import ScoredData
from atropos_trajectory_api.service.old_registrations import EnvIdentifier, RegisterEnv, Registration

_REF = "#/components/schemas/{model}"
_ERRORS = {
    "400": "The body cannot be decompressed.",
    "401": "The token is missing or wrong.",
    "403": "This caller is not allowed.",
    "408": "The body did not arrive in time.",
    "422": "The route does not accept this body; the text says where the error is.",
    "503": "No room, or the server is ending: send it again after `Retry-After` seconds.",
}
_ROUTES: tuple[tuple[str, str, str, type[BaseModel] | None], ...] = (
    ("/", "get", "Is the server there?", None),
    ("/register", "post", "A trainer registers", Registration),
    ("/register-env", "post", "An environment registers; to be repeated until `status` is `success`", RegisterEnv),
    ("/disconnect-env", "post", "An environment has ended", EnvIdentifier),
    ("/wandb_info", "get", "W&B project and group of the trainer", None),
    ("/info", "get", "Batch size and token limit of the trainer", None),
    ("/batch", "get", "The next batch, or null", None),
    ("/latest_example", "get", "The last queued group", None),
    ("/scored_data", "post", "One group", ScoredData),
    ("/scored_data_list", "post", "Several groups", ScoredData),
    ("/status", "get", "Step, and number of waiting groups", None),
    ("/status-env", "get", "Number of waiting groups, as one environment should see it", None),
    ("/reset_data", "get", "Forget everything", None),
)


def old_paths() -> tuple[dict[str, Any], dict[str, Any]]:
    """Paths and schemas for the document."""
    models = {model for *_, model in _ROUTES if model is not None}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, made = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF)
    paths = {path: {method: _operation(path, summary, model)} for path, method, summary, model in _ROUTES}
    return paths, made["$defs"]


def _operation(path: str, summary: str, model: type[BaseModel] | None) -> dict[str, Any]:
    kind = "text/plain" if path == "/reset_data" else "application/json"
    made: dict[str, Any] = {
        "summary": summary,
        "tags": ["atroposlib"],
        "responses": {
            "200": {"description": "Done.", "content": {kind: {"schema": {}}}},
            **{code: _error(text) for code, text in _ERRORS.items()},
        },
    }
    if model is not None:
        schema: dict[str, Any] = {"$ref": _REF.format(model=model.__name__)}
        if path == "/scored_data_list":
            schema = {"type": "array", "items": schema}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path == "/status-env":
        made["description"] = "atroposlib's clients send `env_id` as a JSON body."
        whole = {"type": "integer", "minimum": -(2**53), "maximum": 2**53}
        made["parameters"] = [{"name": "env_id", "in": "query", "required": True, "schema": whole}]
        made["responses"]["404"] = _error("No such environment.")
    if path == "/reset_data":
        made["responses"]["409"] = _error("A trainer of the native protocol is running.")
    return made


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {}}}}
