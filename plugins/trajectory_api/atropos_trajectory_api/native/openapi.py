"""`/v1` in the OpenAPI document: its calls, and the keys of the mappings that they accept and return."""

from __future__ import annotations

from typing import Any

from atropos_trajectory_client.client import CONTENT_TYPE

_ERRORS = {
    "400": "The body cannot be decompressed.",
    "401": "The token is missing or wrong.",
    "403": "This caller is not allowed.",
    "404": "Unknown worker or call: register again, or compare the versions.",
    "405": "The path takes another method.",
    "408": "The body did not arrive in time.",
    "409": "The session is over (LeaseLost), or the tokenizers differ (TokenizerMismatch).",
    "413": "The body is over the limit.",
    "422": "The call does not accept this body; the message says where the error is.",
    "503": "No room, or the server is ending: send it again after `Retry-After` seconds.",
}
_NEWS = "version, engines, policy"
# method, path, summary, keys taken (None: no body), keys given
NATIVE: tuple[tuple[str, str, str, str | None, str], ...] = (
    ("get", "/v1", "What is this server?", None, "protocol, frames, version, policy, same_host"),
    ("post", "/v1/workers", "A worker registers",
     "name, environment, tasks, weight, minimum, group_size, tokenizer, vocabulary, digest, playing", f"worker, heartbeat_s, {_NEWS}"),
    ("delete", "/v1/workers/{worker}", "It has ended: its draws go to others", None, ""),
    ("post", "/v1/workers/{worker}/heartbeat", "It lives", "draining, returned", _NEWS),
    ("post", "/v1/workers/{worker}/draws", "Draws to run; waits for some", "n, playing, wait_s",
     "draws, group_size, min_group, sampling, version, deadline_s"),
    ("post", "/v1/workers/{worker}/failed", "Too few rollouts of a draw became an episode", "group", ""),
    ("post", "/v1/groups", "Scored groups; waits for room", "groups: [key, worker, frame], wait_s", "ids, full"),
    ("post", "/v1/sessions", "A trainer opens its session, and ends the one before",
     "holder, tokenizer, vocabulary, model, committed, group_size, min_group, sampling, batch_groups, max_staleness, "
     "max_token_len, version, deadline_s, hub_id",
     "session, boot, lease_s, environments, waiting_draws, played_draws, hub_id, next_id, newest_version"),
    ("delete", "/v1/sessions/{session}", "It ends", None, ""),
    ("post", "/v1/sessions/{session}/lease", "The next groups, or notices of draws that bring none; waits for either",
     "groups, version, wait_s, trained, holding, seen, boot",
     "entries: [id, frame], failed, dropped, seen, commit_due, why, boot"),
    ("post", "/v1/sessions/{session}/give_back", "Groups that it will not train", "ids", "boot"),
    ("post", "/v1/sessions/{session}/commit", "Groups that are inside a durable checkpoint", "ids", "settled, boot"),
    ("post", "/v1/sessions/{session}/drop", "Groups that will never be trained", "ids, cause", "dropped, boot"),
    ("post", "/v1/sessions/{session}/renew", "It lives, and has these groups in its memory", "trained", "boot"),
    ("post", "/v1/sessions/{session}/draws", "Draws that workers may run", "draws", "new, boot"),
    ("post", "/v1/sessions/{session}/version", "The version that the engines sample from, and the newest that they may have",
     "version, newest", "boot"),
    ("get", "/v1/environments", "The environments of the workers", None, "by name"),
    ("post", "/v1/engines", "Add an engine for workers to sample from", "session, url", ""),
    ("get", "/v1/engines", "The engines that workers can sample from", None, "engines"),
    ("get", "/v1/status", "Hub, workers, draws, and why no batch can be formed", None, "hub, why, workers, draws, ..."),
)  # fmt: skip


def native_paths() -> dict[str, Any]:
    """Paths for the document."""
    paths: dict[str, Any] = {}
    for method, path, summary, takes, gives in NATIVE:
        paths.setdefault(path, {})[method] = _operation(path, summary, takes, gives)
    return paths


def _operation(path: str, summary: str, takes: str | None, gives: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": summary,
        "tags": ["native"],
        "responses": {
            "200": {"description": f"A mapping: {gives}" if gives else "Done.", "content": _frame()},
            **{code: {"description": text, "content": _error()} for code, text in _ERRORS.items()},
        },
    }
    if takes is not None:
        made["requestBody"] = {
            "required": bool(takes),
            "description": f"A mapping: {takes}" if takes else "None is needed.",
            "content": _frame(),
        }
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        of: dict[str, Any] = {"type": "integer", "minimum": 0} if name == "session" else {"type": "string"}
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": of}]
    return made


def _frame() -> dict[str, Any]:
    return {CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}


def _error() -> dict[str, Any]:
    error_fields = {"kind": {"type": "string"}, "message": {"type": "string"}, "remedy": {"type": ["string", "null"]}}
    error = {"type": "object", "properties": error_fields, "required": ["kind", "message"]}
    return {"application/json": {"schema": {"type": "object", "properties": {"error": error}, "required": ["error"]}}}
